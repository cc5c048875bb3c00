"""A process that decodes image files: `python -m harmonium.data.decoding.worker`.

A damaged or malicious file may crash a decoder, exhaust its memory or never finish; in a process of
its own it does no harm. An order is one line of JSON with paths. Every image is answered at once by
a line of JSON followed by its pixels, so that the caller knows which image ended the process.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from harmonium.data.decoding import dicom
from harmonium.data.decoding.conversion import Fit, Levels, Size, kind_of, read_image, upright
from harmonium.data.images import Pixels

FORMATS = (
    "JPEG",
    "PNG",
    "GIF",
    "BMP",
    "PPM",
    "TIFF",
    "WEBP",
)  # no others: some formats start programs
SECONDS = 120.0  # of processor time for one image
MEMORY = 4 << 30  # bytes of address space: several times what the largest allowed image needs


Source = str | tuple[str, int]
"""An image to read: a file, or a file and which of its frames, counted from 0."""

Frames = Literal["all", "first", "middle"]
"""Which frames of a DICOM file are images."""


class Order(NamedTuple):
    """How to read an image."""

    head: bool = False  # only its kind and size, without decoding the pixels
    size: Size = None
    channels: int = 3
    depth: int = 16  # bits that 16-bit grey uses
    fit: Fit = "cut"  # how an image of another shape comes to the size
    window: Sequence[float] | None = None  # see `conversion.Levels`
    percentiles: Sequence[float] | None = None
    frames: Frames = "all"  # `middle`: the middle frame, of a source that names none
    key: str = ""  # hexadecimal, to hash PatientID with; empty: it is not read
    rough: bool = False  # may be scaled with less care where that is faster: JPEG in big steps

    @property
    def levels(self) -> Levels:
        """How values of more than 8 bits become bytes."""
        return Levels(self.depth, self.window, self.percentiles)


class Answer(NamedTuple):
    """The result for one image."""

    error: str = ""  # why it cannot be read
    kind: str = ""  # see `conversion.kind_of`
    size: tuple[int, int] = (0, 0)  # width and height, upright
    pixels: Pixels | None = None  # (height, width, channels); None if only the header was read
    frames: int = 1  # in the file; more than one in DICOM files only
    group: str = ""  # hash of PatientID, if the order has a key and the file a patient


def perform(source: Source, order: Order) -> Answer:
    """Open one file and do what is ordered; errors are returned as answers."""
    path, number = (source, None) if isinstance(source, str) else source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return Answer(error="not a file")  # a pipe would never end
            if dicom.is_dicom(Path(path)):
                return _read_dicom(path, number, order)
            with Image.open(path, formats=FORMATS) as image:
                return _read(image, order)
        except Exception as error:  # noqa: BLE001  (damaged files make decoders raise anything)
            return Answer(error=_reason(path, error))


def _read(image: Image.Image, order: Order) -> Answer:
    kind = kind_of(image)
    if not order.head:
        if order.rough and isinstance(order.size, int):
            image.draft(None, (4 * order.size, 4 * order.size))
        image.load()
        pixels = read_image(image, order.size, order.channels, order.levels, order.fit)
        return Answer("", kind, (pixels.shape[1], pixels.shape[0]), pixels)
    width, height = image.size
    if width != height and upright(image).size != image.size:
        width, height = upright(
            image
        ).size  # by now Pillow has read it, and has rotated a TIFF itself
    return Answer("", kind, (width, height))


def _read_dicom(path: str, number: int | None, order: Order) -> Answer:
    """The same for a DICOM file, of which one frame is read."""
    kind, size, frames = dicom.header(path)
    group = dicom.patient(path, order.key) if order.key else ""
    if order.head:
        return Answer("", kind, size, frames=frames, group=group)
    if number is None:
        number = frames // 2 if order.frames == "middle" else 0
    image = dicom.frame(path, number, order.levels)
    pixels = read_image(image, order.size, order.channels, fit=order.fit)
    return Answer("", kind, (pixels.shape[1], pixels.shape[0]), pixels, frames, group)


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image" if os.path.getsize(path) else "empty"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 80 else line[:77] + "..."


def serve(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Answer orders until the stream ends."""
    for line in orders:
        words = json.loads(line)
        order = Order(*words["order"])
        for source in words["paths"]:
            _allow(SECONDS)
            answer = perform(source, order)
            _allow(0)
            about: dict[str, Any] = {**answer._asdict(), "pixels": None}
            pixels = answer.pixels
            if pixels is not None:
                about["pixels"] = pixels.shape
            answers.write(json.dumps(about).encode() + b"\n")
            if pixels is not None:
                answers.write(pixels.tobytes())
            answers.flush()


def _allow(seconds: float) -> None:
    """End this process after so much CPU time; the signal interrupts even native code."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serve orders from stdin on stdout; what decoders print is redirected to stderr."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(b"ready\n")
    answers.flush()
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the parent process is gone
        os._exit(1)
