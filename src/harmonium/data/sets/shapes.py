"""Synthetic images of shapes whose content and style are known; nothing is downloaded.

Content is a shape with a position, a size and an angle. Style is a palette, a paper texture, a way
of painting and an amount of grain. The two are independent, so that one can measure which of them a
representation has learned. Shapes are signed distance functions, rendered for a whole batch at once
and antialiased over one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, Key
from harmonium.core.seeds import numpy_rng
from harmonium.data.cache import Writer
from harmonium.data.datasets import DataSpec, check_at_least, datasets, no_labels
from harmonium.data.images import Integers, Pixels

Field = npt.NDArray[Any]  # (images, height, width) float32: one number for every pixel
RENDERING = 2  # increase when the images change, so that old caches are not used
CHUNK = 512  # images drawn at once: large enough for NumPy, small enough for little memory
CHUNK_PIXELS = CHUNK * 64 * 64  # fewer where they are larger than 64x64


# ---- content: distance to the edge of a shape of radius 1 around the origin, negative inside -----


def _box(x: Field, y: Field, width: float, height: float) -> Field:
    across, down = np.abs(x) - width, np.abs(y) - height
    outside = np.hypot(np.maximum(across, 0), np.maximum(down, 0))
    return outside + np.minimum(np.maximum(across, down), 0)


def _disc(x: Field, y: Field) -> Field:
    return np.hypot(x, y) - np.float32(0.9)


def _square(x: Field, y: Field) -> Field:
    return _box(x, y, 0.75, 0.75)


def _triangle(x: Field, y: Field) -> Field:
    slope = np.abs(x) * np.float32(3**0.5 / 2)
    return np.maximum(slope - y * np.float32(0.5), y) - np.float32(0.5)


def _cross(x: Field, y: Field) -> Field:
    return np.minimum(_box(x, y, 0.95, 0.28), _box(x, y, 0.28, 0.95))


def _ring(x: Field, y: Field) -> Field:
    return np.abs(np.hypot(x, y) - np.float32(0.7)) - np.float32(0.2)


def _star(x: Field, y: Field) -> Field:
    # Five points are one half point, folded ten times: the edge is a line from tip to notch.
    turn = 2 * np.pi / 5
    folded = np.abs(np.mod(np.arctan2(x, -y) + turn / 2, turn) - turn / 2)
    radius = np.hypot(x, y)
    tip, notch = np.array([1.0, 0.0]), 0.42 * np.array([np.cos(turn / 2), np.sin(turn / 2)])
    along = (notch - tip) / np.hypot(*(notch - tip))
    distance = (radius * np.cos(folded) - tip[0]) * along[1] - radius * np.sin(folded) * along[0]
    return np.asarray(distance, np.float32)


def _bars(x: Field, y: Field) -> Field:
    pitch = np.float32(0.66)
    return _box(x, y - pitch * np.clip(np.rint(y / pitch), -1, 1), 0.85, 0.18)


def _crescent(x: Field, y: Field) -> Field:
    return np.maximum(np.hypot(x, y) - np.float32(0.95), np.float32(0.78) - np.hypot(x - 0.5, y))


def _corner(x: Field, y: Field) -> Field:
    return np.minimum(_box(x + 0.5, y, 0.25, 0.85), _box(x, y - 0.6, 0.75, 0.25))


def _dumbbell(x: Field, y: Field) -> Field:
    ends = np.hypot(np.abs(x) - np.float32(0.6), y) - np.float32(0.38)
    return np.minimum(ends, _box(x, y, 0.6, 0.12))


SHAPES: dict[str, Callable[[Field, Field], Field]] = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
    "star": _star,
    "bars": _bars,
    "crescent": _crescent,
    "corner": _corner,
    "dumbbell": _dumbbell,
}


# ---- style: paper textures between -1 and 1 on turned coordinates, and what goes with them -------

TEXTURES: dict[str, Callable[[Field, Field], Field]] = {
    "flat": lambda x, y: np.zeros_like(x),
    "gradient": lambda x, y: np.clip(1.6 * x, -1, 1),
    "stripes": lambda x, y: np.clip(3 * np.sin(34 * x), -1, 1),
    "checks": lambda x, y: np.clip(4 * np.sin(20 * x) * np.sin(20 * y), -1, 1),
    "grid": lambda x, y: np.clip(6 * np.maximum(np.cos(28 * x), np.cos(28 * y)) - 5, -1, 1),
    "dots": lambda x, y: np.clip(5 * np.cos(24 * x) * np.cos(24 * y) - 3, -1, 1),
    "glow": lambda x, y: np.clip(1 - 3 * np.hypot(x, y), -1, 1),
}


class Style(NamedTuple):
    """How an image is painted, independent of its content."""

    ink: tuple[float, float, float]  # red, green, blue of the shape, 0 to 1
    paper: tuple[float, float, float]  # of the background
    texture: str  # pattern of the background
    strength: float  # how far the pattern changes the background
    paint: str  # "fill", "outline" (a full edge around a faint inside) or "hatch"
    grain: float  # standard deviation of the noise on every pixel


# An outline keeps a faint inside, so that an outlined disc does not turn into a ring.
STYLES: dict[str, Style] = {
    "print": Style((0.08, 0.08, 0.10), (0.93, 0.92, 0.88), "flat", 0.0, "fill", 0.01),
    "dusk": Style((0.98, 0.82, 0.25), (0.32, 0.14, 0.42), "gradient", 0.22, "fill", 0.02),
    "blueprint": Style((0.85, 0.96, 1.00), (0.12, 0.30, 0.62), "grid", 0.12, "outline", 0.02),
    "fabric": Style((0.72, 0.10, 0.12), (0.87, 0.78, 0.62), "stripes", 0.10, "fill", 0.04),
    "chalk": Style((0.95, 0.95, 0.90), (0.16, 0.30, 0.22), "flat", 0.0, "hatch", 0.10),
    "leaf": Style((0.05, 0.32, 0.12), (0.72, 0.86, 0.48), "checks", 0.10, "hatch", 0.03),
    "neon": Style((1.00, 0.30, 0.85), (0.06, 0.06, 0.12), "glow", 0.14, "outline", 0.03),
    "sand": Style((0.36, 0.17, 0.08), (0.90, 0.72, 0.40), "dots", 0.12, "fill", 0.08),
}


@datasets("shapes")
@dataclass(frozen=True)
class Shapes(DataSpec):
    """Drawn shapes with known content and style; labels are the shape, factors say the rest.

    Factors: `style` (number in the order of `STYLES`), `angle` (degrees), `size` (radius in
    thousandths of the image's width), `x` and `y` (centre, likewise).
    """

    count: int = 10_000  # images in the training part, validation included
    test_count: int = 2_000  # images in the test part
    size: int = 32  # height and width in pixels
    classes: int = 8  # how many of the shapes, in the order of SHAPES
    styles: int = 4  # how many of the styles, in the order of STYLES
    channels: int = 3  # 3: colour, 1: grey
    tilt: float = 180.0  # shapes are turned by up to so many degrees either way
    contrast: float = 1.0  # 1: ink as it is; towards 0 the shape fades into the paper
    noise: float = 1.0  # factor on the grain of every style
    unlabelled: bool = False  # hide labels and factors, to simulate unlabelled data

    def check(self) -> None:
        """Check the settings of the shapes too."""
        super().check()
        for setting, least in (("count", 1), ("test_count", 1), ("size", 8), ("noise", 0)):
            check_at_least(setting, getattr(self, setting), least)
        for setting, known in (("classes", SHAPES), ("styles", STYLES)):
            value = getattr(self, setting)
            if not 1 <= value <= len(known):
                raise ConfigError(
                    Key("data", setting),
                    f"={value}: between 1 and {len(known)} ({', '.join(known)})",
                )
        if self.channels not in (1, 3):
            raise ConfigError(
                Key("data", "channels"), f"={self.channels}: use 1 (grey) or 3 (colour)"
            )
        if not 0 < self.contrast <= 1:
            raise ConfigError(Key("data", "contrast"), f"={self.contrast}: above 0 and at most 1")
        if not 0 <= self.tilt <= 180:
            raise ConfigError(Key("data", "tilt"), f"={self.tilt}: between 0 and 180 degrees")

    def identity(self) -> dict[str, Any]:
        """All settings except those that only select images."""
        settings = asdict(self)
        for selects in ("limit", "validation", "labelled"):
            del settings[selects]
        return {"rendering": RENDERING, **settings}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Render both parts."""
        chunk = max(1, min(CHUNK, CHUNK_PIXELS // self.size**2))
        for part, count in (("train", self.count), ("test", self.test_count)):
            scene = self.scene(part, count)
            for start in range(0, count, chunk):
                piece = {name: column[start : start + chunk] for name, column in scene.items()}
                rng = numpy_rng(self.seed, "shapes", part, "pixels", start // chunk)
                pixels = self.draw(piece, rng)
                labels = piece.pop("shape")
                if self.unlabelled:
                    writer.append(part, pixels, no_labels(len(pixels)))
                else:
                    writer.append(part, pixels, labels, piece)
        if self.unlabelled:
            return ()
        writer.names["style"] = tuple(STYLES)[: self.styles]
        return tuple(SHAPES)[: self.classes]

    def scene(self, part: str, count: int) -> dict[str, Integers]:
        """The content and style of `count` images, a column each, sampled independently.

        Only the centre depends on another column, as it must leave room for the size.
        """
        rng = numpy_rng(self.seed, "shapes", part, "scene")
        shape = rng.permutation(np.arange(count) % self.classes)
        style = rng.permutation(np.arange(count) % self.styles)
        tilt = int(self.tilt)
        angle = rng.integers(-tilt, tilt + 1, count) % 360
        size = rng.integers(240, 401, count)
        room = np.maximum(480 - size, 1)
        x, y = (500 + np.rint(room * rng.uniform(-1, 1, count)).astype(np.int64) for _ in "xy")
        return {"shape": shape, "style": style, "angle": angle, "size": size, "x": x, "y": y}

    def draw(self, scene: dict[str, Integers], rng: np.random.Generator) -> Pixels:
        """The images (n, size, size, channels) of a scene.

        >>> shapes = Shapes(size=16)
        >>> shapes.draw(shapes.scene("train", 5), np.random.default_rng(0)).shape
        (5, 16, 16, 3)
        """
        count = len(scene["shape"])
        distance = _distances(scene, self.size)  # in pixels, negative inside
        paper, cover, colours = _styled(scene["style"], distance, rng)
        cover = (cover * np.float32(self.contrast))[..., None]
        image = paper * (1 - cover) + colours[:, None, None, :] * cover
        grain = np.array([style.grain for style in STYLES.values()], np.float32) * self.noise
        image *= rng.uniform(0.85, 1.1, (count, 1, 1, 1)).astype(np.float32)  # exposure
        if self.channels == 1:
            weights = np.array([0.299, 0.587, 0.114], np.float32)
            image = (image @ weights)[..., None]
        dust = rng.standard_normal(image.shape, np.float32)
        image += dust * grain[scene["style"], None, None, None].astype(np.float32)
        return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _grid(size: int) -> tuple[Field, Field]:
    """Coordinates of the pixel centres from -0.5 to 0.5, x and y, each (1, size, size)."""
    line = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    return line[None, None, :].repeat(size, 1), line[None, :, None].repeat(size, 2)


def _turned(x: Field, y: Field, radians: npt.NDArray[Any]) -> tuple[Field, Field]:
    cosine = np.cos(radians).astype(np.float32)[:, None, None]
    sine = np.sin(radians).astype(np.float32)[:, None, None]
    return x * cosine + y * sine, y * cosine - x * sine


def _distances(scene: dict[str, Integers], size: int) -> Field:
    """Signed distance in pixels of every pixel from its image's shape, one pass per class."""
    x, y = _grid(size)
    distance = np.empty((len(scene["shape"]), size, size), np.float32)
    for number, shape in enumerate(SHAPES.values()):
        rows = np.flatnonzero(scene["shape"] == number)
        if len(rows) == 0:
            continue
        across, down, radius = (
            scene[name][rows].astype(np.float32)[:, None, None] / 1000
            for name in ("x", "y", "size")
        )
        own_x, own_y = _turned(x - across + 0.5, y - down + 0.5, np.deg2rad(scene["angle"][rows]))
        distance[rows] = shape(own_x / radius, own_y / radius) * (radius * size)
    return distance


def _styled(
    styles: Integers, distance: Field, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], Field, npt.NDArray[np.float32]]:
    """Paper (n, size, size, 3), coverage by ink (n, size, size) and ink colour (n, 3)."""
    count, size = distance.shape[:2]
    x, y = _grid(size)
    # Sampled for all images before the loop, so that no image depends on the styles of others.
    turns = np.asarray(rng.uniform(0, 2 * np.pi, count))
    shifts: Field = rng.uniform(-0.15, 0.15, (2, count, 1, 1)).astype(np.float32)
    tints = rng.normal(0, 0.035, (2, count, 3)).astype(np.float32)
    paper = np.empty((count, size, size, 3), np.float32)
    cover = np.empty_like(distance)
    colours = tints[0]
    for number, style in enumerate(STYLES.values()):
        rows = np.flatnonzero(styles == number)
        if len(rows) == 0:
            continue
        own_x, own_y = _turned(x + shifts[0, rows], y + shifts[1, rows], turns[rows])
        pattern: Field = TEXTURES[style.texture](own_x, own_y)
        base = np.array(style.paper, np.float32) + tints[1, rows]
        paper[rows] = base[:, None, None, :] + style.strength * pattern[..., None]
        colours[rows] += np.array(style.ink, np.float32)
        cover[rows] = _painted(style.paint, distance[rows], x, y)
    return paper, cover, colours


def _painted(paint: str, distance: Field, x: Field, y: Field) -> Field:
    """Coverage of each pixel by ink, with the edge antialiased over one pixel."""
    inside: Field = np.clip(0.5 - distance, 0, 1)
    if paint == "outline":
        width = 0.05 * distance.shape[1]
        edge = np.clip(0.5 + width / 2 - np.abs(distance + width / 2), 0, 1)
        return np.asarray(np.maximum(edge, 0.45 * inside))
    if paint == "hatch":
        return np.asarray(inside * (0.75 + 0.25 * np.clip(2 * np.sin(60 * (x + y)), -1, 1)))
    return inside
