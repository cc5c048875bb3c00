"""Who holds which images: the training part shared out among clients.

No two clients hold the same image. What cannot be done is refused with the reason before
anything is drawn, so that no rule can go round in circles. The rules themselves are in `splits`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, DataError, StoreError, undefined
from harmonium.core.paths import make_folder
from harmonium.core.registry import Registry
from harmonium.core.seeds import numpy_rng
from harmonium.data.images import UNKNOWN, Dataset, Images, Integers
from harmonium.data.labels import stratified
from harmonium.data.newcomers import newcomers

FORMAT = 2


@dataclass(frozen=True)
class Shares:
    """What a rule decides."""

    indices: Sequence[Integers]  # for each client, sorted positions; a repeat counts twice
    angles: Sequence[npt.NDArray[np.float32]] | None = None  # degrees that each image is turned
    notes: Sequence[str] = ()  # what a reader should know, e.g. how many images nobody holds
    labelled: Sequence[Integers] | None = None  # see `Split`; None: as `SplitRule.labels` says
    data: str | None = None  # digest of the only data that these shares fit; None: any
    newcomers: Sequence[int] = ()  # see `Split`; none: as `SplitRule.newcomers` says


@dataclass(frozen=True)
class SplitRule:
    """A way to share images out; its fields are its settings."""

    _: KW_ONLY
    labels: float = 1.0  # share of a client's labels that its method may see; at least 1 a class
    labelled: float = 1.0  # share of the clients that have any label to see, drawn at random
    merge: int = 1  # so many clients are put together into one, with the labels each may see
    newcomers: int = 0  # clients that hold images and never train, drawn at random

    name: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right whatever the data."""
        if not 0 < self.labels <= 1:
            raise ConfigError(
                f"split.labels is {self.labels}; it must be above 0 and at most 1, e.g. 0.1"
            )
        if not 0 < self.labelled <= 1:
            raise ConfigError(
                f"split.labelled is {self.labelled}; it must be above 0 and at most 1, e.g. 0.5"
            )
        if self.merge < 1:
            raise ConfigError(f"split.merge is {self.merge}; it must be at least 1")
        if self.newcomers < 0:
            raise ConfigError(f"split.newcomers is {self.newcomers}; it must be 0 or more")

    def training(self, clients: int) -> int:
        """How many of so many clients train; newcomers are some of them.

        Where all are merged into one, newcomers are those of the merged that stay apart.
        """
        among = clients if clients > 1 else self.merge
        if self.newcomers and self.newcomers >= among:
            raise ConfigError(
                f"split.newcomers is {self.newcomers}, but there are {among} clients: fewer must "
                "be newcomers, for these never train"
            )
        return clients - self.newcomers if clients > 1 else 1

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse what cannot be done, and say why; messages call the data `called`."""
        if clients < 1:
            raise ConfigError(f"clients={clients}: at least 1 is needed")
        if clients > len(images):
            raise DataError(
                f"clients={clients}, but {called} has {len(images)} training images: "
                f"use at most {len(images)} clients"
            )
        if self.needs_labels and not images.labelled:
            raise DataError(f"split '{self.name}' needs labels; {called} has none: use split=iid")
        missing = int((images.labels < 0).sum())
        if self.needs_labels and missing:
            raise DataError(
                f"split '{self.name}' needs a label for every image; {missing} of "
                f"{len(images)} have none: use split=iid"
            )
        for name in ("labels", "labelled"):
            if (value := getattr(self, name)) < 1 and not images.labelled:
                raise DataError(f"split.{name}={value}, but {called} has no labels: leave it out")

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Share the images out; `check` has passed."""
        raise undefined(self, "assign")

    def client_names(self, dataset: Dataset) -> tuple[str, ...]:
        """What the data call the clients, in their order; none where they call them nothing."""
        return ()


splits: Registry[SplitRule] = Registry("split", "harmonium.data.splits", SplitRule)
"""Every way to share images out, by name."""


def pools_by_class(labels: Integers, rng: np.random.Generator) -> list[Integers]:
    """The indices of each class that occurs, in ascending order of class, each shuffled."""
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return [rng.permutation(pool) for pool in np.split(order, cuts)]


@dataclass(frozen=True, eq=False)
class Split:
    """Who holds what, with all that is needed to tell it from any other split."""

    indices: tuple[Integers, ...]  # for each client, sorted positions in the training part
    spec: Mapping[str, Any]  # name and settings of the rule, number of clients, seed
    data: str  # digest of the data set that was shared out
    digest: str  # sha256 over all of the above and of angles and labelled
    angles: tuple[npt.NDArray[np.float32], ...] | None = None  # see `shift.as_held`
    labelled: tuple[Integers, ...] | None = None  # positions whose label may be seen; None: all
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # what the data call the clients, where they do
    newcomers: tuple[int, ...] = ()  # clients that never train, ascending

    @property
    def examples(self) -> dict[int, int]:
        """How many images each client holds that trains."""
        sizes = {client: len(own) for client, own in enumerate(self.indices)}
        return {client: size for client, size in sizes.items() if client not in self.newcomers}

    def __len__(self) -> int:
        """How many clients."""
        return len(self.indices)

    def check(self, dataset: Dataset) -> None:
        """Refuse a split that was made for other data."""
        _check_data(self.data, dataset.digest, dataset.name)

    def validate(self, pictures: int) -> None:
        """Refuse shares that cannot be right for so many training images."""
        sizes = np.array([len(own) for own in self.indices])
        held = np.concatenate(self.indices)
        if held.max(initial=-1) >= pictures:
            raise DataError(
                f"this split shares out image {held.max()}, but there are {pictures} training "
                "images: use the data that it was made for"
            )
        steps = _steps(held, sizes)
        right = sizes.min() > 0 and held.min() >= 0 and (steps >= 0).all()
        if self.angles is not None:
            right = right and [len(own) for own in self.angles] == sizes.tolist()
            right = right and np.isfinite(np.concatenate(self.angles)).all()
        if self.labelled is not None:
            counts = np.array([len(own) for own in self.labelled])
            seen = np.concatenate(self.labelled)
            right = right and len(counts) == len(sizes) and (_steps(seen, counts) > 0).all()
            right = right and (seen >= 0).all() and (seen < np.repeat(sizes, counts)).all()
        new = np.array(self.newcomers, np.int64)
        right = right and (np.diff(new, prepend=-1) > 0).all() and len(new) < len(sizes)
        right = right and new.max(initial=0) < len(sizes)
        if not right:
            raise DataError("this split is damaged: it does not fit the images it shares out")
        if np.bincount(held[steps > 0]).max() > 1:  # a repeat within a client is a step of 0
            raise DataError("this split is damaged: two clients hold the same image")

    def seen(self, images: Images) -> Images:
        """The images with the labels that clients' methods may see, and no further columns."""
        if self.labelled is None:
            return images.relabelled(images.labels)
        labels = np.full(len(images), UNKNOWN, np.int64)
        for rows, own in zip(self.indices, self.labelled, strict=True):
            labels[rows[own]] = images.labels[rows[own]]
        return images.relabelled(labels)

    def save(self, path: Path) -> None:
        """Write the split as one `.npz` file, whole or not at all."""
        folder = make_folder(path.absolute().parent)
        about = {
            "format": FORMAT,
            "spec": self.spec,
            "data": self.data,
            "digest": self.digest,
            "notes": self.notes,
            "names": self.names,
            "newcomers": self.newcomers,
        }
        columns = {"indices": self.indices, "angles": self.angles, "labelled": self.labelled}
        arrays: dict[str, Any] = {"about": np.array(json.dumps(about, sort_keys=True))}
        for name, each in columns.items():
            if each is not None:
                arrays[name] = np.concatenate(each)
                arrays[f"{name}_sizes"] = np.array([len(one) for one in each], np.int64)
        temporary = folder / f".{path.name}.{secrets.token_hex(6)}.part"
        try:
            with open(temporary, "xb") as file:
                np.savez_compressed(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Split:
        """Read a split; one that was damaged or changed is refused."""
        try:
            if path.is_file() and not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz archive")
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise DataError(f"{path} has format {about['format']}, not {FORMAT}")
                indices = _cut(file, "indices", np.int64)
                angles = _cut(file, "angles", np.float32) if "angles" in file else None
                labelled = _cut(file, "labelled", np.int64) if "labelled" in file else None
            spec, data, digest = dict(about["spec"]), str(about["data"]), about["digest"]
            notes, names = (tuple(map(str, about[key])) for key in ("notes", "names"))
            new = tuple(map(int, about.get("newcomers", ())))  # files of before newcomers
        except FileNotFoundError:
            raise DataError(f"there is no split {path}") from None
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  (a damaged archive may raise anything)
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{path} is not a split file: {why}") from None
        if _digest(indices, angles, labelled, spec, data, new) != digest:
            raise DataError(f"{path} does not match its own digest: it was damaged or changed")
        return cls(indices, spec, data, digest, angles, labelled, notes, names, new)


def make_split(
    spec: SplitRule, data: Dataset | Images, data_digest: str | None, clients: int, seed: int
) -> Split:
    """Share the training images of `data` out among `clients`.

    Args:
        spec: the rule.
        data: a data set, of which the training part is shared out, or the images themselves.
        data_digest: what identifies the images; None takes the data set's own.
        clients: how many.
        seed: the run's seed; the same seed gives the same split.

    >>> from harmonium.data.splits.by_class import ByClass
    >>> images = Images(np.zeros((6, 8, 8, 1), np.uint8), np.array([0, 0, 1, 1, 2, 2]))
    >>> split = make_split(ByClass(classes_per_client=1), images, "six", clients=3, seed=0)
    >>> [index.tolist() for index in split.indices]
    [[0, 1], [2, 3], [4, 5]]
    """
    images = data.train if isinstance(data, Dataset) else data
    if data_digest is None:
        data_digest = data.digest if isinstance(data, Dataset) else ""
    places = clients * spec.merge
    called = data.name if isinstance(data, Dataset) else "this data set"
    spec.training(clients)
    spec.check(images, places, called)
    shares = spec.assign(images, places, numpy_rng(seed, "split"))
    if shares.data is not None:
        _check_data(shares.data, data_digest, called)
    indices = tuple(shares.indices)
    angles = None if shares.angles is None else tuple(shares.angles)
    labelled = None if shares.labelled is None else tuple(shares.labelled)
    if labelled is None and min(spec.labels, spec.labelled) < 1:
        rng = numpy_rng(seed, "split", "labels")
        labelled = tuple(_labelled(images.labels, own, spec.labels, rng) for own in indices)
        holders = max(1, round(spec.labelled * places))
        for client in numpy_rng(seed, "split", "labelled").permutation(places)[holders:]:
            labelled = (*labelled[:client], np.empty(0, np.int64), *labelled[client + 1 :])
    new, groups = tuple(shares.newcomers), _neighbours(places, spec.merge)
    if spec.newcomers and not new:
        among = indices if clients == 1 else _merged(indices, None, None, groups)[0]
        rng = numpy_rng(seed, "split", "newcomers")
        new = newcomers(images, among, getattr(spec, "column", ""), spec.newcomers, rng)
    if new and clients == 1:  # all but they are merged; they stay what they are, behind the one
        groups = [[k for k in range(places) if k not in new], *([k] for k in new)]
        new = tuple(range(1, len(groups)))
    if spec.merge > 1:
        indices, angles, labelled = _merged(indices, angles, labelled, groups)
    for arrays in (indices, angles, labelled):
        for array in arrays or ():
            array.flags.writeable = False
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if not spec.newcomers:  # a split without any is what it was before there could be some
        del settings["newcomers"]
    about = {"name": spec.name, **settings, "clients": clients, "seed": seed}
    digest = _digest(indices, angles, labelled, about, data_digest, new)
    told = [f"newcomers, which never train: clients {', '.join(map(str, new))}"] if new else []
    notes = tuple(dict.fromkeys([*shares.notes, *_unheld(indices, len(images)), *told]))
    names = spec.client_names(data) if isinstance(data, Dataset) and spec.merge == 1 else ()
    split = Split(indices, about, data_digest, digest, angles, labelled, notes, names, new)
    split.validate(len(images))
    return split


def _labelled(labels: Integers, own: Integers, share: float, rng: np.random.Generator) -> Integers:
    """Positions whose label may be seen: of all copies of an image, or of none."""
    pictures, copies = np.unique(own, return_inverse=True)
    chosen = stratified(labels[pictures], share, rng)
    return np.flatnonzero(np.isin(copies, chosen))


def _steps(rows: Integers, sizes: Integers) -> Integers:
    """How far each value lies above the one before it; the first of each client is a step of 1."""
    steps = np.diff(rows, prepend=0)
    starts = np.cumsum(sizes) - sizes
    steps[starts[sizes > 0]] = 1
    return steps


def _unheld(indices: Sequence[Integers], pictures: int) -> list[str]:
    """A note on the images that nobody holds, if there are any."""
    nobody = pictures - np.count_nonzero(np.bincount(np.concatenate(indices)))
    return [f"{nobody} of {pictures} training images are held by no client"] if nobody else []


Columns = tuple[npt.NDArray[Any], ...]  # one array for each client


def _neighbours(places: int, merge: int) -> list[Sequence[int]]:
    """Who is put together with whom, `merge` at a time."""
    return [range(start, start + merge) for start in range(0, places, merge)]


def _merged(
    indices: Columns,
    angles: Columns | None,
    labelled: Columns | None,
    groups: Sequence[Sequence[int]],
) -> tuple[Columns, Columns | None, Columns | None]:
    """Clients put together group by group; everything stays with its image."""
    joined = [np.concatenate([indices[k] for k in group]) for group in groups]
    orders = [np.argsort(index, kind="stable") for index in joined]
    if angles is not None:
        whole = [np.concatenate([angles[k] for k in group]) for group in groups]
        angles = tuple(angle[order] for angle, order in zip(whole, orders, strict=True))
    if labelled is not None:
        seen = [np.isin(np.arange(len(indices[k])), labelled[k]) for k in range(len(indices))]
        whole = [np.concatenate([seen[k] for k in group]) for group in groups]
        labelled = tuple(np.flatnonzero(s[o]) for s, o in zip(whole, orders, strict=True))
    return tuple(i[o] for i, o in zip(joined, orders, strict=True)), angles, labelled


def _check_data(made_for: str, digest: str, called: str) -> None:
    if made_for != digest:
        raise DataError(
            f"this split was made for data {made_for[:12]}, but {called} as set is "
            f"{digest[:12]}: make the split again"
        )


def _cut(file: Any, name: str, kind: type[Any]) -> tuple[npt.NDArray[Any], ...]:
    """One array for each client out of all of them in a row."""
    ends = np.cumsum(file[f"{name}_sizes"])
    return tuple(np.split(file[name].astype(kind), ends[:-1]))


def _digest(
    indices: Sequence[npt.NDArray[Any]],
    angles: Sequence[npt.NDArray[Any]] | None,
    labelled: Sequence[npt.NDArray[Any]] | None,
    spec: Mapping[str, Any],
    data: str,
    new: Sequence[int],
) -> str:
    known = [spec, data, *([list(new)] if new else [])]
    total = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, kind, arrays in (("", "<i8", indices), ("a", "<f4", angles), ("l", "<i8", labelled)):
        for array in arrays or ():
            total.update(name.encode() + len(array).to_bytes(8, "little"))
            total.update(array.astype(kind).tobytes())
    return total.hexdigest()
