"""Random views of pictures: what self-supervised learning compares, made for a batch at a time.

A `View` is one random pipeline whose fields are settings of a recipe; a `Views` is the two or more
pipelines that a method compares; `preset` gives the ones of the published systems by name; `plain`
is no view at all, for evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmonium.data.view import View, check_normalisation, check_pixels, normalise
from harmonium.data.view_ops import quarter_turns
from harmonium.errors import ConfigError, suggest

__all__ = ["PRESETS", "View", "Views", "plain", "preset", "quarter_turns"]


@dataclass(frozen=True)
class Views:
    """The views that a method compares: one pipeline each.

    >>> pixels = torch.zeros(4, 8, 8, 1, dtype=torch.uint8)
    >>> [view.shape[0] for view in preset("digits")(pixels, torch.Generator())]
    [4, 4]
    """

    pipelines: tuple[View, ...]

    def __call__(self, pixels: Tensor, rng: torch.Generator) -> list[Tensor]:
        """One tensor for each pipeline; see `View.__call__` for shapes."""
        made: list[Tensor] = []
        for view, same in itertools.groupby(self.pipelines):
            # Equal neighbours are made together: the same numbers for about half the calls.
            times, count = len(list(same)), pixels.shape[0]
            images = view(pixels if times == 1 else pixels.repeat(times, 1, 1, 1), rng)
            made += [images[k * count : (k + 1) * count] for k in range(times)]
        return made

    def plain(self, pixels: Tensor) -> Tensor:
        """The pictures themselves, normalised and sized like the first pipeline's views."""
        first = self.pipelines[0]
        return plain(pixels, first.mean, first.std, first.size)


def plain(
    pixels: Tensor,
    mean: tuple[float, ...] | None = (0.5,),
    std: tuple[float, ...] | None = (0.5,),
    size: int | None = None,
) -> Tensor:
    """The pictures themselves in the layout of views: resized if `size` says so, normalised.

    Args:
        pixels: uint8 `(n, height, width, channels)`.
        mean: subtracted from values in [0, 1]; one for all channels, or one for each.
        std: divided by.
        size: side of the result; None keeps height and width.

    Returns:
        float32 `(n, channels, height, width)`, channels last in memory.
    """
    if size is None:
        check_pixels(pixels)
        check_normalisation(mean, std)
        made = pixels.float().div_(255)
        normalise(made, mean, std)
        return made.permute(0, 3, 1, 2)
    return View(size=size, mean=mean, std=std, **_OFF)(pixels, torch.Generator())


_OFF: dict[str, Any] = {"crop_min": 1.0, "flip": 0.0, "jitter": 0.0, "gray": 0.0}
_CIFAR10: dict[str, Any] = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2434, 0.2615)}
_SVHN: dict[str, Any] = {"mean": (0.4377, 0.4438, 0.4728), "std": (0.1980, 0.2010, 0.1970)}

_SIMCLR = View()
_EASYFL = View(
    crop_min=0.08, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, mean=None, std=None
)
_ORCHESTRA = View(crop_min=0.5, saturation=0.2, blur=0.5, interpolation="bicubic")
_ORCHESTRA_PRIME = dataclasses.replace(_ORCHESTRA, blur=0.1, solarise=0.2)
_ORCHESTRA_STRONG = View(blur=0.5, interpolation="bicubic")  # of its spectral baseline
_FEDX = View(**_OFF | _CIFAR10 | {"pad_crop": 4, "flip": 0.5})
_FEDX_SVHN = View(
    pad_crop=4, pad_mode="zero", flip=0, jitter=1, hue=0.4, gray=0, rotate=15, **_SVHN
)

# The views of the published systems. Papers that normalise by their data set have CIFAR-10's
# figures here; for other data pass `mean` and `std`.
PRESETS: dict[str, tuple[View, ...]] = {
    "simclr": (_SIMCLR, _SIMCLR),
    "fedsimclr": (_SIMCLR, _SIMCLR),  # Federated SimCLR, appendix A
    "fedstyle": (_SIMCLR, _SIMCLR),  # FedStyle at 32 pixels; flip=0 for digits
    "fedstyle_224": (View(size=224, blur=0.5),) * 2,  # FedStyle's larger pictures
    "fedca": (View(blur=0.5),) * 2,  # FedCA
    "fedsc": (View(**_CIFAR10),) * 2,  # FedSC and its baselines
    "orchestra": (_ORCHESTRA, _ORCHESTRA_PRIME),
    "orchestra_turned": (
        _ORCHESTRA,
        _ORCHESTRA_PRIME,
        dataclasses.replace(_ORCHESTRA, quarter_turn=True),
    ),
    "orch_simclr": (_ORCHESTRA, _ORCHESTRA),  # Orchestra's SimCLR and SimSiam baselines
    "orch_byol": (dataclasses.replace(_ORCHESTRA, blur=1), _ORCHESTRA_PRIME),
    "orch_spec": (View(crop_min=0.08, jitter=0, gray=0), _ORCHESTRA_STRONG),
    "orch_rot": (View(**_OFF, quarter_turn=True),),
    "easyfl": (_EASYFL, _EASYFL),  # FedU and FedEMA
    "fedx": (_FEDX, _FEDX),  # weak on purpose: its colour jitter has strength 0
    "fedx_svhn": (_FEDX_SVHN, _FEDX_SVHN),
    "hao": (_SIMCLR, _SIMCLR),  # spectral contrastive learning
    "digits": (View(crop_min=0.5, flip=0, gray=0),) * 2,  # mirrored digits are other digits
    "none": (View(**_OFF),) * 2,
}


def preset(name: str, **changes: Any) -> Views:
    """The views of a published system, with `changes` to the settings of every pipeline.

    >>> preset("orchestra", mode="fast").pipelines[1].solarise
    0.2
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown views '{name}': {suggest(name, PRESETS)}")
    known = [field.name for field in dataclasses.fields(View)]
    for key in changes:
        if key not in known:
            raise ConfigError(f"unknown setting of views '{key}': {suggest(key, known)}")
    return Views(tuple(dataclasses.replace(view, **changes) for view in PRESETS[name]))
