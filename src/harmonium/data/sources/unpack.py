"""Unpacking untrusted archives: only regular files, only below one folder.

Members are written under names that stay within the folder, never over an existing file, and never
more bytes in total than are allowed.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import shutil
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Literal

from harmonium.core.errors import DataError
from harmonium.data.sources.download import BLOCK

Wanted = Callable[[str], bool]
"""Whether a member, by its name within the archive, is to be unpacked."""

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError),
    *(RuntimeError, NotImplementedError, ValueError),  # zipfile: encrypted, unknown compression
)
_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)


def kind_of(path: Path) -> Literal["tar", "zip", "deb"] | None:
    """The kind of an archive, by its content; None if the file is not an archive."""
    with open(path, "rb") as file:
        head = file.read(8)
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head == b"!<arch>\n":
        return "deb"
    try:
        return "tar" if head.strip(b"\0") and tarfile.is_tarfile(path) else None
    except (OSError, *_BROKEN):
        return None


def unpack(archive: Path, to: Path, wanted: Wanted, most_bytes: int) -> None:
    """Unpack the wanted regular files into `to`.

    Args:
        archive: a tar file (compressed or not), a zip file or a Debian package.
        to: an existing folder.
        wanted: chooses members; links, devices and folders are never unpacked.
        most_bytes: largest total size of the members.

    Raises:
        DataError: the archive is damaged or too large, or the name of a member is unsafe.
    """
    left = most_bytes
    try:
        for name, size, content in _members(archive):
            left -= size + tarfile.BLOCKSIZE  # so that empty members are limited too
            if left < 0:
                raise DataError(f"{archive.name} holds more than {most_bytes:,} bytes")
            if content is not None and wanted(name):
                target = to / _safe(name, archive)
                target.parent.mkdir(parents=True, exist_ok=True)
                with content() as source, open(target, "xb") as file:
                    shutil.copyfileobj(source, file, BLOCK)
    except _BROKEN as error:
        raise DataError(f"{archive.name} is damaged or incomplete: {_first(error)}") from error
    except OSError as error:
        if error.errno in _NAMES:
            raise DataError(f"{archive.name} holds names that cannot be files: {error}") from error
        if error.errno is not None:  # an error of the disk, not of the archive
            raise
        raise DataError(f"{archive.name} is damaged or incomplete: {_first(error)}") from error


def decompress(source: Path, target: Path, most_bytes: int) -> None:
    """Decompress a `.gz` file to `target`; raises DataError beyond `most_bytes`."""
    left = most_bytes
    try:
        with gzip.open(source, "rb") as content, open(target, "xb") as file:
            while block := content.read(BLOCK):
                left -= len(block)
                if left < 0:
                    raise DataError(f"{source.name} holds more than {most_bytes:,} bytes: refused")
                file.write(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{source.name} is damaged or incomplete: {_first(error)}") from error


Member = tuple[str, int, Callable[[], IO[bytes]] | None]
"""Name, unpacked size, and a function that opens it, which is None unless it is a regular file."""


def _members(archive: Path) -> Iterator[Member]:
    kind = kind_of(archive)
    if kind == "zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                yield info.filename, info.file_size, _zip_opener(opened, info)
        return
    with ExitStack() as stack:
        if kind == "deb":
            stream = stack.enter_context(_deb_content(archive))
            tar = stack.enter_context(tarfile.open(fileobj=stream, mode="r|"))
        else:
            tar = stack.enter_context(tarfile.open(archive, "r:*"))
        for member in tar:
            yield member.name.removeprefix("./"), member.size, _tar_opener(tar, member)


def _zip_opener(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]] | None:
    mode = info.external_attr >> 16  # 0 where the archive was not made on Unix
    regular = not info.is_dir() and stat.S_IFMT(mode) in (0, stat.S_IFREG)
    return (lambda: opened.open(info)) if regular else None


def _tar_opener(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]] | None:
    def content() -> IO[bytes]:
        file = tar.extractfile(member)
        assert file is not None  # it is a regular file
        return file

    return content if member.isreg() else None


@contextmanager
def _deb_content(archive: Path) -> Iterator[IO[bytes]]:
    """The files of a Debian package as a tar stream, from dpkg-deb."""
    tool = shutil.which("dpkg-deb")
    if tool is None:
        raise DataError(f"{archive.name} is a Debian package, but dpkg-deb is not installed")
    with subprocess.Popen(
        [tool, "--fsys-tarfile", str(archive.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def _safe(name: str, archive: Path) -> PurePosixPath:
    """The name as a relative path; raises DataError if it would leave the folder."""
    path = PurePosixPath(name)
    unsafe = path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name
    if unsafe or PureWindowsPath(name).drive:
        raise DataError(f"{archive.name} has a member with the unsafe name {name!r}")
    return path


def _first(error: Exception) -> str:
    """The first line of an error message; tarfile lists every format that it tried."""
    return str(error).partition("\n")[0].rstrip(":") or type(error).__name__
