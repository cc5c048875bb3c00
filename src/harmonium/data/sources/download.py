"""Download of one file: resumes interrupted transfers and verifies the checksum."""

from __future__ import annotations

import errno
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harmonium.core.errors import DataError, StoreError

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, the bytes done, and the total bytes if known."""

BLOCK = 1 << 20

_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
)


@dataclass(frozen=True)
class Patience:
    """Number of attempts, pauses and timeouts of a download."""

    attempts: int = 4  # in total; each continues where the last was interrupted
    timeout_seconds: float = 20.0  # without a byte
    pause_seconds: float = 1.0  # before the second attempt, twice as long before each further one
    slowest: float = 1000.0  # least bytes per second, over one attempt
    package_seconds: float = 1800.0  # for the package client in total


class _Interrupted(Exception):
    """A connection that ended early; the next attempt continues from there."""


def download(
    url: str, file: Path, md5: str, report: Progress, patience: Patience, most_bytes: int
) -> None:
    """Download `url` to `file`, whose folder exists; an incomplete download stays as `.part`.

    Raises:
        DataError: the server could not be reached, or the file has another checksum (and is then
            removed).
    """
    if file.is_file() and md5_of(file) == md5:
        return
    part = file.with_name(file.name + ".part")
    run = _Download(url, part, report, patience, most_bytes)
    continued = _size(part) > 0
    run.complete()
    actual = md5_of(part)
    if actual != md5 and continued:  # the first half may have been another server's error page
        part.unlink()
        run.complete()
        actual = md5_of(part)
    if actual != md5:
        part.unlink()
        raise DataError(
            f"{url}: wrong checksum (md5 {actual}, expected {md5}); the file was removed"
        )
    part.replace(file)


def md5_of(path: Path) -> str:
    """The md5 of a file, which is what data sets publish; it detects accidents, not attacks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class _Download:
    url: str
    part: Path
    report: Progress
    patience: Patience
    most_bytes: int

    def complete(self) -> None:
        """Try until the part is complete, by the length that the server states."""
        for attempt in range(1, self.patience.attempts + 1):
            try:
                return self._attempt()
            except (_Interrupted, OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in _DISK:
                    raise StoreError(f"cannot write {self.part}: {error.strerror}") from error
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                if attempt == self.patience.attempts or not _may_succeed_later(error):
                    partial = (
                        ", the part received is kept for next time" if _size(self.part) else ""
                    )
                    raise DataError(f"{self.url}: {_reason(error)}{partial}") from error
                time.sleep(self.patience.pause_seconds * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> None:
        """Make one connection: continue the part, or start anew if the server cannot continue."""
        start = _size(self.part)
        try:
            reply = self._request(start)
        except urllib.error.HTTPError as error:
            if error.code == 416 and start and self._is_complete(error, start):
                return
            raise
        with reply:
            continues = self._continues(reply, start)
            done = start if continues else 0
            length = reply.headers.get("Content-Length", "")
            total = done + int(length) if length.isdigit() else None
            if total is None or total <= self.most_bytes:
                with open(self.part, "ab" if continues else "wb") as file:
                    done = self._receive(reply, file, done, total)
        if max(done, total or 0) > self.most_bytes:
            self.part.unlink(missing_ok=True)
            raise DataError(f"{self.url}: more than {self.most_bytes:,} bytes: not the right file")
        if total is not None and done < total:
            raise _Interrupted(f"the connection was cut after {done:,} of {total:,} bytes")

    def _is_complete(self, error: urllib.error.HTTPError, start: int) -> bool:
        """Whether an error 416 (range not satisfiable) says that the part is the whole file.

        If not, the part is another file, and is removed.
        """
        if error.headers.get("Content-Range") == f"bytes */{start}":
            error.close()
            return True
        self.part.unlink()
        return False

    def _continues(self, reply: http.client.HTTPResponse, start: int) -> bool:
        """Whether the server sends the rest of the file, and not the whole file again."""
        if reply.status != 206:
            return False
        if not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            self.part.unlink(missing_ok=True)
            raise _Interrupted("the server sent another range than was asked for")
        return True

    def _request(self, start: int) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity", "User-Agent": "harmonium"}
        if start:
            headers["Range"] = f"bytes={start}-"
        request = urllib.request.Request(self.url, headers=headers)
        reply: http.client.HTTPResponse = urllib.request.urlopen(
            request, timeout=self.patience.timeout_seconds
        )
        return reply

    def _receive(
        self, reply: http.client.HTTPResponse, file: IO[bytes], done: int, total: int | None
    ) -> int:
        """Write what arrives and return the bytes then present; stop beyond `most_bytes`."""
        began, before = time.monotonic(), done
        while done <= self.most_bytes and (block := reply.read1(BLOCK)):
            done += len(block)
            file.write(block)
            self.report(f"downloading {self.part.stem}", done, total)
            seconds = time.monotonic() - began
            fair = max(0.0, seconds - self.patience.timeout_seconds) * self.patience.slowest
            if done - before < fair:
                raise _Interrupted(
                    f"the server is too slow: {done - before:,} bytes in {seconds:.0f} s"
                )
        return done


def _may_succeed_later(error: Exception) -> bool:
    """Whether another attempt may succeed; not if the file is missing or the host unreachable."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 416, 429)
    if isinstance(error, urllib.error.URLError):  # no connection came about
        return isinstance(error.reason, ConnectionResetError)
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, _Interrupted):
        return str(error)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "cannot be reached: timed out"
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return f"cannot be reached: {text or type(cause).__name__}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
