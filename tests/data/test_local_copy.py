"""A copy that the user has: folders, archives, packages, images of one's own; and refusals."""

import gzip
import json
import os
import zipfile

import numpy as np
import pytest

from harmonium.core.errors import DataError
from harmonium.data.datasets import About
from harmonium.data.published_datasets import Package, Published, Remote, Source
from harmonium.data.sources.fetch import fetch_set

TRAIN, TEST = bytes(range(48)), bytes(range(100, 116))
PIECES = {"one/1.png": b"1", "one/deep/2.png": b"2", "two/3.png": b"3"}


@pytest.fixture(autouse=True)
def _own_home(home):
    pass


def make_set(**source):
    class Mine(Published):
        name = "mine"
        about = About((4, 4, 3), 4, 3, 1, "none")

    Mine.source = Source(page="https://example.org/mine", **source)
    return Mine


def turned_round(packed, folder):
    """What a package holds backwards."""
    (folder / "bin").mkdir()
    for name in ("train", "test"):
        body = (packed / "package" / f"{name}.rev").read_bytes()
        (folder / "bin" / f"{name}.bin").write_bytes(body[::-1])


@pytest.fixture
def spec(md5):
    """A set of two files that can be compared, with a package that holds them in another form."""
    return make_set(
        layouts=({"bin/train.bin": md5(TRAIN), "bin/test.bin": md5(TEST)},),
        remotes=(Remote("mine.tar.gz", ("http://127.0.0.1:9/mine.tar.gz",), "0" * 32),),
        packages=(Package("npm", "x@1", ("package/train.rev", "package/test.rev"), turned_round),),
        pickled=("mine-py", "train.pkl"),
        most_bytes=100_000,
    )


@pytest.fixture
def tree(md5):
    """A set of folders in an archive whose sum is known."""

    def make(body=b"", **further):
        remotes = (Remote("tree.zip", ("http://127.0.0.1:9/tree.zip",), md5(body)),)
        return make_set(
            **{"tree": ("one", "two"), "remotes": remotes, "most_bytes": 9000} | further
        )

    return make


def write(folder, files):
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "fetched.json"
    }


def notes(folder):
    return json.loads((folder / "fetched.json").read_text())["notes"]


def give(spec, path):
    return fetch_set(spec, from_path=path)


def refused(spec, path):
    """One line, and nothing of it stays."""
    from harmonium.data.cache import fetched_folder

    with pytest.raises(DataError) as caught:
        give(spec, path)
    assert "\n" not in str(caught.value)
    left = [entry for entry in fetched_folder().iterdir() if not entry.name.endswith(".lock")]
    assert left == []
    return str(caught.value)


# ---- files that can be compared ------------------------------------------------------------------


def is_right(folder):
    assert content(folder) == {"bin/train.bin": TRAIN, "bin/test.bin": TEST}
    return notes(folder) == []


@pytest.mark.parametrize("place", ["", "bin/", "far/below/bin/"])
def test_a_folder_with_the_files_somewhere_below(spec, tmp_path, place):
    files = {f"{place}train.bin": TRAIN, f"{place}test.bin.gz": gzip.compress(TEST)}
    mine = write(tmp_path / "mine", {**files, "other.txt": b"x", "bin2/train.txt": b"y"})
    before = content(mine)
    assert is_right(give(spec, mine)) and content(mine) == before


def test_of_several_files_of_a_name_the_right_one_is_taken(spec, tmp_path):
    files = {"old/train.bin": TRAIN[::-1], "new/train.bin": TRAIN, "x/bin/test.bin": TEST}
    assert is_right(give(spec, write(tmp_path / "mine", files)))


@pytest.mark.parametrize("form", ["tar", "zip", "package", "unpacked package", "downloads"])
def test_archives_and_packages(spec, tmp_path, tar, zipped, form):
    files = {"bin/train.bin": TRAIN, "bin/test.bin": TEST, "bin/readme": b"!"}
    package = {"package/train.rev": TRAIN[::-1], "package/test.rev": TEST[::-1]}
    if form == "unpacked package":
        path = write(tmp_path / "mine", package) / "package"
    elif form == "downloads":
        (tmp_path / "all").mkdir()
        tar(tmp_path / "all" / "mine.tar.gz", files.items())
        path = write(tmp_path / "all", {"other.zip": b"x"})
    elif form == "zip":
        path = zipped(tmp_path / "any name", files.items())
    else:
        members = files if form == "tar" else package
        path = tar(tmp_path / "any name", members.items())
    assert is_right(give(spec, path))


def test_one_file_that_is_the_whole_set(tmp_path, md5):
    spec = make_set(layouts=({"set.npz": md5(b"PK\x03\x04 official")},))
    path = tmp_path / "set.npz"
    path.write_bytes(b"PK\x03\x04 official")
    assert content(give(spec, path)) == {"set.npz": b"PK\x03\x04 official"}
    path.write_bytes(b"PK\x03\x04 other")
    with pytest.raises(DataError, match="set.npz .*official"):
        give(spec, path)


def test_copies_that_are_refused(spec, tmp_path, tar):
    assert "no such file or folder" in refused(spec, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "lacks 2 expected files, e.g. bin/train.bin" in refused(spec, tmp_path / "empty")
    half = write(tmp_path / "half", {"train.bin": TRAIN})
    assert "lacks 1 expected files, e.g. bin/test.bin" in refused(spec, half)
    wrong = write(tmp_path / "wrong", {"train.bin": TRAIN, "test.bin": TRAIN})
    assert "test.bin is not the official file (md5 " in refused(spec, wrong)
    (tmp_path / "text").write_text("hello")
    assert "tar, zip, deb or npz archive" in refused(spec, tmp_path / "text")
    cut = tar(tmp_path / "cut", [("bin/train.bin", os.urandom(40_000))])
    cut.write_bytes(cut.read_bytes()[:20_000])
    assert "cut is damaged" in refused(spec, cut)
    large = tar(tmp_path / "large", [("bin/train.bin", bytes(200_000))])
    assert "more than 100,000 bytes" in refused(spec, large)
    bomb = write(tmp_path / "bomb", {"train.bin.gz": gzip.compress(bytes(200_000))})
    write(bomb, {"test.bin": TEST})
    assert "more than 100,000 bytes" in refused(spec, bomb)
    links = write(tmp_path / "links", {"bin/test.bin": TEST})
    (links / "bin" / "train.bin").symlink_to(half / "train.bin")
    assert "lacks 1 expected files, e.g. bin/train.bin" in refused(spec, links)


@pytest.mark.parametrize("form", ["file", "folder", "named folder", "archive"])
def test_pickled_editions_are_refused_unread(spec, tmp_path, tar, form):
    body = b"cos\nsystem\n(S'touch evil'\ntR."
    path = write(tmp_path / "mine", {"mine-py/train.pkl": body, "mine-py/test.pkl": body})
    if form == "file":
        path = path / "mine-py" / "train.pkl"
    elif form == "named folder":
        path = write(tmp_path / "mine-py", {"x": body})
    elif form == "archive":
        path = tar(tmp_path / "mine.tgz", [("mine-py/train.pkl", body)])
    says = refused(spec, path)
    assert "pickled" in says and "take mine.tar.gz from https://example.org/mine instead" in says


def test_what_cannot_be_compared_is_noted(tmp_path, tar, md5):
    body = tar(tmp_path / "x.tar.gz", [("a", b"1"), ("b", b"2")]).read_bytes()
    remotes = (Remote("x.tar.gz", ("http://127.0.0.1:9/",), md5(body)),)
    spec = make_set(layouts=({"a": md5(b"1"), "b": None},), remotes=remotes)
    assert notes(give(spec, tmp_path / "x.tar.gz")) == []
    folder = give(spec, write(tmp_path / "mine", {"a": b"1", "b": b"2"}))
    assert notes(folder) == ["b of mine could not be compared with an official checksum"]
    tar(tmp_path / "x.tar.gz", [("a", b"1"), ("b", b"3")])
    with pytest.raises(DataError, match="x.tar.gz .*official.*md5"):
        give(spec, tmp_path / "x.tar.gz")
    assert content(folder) == {"a": b"1", "b": b"2"}


def test_the_note_reaches_whoever_reads_results(tmp_path, tar, md5):
    archive = tar(tmp_path / "x.tar.gz", [("a", b"1")])
    remote = Remote("x.tar.gz", ("http://127.0.0.1:9/",), md5(archive.read_bytes()))

    class Mine(make_set(layouts=({"a": None},), remotes=(remote,))):
        def read(self, folder, writer):
            writer.append("train", np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, int))
            return ("all",)

    give(Mine, write(tmp_path / "mine", {"a": b"1"}))
    assert Mine().load().notes == ("a of mine could not be compared with an official checksum",)
    give(Mine, archive)
    assert Mine().load().notes == ()


# ---- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "top/", "far/below/"])
@pytest.mark.parametrize("form", ["zip", "tar", "folder"])
def test_trees(tree, tmp_path, tar, zipped, form, place):
    files = {place + name: body for name, body in PIECES.items()}
    files |= {f"{place}one/.DS_Store": b"x", "__MACOSX/one/1.png": b"x"}
    if form == "folder":
        path = write(tmp_path / "mine", files)
        (path / place / "one" / "link").symlink_to("/etc")
        (path / place / "one" / "link.png").symlink_to("/etc/hostname")
        os.mkfifo(path / place / "one" / "pipe")
    else:
        path = (tar if form == "tar" else zipped)(tmp_path / "mine", files.items())
    folder = give(tree(), path)
    assert content(folder) == PIECES and not any(p.is_symlink() for p in folder.rglob("*"))
    assert notes(folder) == ["mine could not be compared with an official checksum"]


def test_the_outermost_of_nested_trees_is_taken(tree, tmp_path):
    files = {**PIECES, "one/copy/one/1.png": b"1", "one/copy/two/2.png": b"2"}
    assert content(give(tree(), write(tmp_path / "mine", files))) == files


def test_a_tree_from_the_official_archive_needs_no_note(tree, tmp_path, zipped):
    archive = zipped(tmp_path / "renamed.zip", PIECES.items())
    assert notes(give(tree(archive.read_bytes()), archive)) == []
    (tmp_path / "all").mkdir()
    archive = archive.rename(tmp_path / "all" / "tree.zip")
    assert notes(give(tree(archive.read_bytes()), tmp_path / "all")) == []
    with pytest.raises(DataError, match="tree.zip .*official"):
        give(tree(b"other"), archive)


def test_links_left_out_of_a_folder_are_told(tree, tmp_path):
    path = write(tmp_path / "mine", PIECES)
    (path / "one" / "4.png").symlink_to(path / "two" / "3.png")
    told = []
    fetch_set(tree(), from_path=path, progress=lambda *what: told.append(what[0]))
    assert f"{path}: 1 links are left out, e.g. 4.png" in told


def test_trees_that_are_refused(tree, tmp_path, tar, zipped):
    part = write(tmp_path / "part", {"one/1.png": b"1", "three/3.png": b"3"})
    assert "part holds no folder with one, two in it" in refused(tree(), part)
    for write_archive in (tar, zipped):
        evil = write_archive(tmp_path / "evil", [*PIECES.items(), ("../../evil", b"e")])
        assert "'../../evil'" in refused(tree(), evil)
        bomb = write_archive(tmp_path / "bomb", [*PIECES.items(), ("one/4.png", bytes(20_000))])
        assert "more than 9,000 bytes" in refused(tree(), bomb)
    large = write(tmp_path / "large", {**PIECES, "one/a": bytes(5000), "two/b": bytes(5000)})
    assert "more than 9,000 bytes" in refused(tree(), large)


# ---- images of one's own in place of the official ones -----------------------------------------


def make_images(count, channels=3):
    return np.arange(count * 16 * channels).reshape(count, 4, 4, channels).astype(np.uint8)


def own(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def test_an_npz_in_place_of_the_set(spec, tmp_path):
    path = own(
        tmp_path / "few.npz",
        train_x=make_images(6),
        train_y=np.array([0, 3, 0, 3, 0, 3]),
        test_x=make_images(2),
        test_y=np.array([3, 0]),
    )
    folder = give(spec, path)
    assert content(folder) == {"given.npz": path.read_bytes()}
    data = spec(validation=0).load()
    assert [len(part) for part in (data.train, data.test)] == [6, 2]
    assert data.classes == ("0", "1", "2", "3") and set(data.train.labels) == {0, 3}
    says = "mine here is not the official set but few.npz given with --from: "
    assert data.notes == (f"{says}6 training images of 4x4x3",)
    told = []
    assert fetch_set(spec, progress=lambda *what: told.append(what[0])) == folder
    assert told[0] == "mine is already here" and f"remove {folder} to fetch" in told[1]


def test_an_npz_gives_way_to_the_official_files(spec, tmp_path):
    both = {"train_x": make_images(6), "test_x": make_images(2)}
    folder = give(spec, own(tmp_path / "few.npz", **both))
    assert is_right(give(spec, write(tmp_path / "mine", {"train.bin": TRAIN, "test.bin": TEST})))
    assert not (folder / "given.npz").exists()


def test_labels_that_are_not_the_sets_are_numbered(spec, tmp_path):
    labels = {"train_y": np.array([10, 20, 30]), "test_y": np.array([10])}
    path = own(tmp_path / "x.npz", train_x=make_images(3), test_x=make_images(1), **labels)
    give(spec, path)
    assert spec(validation=0).load().classes == ("10", "20", "30")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (
            {"train_x": make_images(3, 1), "test_x": make_images(1, 1)},
            "grey, those of the set in colour",
        ),
        ({"train_x": make_images(3)}, "no test images"),
        (
            {"train_x": make_images(3), "test_x": make_images(1)[:, :2]},
            "(2, 4, 3), others (4, 4, 3)",
        ),
        ({"train_x": make_images(3) / 255, "test_x": make_images(1)}, "float64"),
        ({"test_x": make_images(1)}, "expected train_x"),
        ({"train_x": bytes(200_000)}, "more than 100,000 bytes"),
        (
            {"train_x": make_images(5), "train_y": np.arange(5), "test_x": make_images(1)},
            "it has 5 classes, the set 4",
        ),
        (
            {"train_x": make_images(1), "train_y": np.array([object()]), "test_x": make_images(1)},
            "labels 'train_y'",
        ),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(spec, tmp_path, arrays, says):
    assert says in refused(spec, own(tmp_path / "x.npz", **arrays))


def test_an_npz_that_is_none_is_refused(spec, tmp_path):
    (tmp_path / "x.npz").write_text("hello")
    assert "is not an .npz archive" in refused(spec, tmp_path / "x.npz")


def test_an_npz_that_claims_more_than_it_holds_is_refused(spec, tmp_path):
    path = own(tmp_path / "x.npz", train_x=make_images(1))
    with zipfile.ZipFile(path) as archive:
        body = archive.read("train_x.npy")
    with zipfile.ZipFile(path, "w") as archive:
        claim = body.replace(
            b"(1, 4, 4, 3), }" + b" " * 16, b"(99999999999, 4, 4, 3), }" + b" " * 6
        )
        assert len(claim) == len(body) and claim != body
        archive.writestr("train_x.npy", claim)
    assert "train_x" in (error := refused(spec, path)) and "(99999999999, 4, 4, 3)" in error
