"""Archives, also those made to do harm: only plain files, only below one folder, only so much."""

import gzip
import os
import shutil
import stat
import tarfile
import time
import zipfile

import pytest

from harmonium.core.errors import DataError
from harmonium.data.sources.unpack import decompress, kind_of, unpack

LEAST = 512  # what a member costs besides its content


@pytest.fixture
def to(tmp_path):
    (tmp_path / "deep" / "to").mkdir(parents=True)
    return tmp_path / "deep" / "to"


def everything(name):
    return True


def found(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_only_what_is_wanted_is_unpacked(tmp_path, to, tar, zipped, mode):
    members = [("a/one", b"1"), ("./a/two", b"2"), ("three", b"3"), ("../evil", b"e")]
    if mode == "zip":
        archive = zipped(
            tmp_path / "x", [(name.removeprefix("./"), body) for name, body in members]
        )
    else:
        archive = tar(tmp_path / "x", members, mode)
    assert kind_of(archive) == ("zip" if mode == "zip" else "tar")
    unpack(archive, to, lambda name: name in ("a/one", "a/two"), 1 << 20)
    assert found(to) == {"a/one": b"1", "a/two": b"2"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "{top}/evil", "C:/evil", "..\\evil"])
@pytest.mark.parametrize("form", ["tar", "zip"])
def test_names_that_lead_out_are_refused(tmp_path, to, tar, zipped, name, form):
    write = tar if form == "tar" else zipped
    archive = write(tmp_path / "x", [("good", b"1"), (name.format(top=tmp_path), b"e")])
    with pytest.raises(DataError, match="unsafe name"):
        unpack(archive, to, everything, 1 << 20)
    assert found(tmp_path).keys() <= {"x", "deep/to/good"}


def special(kind, **settings):
    info = tarfile.TarInfo("x")
    info.type = kind
    for key, value in settings.items():
        setattr(info, key, value)
    return info


def test_links_and_devices_are_left_out(tmp_path, to, tar):
    members = [
        ("soft", special(tarfile.SYMTYPE, linkname="/etc")),
        ("hard", special(tarfile.LNKTYPE, linkname="good")),
        ("pipe", special(tarfile.FIFOTYPE)),
        ("disk", special(tarfile.BLKTYPE, devmajor=8)),
        ("good", b"1"),
        ("soft/passwd", b"e"),  # would be written through the link
    ]
    unpack(tar(tmp_path / "x", members), to, everything, 1 << 20)
    assert found(to) == {"good": b"1", "soft/passwd": b"e"}
    assert not any(path.is_symlink() for path in to.rglob("*"))


def test_links_in_a_zip_are_left_out(tmp_path, to, zipped):
    link = zipfile.ZipInfo("link")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    folder = zipfile.ZipInfo("folder/")
    unpack(
        zipped(tmp_path / "x", [(link, b"/etc/passwd"), (folder, b""), ("good", b"1")]),
        to,
        everything,
        1 << 20,
    )
    assert found(to) == {"good": b"1"} and not os.path.lexists(to / "link")


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_bombs_are_refused_before_they_go_off(tmp_path, to, tar, zipped, form):
    write = tar if form == "tar" else zipped
    members = [(f"{n}", bytes(100_000)) for n in range(30)]
    archive = write(tmp_path / "x", members)
    assert archive.stat().st_size < 30_000
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        unpack(archive, to, everything, 1_000_000)
    assert sum(map(len, found(to).values())) <= 1_000_000
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        unpack(archive, to, lambda name: False, 1_000_000)  # reading past it would take as long
    empty = write(tmp_path / "y", [(f"{n}", b"") for n in range(200)])
    with pytest.raises(DataError, match="more than"):
        unpack(empty, to, lambda name: False, 199 * LEAST)


@pytest.mark.parametrize("form", ["tar", "zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_nothing_is_written_twice(tmp_path, to, tar, zipped, form):
    write = tar if form == "tar" else zipped
    for name, members in {"x": ("a", "a"), "y": ("b", "b/c"), "z": ("d" * 300,)}.items():
        archive = write(tmp_path / name, [(member, b"1") for member in members])
        with pytest.raises(DataError, match="cannot be files"):
            unpack(archive, to, everything, 1 << 20)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "zip"])
def test_archives_that_are_damaged(tmp_path, to, tar, zipped, mode):
    members = [("a", os.urandom(50_000)), ("b", os.urandom(50_000))]
    path = tmp_path / "x"
    archive = zipped(path, members) if mode == "zip" else tar(path, members, mode)
    whole = path.read_bytes()
    path.write_bytes(whole[:60_000])
    with pytest.raises(DataError, match="x is damaged") as caught:
        unpack(archive, to, everything, 1 << 20)
    assert "\n" not in str(caught.value)
    path.write_bytes(whole[:30_000] + b"damaged" + whole[30_007:])
    shutil.rmtree(to)
    to.mkdir()
    if mode == "zip":  # sums are kept for each file
        with pytest.raises(DataError, match="is damaged"):
            unpack(archive, to, everything, 1 << 20)


def test_an_encrypted_zip_is_refused(tmp_path, to, zipped):
    path = zipped(tmp_path / "x", [("a", b"1")])
    body = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        body[body.index(mark) + offset] |= 1
    path.write_bytes(body)
    with pytest.raises(DataError, match="encrypted"):
        unpack(path, to, everything, 1 << 20)


def test_what_is_no_archive(tmp_path, to):
    for content in (b"", b"hello", bytes(2000), gzip.compress(b"hello"), os.urandom(2000)):
        (tmp_path / "x").write_bytes(content)
        assert kind_of(tmp_path / "x") is None
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "x", to, everything, 1 << 20)


def deb(path, content):
    """A Debian package whose files are this tar archive."""
    with open(path, "wb") as file:
        file.write(b"!<arch>\n")
        for name, body in (("debian-binary", b"2.0\n"), ("data.tar", content)):
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode())
            file.write(body + b"\n" * (len(body) % 2))
    return path


def test_a_debian_package_is_unpacked_by_its_own_tool(tmp_path, to, tar, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    plain = tar(tmp_path / "data.tar", [("./usr/a.gz", b"1"), ("./usr/b", b"2")], "w")
    package = deb(tmp_path / "x.deb", plain.read_bytes())
    assert kind_of(package) == "deb"
    with pytest.raises(DataError, match="dpkg-deb is not installed"):
        unpack(package, to, everything, 1 << 20)
    tool = tmp_path / "bin" / "dpkg-deb"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "--fsys-tarfile {package}" ] && exec /bin/cat {plain}')
    tool.chmod(stat.S_IRWXU)
    unpack(package, to, lambda name: name == "usr/a.gz", 1 << 20)
    assert found(to) == {"usr/a.gz": b"1"}
    tool.write_text("#!/bin/sh\nexit 2")
    with pytest.raises(DataError, match="x.deb is damaged"):
        unpack(package, to, everything, 1 << 20)
    tool.write_text(f"#!/bin/sh\n/bin/cat {plain}; exec /bin/sleep 20")
    began = time.monotonic()
    unpack(package, to, lambda name: name == "usr/b", 1 << 20)
    assert found(to)["usr/b"] == b"2" and time.monotonic() - began < 10


def test_gz_files_are_bounded_too(tmp_path):
    source = tmp_path / "x.gz"
    source.write_bytes(gzip.compress(bytes(3_000_000)))
    decompress(source, tmp_path / "x", 3_000_000)
    assert (tmp_path / "x").read_bytes() == bytes(3_000_000)
    with pytest.raises(DataError, match="more than 2,999,999 bytes"):
        decompress(source, tmp_path / "y", 2_999_999)
    for damaged in (source.read_bytes()[:-4], b"hello", source.read_bytes()[:-8] + bytes(8)):
        source.write_bytes(damaged)
        with pytest.raises(DataError, match="x.gz is damaged"):
            decompress(source, tmp_path / str(len(damaged)), 1 << 30)
