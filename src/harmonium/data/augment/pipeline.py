"""One random pipeline from stored bytes to a batch of normalised views.

Every image of a batch has its own parameters, and all chance comes from the generator passed in.

`faithful` follows the definitions that the published results used (Pillow's filters, HSV hue,
brightness, contrast, saturation and hue in a random order for each image, clamped in between), on
floats instead of rounded bytes. `fast` makes the same crops but folds the colour changes into one
matrix per image, in a fixed order and with hue turned in YIQ, and blurs while it resizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.core.errors import ConfigError, suggest
from harmonium.data.augment import operations as ops
from harmonium.data.augment import parameters as draw
from harmonium.data.augment.checks import (
    check_normalisation,
    check_pixels,
    normalise,
    ordered,
    within,
)
from harmonium.data.augment.randaugment import DRAWS, GREATEST, randaugment

Mode = Literal["faithful", "fast"]
Interpolation = Literal["bilinear", "bicubic"]
PadMode = Literal["reflect", "zero"]

# Pixels worked on at once: enough to hide the cost of calling torch, few enough for the cache.
PIECE_PIXELS = 2**17


@dataclass(frozen=True)
class View:
    """One random pipeline: crop, flip, colour jitter, grey, blur, solarise, rotate, normalise.

    RandAugment, if any, comes before all of them.

    >>> pixels = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    >>> View(blur=0.5)(pixels, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """

    mode: Mode = "faithful"  # 'fast' folds all colour changes into one matrix per image
    size: int | None = None  # side of the result in pixels; None keeps height and width
    crop_min: float = 0.2  # least share of the area that a random resized crop keeps
    crop_max: float = 1.0  # greatest share; crop_min = crop_max = 1 takes the whole image
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # least and greatest width / height of a crop
    interpolation: Interpolation = "bilinear"  # filter of the resize, as Pillow defines it
    pad_crop: int = 0  # instead of the resized crop: pad by so many pixels and cut a window
    pad_mode: PadMode = "reflect"  # what the padding shows
    flip: float = 0.5  # probability of a mirror image
    jitter: float = 0.8  # probability of changing the colours
    brightness: float = 0.4  # factor within 1 -+ this
    contrast: float = 0.4  # factor within 1 -+ this, about the mean luma of the crop
    saturation: float = 0.4  # factor within 1 -+ this; acts on images of 3 channels only
    hue: float = 0.1  # greatest shift in turns, at most 0.5; acts on images of 3 channels only
    gray: float = 0.2  # probability of dropping the colours, of images of 3 channels
    blur: float = 0.0  # probability of a Gaussian blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # least and greatest, in pixels
    blur_kernel: int = 0  # odd width in pixels; 0 is a tenth of the side, at least 3
    solarise: float = 0.0  # probability of inverting the bright pixels
    solarise_threshold: float = 0.5  # what counts as bright
    rotate: float = 0.0  # greatest angle in degrees, either way; black corners
    quarter_turn: bool = False  # turn by 0, 90, 180 or 270 degrees, each as likely
    randaugment: int = 0  # operations of RandAugment, before all others; 0: none
    randaugment_magnitude: int = 10  # their strength, 0 to 30
    mean: tuple[float, ...] | None = (0.5,)  # subtracted; one for all channels, or one for each
    std: tuple[float, ...] | None = (0.5,)  # divided by; None for both leaves values in [0, 1]

    def __post_init__(self) -> None:
        """Raise an error for invalid settings."""
        for name in ("aspect", "blur_sigma", "mean", "std"):
            value = getattr(self, name)
            if isinstance(value, list):  # YAML has no tuples
                object.__setattr__(self, name, tuple(value))
        for name, kind in (("mode", Mode), ("interpolation", Interpolation), ("pad_mode", PadMode)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ConfigError(
                    f"views.{name} is {value!r}: {suggest(str(value), get_args(kind))}"
                )
        for name in ("flip", "jitter", "gray", "blur", "solarise", "solarise_threshold"):
            within(name, getattr(self, name), 0, 1)
        for name in ("brightness", "contrast", "saturation"):
            within(name, getattr(self, name), 0, math.inf)
        within("hue", self.hue, 0, 0.5)
        within("rotate", self.rotate, 0, 180)
        within("randaugment", self.randaugment, 0, math.inf, whole=True)
        within("randaugment_magnitude", self.randaugment_magnitude, 0, GREATEST, whole=True)
        within("pad_crop", self.pad_crop, 0, math.inf, whole=True)
        within("blur_kernel", self.blur_kernel, 0, math.inf, whole=True)
        if self.blur_kernel and self.blur_kernel % 2 == 0:
            raise ConfigError(f"views.blur_kernel is {self.blur_kernel}: give an odd number, or 0")
        if self.size is not None:
            within("size", self.size, 1, math.inf, whole=True)
        ordered("crop_min and crop_max", (self.crop_min, self.crop_max), greatest=1)
        ordered("aspect", self.aspect)
        ordered("blur_sigma", self.blur_sigma)
        check_normalisation(self.mean, self.std)

    def __call__(self, pixels: Tensor, rng: torch.Generator) -> Tensor:
        """One random view of every image.

        Args:
            pixels: uint8 `(n, height, width, channels)`, 1 to 4 channels.
            rng: the only source of chance; how much is drawn depends on n and the settings alone.

        Returns:
            float32 `(n, channels, height, width)`, channels last in memory, normalised.
        """
        count, _, _, channels = check_pixels(pixels)
        return self.render(pixels, self.chance(count, channels, rng))

    def chance(self, count: int, channels: int, rng: torch.Generator) -> draw.Floats:
        """The uniform numbers of random views of `count` images, one row each."""
        needs = sum(self._needs(channels).values())
        uniform: draw.Floats = (
            torch.rand(count, needs, generator=rng, device=rng.device).cpu().numpy()
        )
        return uniform

    def render(self, pixels: Tensor, chance: draw.Floats) -> Tensor:
        """The views that these uniform numbers stand for, as `__call__` returns them."""
        count, height, width, channels = check_pixels(pixels)
        new, needs = self._new_sides(height, width), self._needs(channels)
        views = torch.empty(count, *new, channels, device=pixels.device)
        piece = piece_of(height * width, new[0] * new[1])
        if pixels.device.type != "cpu":  # an accelerator has no use for small pieces
            piece = max(1, count)
        for begin in range(0, count, piece):
            part = slice(begin, begin + piece)
            self._render(pixels[part], chance[part], needs, views[part])
        normalise(views, self.mean, self.std)
        images = views.permute(0, 3, 1, 2)
        if not self.quarter_turn:
            return images
        turns = draw.whole_number(chance[:, -1], 4)
        return ops.quarter_turns(images, torch.from_numpy(turns))

    def at_once(self, height: int, width: int) -> int:
        """How many images of this size are best rendered together.

        One if the views of an image depend, in their last bits, on which images are beside it: the
        vector instructions of processors take up to 16 numbers at a time.
        """
        new = self._new_sides(height, width)
        if height * width % 16 or new[0] * new[1] % 16:
            return 1
        return piece_of(height * width, new[0] * new[1])

    def _needs(self, channels: int) -> dict[str, int]:
        """How many uniform numbers each operation takes per image; none if it never happens."""
        jitters = self.jitter > 0 and max(self._strengths(channels)) > 0
        crop = 2 if self.pad_crop else draw.CROP_DRAWS if self.crop_min < 1 else 0
        return {
            "jitter": 7
            * jitters,  # whether to jitter, position of the hue, order of the others, 4 factors
            "crop": crop,
            "flip": int(self.flip > 0),
            "gray": int(self.gray > 0 and channels == 3),
            "blur": 2 * (self.blur > 0),  # whether to blur, sigma
            "solarise": int(self.solarise > 0),
            "rotate": int(self.rotate > 0),
            "randaugment": DRAWS * self.randaugment,
            "turn": int(self.quarter_turn),
        }

    def _strengths(self, channels: int) -> tuple[float, float, float, float]:
        """Brightness, contrast, saturation, hue; only images of 3 channels have colours."""
        colour = (self.saturation, self.hue) if channels == 3 else (0.0, 0.0)
        return (self.brightness, self.contrast, *colour)

    def _new_sides(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the views of images of this size."""
        new = (height, width) if self.size is None else (self.size, self.size)
        if self.quarter_turn and new[0] != new[1]:
            raise ConfigError(
                f"views.quarter_turn needs square views but images are {height} x {width}: "
                "set view.size"
            )
        if self.pad_crop:
            pad = self.pad_crop
            if self.pad_mode == "reflect" and pad >= min(height, width):
                raise ConfigError(
                    f"views.pad_crop is {pad} but images are {height} x {width}: "
                    "give fewer pixels than a side, or pad_mode=zero"
                )
            if max(new[0] - height, new[1] - width) > 2 * pad:
                raise ConfigError(
                    f"views.size is {self.size} but images of {height} x {width} padded by {pad} "
                    "are smaller: give a smaller size or a larger pad_crop"
                )
        if self.blur > 0 and self._taps(new) // 2 >= min(new):
            raise ConfigError(
                f"views.blur_kernel is {self._taps(new)} but views are {new[0]} x {new[1]}: "
                "give a narrower kernel"
            )
        return new

    def _taps(self, sides: tuple[int, int]) -> int:
        """Width of the blur: as given, or a tenth of the side, odd, at least 3."""
        return self.blur_kernel or max(3, min(sides) // 10 | 1)

    def _render(
        self, pixels: Tensor, chance: draw.Floats, needs: dict[str, int], out: Tensor
    ) -> None:
        """Fill `out`, `(n, height, width, channels)`, with views in [0, 1]."""
        order = None
        if needs["jitter"] and self.mode == "faithful":
            # Images are sorted by the position of their hue shift, so that those with the same next
            # operation are one slice of memory; images that keep their colours come last.
            when = np.where(chance[:, 0] < self.jitter, np.floor(chance[:, 1] * 4), 4)
            sorting = when.argsort(kind="stable")
            ends = [int(end) for end in np.bincount(when.astype(np.intp), minlength=5).cumsum()]
            order = _tensor(sorting, pixels)
            chance, pixels = chance[sorting], pixels.index_select(0, order)
        ends_of_columns = itertools.accumulate(needs.values())
        draws = {
            name: chance[:, end - needs[name] : end]
            for name, end in zip(needs, ends_of_columns, strict=True)
        }
        if needs["randaugment"]:
            pixels = randaugment(pixels, draws["randaugment"], self.randaugment_magnitude)
        planes = self._place(pixels, draws, out)
        if order is not None:
            self._jitter(planes, draws["jitter"], ends)
        if self.mode == "fast":
            planes = self._recolour(planes, draws)
        else:
            if needs["gray"]:
                ops.to_gray(planes, self._chosen("gray", draws, pixels))
            if needs["blur"]:
                chosen = self._chosen("blur", draws, pixels)
                ops.blur_planes(planes, chosen, self._kernels(draws["blur"], out)[chosen])
        if needs["solarise"]:
            chosen = self._chosen("solarise", draws, pixels)
            ops.solarise_planes(planes, chosen, self.solarise_threshold)
        if needs["rotate"]:
            degrees = (draws["rotate"][:, 0] * 2 - 1) * self.rotate
            planes = ops.rotate_planes(planes, _tensor(degrees, pixels))
        images = planes.permute(1, 2, 3, 0)
        if order is None:
            out.copy_(images)
        else:
            out.index_copy_(0, order, images.contiguous())

    def _place(self, pixels: Tensor, draws: Mapping[str, draw.Floats], out: Tensor) -> Tensor:
        """Crop, resize, flip, and in fast mode blur; returns planes."""
        new = (out.shape[1], out.shape[2])
        flip = draws["flip"][:, 0] < self.flip if self.flip > 0 else np.zeros(len(pixels), bool)
        rows, columns = self._weights(pixels, new, draws["crop"], flip)
        unflipped = columns is None
        if self.mode == "fast" and self.blur > 0:
            kernels = self._kernels(draws["blur"], out)
            down = ops.blur_weights(kernels, new[0])
            across = down if new[0] == new[1] else ops.blur_weights(kernels, new[1])
            rows = down if rows is None else torch.bmm(down, rows)
            columns = across if columns is None else torch.bmm(across, columns)
        planes = ops.to_planes(pixels, rows, columns)
        if unflipped and self.flip > 0:
            ops.flip_planes(planes, _tensor(np.flatnonzero(flip), pixels))
        return planes.clamp_(0, 1)  # bicubic overshoots, and sums of weights round

    def _weights(
        self, pixels: Tensor, new: tuple[int, int], draws: draw.Floats, flip: NDArray[Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The matrices that crop, resize and flip; None if there is at most a flip to do."""
        old, count = (pixels.shape[1], pixels.shape[2]), len(draws)
        still = np.zeros_like(flip)
        if self.pad_crop:
            matrices = []
            for axis, mirror in ((0, still), (1, flip)):
                points = draw.pad_points(
                    draws[:, axis],
                    mirror,
                    old[axis],
                    new[axis],
                    self.pad_crop,
                    self.pad_mode == "reflect",
                )
                matrices.append(ops.hat_weights(_tensor(points, pixels), old[axis]))
            return matrices[0], matrices[1]
        if draws.shape[1]:
            area = (self.crop_min, self.crop_max)
            starts, lengths = draw.crop_boxes(draws, old, area, self.aspect)
        elif new == old:
            return None, None
        else:
            starts = np.zeros((2, count), np.float32)
            lengths = starts + np.array(old, np.float32)[:, None]

        def weights(
            start: draw.Floats, length: draw.Floats, mirror: NDArray[Any], axis: int
        ) -> Tensor:
            points = draw.crop_points(start, length, mirror, new[axis])
            return ops.crop_weights(
                _tensor(points, pixels),
                _tensor(start, pixels)[:, None],
                _tensor(length, pixels)[:, None],
                old[axis],
                self.interpolation,
            )

        if old[0] == old[1] and new[0] == new[1]:
            # Both axes in one go: half the calls, which is what a small batch pays for.
            mirror = np.concatenate((still, flip))
            both = weights(starts.reshape(-1), lengths.reshape(-1), mirror, 0)
            return both[:count], both[count:]
        return weights(starts[0], lengths[0], still, 0), weights(starts[1], lengths[1], flip, 1)

    def _jitter(self, planes: Tensor, draws: draw.Floats, ends: list[int]) -> None:
        """Brightness, contrast, saturation and hue in the order each image drew, in place.

        The first `ends[0]` images turn their hue before the three other changes, those up to
        `ends[1]` after one of them, and so on; those from `ends[3]` on keep their colours.
        """
        strengths = self._strengths(planes.shape[0])
        last = ends[3]
        factors = draw.factors(draws[:last, 3:], strengths)
        adjusts = max(strengths[:3]) > 0
        if adjusts:
            order = draw.whole_number(draws[:last, 2], len(draw.ORDERS))
            shares = _tensor(draw.slot_shares(factors[:, :3], order), planes)
            for slot, end in enumerate(ends[:3]):
                ops.adjust(planes[:, end:last], shares[slot, :, end:])
        if strengths[3] > 0:
            ops.shift_hue(planes[:, :last], _tensor(draw.hue_offsets(factors[:, 3]), planes))
        if adjusts:
            for slot, end in enumerate(ends[:3]):
                ops.adjust(planes[:, :end], shares[slot, :, :end])

    def _recolour(self, planes: Tensor, draws: Mapping[str, draw.Floats]) -> Tensor:
        """Jitter and grey as one matrix per image."""
        jitter, gray = draws["jitter"], draws["gray"]
        if not jitter.shape[1] and not gray.shape[1]:
            return planes
        neutral = np.array((1, 1, 1, 0), np.float32)
        if jitter.shape[1]:
            factors = draw.factors(jitter[:, 3:], self._strengths(planes.shape[0]))
            factors = np.where(jitter[:, :1] < self.jitter, factors, neutral)
        else:
            factors = np.tile(neutral, (planes.shape[1], 1))
        if gray.shape[1]:
            factors[:, 2] *= gray[:, 0] >= self.gray
        matrices, mean_share = draw.colour_matrices(factors)
        return ops.recolour(planes, _tensor(matrices, planes), _tensor(mean_share, planes))

    def _chosen(self, name: str, draws: Mapping[str, draw.Floats], like: Tensor) -> Tensor:
        """Indices of the images that the operation `name` applies to."""
        return _tensor(np.flatnonzero(draws[name][:, 0] < getattr(self, name)), like)

    def _kernels(self, draws: draw.Floats, out: Tensor) -> Tensor:
        """Blur kernels from uniform `(n, 2)`; those of images that stay sharp do nothing."""
        sigma = self.blur_sigma[0] + (self.blur_sigma[1] - self.blur_sigma[0]) * draws[:, 1]
        sigma = np.where(draws[:, 0] < self.blur, sigma, np.float32(1e-3))
        taps = self._taps((out.shape[1], out.shape[2]))
        return _tensor(draw.blur_kernels(sigma, taps), out)


def piece_of(*pixels: int) -> int:
    """How many images to work on at once, given the pixels of one before and after."""
    return max(1, PIECE_PIXELS // max(pixels))


def _tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    """Parameters as a tensor on the device of the pixels."""
    return to_device(torch.from_numpy(array), like.device)
