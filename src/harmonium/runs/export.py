"""Export of encoders: a safetensors file with the weights and all that is needed to use them."""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from harmonium.core import files
from harmonium.core.errors import ConfigError, DataError, StoreError, counted
from harmonium.core.registry import recipe_name
from harmonium.core.settings import choose, plain
from harmonium.data.augment.checks import for_channels, normalise
from harmonium.data.augment.views import plain as plain_images
from harmonium.data.cache import printable
from harmonium.data.datasets import DataSpec
from harmonium.data.decoding.conversion import RESIZED, Fit, Levels
from harmonium.data.decoding.image_files import ENDINGS, is_image_file, unread
from harmonium.data.decoding.in_memory import (
    Layout,
    channels_last,
    check_strict,
    is_array,
    is_float,
    kind,
    read_images,
)
from harmonium.data.decoding.pool import Decoders
from harmonium.data.decoding.worker import Order
from harmonium.data.images import Pixels
from harmonium.evaluation.whitening import STORED, Whitening
from harmonium.federation.method import Method
from harmonium.learning.encoders import encoders
from harmonium.learning.encoders.given import Given
from harmonium.recipe.initial_weights import checked_seal, seal_of
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import ABOUT, ENCODER, RECIPE, RESULT, RunFolder

FORMAT = 2
DECODED = 16  # image files decoded by one process at once
LARGEST = 1 << 12  # side of an image in pixels
LAYOUT = 'load_encoder(..., layout="NCHW")'  # where the order of axes is in doubt


class LoadedEncoder(nn.Module):
    """A trained encoder that takes images as they are and prepares them as training did.

    Attributes:
        size: height and width of the images it was trained on; others are resized to it.
        channels: 1 (grey) or 3 (colour); 2 or 4 as its training images had them.
        fit: how images of another shape come to `size`: cut, resize or pad.
        levels: how values of more than 8 bits become bytes.
        features: length of a feature vector.
        whitening: the whitening of its features, if it was loaded with `whiten`; else none.
        mean: subtracted from values between 0 and 1; one number or one for each channel.
        std: divided by, likewise.
        method: the method that trained it.
        data: the name of the data it was trained on.
        recipe: the digest of its recipe.
        digest: SHA-256 of the file it comes from.
        network: the network itself, for prepared images `(n, channels, height, width)`.
        about: the metadata of its file.
    """

    def __init__(
        self,
        network: nn.Module,
        about: dict[str, Any],
        digest: str = "",
        *,
        layout: Layout | None = None,
        strict: bool = False,
        value_range: tuple[float, float] | None = None,
        whitening: Whitening | None = None,
    ) -> None:
        """Wrap a network; `about` has its training data and the preprocessing of images."""
        super().__init__()
        self.network, self.about, self.digest = network, about, digest
        self.layout, self.strict, self.value_range = layout, strict, value_range
        view = about["prepare"]
        self.mean, self.std = (view[key] and tuple(view[key]) for key in ("mean", "std"))
        self._side = view["size"]  # to which views are resized; None: as images are
        # Files of format 1 do not name the size of the images, only that of the views.
        self.size: tuple[int, int] = tuple(about.get("size") or (about["side"], about["side"]))
        self.channels: int = about["channels"]
        self.whitening = whitening
        self.features: int = whitening.directions if whitening else about["features"]
        self.fit: Fit = about.get("fit", "cut")
        self.levels = Levels(about.get("depth", 16), about.get("window"), about.get("percentiles"))
        self.method, self.data, self.recipe = about["method"], about["data"], about["recipe"]

    def __repr__(self) -> str:
        (height, width), encoder = self.size, self.about["encoder"]
        name = encoder.get("network") or encoder["name"]
        return (
            f"LoadedEncoder({name}, trained by {self.method} on "
            f"{self.data}: {height} x {width} x {self.channels} -> {self.features})"
        )

    def forward(self, images: Any) -> Tensor:
        """Features `(n, features)` of images.

        Args:
            images: uint8 `(n, height, width, channels)` as an array or a tensor, a PIL image, or a
                list of these of any sizes. Images of another size or with other channels are
                brought to those of training, unless the encoder was loaded with `strict=True`.
                Floats are taken only at the network's own size and with `value_range`.

        Returns:
            One row for each image. Gradients flow into the network.
        """
        return self._features(images, self.layout)

    def prepare(self, images: Any) -> Tensor:
        """Images as the network takes them: float32 `(n, channels, height, width)`, normalised."""
        return self._prepared(images, self.layout)

    def _features(self, images: Any, layout: Layout | None) -> Tensor:
        prepared = self._prepared(images, layout)
        parameter = next(self.network.parameters(), None)
        if parameter is not None:
            prepared = prepared.to(parameter.device, parameter.dtype)
        features: Tensor = self.network(prepared)
        if self.whitening is not None:
            return cast(Tensor, self.whitening(features))
        return features

    def _prepared(self, images: Any, layout: Layout | None) -> Tensor:
        if torch.compiler.is_compiling():  # the network is compiled, NumPy and Pillow cannot be
            apart = torch.compiler.disable(self._prepare_apart)  # type: ignore[no-untyped-call]
            return cast(Tensor, apart(images, layout))
        return self._prepare_apart(images, layout)

    def _prepare_apart(self, images: Any, layout: Layout | None) -> Tensor:
        if is_float(images):
            return self._scaled(torch.as_tensor(images), layout)
        shape = (*self.size, self.channels)
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            pixels = channels_last(images, layout, "images", LAYOUT, self.channels)
            if tuple(pixels.shape[1:]) == shape:  # stays where it is, e.g. on a GPU
                return plain_images(pixels.contiguous(), self.mean, self.std, self._side)
        # Copied into contiguous memory, because kernels depend on strides and round differently.
        read = read_images(images, shape, layout, self.strict, self.levels, self.fit)
        array = np.array(read, order="C")
        return plain_images(torch.from_numpy(array), self.mean, self.std, self._side)

    def _scaled(self, images: Tensor, layout: Layout | None) -> Tensor:
        """Floating-point images of a stated range, which are never resized."""
        if self.value_range is None:
            raise DataError(
                f"images are a {kind(images)}, but should be uint8 from 0 to 255: convert them, or "
                "give their range, e.g. load_encoder(..., value_range=(0, 1))"
            )
        pixels = channels_last(images, layout, "images", LAYOUT, self.channels).float()
        side = (self._side, self._side) if self._side else self.size
        if tuple(pixels.shape[1:]) != (*side, self.channels):
            raise DataError(
                f"images are a {kind(images)}, but floats must be {side[0]} x {side[1]} with "
                f"{counted(self.channels, 'channel')}: resize them, or give uint8 images, which "
                "are resized as in training"
            )
        low, high = self.value_range
        seen = pixels.detach()
        least, most = (float(seen.min()), float(seen.max())) if len(seen) else (low, high)
        slack = 1e-3 * (high - low)
        if not low - slack <= least <= most <= high + slack:  # also if one is not a number
            raise DataError(
                f"images run from {least:g} to {most:g}, but value_range is {low:g} to {high:g}"
            )
        scaled = (pixels - low) / (high - low)
        normalise(scaled, self.mean, self.std)
        prepared: Tensor = scaled.permute(0, 3, 1, 2)
        return prepared

    def embed(self, images: Any, batch: int = 256) -> Tensor:
        """Features of many images, computed in batches, in evaluation mode without gradients.

        Args:
            images: what `forward` takes, of any length; also a memory-mapped array, an iterable of
                single images, a folder of image files (sorted by path, subfolders included), or a
                list of files. A DICOM file has a row for each frame that training would have used.
            batch: how many images are in memory at once.

        Returns:
            float32 `(n, features)` on the CPU, in the order of the images.
        """
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1")
        was = self.training
        self.eval()
        try:
            with torch.inference_mode():
                pieces = self._batches(images, batch)
                features = [self._features(some, layout).float().cpu() for some, layout in pieces]
        finally:
            self.train(was)
        return torch.cat(features) if features else torch.empty(0, self.features)

    def _batches(self, images: Any, batch: int) -> Iterator[tuple[Any, Layout | None]]:
        """Some images at a time, and the order of their axes."""
        if isinstance(images, str | Path):
            images = image_files(Path(images))
        if isinstance(images, list | tuple) and images and isinstance(images[0], str | Path):
            yield from ((some, "NHWC") for some in self._decoded(images, batch))
        elif is_array(images):
            pixels = channels_last(images, self.layout, "images", LAYOUT, self.channels)
            for start in range(0, len(pixels), batch):
                yield pixels[start : start + batch], "NHWC"
        elif hasattr(images, "__iter__"):  # a PIL image is no iterable
            rest = iter(images)
            while some := list(islice(rest, batch)):
                yield some, self.layout
        else:
            yield images, self.layout

    def order(self) -> Order:
        """How image files are decoded, as those of training were."""
        return Order(
            size=None if self.strict else self.size,
            channels=self.channels,
            fit=self.fit,
            frames=self.about.get("frames", "all"),
            **self.levels._asdict(),
        )

    def _decoded(self, paths: Sequence[str | Path], batch: int) -> Iterator[Pixels]:
        """The pixels of image files, decoded as a data set's are, in processes of their own."""
        order, decoded = self.order(), list[Pixels]()
        with Decoders() as decoders:
            files = decoders.sources([str(path) for path in paths], order.frames)
            sources = [source for some in files for source in some]
            rest = iter(sources)
            for answers in decoders.run(sources, order, DECODED):
                for answer in answers:
                    source = next(rest)
                    file = printable(source if isinstance(source, str) else source[0])
                    if answer.error or answer.pixels is None:
                        raise DataError(f"{file} cannot be read: {answer.error}")
                    check_strict(self.strict, answer.pixels.shape, (*self.size, self.channels))
                    decoded.append(answer.pixels)
                    if len(decoded) == batch:
                        yield np.stack(decoded)
                        decoded.clear()
        if decoded:
            yield np.stack(decoded)


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder and its subfolders, in the order in which `embed` reads them."""
    if not folder.exists():
        raise DataError(f"{folder}: there is no such file or folder")
    if folder.is_file():
        return [folder]
    paths = sorted(
        path
        for path in folder.rglob("*")
        if is_image_file(path)
        and not any(name.startswith(".") for name in path.relative_to(folder).parts)
    )
    if not paths:
        others = unread(folder)
        beside = f", but {others}" if others else ""
        raise DataError(f"{folder} holds no images ({' '.join(ENDINGS)}){beside}")
    return paths


def save_encoder(
    path: Path,
    encoder: nn.Module,
    recipe: Recipe,
    method: Method,
    data: str,
    shape: tuple[int, int, int],
    whitening: Whitening | None = None,
    reading: DataSpec | None = None,
) -> str:
    """Write an encoder with all that `load_encoder` needs.

    Args:
        path: the file.
        encoder: the trained network.
        recipe: the recipe that it was trained with.
        method: the method of the run.
        data: the name of the data.
        shape: height, width and channels of the images before any view.
        whitening: of its features, where the run has fitted one.
        reading: the settings by which images were read, if not those of the recipe's data.

    Returns:
        The SHA-256 of the file.
    """
    view = recipe.views.build().pipelines[0]
    numbers = {"mean": view.mean, "std": view.std}
    prepare = {k: v and for_channels(v, method.world.channels) for k, v in numbers.items()}
    about = {
        "format": FORMAT,
        "encoder": plain(recipe.encoder),
        "channels": method.world.channels,
        "side": method.world.side,
        "size": shape[:2],
        **preprocessing(reading or recipe.data),
        "features": method.encoder.features_for(method.world.channels, method.world.side),
        "prepare": {**prepare, "size": view.size},
        "data": data,
        "method": recipe.method.name,
        "recipe": recipe.digest,
    }
    weights = {key: value.contiguous().clone() for key, value in encoder.state_dict().items()}
    if whitening is not None:
        about["whitening"] = {"directions": whitening.directions}
        tensors = whitening.state_dict()
        weights |= {f"{STORED}{key}": value.contiguous() for key, value in tensors.items()}
    about = json.loads(json.dumps(about))  # as it will be read
    metadata = json.dumps({**about, files.SEAL: seal_of(weights, about)})
    return files.write_atomic(path, safetensors.torch.save(weights, {"harmonium": metadata}))


def preprocessing(data: DataSpec) -> dict[str, Any]:
    """How images become uint8 of one shape, from a data set's settings, as plain values.

    These keys of an encoder's metadata say all that is needed to prepare other images alike, with
    `size`, `channels` and `prepare`:

    - `fit`: cut, resize or pad; `resize` is the same in words;
    - `window`: centre and width for images of more than 8 bits, or null;
    - `percentiles`: two percentiles of each such image that become black and white, or null;
    - `depth`: where both are null, bits that 16-bit grey uses; DICOM files then go by their own
      window, or by all of their stored bits;
    - `frames`: which frames of a DICOM file are images.
    """
    window, percentiles = (getattr(data, name, None) for name in ("window", "percentiles"))
    return {
        "fit": data.fit,
        "resize": RESIZED[data.fit],
        "depth": getattr(data, "depth", 16),
        "window": plain(window),
        "percentiles": plain(percentiles),
        "frames": getattr(data, "frames", "all"),
    }


class HasFolder(Protocol):
    """A finished run, such as a `Result`."""

    @property
    def folder(self) -> Path:
        """The run's folder."""


def load_encoder(
    path: str | Path | HasFolder,
    *,
    layout: Layout | None = None,
    strict: bool = False,
    value_range: tuple[float, float] | None = None,
    network: nn.Module | Callable[[int, int], nn.Module] | None = None,
    whiten: bool | int = False,
) -> LoadedEncoder:
    """The encoder of a finished run, as an `nn.Module` that takes images as they are.

    Args:
        path: a run's folder, its `Result`, a bundle's folder, or an `encoder.safetensors`.
        layout: the order of the axes of arrays and tensors, "NHWC" or "NCHW". Without it channels
            are last, and an ambiguous array is refused.
        strict: refuse images of another size or with other channels than those of training,
            instead of resizing them as in training.
        value_range: least and greatest value of floating-point images, e.g. `(0, 1)`; without it
            they are refused.
        network: the network, or a function of channels and side that returns it, for encoders that
            were given as an `nn.Module`, which their files do not name. A copy of it gets the
            weights of the file.
        whiten: return whitened features, which often improve kNN, of a run with
            `evaluate.whiten=true`; a number keeps that many leading directions.

    Returns:
        The encoder in evaluation mode. `encoder(images)` are features with gradients, for
        fine-tuning; `encoder.embed(images)` are those of many images, of a folder or of files.

    An encoder that is not part of Harmonium needs its module to be imported already, or `network`,
    because a file must not decide which code runs.

    >>> import harmonium, numpy as np
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", **small)
    >>> encoder = harmonium.load_encoder(result)
    >>> encoder.size, encoder.channels
    ((8, 8), 1)
    >>> encoder.embed(np.zeros((5, 28, 28, 3), np.uint8)).shape  # resized, in grey
    torch.Size([5, 128])
    """
    if layout not in (None, "NHWC", "NCHW"):
        raise ConfigError(f'layout is {layout!r}: give "NHWC" (channels last) or "NCHW"')
    if value_range is not None:
        value_range = _checked_range(value_range)
    path = Path(path if isinstance(path, str | Path) else path.folder)
    path = path / ENCODER if path.is_dir() else path
    weights, about, digest = _read_encoder(path)
    name = str(about["encoder"]["name"])
    how: dict[str, Any] = {"layout": layout, "strict": strict, "value_range": value_range}
    stored = {key: weights.pop(key) for key in list(weights) if key.startswith(STORED)}
    with files.reading(path, f"it does not fit the encoder {name} that it names"):
        with torch.random.fork_rng(devices=[]):
            built = _network(path, name, about, network, weights)
        if whiten is not False:
            how["whitening"] = _whitening(path, stored, whiten)
        return LoadedEncoder(built, about, digest, **how).eval()


def _read_encoder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The weights in a file, its metadata, and the file's digest, all of them checked."""
    if not path.exists():
        raise StoreError(f"there is no encoder {path}: {_why_none(path)}")
    run = RunFolder(path.parent)
    if path.name == ENCODER and all((path.parent / name).exists() for name in (RECIPE, ABOUT)):
        run.check(ENCODER, run.remedy)
    with files.reading(path, "give the encoder.safetensors of a run, as it was written"):
        data = path.read_bytes()
        weights = {k: v.clone() for k, v in safetensors.torch.load(data).items()}
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        if "harmonium" not in header.get("__metadata__", {}):
            raise ValueError("it is not an encoder of Harmonium")
        about = _checked_about(checked_seal(weights, header["__metadata__"]["harmonium"]))
        _ = about["encoder"]["name"]  # a file without it is damaged
        return weights, about, files.digest_of(data)


def _why_none(path: Path) -> str:
    """The probable reason why there is no encoder."""
    if not path.parent.exists():
        return "its folder does not exist"
    if not (path.parent / RESULT).exists():
        return "has the run finished?"
    run = RunFolder(path.parent)
    lost = (path.parent / ABOUT).exists() and ENCODER in run.about().get("files", {})
    return run.remedy if lost else "each client has its own"


def _checked_about(about: dict[str, Any]) -> dict[str, Any]:
    """The metadata of an encoder's file; ValueError if its sizes are not those of images."""
    view = about.get("prepare", {}).get("size")
    sides = [about["side"], *about.get("size", ()), *([] if view is None else [view])]
    for number in (about["channels"], *sides):
        if type(number) is not int or not 1 <= number <= LARGEST:
            raise ValueError(f"images cannot have {number} pixels or channels")
    if about.get("fit", "cut") not in RESIZED:
        raise ValueError(f"images cannot be fitted by {about['fit']!r}")
    for pair in (about.get("window"), about.get("percentiles")):
        if pair is not None and {*map(type, pair)} - {int, float} or len(pair or "ab") != 2:
            raise ValueError(f"{pair!r} should be two numbers")
    return about


def _network(
    path: Path, name: str, about: dict[str, Any], given: Any, weights: dict[str, Tensor]
) -> nn.Module:
    """The network of a file, with its weights; a file must not decide which code runs."""
    if isinstance(given, nn.Module):
        return _loaded(copy.deepcopy(given), weights)
    if given is not None:
        network = given(about["channels"], about["side"]) if callable(given) else given
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"network is {_kind(given)}; give an nn.Module, or a function of channels and side "
                "that returns one"
            )
        return _loaded(network, weights)
    if name == recipe_name(Given):
        raise StoreError(
            f"{path} is of a {about['encoder']['network']} that was given as an nn.Module: pass "
            "it again, as load_encoder(..., network=module)"
        )
    if ":" in name and name.partition(":")[0] not in sys.modules:
        raise StoreError(
            f"{path} is an encoder of {name}, which is not part of Harmonium: import that module "
            "first, if you trust it"
        )
    try:
        settings = choose("encoder", encoders, about["encoder"])
    except ConfigError as error:
        raise ValueError(str(error)) from None
    channels, side = about["channels"], about["side"]
    about.setdefault("features", settings.features_for(channels, side))
    if ":" in name:  # someone else's code, which may need real tensors
        return _loaded(settings.build(channels, side), weights)
    with _shaped({value.shape for value in weights.values()}):
        return _loaded(settings.build(channels, side), weights)


@contextmanager
def _shaped(shapes: set[torch.Size]) -> Iterator[None]:
    """Allow networks built in this thread only parameters of these shapes.

    A file may state any width. Parameters of other shapes are refused when they are registered,
    before they are initialised: until then their memory is not touched.
    """
    thread = threading.get_ident()

    def check(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        shape = None if parameter is None else parameter.shape
        if shape is not None and threading.get_ident() == thread and shape not in shapes:
            raise ValueError(f"it has no weights of shape {tuple(shape)}")

    hook = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _loaded(network: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    network.load_state_dict(weights)
    return network


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _whitening(path: Path, stored: dict[str, Tensor], whiten: bool | int) -> Whitening:
    """The whitening of a file, or its leading directions."""
    if not stored:
        raise ConfigError(
            f"{path} has no whitening: train with evaluate.whiten=true, or leave whiten out"
        )
    whitening = Whitening(stored[f"{STORED}mean"], stored[f"{STORED}matrix"])
    if isinstance(whiten, bool):
        return whitening
    if not 1 <= whiten <= whitening.directions:
        raise ConfigError(
            f"whiten is {whiten}; {path} has 1 to {whitening.directions} whitened directions"
        )
    return Whitening(whitening.mean, whitening.matrix[:, :whiten].contiguous())


def _checked_range(given: Any) -> tuple[float, float]:
    """Two numbers, the first below the second."""
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        low = high = 0.0
    if not low < high:
        raise ConfigError(f"value_range is {given!r}: give least and greatest value, e.g. (0, 1)")
    return low, high
