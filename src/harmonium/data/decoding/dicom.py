"""DICOM files: their frames as 8-bit images, by the optional package pydicom.

Only elements that say how pixels are stored and shown are read. Names, numbers and dates of
patients and studies are not, except PatientID where images are grouped by it: of that only a keyed
hash leaves this module, and neither the hash nor its key is ever stored. What pydicom says about a
file may quote any of its elements, so errors are named in words of our own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.decoding.conversion import (
    Levels,
    levelled,
    of_depth,
    stretched,
    windowed,
)
from harmonium.data.images import Pixels

ENDINGS = (".dcm", ".dicom")
NO_IMAGE = "a DICOM file without an image"  # a report, a plan, a presentation
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "YBR_PARTIAL_420")
PALETTE = "PALETTE COLOR"

_SHARED, _EACH = "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"
_GROUPS = ("PixelValueTransformationSequence", "FrameVOILUTSequence")
_PALETTES = [
    f"{colour}PaletteColorLookupTable{part}"
    for colour in ("Red", "Green", "Blue")
    for part in ("Descriptor", "Data")
]
_READ = [
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PhotometricInterpretation"),
    *("PlanarConfiguration", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("PixelPaddingValue", "PixelPaddingRangeLimit", "RescaleSlope", "RescaleIntercept"),
    *("ModalityLUTSequence", "VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("SegmentedRedPaletteColorLookupTableData", *_PALETTES, _SHARED, _EACH),
]


class Header(NamedTuple):
    """What a file says of its images."""

    kind: str  # grey or colour
    size: tuple[int, int]  # width and height
    frames: int


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its ending, or by its first bytes if it has none.

    Many archives name files by numbers with dots in between, so `1.2.840` has no ending.
    """
    ending = path.suffix.lower()
    if ending in ENDINGS:
        return True
    if (ending and not ending[1:].isdigit()) or path.name.upper() == "DICOMDIR":
        return False
    try:
        with open(path, "rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def check_installed(paths: Sequence[str]) -> None:
    """Raise an error if any of the files needs pydicom and it is missing."""
    if find_spec("pydicom") is None and any(is_dicom(Path(path)) for path in paths):
        raise ConfigError("DICOM images need pydicom: pip install 'harmonium[dicom]'")


def header(path: str) -> Header:
    """The header of a file; raises DataError if it has no image that can be read."""
    with _reading():
        about = _about(path, *_version(path))
        if not about.get("Rows") or not about.get("Columns"):
            raise DataError(NO_IMAGE)
        width, height = int(about.Columns), int(about.Rows)
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise DataError(f"{width} x {height} pixels are too many")
        shown = str(about.get("PhotometricInterpretation", ""))
        if shown not in (*GREY, *COLOUR, PALETTE):
            raise DataError("a photometric interpretation that cannot be read")
        _check_compression(about.file_meta.get("TransferSyntaxUID"))
        kind = "grey" if shown in GREY else "colour"
        return Header(kind, (width, height), max(1, int(about.get("NumberOfFrames") or 1)))


def frame(path: str, number: int, levels: Levels) -> Image.Image:
    """One frame, counted from 0, as it is meant to be shown: 8-bit grey or RGB."""
    from pydicom.pixels.processing import apply_color_lut

    header(path)  # refuses what cannot be read, with the reason
    with _reading():
        about = _about(path, *_version(path))
        values = _stored(path, number, about.file_meta.TransferSyntaxUID)
        shown = str(about.PhotometricInterpretation)
        if shown in GREY:
            grey = _grey(values, _of_frame(about, number), levels)
            return Image.fromarray(255 - grey if shown == "MONOCHROME1" else grey)
        if shown == PALETTE:
            values = apply_color_lut(values, about)
            # A table of 16 bits may hold numbers of 8: its descriptor says so.
            bits = int(about.RedPaletteColorLookupTableDescriptor[2])
        else:
            bits = int(about.BitsStored)
        return Image.fromarray(of_depth(values, bits))


def patient(path: str, key: str) -> str:
    """A hash of PatientID that nobody can repeat without `key`; empty if there is no PatientID."""
    from pydicom import dcmread

    with _reading():
        found = dcmread(path, stop_before_pixels=True, specific_tags=["PatientID"])
        name = str(found.get("PatientID") or "").strip()
    digest = hashlib.blake2b(name.encode(), key=bytes.fromhex(key), digest_size=16)
    return digest.hexdigest() if name else ""


# ---- elements ------------------------------------------------------------------------------------


def _version(path: str) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


@lru_cache(maxsize=1)  # the frames of a file are read one after another
def _about(path: str, size: int, changed: int) -> Any:
    """The elements that say how pixels are stored and shown; none of a patient."""
    from pydicom import dcmread

    return dcmread(path, stop_before_pixels=True, specific_tags=_READ)


def _of_frame(about: Any, number: int) -> Any:
    """The elements for one frame, whose rescale and window may be its own (enhanced CT and MR)."""
    each = about.get(_EACH) or ()
    groups = [*(about.get(_SHARED) or ())[:1], *each[number : number + 1]]
    items = [item for group in groups for name in _GROUPS for item in (group.get(name) or ())[:1]]
    if not items:
        return about
    from pydicom import Dataset

    own = Dataset()
    own.update({e.tag: e for e in about if e.keyword not in (_SHARED, _EACH)})
    for item in items:
        own.update(item)
    return own


def _check_compression(syntax: Any) -> None:
    """Raise an error if pydicom cannot decode a transfer syntax with what is installed."""
    from pydicom.pixels.decoders.base import get_decoder

    if syntax is None:
        raise DataError("a DICOM file that does not say how its pixels are stored")
    if not syntax.is_transfer_syntax:
        raise DataError("a transfer syntax that pydicom does not know")
    if not syntax.is_compressed:
        return
    try:
        usable = get_decoder(syntax).is_available
    except NotImplementedError:
        usable = False
    if not usable:
        raise DataError(f"no decoder here for {syntax.name.partition(' (')[0]}")


def _stored(path: str, number: int, syntax: Any) -> npt.NDArray[Any]:
    """The values of a frame as they are stored, but for colours, which are RGB."""
    from pydicom import dcmread
    from pydicom.pixels.utils import pixel_array

    source: Any = path
    if syntax.is_deflated:  # the whole file is compressed, so no part of it can be sought
        source = dcmread(path, specific_tags=[*_READ, "PixelData"])
    try:
        values: npt.NDArray[Any] = pixel_array(source, index=number)
    except AttributeError:
        raise DataError("a DICOM file without pixels, or without their description") from None
    except RuntimeError:  # e.g. 12 bits, which the decoder that is installed does not know
        raise DataError(f"its {syntax.name.partition(' (')[0]} cannot be decoded here") from None
    return values


# ---- grey levels ---------------------------------------------------------------------------------


def _grey(stored: npt.NDArray[Any], about: Any, levels: Levels) -> Pixels:
    """Bytes from stored values: rescaled, then by the window that `levels` or the file gives."""
    from pydicom.pixels.processing import apply_modality_lut

    values = apply_modality_lut(stored, about)
    given = levelled(values, levels, ~_padding(stored, about))
    if given is not None:
        return given
    if tables := about.get("VOILUTSequence"):
        return _by_table(values, tables[0])
    centre, width = (_first(about.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is None or width is None:
        return stretched(values, *_range(stored, about))
    function = str(about.get("VOILUTFunction") or "LINEAR").upper()
    if width < (1 if function == "LINEAR" else 1e-9):
        raise DataError("its window has no width: set data.window")
    if function == "SIGMOID":
        return stretched(1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -99, 99))), 0, 1)
    if function == "LINEAR_EXACT":
        return stretched(values, centre - width / 2, centre + width / 2)
    return windowed(values, centre, width)


def _first(value: Any) -> float | None:
    """The first of the numbers of an element: a file may offer several windows."""
    if value is None or isinstance(value, str):
        return None
    values = value if hasattr(value, "__len__") else [value]
    return float(values[0]) if len(values) else None


def _padding(stored: npt.NDArray[Any], about: Any) -> npt.NDArray[np.bool_]:
    """Which pixels only fill the rectangle, such as those outside the circle of a CT."""
    value = about.get("PixelPaddingValue")
    if value is None:
        return np.zeros(stored.shape, bool)
    limit = about.get("PixelPaddingRangeLimit")
    low, high = sorted((int(value), int(value if limit is None else limit)))
    return (stored >= low) & (stored <= high)


def _range(stored: npt.NDArray[Any], about: Any) -> tuple[float, float]:
    """Least and greatest value that the stored bits can have, rescaled."""
    if tables := about.get("ModalityLUTSequence"):
        return 0, (1 << int(tables[0].LUTDescriptor[2])) - 1
    if stored.dtype.kind == "f":
        raise DataError("floating-point pixels, whose range is unknown: set data.window")
    bits, signed = int(about.BitsStored), bool(about.PixelRepresentation)
    ends = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    slope, intercept = (about.get(f"Rescale{name}") for name in ("Slope", "Intercept"))
    if slope is not None and intercept is not None:
        first, last = (float(slope) * end + float(intercept) for end in ends)
        return min(first, last), max(first, last)
    return ends


def _by_table(values: npt.NDArray[Any], item: Any) -> Pixels:
    """Bytes by a VOI lookup table.

    pydicom's own function wraps around where entries of 8 bits follow more than 256 values.
    """
    count, first, bits = (int(number) for number in item.LUTDescriptor)
    count = count or 1 << 16
    table = item.LUTData
    if isinstance(table, bytes):  # one or two bytes an entry, as the file's bytes are ordered
        table = np.frombuffer(table, np.uint8 if len(table) <= count + 1 else "<u2")
    table = np.asarray(table)[:count]
    places = np.clip(np.rint(values).astype(np.int64) - first, 0, len(table) - 1)
    return of_depth(table[places], bits)


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what pydicom raises into words without any content, and silence its warnings."""
    from pydicom.errors import InvalidDicomError

    logger = logging.getLogger("pydicom")
    was, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except DataError:
        raise
    except MemoryError:
        raise DataError("it needs too much memory") from None
    except InvalidDicomError:
        raise DataError("not a DICOM file") from None
    except OSError as error:
        raise DataError((error.strerror or "it cannot be read").lower()) from None
    except Exception as error:  # noqa: BLE001  (damaged files make pydicom raise anything)
        raise DataError(f"a damaged DICOM file ({type(error).__name__})") from None
    finally:
        logger.disabled = was
