"""Downloads that break in every way."""

import time

import numpy as np
import pytest

from harmonium.core.errors import DataError, StoreError
from harmonium.data.sources.download import Patience, download

NAME = "archive.tar.gz"
BODY = np.random.default_rng(0).bytes(300_000)
QUICK = Patience(attempts=3, timeout_seconds=5, pause_seconds=0)


@pytest.fixture
def server(serve):
    return serve({NAME: BODY})


@pytest.fixture
def get(server, tmp_path, md5):
    def run(checksum=None, most_bytes=1 << 30, patience=QUICK, tell=lambda *_: None):
        file = tmp_path / NAME
        checksum = checksum or md5(BODY)
        download(server.url(NAME), file, checksum, tell, patience, most_bytes)
        return file

    return run


def test_a_whole_download(get, tmp_path):
    told = []
    file = get(tell=lambda *what: told.append(what))
    assert file.read_bytes() == BODY
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
    assert told[-1] == (f"downloading {NAME}", 300_000, 300_000)
    assert [what[1] for what in told] == sorted(what[1] for what in told)


def test_what_is_whole_is_not_asked_for_again(get, server):
    get()
    get()
    assert len(server.asked) == 1


def test_a_cut_download_goes_on_where_it_was_cut(get, server):
    server.plan = ["cut", "cut"]
    assert get().read_bytes() == BODY
    assert server.ranges == [None, "bytes=150000-", "bytes=225000-"]


def test_it_goes_on_in_the_next_run_too(get, server, tmp_path):
    server.plan = ["cut", 503, 503]
    with pytest.raises(DataError, match="503.*kept"):
        get()
    assert (tmp_path / f"{NAME}.part").stat().st_size == 150_000
    assert get().read_bytes() == BODY
    assert server.ranges[-1] == "bytes=150000-"


def test_a_server_that_cannot_go_on_starts_anew(get, server):
    server.honours_range = False
    server.plan = ["cut"]
    assert get().read_bytes() == BODY
    assert server.ranges == [None, "bytes=150000-"]


def test_another_range_than_asked_for_is_not_used(get, server):
    server.plan = ["cut", "other range"]
    assert get().read_bytes() == BODY
    assert server.ranges == [None, "bytes=150000-", None]


def test_a_part_that_is_whole_needs_no_byte(get, server, tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(BODY)
    assert get().read_bytes() == BODY
    assert server.ranges == ["bytes=300000-"]


def test_a_part_that_is_too_long_is_dropped(get, tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(BODY + b"more")
    assert get().read_bytes() == BODY


def test_a_first_half_from_elsewhere_is_dropped(get, server, tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(b"<html>Please log in</html>")
    assert get().read_bytes() == BODY
    assert server.ranges == ["bytes=26-", None]


def test_a_wrong_checksum_is_refused_and_the_file_removed(get, server, tmp_path):
    with pytest.raises(DataError, match="wrong checksum .md5 .*expected 0000.*was removed"):
        get("0" * 32)
    assert list(tmp_path.iterdir()) == [] and len(server.asked) == 1


def test_a_body_that_is_always_short_is_given_up(get, server):
    server.honours_range = False
    server.plan = ["cut"] * 9
    with pytest.raises(DataError, match="cut after 150,000 of 300,000 bytes"):
        get()
    assert len(server.asked) == QUICK.attempts


def test_a_missing_file_is_not_asked_for_again(get, server):
    server.plan = [404] * 9
    with pytest.raises(DataError, match="answered 404"):
        get()
    assert len(server.asked) == 1


def test_a_passing_fault_is_tried_again(get, server):
    server.plan = [503, 429]
    assert get().read_bytes() == BODY


def test_a_body_without_end_is_cut_off(get, server, tmp_path):
    server.plan = ["endless"]
    with pytest.raises(DataError, match="more than 2,000,000 bytes"):
        get(most_bytes=2_000_000)
    assert list(tmp_path.iterdir()) == [] and len(server.asked) == 1


def test_a_body_that_says_it_is_too_long_is_not_read(get, tmp_path):
    told = []
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        get(most_bytes=1000, tell=lambda *what: told.append(what))
    assert told == [] and list(tmp_path.iterdir()) == []


def test_a_body_that_trickles_is_given_up(get, server):
    def trickle(request, body):
        try:
            for _ in range(100):
                request.wfile.write(b"x")
                time.sleep(0.02)
        except OSError:
            pass

    server.send_on = trickle
    server.plan = ["endless"] * 9
    began = time.monotonic()
    with pytest.raises(DataError, match="too slow"):
        get(patience=Patience(attempts=2, timeout_seconds=0.2, pause_seconds=0))
    assert time.monotonic() - began < 2 and len(server.asked) == 2


def test_a_refused_connection_is_one_line_at_once(get, server):
    server.close()
    began = time.monotonic()
    with pytest.raises(DataError, match="cannot be reached: Connection refused") as caught:
        get(patience=Patience())
    assert time.monotonic() - began < 1
    assert "\n" not in str(caught.value) and server.url(NAME) in str(caught.value)


def test_a_name_without_address_is_one_line_at_once(tmp_path, monkeypatch):
    import socket

    def unknown(*_args, **_settings):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    began = time.monotonic()
    with pytest.raises(DataError, match="cannot be reached: Temporary failure"):
        download("http://nowhere/x", tmp_path / "x", "", lambda *_: None, Patience(), 1000)
    assert time.monotonic() - began < 1


def test_a_folder_that_cannot_be_written_is_not_the_servers_fault(server, tmp_path, md5):
    with pytest.raises(StoreError, match="cannot write .*none"):
        file = tmp_path / "none" / NAME
        download(server.url(NAME), file, md5(BODY), lambda *_: None, QUICK, 1 << 30)
    assert len(server.asked) == 1
