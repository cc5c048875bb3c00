"""Splits: which client holds which training images.

`make_split` applies a `SplitRule` and returns a `Split`. No two clients hold the same image. Rules
check their settings against the data before they draw anything, so an impossible split is an error
with its reason and never an endless loop. The rules themselves are in `splits`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, DataError, StoreError, counted, undefined
from harmonium.core.paths import make_folder
from harmonium.core.registry import Registry
from harmonium.core.seeds import numpy_rng
from harmonium.data.grouping import check_clients, divided, groups_of, regrouped
from harmonium.data.images import UNKNOWN, Dataset, Images, Integers
from harmonium.data.labels import stratified
from harmonium.data.newcomers import newcomers

FORMAT = 2


@dataclass(frozen=True)
class Shares:
    """What `SplitRule.assign` returns: each client's images, and what the rule fixes besides."""

    indices: Sequence[Integers]  # for each client, sorted positions; a repeat counts twice
    angles: Sequence[npt.NDArray[np.float32]] | None = None  # degrees to rotate each image by
    notes: Sequence[str] = ()  # for readers of the results, e.g. how many images repeat
    labelled: Sequence[Integers] | None = None  # see `Split`; None: drawn by `SplitRule.labels`
    data: str | None = None  # digest of the only data set that these shares fit; None: any
    newcomers: Sequence[int] = ()  # see `Split`; empty: drawn by `SplitRule.newcomers`


@dataclass(frozen=True)
class SplitRule:
    """A rule that divides images among clients; its fields are its settings."""

    _: KW_ONLY
    labels: float = 1.0  # share of a client's labels that its method may see; at least 1 a class
    labelled: float = 1.0  # share of the clients that have any label to see, drawn at random
    merge: int = 1  # so many clients are put together into one, with the labels each may see
    newcomers: int = 0  # clients that hold images and never train, drawn at random

    name: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False
    moves_groups: ClassVar[bool] = False  # whether images may change clients to keep groups whole

    def __post_init__(self) -> None:
        """Check the settings that do not depend on the data."""
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
        """How many of `clients` train; the others are newcomers.

        With `clients=1` all but the newcomers are merged into that one client.
        """
        among = clients if clients > 1 else self.merge
        if self.newcomers and self.newcomers >= among:
            raise ConfigError(
                f"split.newcomers is {self.newcomers}, but there are {among} clients: newcomers "
                f"never train, so use at most {among - 1}"
            )
        return clients - self.newcomers if clients > 1 else 1

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Raise an error if these images cannot be split so; messages call the data `called`."""
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

    def deal(
        self, images: Images, clients: int, rng: np.random.Generator, called: str = "this data set"
    ) -> Shares:
        """What `assign` returns, with each group of images, if there are any, at one client.

        Rules that deal single images out give whole groups instead, as near as possible to the same
        shares; others are refused if they would divide a group.
        """
        groups = groups_of(images)
        if groups is None:
            return self.assign(images, clients, rng)
        if self.moves_groups:
            check_clients(groups, clients, called)
        shares = self.assign(images, clients, rng)
        if not (parted := divided(groups, shares.indices)):
            return shares
        if not self.moves_groups:
            raise DataError(
                f"split '{self.name}' would divide {counted(parted, 'group')} of {called} among "
                "clients, and cannot keep groups together: use one that can, such as split=iid"
            )
        indices = regrouped(groups, images.labels, shares.indices, rng)
        sizes = [len(own) for own in indices]
        note = f"groups are kept together: clients hold {min(sizes)} to {max(sizes)} images"
        return replace(shares, indices=indices, notes=[*shares.notes, note])

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Divide the images among clients; `check` has passed."""
        raise undefined(self, "assign")

    def client_names(self, dataset: Dataset) -> tuple[str, ...]:
        """The names that the data give to the clients, in order; empty if they have none."""
        return ()


splits: Registry[SplitRule] = Registry("split", "harmonium.data.splits", SplitRule)
"""Every split rule by name."""


def pools_by_class(labels: Integers, rng: np.random.Generator) -> list[Integers]:
    """Shuffled indices of every class that occurs, in ascending order of class."""
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return [rng.permutation(pool) for pool in np.split(order, cuts)]


@dataclass(frozen=True, eq=False)
class Split:
    """The images of every client, with what identifies this split among all others."""

    indices: tuple[Integers, ...]  # for each client, sorted positions in the training part
    spec: Mapping[str, Any]  # name and settings of the rule, number of clients, seed
    data: str  # digest of the data set that was split
    digest: str  # sha256 over all of the above and of angles and labelled
    angles: tuple[npt.NDArray[np.float32], ...] | None = None  # see `shift.with_split_angles`
    labelled: tuple[Integers, ...] | None = None  # positions whose label may be seen; None: all
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # names that the data give to the clients, if any
    newcomers: tuple[int, ...] = ()  # clients that never train, ascending

    @property
    def examples(self) -> dict[int, int]:
        """Number of images of every client that trains."""
        sizes = {client: len(own) for client, own in enumerate(self.indices)}
        return {client: size for client, size in sizes.items() if client not in self.newcomers}

    def __len__(self) -> int:
        """Number of clients, newcomers included."""
        return len(self.indices)

    def check(self, dataset: Dataset) -> None:
        """Raise an error if the split was made for other data."""
        _check_data(self.data, dataset.digest, dataset.name)

    def validate(self, images: int) -> None:
        """Raise an error if this is no valid split of `images` training images."""
        sizes = np.array([len(own) for own in self.indices])
        rows = np.concatenate(self.indices)
        if rows.max(initial=-1) >= images:
            raise DataError(
                f"this split assigns image {rows.max()}, but there are {images} training images: "
                "use the data that it was made for"
            )
        steps = _steps(rows, sizes)
        sorted_rows = sizes.min() > 0 and rows.min() >= 0 and (steps >= 0).all()
        fits = self._angles_fit(sizes) and self._labelled_fit(sizes) and self._newcomers_fit()
        if not (sorted_rows and fits):
            raise DataError("this split is damaged: its arrays do not fit each other")
        if np.bincount(rows[steps > 0]).max() > 1:  # a repeat within a client is a step of 0
            raise DataError("this split is damaged: two clients hold the same image")

    def _angles_fit(self, sizes: Integers) -> bool:
        """Whether every image has one finite angle, if there are angles."""
        if self.angles is None:
            return True
        one_each = [len(own) for own in self.angles] == sizes.tolist()
        return one_each and bool(np.isfinite(np.concatenate(self.angles)).all())

    def _labelled_fit(self, sizes: Integers) -> bool:
        """Whether `labelled` are ascending positions within each client's images."""
        if self.labelled is None:
            return True
        counts = np.array([len(own) for own in self.labelled])
        positions = np.concatenate(self.labelled)
        if len(counts) != len(sizes) or not (_steps(positions, counts) > 0).all():
            return False
        return bool((positions >= 0).all() and (positions < np.repeat(sizes, counts)).all())

    def _newcomers_fit(self) -> bool:
        """Whether newcomers are ascending numbers of clients, and at least one client trains."""
        new = np.array(self.newcomers, np.int64)
        ascending = bool((np.diff(new, prepend=-1) > 0).all())
        return ascending and len(new) < len(self) and new.max(initial=0) < len(self)

    def seen(self, images: Images) -> Images:
        """The images with only the labels that methods may see, and without further columns."""
        if self.labelled is None:
            return images.relabelled(images.labels)
        labels = np.full(len(images), UNKNOWN, np.int64)
        for rows, own in zip(self.indices, self.labelled, strict=True):
            labels[rows[own]] = images.labels[rows[own]]
        return images.relabelled(labels)

    def save(self, path: Path) -> None:
        """Write the split atomically as one `.npz` file."""
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
                arrays[f"{name}_sizes"] = np.array([len(own) for own in each], np.int64)
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
        """Read a saved split; raises DataError if it was damaged or changed."""
        try:
            if path.is_file() and not zipfile.is_zipfile(path):
                raise ValueError("not an .npz archive")
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise DataError(f"{path} has format {about['format']}, not {FORMAT}")
                indices = _cut(file, "indices", np.int64)
                angles = _cut(file, "angles", np.float32) if "angles" in file else None
                labelled = _cut(file, "labelled", np.int64) if "labelled" in file else None
            spec, data, digest = dict(about["spec"]), str(about["data"]), about["digest"]
            notes, names = (tuple(map(str, about[key])) for key in ("notes", "names"))
            new = tuple(map(int, about.get("newcomers", ())))  # older files have no such key
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
    """Split the training images of `data` among `clients`.

    Args:
        spec: the rule.
        data: a data set, of which the training part is split, or the images themselves.
        data_digest: identifies the images; None takes the data set's own digest.
        clients: number of clients.
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
    called = data.name if isinstance(data, Dataset) else "this data set"
    places = clients * spec.merge  # clients before neighbours are merged
    spec.training(clients)
    spec.check(images, places, called)
    shares = spec.deal(images, places, numpy_rng(seed, "split"), called)
    if shares.data is not None:
        _check_data(shares.data, data_digest, called)
    indices = tuple(shares.indices)
    angles = None if shares.angles is None else tuple(shares.angles)
    labelled = None if shares.labelled is None else tuple(shares.labelled)
    if labelled is None and min(spec.labels, spec.labelled) < 1:
        labelled = _draw_labelled(spec, images.labels, indices, seed)
    new, groups = _newcomers_and_groups(spec, images, shares, clients, seed)
    if spec.merge > 1:
        indices, angles, labelled = _merged(indices, angles, labelled, groups)
    for arrays in (indices, angles, labelled):
        for array in arrays or ():
            array.flags.writeable = False
    about = _about(spec, clients, seed)
    digest = _digest(indices, angles, labelled, about, data_digest, new)
    notes = (*shares.notes, *_notes(indices, len(images), new))
    names = spec.client_names(data) if isinstance(data, Dataset) and spec.merge == 1 else ()
    split = Split(
        *(indices, about, data_digest, digest, angles, labelled),
        *(tuple(dict.fromkeys(notes)), names, new),
    )
    split.validate(len(images))
    return split


def _about(spec: SplitRule, clients: int, seed: int) -> dict[str, Any]:
    """The rule with its settings, the number of clients and the seed: `Split.spec`."""
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if not spec.newcomers:  # keeps the digests of splits made before this setting existed
        del settings["newcomers"]
    return {"name": spec.name, **settings, "clients": clients, "seed": seed}


def _notes(indices: Sequence[Integers], images: int, new: Sequence[int]) -> list[str]:
    """Notes on images that no client holds and on newcomers, if there are any."""
    notes = []
    unassigned = images - np.count_nonzero(np.bincount(np.concatenate(indices)))
    if unassigned:
        notes.append(f"{unassigned} of {images} training images are held by no client")
    if new:
        notes.append(f"newcomers, which never train: clients {', '.join(map(str, new))}")
    return notes


# ---- labels that may be seen ---------------------------------------------------------------------


def _draw_labelled(
    spec: SplitRule, labels: Integers, indices: Sequence[Integers], seed: int
) -> tuple[Integers, ...]:
    """For each client, the positions whose label may be seen; none at clients without labels."""
    rng = numpy_rng(seed, "split", "labels")
    labelled = [_labelled(labels, own, spec.labels, rng) for own in indices]
    holders = max(1, round(spec.labelled * len(indices)))
    for client in numpy_rng(seed, "split", "labelled").permutation(len(indices))[holders:]:
        labelled[client] = np.empty(0, np.int64)
    return tuple(labelled)


def _labelled(labels: Integers, own: Integers, share: float, rng: np.random.Generator) -> Integers:
    """A client's positions whose label may be seen: all copies of an image, or none."""
    distinct, copies = np.unique(own, return_inverse=True)
    chosen = stratified(labels[distinct], share, rng)
    return np.flatnonzero(np.isin(copies, chosen))


def _steps(rows: Integers, sizes: Integers) -> Integers:
    """Differences between neighbouring values; 1 for the first value of each client."""
    steps = np.diff(rows, prepend=0)
    starts = np.cumsum(sizes) - sizes
    steps[starts[sizes > 0]] = 1
    return steps


# ---- merging clients, and newcomers --------------------------------------------------------------


Columns = tuple[npt.NDArray[Any], ...]  # one array for each client


def _newcomers_and_groups(
    spec: SplitRule, images: Images, shares: Shares, clients: int, seed: int
) -> tuple[tuple[int, ...], list[Sequence[int]]]:
    """The clients that never train, and which of the rule's clients are merged into which."""
    places = len(shares.indices)
    groups: list[Sequence[int]] = [
        range(start, start + spec.merge) for start in range(0, places, spec.merge)
    ]
    new = tuple(shares.newcomers)
    if spec.newcomers and not new:
        indices = tuple(shares.indices)
        among = indices if clients == 1 else _merged(indices, None, None, groups)[0]
        rng = numpy_rng(seed, "split", "newcomers")
        new = newcomers(images, among, getattr(spec, "column", ""), spec.newcomers, rng)
    if new and clients == 1:  # all but the newcomers are merged; these follow unmerged
        groups = [[k for k in range(places) if k not in new], *([k] for k in new)]
        new = tuple(range(1, len(groups)))
    return new, groups


def _merged(
    indices: Columns,
    angles: Columns | None,
    labelled: Columns | None,
    groups: Sequence[Sequence[int]],
) -> tuple[Columns, Columns | None, Columns | None]:
    """One client for each group; angles and labels stay with their images."""
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
            f"this split was made for the data with digest {made_for[:12]}, but {called} with "
            f"these settings has {digest[:12]}: make the split again"
        )


def _cut(file: Any, name: str, kind: type[Any]) -> tuple[npt.NDArray[Any], ...]:
    """One array for each client, from the concatenation that is stored."""
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
