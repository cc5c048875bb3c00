"""A linear classifier on an encoder's features, trained on labels and kept with the encoder.

It is multinomial logistic regression on standardised features. Labelled images are divided into
folds, stratified by class, with the images of a group, such as a patient, in one fold. Every image
is classified by a probe that was trained without its fold. These predictions choose the penalty and
the temperature that calibrates probabilities, and give the figures: those of a fold are computed
with the choice that the other folds make, so they are not flattered by it. The final probe is then
trained on all labelled images.

A probe is a safetensors file. It names its encoder by digest and is refused with another.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn

from harmonium import __version__
from harmonium.core import files
from harmonium.core.devices import AUTO
from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.core.paths import make_folder
from harmonium.core.progress import each
from harmonium.core.seeds import seed_of
from harmonium.evaluation.linear import STRENGTHS, LinearRule, linear_rules, standard
from harmonium.evaluation.metrics import auroc, balanced_accuracy
from harmonium.evaluation.pixels import Pixels
from harmonium.recipe.initial_weights import checked_seal, seal_of
from harmonium.runs.export import HasFolder, LoadedEncoder, load_encoder
from harmonium.storage.run_folder import ENCODER
from harmonium.use import labels as labelling
from harmonium.use import tables
from harmonium.use.embedding import Corrupt, Job, Note, on_device, silent, used_encoder
from harmonium.use.labels import Columns, Labelled
from harmonium.use.sources import ImageSource, open_images
from harmonium.use.tables import FEATURES

FORMAT = 1
FOLDS = 5
FEW = 3  # labels of a class below which its figures say nothing
SOUGHT = 20  # labels of a class that give figures within some points
LEAST = 1e-6  # the least probability that counts in a loss
TEMPERATURES = (0.1, 10.0)
PREDICTIONS = "predictions"
FILE = "probe.safetensors"
RAW, COMMONEST = "raw pixels", "commonest class"

Array = npt.NDArray[Any]


# ---- a trained probe -----------------------------------------------------------------------------


class Head(nn.Module):
    """Features `(n, dim)` to probabilities `(n, classes)`."""

    shift: Tensor
    scale: Tensor
    weights: Tensor

    def __init__(self, shift: Tensor, scale: Tensor, weights: Tensor, temperature: float) -> None:
        """Take the standardisation `(dim,)` and the weights `(classes, dim + 1)`, bias last."""
        super().__init__()
        for name, tensor in (("shift", shift), ("scale", scale), ("weights", weights)):
            self.register_buffer(name, tensor)
        self.temperature = temperature

    def forward(self, features: Tensor) -> Tensor:
        """Calibrated probabilities."""
        rows = (features.float() - self.shift) / self.scale
        scores = torch.addmm(self.weights[:, -1], rows, self.weights[:, :-1].T)
        return torch.softmax(scores / self.temperature, dim=1)


@dataclass(frozen=True, eq=False)
class Probe:
    """A classifier for the features of one encoder.

    Attributes:
        head: features to probabilities.
        about: its classes, encoder, settings, and figures of its validation.
        path: its file; None if it was not saved.
    """

    head: Head = field(repr=False)
    about: Mapping[str, Any] = field(repr=False)
    path: Path | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return tuple(self.about["classes"])

    @property
    def figures(self) -> dict[str, Any]:
        """Accuracy and other figures of images that the probe was not trained on, as shares."""
        return dict(self.about["validation"])

    @property
    def digest(self) -> str:
        """SHA-256 of its weights and of all that is known about it."""
        return seal_of(dict(self.head.state_dict()), dict(self.about))

    def encoder(
        self, encoder: str | Path | HasFolder | LoadedEncoder | None = None
    ) -> LoadedEncoder:
        """Its encoder, by default the one beside it; another one is refused."""
        if encoder is None:
            return self._beside()
        if isinstance(encoder, LoadedEncoder):
            whitening = encoder.whitening.directions if encoder.whitening else None
            self._check(encoder, whitening)
            return encoder.eval()
        loaded = load_encoder(encoder)
        self._check(loaded, self.about["whitening"])
        return used_encoder(encoder, self.about["whitening"] or False)

    def _check(self, encoder: LoadedEncoder, whitening: int | None) -> None:
        if encoder.digest != self.about["encoder"] or whitening != self.about["whitening"]:
            raise StoreError(
                f"{self.path or 'the probe'} was trained on features of the encoder "
                f"{self.about['encoder'][:12]}, not of {encoder.digest[:12]}: give its own "
                "encoder, or train a probe for this one"
            )

    def _beside(self) -> LoadedEncoder:
        """The encoder in the probe's folder or in one of the two above it."""
        for folder in list(self.path.absolute().parents)[:3] if self.path else []:
            if (folder / ENCODER).is_file():
                with suppress(StoreError):
                    return self.encoder(folder)
        raise StoreError(
            f"the encoder {self.about['encoder'][:12]} of {self.path or 'the probe'} is not beside "
            "it: give it with --encoder"
        )

    def save(self, path: str | Path) -> Probe:
        """Write the probe, and what is known about it as JSON beside it.

        Args:
            path: a folder, or a file that ends in `.safetensors`.
        """
        place = probe_file(Path(path))
        if place.exists():
            read_probe(place)  # refuses what is no probe
        make_folder(place.absolute().parent)
        tensors = {name: one.contiguous() for name, one in self.head.state_dict().items()}
        metadata = json.dumps({**self.about, files.SEAL: seal_of(tensors, dict(self.about))})
        files.write_atomic(place, safetensors.torch.save(tensors, {"harmonium": metadata}))
        shown = (json.dumps(self.about, indent=1) + "\n").encode()
        files.write_atomic(place.with_suffix(".json"), shown)
        return Probe(self.head, self.about, place)


def probe_file(path: Path) -> Path:
    """The file of a probe: the path itself, or in the folder that it names."""
    return path if path.suffix == ".safetensors" else path / FILE


_TRAIN = "train one with `harmonium classify fit`"


def read_probe(path: str | Path) -> Probe:
    """A saved probe.

    Args:
        path: its file, or the folder of it.
    """
    place = probe_file(Path(path))
    if not place.is_file():
        others = sorted(one.parent for one in Path(path).glob(f"probes/*/{FILE}"))
        remedy = f"give {' or '.join(map(str, others))}" if others else _TRAIN
        raise StoreError(f"there is no probe {place}: {remedy}")
    with files.reading(place, "give the file of a probe, as it was written"):
        data = place.read_bytes()
        tensors = {key: value.clone() for key, value in safetensors.torch.load(data).items()}
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = checked_seal(tensors, header["__metadata__"]["harmonium"])
        if about.get("kind") != "probe" or about.get("format") != FORMAT:
            raise ValueError("it is not a probe of this version of Harmonium")
        weights = tensors["weights"]
        if weights.shape != (len(about["classes"]), about["features"] + 1):
            raise ValueError("its weights do not fit its classes and features")
        head = Head(tensors["shift"], tensors["scale"], weights, float(about["temperature"]))
    return Probe(head.eval(), about, place)


# ---- training ------------------------------------------------------------------------------------


def fit_probe(
    encoder: str | Path | HasFolder | LoadedEncoder,
    *images: str | Path | ImageSource,
    labels: str | Path | Mapping[str, str] | None = None,
    out: str | Path | None = None,
    columns: Columns = Columns(),  # noqa: B008
    folds: int = FOLDS,
    seed: int = 0,
    whiten: bool | int = False,
    batch: int | None = None,
    device: str = AUTO,
    corrupt: Corrupt = "skip",
    note: Note = silent,
) -> Probe:
    """Train a classifier on the features of labelled images.

    Args:
        encoder: a run's folder, its `Result`, a bundle's folder, an `encoder.safetensors`, or what
            `load_encoder` returned.
        images: a folder, files, a table or an archive; only labelled ones are read.
        labels: a table (`.csv`), or a mapping from names to labels; none: those that an archive
            has, or the folders that the images lie in.
        out: where to save the probe, a folder or a `.safetensors` file; none: it is not saved.
        columns: the columns of the table.
        folds: parts of the labelled images, each of which is predicted from the others.
        seed: of the division into folds.
        whiten: train on whitened features; as for `load_encoder`.
        batch: images of a batch.
        device: where features are computed.
        corrupt: leave out images that cannot be read (`skip`), or refuse them.
        note: is called with what users should know.
    """
    if folds < 2:
        raise ConfigError(f"folds is {folds}; it must be at least 2")
    if out is not None and probe_file(Path(out)).exists():
        read_probe(out)  # refuses what is no probe, before any work
    model = used_encoder(encoder, whiten)
    source = open_images(*images, column=columns.path, frames=model.order().frames)
    labelled = _labelled(labels, source, columns, note)
    some = source.subset(labelled.rows)
    job = Job(_WithPixels(model), model, some, FEATURES, 0, batch, corrupt, note)
    with on_device(device, model):
        features = job.in_memory()
    kept = [row for row, name in enumerate(some.names) if name in features.rows]
    groups = labelled.groups and [labelled.groups[row] for row in kept]
    names = [labelled.labels[row] for row in kept]
    matrix = features.matrix()
    mine, pixels = matrix[:, : model.features], matrix[:, model.features :]
    about, head = _trained(mine, pixels, names, groups, folds, seed, note)
    whitening = model.whitening.directions if model.whitening else None
    probe = Probe(
        head,
        {
            "kind": "probe",
            "format": FORMAT,
            "encoder": model.digest,
            "whitening": whitening,
            "features": model.features,
            "size": list(model.size),
            "channels": model.channels,
            "trained": {"method": model.method, "data": model.data, "recipe": model.recipe},
            **about,
            "versions": {"harmonium": __version__, "torch": torch.__version__},
        },
    )
    return probe if out is None else probe.save(out)


class _WithPixels(nn.Module):
    """Features of an encoder, followed by the pixels that it is compared with."""

    def __init__(self, encoder: LoadedEncoder) -> None:
        super().__init__()
        self.encoder, self.pixels = encoder, Pixels()

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images).float()
        return torch.cat([features, self.pixels(self.encoder.prepare(images).to(features))], dim=1)


def _labelled(
    labels: str | Path | Mapping[str, str] | None,
    source: ImageSource,
    columns: Columns,
    note: Note,
) -> Labelled:
    """The labelled images of a source."""
    for text in source.notes:
        note(text)
    if labels is None:
        return labelling.from_classes(source, note)
    if isinstance(labels, Mapping):
        given = [labelling.Label(str(name), str(label)) for name, label in labels.items()]
        return labelling.match(given, source, Path(), note)
    table = Path(labels)
    return labelling.match(labelling.read_labels(table, columns), source, table.parent, note)


def _trained(
    features: Array,
    pixels: Array,
    names: Sequence[str],
    groups: Sequence[str] | None,
    folds: int,
    seed: int,
    note: Note,
) -> tuple[dict[str, Any], Head]:
    """The probe of all labelled images, and what is known about it."""
    classes, columns = np.unique(np.array(names), return_inverse=True)
    parts = _folds(columns, groups, folds, seed, note, classes.tolist())
    grid = sorted(STRENGTHS, reverse=True)
    validations = []
    for rows in each("validation", [features, pixels], "sets of features"):
        validations.append(_Validation.of(rows, columns, parts, grid))
    mine, theirs = validations
    best = mine.best(np.full(len(columns), True))
    temperature = _temperature(mine.scores[best], columns)
    rule, shift, scale = _rule(features, columns, grid[: best + 1])
    head = Head(torch.from_numpy(shift), torch.from_numpy(scale), rule.weights, temperature)
    figures, predicted = mine.figures(columns, parts)
    raw, others = theirs.figures(columns, parts)
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (columns, predicted), 1)
    about = {
        "classes": [str(name) for name in classes],
        "labels": np.bincount(columns).tolist(),
        "strength": grid[best],
        "temperature": temperature,
        "validation": {
            "images": len(columns),
            "folds": int(parts.max()) + 1,
            "groups": len({one or row for row, one in enumerate(groups)}) if groups else None,
            **figures,
            "confusion": confusion.tolist(),
        },
        "references": {
            COMMONEST: _commonest(columns, parts),
            RAW: {**raw, "behind": _lead(predicted == columns, others == columns)},
        },
    }
    return about, head.eval()


def too_few(labels: Sequence[int]) -> bool:
    """Whether figures of so many labels of each class say nothing.

    >>> too_few([1, 40]), too_few([2, 2]), too_few([3, 40, 1])
    (True, True, False)
    """
    return sum(count >= FEW for count in labels) < 2


def _folds(
    columns: Array,
    groups: Sequence[str] | None,
    folds: int,
    seed: int,
    note: Note,
    classes: Sequence[str],
) -> Array:
    """The fold of every image: as many of each class in every one, and groups kept together."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # takes a second

    counts = np.bincount(columns)
    if len(counts) < 2:
        raise DataError(f"all labels are {classes[0]}: a classifier needs two classes at least")
    if too_few(labels := counts.tolist()):
        few = [f"{name} ({n})" for name, n in zip(classes, labels, strict=False) if n < FEW]
        note(f"figures of so few labels say nothing, give about {SOUGHT} a class: {', '.join(few)}")
    elif rare := [classes[one] for one in np.flatnonzero(counts < 2).tolist()]:
        note(f"one label only, so predictions of it cannot be validated: {', '.join(rare)}")
    own = [group or f"\0{row}" for row, group in enumerate(groups)] if groups else None
    limits = {"labels of a class": int(counts.max())}
    limits |= {"groups": len(set(own))} if own else {}
    for what, most in limits.items():
        if most < 2:
            raise DataError(f"validation needs more {what}: there is one alone")
    count = min(folds, *limits.values())
    random = seed_of(seed, "classify") % 2**32
    splitter = (StratifiedGroupKFold if own else StratifiedKFold)(
        count, shuffle=True, random_state=random
    )
    parts = np.zeros(len(columns), np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes with fewer images than folds are fine
        for number, (_, test) in enumerate(splitter.split(columns, columns, own)):
            parts[test] = number
    return parts


def _rule(
    features: Array, columns: Array, strengths: Sequence[float]
) -> tuple[LinearRule, Array, Array]:
    """The regression of the last of these strengths, and how features are standardised for it."""
    shift, scale = standard(features)
    return linear_rules((features - shift) / scale, columns, strengths)[-1], shift, scale


@dataclass(frozen=True, eq=False)
class _Validation:
    """Scores of every image by probes that were trained without its fold, for each strength."""

    scores: Array  # float64 (strengths, images, classes)
    losses: Array  # (strengths, images)

    @classmethod
    def of(
        cls, features: Array, columns: Array, parts: Array, grid: Sequence[float]
    ) -> _Validation:
        """Train a path of probes without each fold."""
        scores = np.full((len(grid), len(columns), int(columns.max()) + 1), -1e4)
        for part in np.unique(parts):
            known, asked = parts != part, parts == part
            shift, scale = standard(features[known])
            rows = (features - shift) / scale
            rules = linear_rules(rows[known], columns[known], grid)
            for number, rule in enumerate(rules):
                place = np.ix_(np.flatnonzero(asked), rule.classes)
                scores[number][place] = rule.scores(rows[asked])
        losses = np.stack([_losses(one, columns, 1.0) for one in scores])
        return cls(scores, losses)

    def best(self, among: Array) -> int:
        """The strength with the lowest loss over some images, the stronger one on a tie."""
        return int(self.losses[:, among].mean(axis=1).argmin())

    def figures(self, columns: Array, parts: Array) -> tuple[dict[str, Any], Array]:
        """Figures, and predictions, with what the other folds choose for each fold."""
        chances = np.zeros(self.scores.shape[1:])
        for part in np.unique(parts):
            mine, others = parts == part, parts != part
            scores = self.scores[self.best(others)]
            temperature = _temperature(scores[others], columns[others])
            chances[mine] = _softmax(scores[mine] / temperature)
        return _figures(chances, columns), chances.argmax(axis=1)


def _figures(chances: Array, columns: Array) -> dict[str, Any]:
    """What probabilities are worth, as shares."""
    predicted = chances.argmax(axis=1)
    accuracy = float((predicted == columns).mean())
    areas = [auroc(chances[:, one], columns == one) for one in range(chances.shape[1])]
    known = [area for area in areas if area is not None]
    own = np.clip(chances[np.arange(len(columns)), columns], LEAST, 1)
    return {
        "accuracy": accuracy,
        "error": float(np.sqrt(accuracy * (1 - accuracy) / len(columns))),
        "balanced": balanced_accuracy(predicted, columns),
        "auroc": float(np.mean(known)) if known else None,
        "loss": float(-np.log(own).mean()),
        "confidence": float(chances.max(axis=1).mean()),
    }


def _commonest(columns: Array, parts: Array) -> dict[str, Any]:
    """Always naming the commonest class of the other folds."""
    predicted = np.zeros_like(columns)
    for part in np.unique(parts):
        predicted[parts == part] = np.bincount(columns[parts != part]).argmax()
    accuracy = float((predicted == columns).mean())
    balanced = balanced_accuracy(predicted, columns)
    return {"accuracy": accuracy, "balanced": balanced, "auroc": 0.5}


def _lead(right: Array, other: Array) -> dict[str, float]:
    """How much more is right, over the same images, and its standard error."""
    difference = right.astype(float) - other.astype(float)
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return {"by": float(difference.mean()), "error": float(error)}


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: Array = powers / powers.sum(axis=1, keepdims=True)
    return chances


def _losses(scores: Array, columns: Array, temperature: float) -> Array:
    """The cross entropy of every image."""
    own = _softmax(scores / temperature)[np.arange(len(columns)), columns]
    losses: Array = -np.log(np.clip(own, LEAST, 1))
    return losses


def _temperature(scores: Array, columns: Array) -> float:
    """The temperature with the lowest loss, by golden sections of its logarithm.

    >>> scores = np.array([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0], [0.0, 9.0]])
    >>> _temperature(scores, np.array([0, 1, 1, 0])), round(
    ...     _temperature(scores[[0, 0, 0, 0]], np.array([0, 0, 0, 1])), 2)
    (10.0, 8.19)
    """
    low, high = np.log(TEMPERATURES)
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        losses = [_losses(scores, columns, float(np.exp(one))).mean() for one in (left, right)]
        low, high = (low, right) if losses[0] <= losses[1] else (left, high)
    return round(float(np.exp((low + high) / 2)), 6)


# ---- applying ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """The classes that a probe predicts for images.

    Attributes:
        names: of the images.
        predicted: the class of each.
        probabilities: `(images, classes)`.
        about: how they came about, with the images that were left out.
    """

    names: Sequence[str] = field(repr=False)
    predicted: Sequence[str] = field(repr=False)
    probabilities: tables.Rows = field(repr=False)
    about: Mapping[str, Any] = field(repr=False)


class _Classifier(nn.Module):
    """An encoder and a probe: images to probabilities."""

    def __init__(self, encoder: LoadedEncoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor) -> Tensor:
        probabilities: Tensor = self.head(self.encoder(images))
        return probabilities


def apply_probe(
    probe: str | Path | Probe,
    *images: str | Path | ImageSource,
    out: str | Path | None = None,
    encoder: str | Path | HasFolder | LoadedEncoder | None = None,
    batch: int | None = None,
    device: str = AUTO,
    corrupt: Corrupt = "skip",
    column: str = "path",
    note: Note = silent,
) -> Predictions:
    """Classify images; with `out`, a killed command continues where it was.

    Args:
        probe: a probe, its file or its folder.
        images: a folder, files, a table or an archive.
        out: the `.csv` to write: name, predicted class, and a probability for every class.
        encoder: the probe's encoder; by default the one in its folder or in those above it.
        batch: images of a batch.
        device: where to compute.
        corrupt: leave out images that cannot be read (`skip`), or refuse them.
        column: of a table, the column that names the files.
        note: is called with what users should know.
    """
    if out is not None:
        tables.check_ending(Path(out), (".csv",))
    probe = probe if isinstance(probe, Probe) else read_probe(probe)
    loaded = probe.encoder(encoder)
    source = open_images(*images, column=column, frames=loaded.order().frames)
    model, classes = _Classifier(loaded, probe.head).eval(), np.array(probe.classes)
    more = {"probe": probe.digest, "classes": list(probe.classes)}
    job = Job(*(model, loaded, source, PREDICTIONS, len(classes), batch, corrupt, note), more=more)

    def write(names: Sequence[str], about: Mapping[str, Any], blocks: Any) -> None:
        columns = ["predicted", *(f"p_{name}" for name in classes)]
        cells = (
            np.column_stack([classes[block.argmax(axis=1)], np.char.mod("%.6f", block)])
            for block in blocks
        )
        tables.write_csv(Path(out or ""), names, about, columns, cells)

    with on_device(device, model):
        if out is not None:
            job.into(Path(out), write)
            return Predictions(*tables.read_predictions(Path(out)))
        rows = job.in_memory()
    matrix = rows.matrix()
    predicted = classes[matrix.argmax(axis=1)].tolist()
    return Predictions(rows.names, predicted, matrix, rows.about)
