"""Who holds which pictures: the training part shared out among clients.

Every picture goes to at most one client. What cannot be done is refused with the reason before
anything is drawn, so that no rule can go round in circles.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harmonium.data.images import Dataset, Images, Integers
from harmonium.errors import ConfigError, DataError, StoreError
from harmonium.home import make_folder
from harmonium.registry import Registry
from harmonium.seeds import numpy_rng

FORMAT = 1


@dataclass(frozen=True)
class SplitRule:
    """A way to share pictures out; its fields are its settings."""

    name: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse what cannot be done, and say why; messages call the data `called`."""
        if clients < 1:
            raise ConfigError(f"clients={clients}: at least 1 is needed")
        if clients > len(images):
            raise DataError(
                f"clients={clients}, but {called} has {len(images)} training pictures: "
                f"use at most {len(images)} clients"
            )
        if self.needs_labels and not images.labelled:
            raise DataError(f"split '{self.name}' needs labels; {called} has none: use split=iid")
        missing = int((images.labels < 0).sum())
        if self.needs_labels and missing:
            raise DataError(
                f"split '{self.name}' needs a label for every picture; {missing} of "
                f"{len(images)} have none: use split=iid"
            )

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> list[Integers]:
        """The sorted indices of each client's pictures."""
        raise TypeError(f"{type(self).__name__} must define `assign`")


splits: Registry[SplitRule] = Registry("split", "harmonium.data", SplitRule)
"""Every way to share pictures out, by name."""


@splits("iid")
@dataclass(frozen=True)
class IID(SplitRule):
    """Every client the same number of pictures, drawn at random; the remainder goes to nobody."""

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Cut one permutation into equal pieces."""
        self.check(images, clients)
        each = len(images) // clients
        order = rng.permutation(len(images))[: clients * each]
        return [np.sort(piece) for piece in order.reshape(clients, each)]


@splits("dirichlet")
@dataclass(frozen=True)
class Dirichlet(SplitRule):
    """Class proportions from a Dirichlet distribution, equal sizes (Hsu et al., 2019).

    Each client draws its proportions, then its pictures one after another without replacement; a
    class that has run out is left out and the others keep their ratios.
    """

    alpha: float = 0.1  # concentration: small is one class a client, large is iid
    prior: bool = False  # alpha times the share of each class, as Federated SimCLR counts it

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ConfigError(f"split.alpha is {self.alpha}; it must be above 0, e.g. 0.1")

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Client by client, as many as possible of the wanted pictures at a time."""
        self.check(images, clients)
        pools = _by_class(images.labels, rng)
        left = np.array([len(pool) for pool in pools])
        shares = left / left.sum() if self.prior else np.ones(len(pools))
        each = len(images) // clients
        held = []
        for _ in range(clients):
            taken = self._counts(_log_dirichlet(self.alpha * shares, rng), left, each, rng)
            picked = [
                pools[row][left[row] - taken[row] : left[row]] for row in np.flatnonzero(taken)
            ]
            left = left - taken
            held.append(np.sort(np.concatenate(picked)))
        return held

    @staticmethod
    def _counts(
        log_shares: npt.NDArray[np.float64], left: Integers, wanted: int, rng: np.random.Generator
    ) -> Integers:
        """How many of each class, by drawing one at a time and passing over empty classes.

        Drawing all that are wanted at once, keeping what there is, and drawing the rest again has
        the same distribution; each turn but the last empties a class, so there are few turns.
        """
        taken = np.zeros_like(left)
        while wanted:
            open_ = np.flatnonzero(left > taken)
            weights = np.exp(log_shares[open_] - log_shares[open_].max())
            drawn = rng.multinomial(wanted, weights / weights.sum())
            drawn = np.minimum(drawn, left[open_] - taken[open_])
            taken[open_] += drawn
            wanted -= int(drawn.sum())
        return taken


def _log_dirichlet(
    concentration: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Logarithms of a Dirichlet draw, up to a constant.

    Gamma(a) is Gamma(a + 1) * U^(1/a): in logarithms nothing underflows, however small a is, so
    the ratio of two classes is right even where both shares are below the smallest float.
    """
    uniform = 1.0 - rng.random(len(concentration))  # in (0, 1]: its logarithm is finite
    gammas = np.log(rng.standard_gamma(concentration + 1)) + np.log(uniform) / concentration
    # Below about 1e-307 even the logarithm overflows; then the largest finite value stands in.
    return np.nan_to_num(gammas, neginf=-np.finfo(np.float64).max / 4)


@splits("by_class")
@dataclass(frozen=True)
class ByClass(SplitRule):
    """Every client holds a few neighbouring classes and no others.

    Client k takes the next `classes_per_client` classes after client k-1, and after the last class
    comes the first. So every class is held by an equal number of clients, give or take one, and
    those divide it equally. Ten clients with 1 of 10 classes is FedSC's CIFAR-10, twenty with 5 of
    100 its CIFAR-100, five with 2 of 10 FedCA's CIFAR-10.
    """

    classes_per_client: int = 1  # how many classes each client holds

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            each = self.classes_per_client
            raise ConfigError(f"split.classes_per_client is {each}; it must be at least 1")

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse what would leave a class unheld or a client short."""
        each = self.classes_per_client
        super().check(images, clients, called)
        values, counts = np.unique(images.labels, return_counts=True)
        if each > len(values):
            raise DataError(
                f"classes_per_client={each}, but {called} has {len(values)} classes: "
                f"use at most {len(values)}"
            )
        if clients * each < len(values):
            raise DataError(
                f"{clients} clients with classes_per_client={each} hold {clients * each} of "
                f"{len(values)} classes, the others nobody: use at least "
                f"{-(-len(values) // each)} clients or classes_per_client="
                f"{-(-len(values) // clients)}"
            )
        holders = np.array([len(of) for of in self._holders(len(values), clients)])
        short = np.flatnonzero(counts < holders)
        if len(short):
            row = short[0]
            raise DataError(
                f"class {values[row]} has {counts[row]} pictures, but {holders[row]} clients "
                "would hold it: use fewer clients or a smaller classes_per_client"
            )

    def _holders(self, classes: int, clients: int) -> list[list[int]]:
        """The clients that hold each class."""
        holders: list[list[int]] = [[] for _ in range(classes)]
        for slot in range(clients * self.classes_per_client):
            holders[slot % classes].append(slot // self.classes_per_client)
        return holders

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> list[Integers]:
        """Divide each class, shuffled, among those who hold it."""
        self.check(images, clients)
        pools = _by_class(images.labels, rng)
        held: list[list[Integers]] = [[] for _ in range(clients)]
        for pool, holders in zip(pools, self._holders(len(pools), clients), strict=True):
            for client, piece in zip(holders, np.array_split(pool, len(holders)), strict=True):
                held[client].append(piece)
        return [np.sort(np.concatenate(pieces)) for pieces in held]


def _by_class(labels: Integers, rng: np.random.Generator) -> list[Integers]:
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
    digest: str  # sha256 over all of the above

    def __len__(self) -> int:
        """How many clients."""
        return len(self.indices)

    def check(self, dataset: Dataset) -> None:
        """Refuse a split that was made for other data."""
        if self.data != dataset.digest:
            raise DataError(
                f"this split was made for data {self.data[:12]}, but {dataset.name} as set is "
                f"{dataset.digest[:12]}: make the split again"
            )

    def counts(self, labels: Integers, classes: int | None = None) -> Integers:
        """Pictures of each class at each client (clients, classes)."""
        width = classes or int(labels.max(initial=-1)) + 1
        held = [labels[index] for index in self.indices]
        return np.stack([np.bincount(own[own >= 0], minlength=width) for own in held])

    def summary(self, labels: Integers, classes: Sequence[str] = ()) -> dict[str, float | int]:
        """What a reader wants to know of a split; class figures only where there are labels.

        `classes_*` count the classes that a client holds at least one picture of,
        `dominant_share` is the mean share of a client's commonest class, and
        `label_entropy_bits` the mean entropy of its labels (log2 of the classes when even).
        """
        sizes = np.array([len(index) for index in self.indices])
        figures: dict[str, float | int] = {
            "clients": len(sizes),
            "pictures": int(sizes.sum()),
            "dropped": len(labels) - int(sizes.sum()),
            "size_min": int(sizes.min()),
            "size_mean": float(sizes.mean()),
            "size_max": int(sizes.max()),
        }
        counts = self.counts(labels, len(classes) or None)
        known = counts.sum(1)
        if not known.all():
            return figures
        shares = counts / known[:, None]
        occupied = (counts > 0).sum(1)
        logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
        return figures | {
            "classes_min": int(occupied.min()),
            "classes_mean": float(occupied.mean()),
            "classes_max": int(occupied.max()),
            "dominant_share": float(shares.max(1).mean()),
            "label_entropy_bits": float(-(shares * logs).sum(1).mean()),
        }

    def save(self, path: Path) -> None:
        """Write the split as one `.npz` file, whole or not at all."""
        folder = make_folder(path.parent)
        about = {"format": FORMAT, "spec": self.spec, "data": self.data, "digest": self.digest}
        temporary = folder / f".{path.name}.{secrets.token_hex(6)}.part"
        try:
            with open(temporary, "xb") as file:
                np.savez_compressed(
                    file,
                    about=np.array(json.dumps(about, sort_keys=True)),
                    sizes=np.array([len(index) for index in self.indices], np.int64),
                    indices=np.concatenate(self.indices),
                )
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
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                sizes, joined = file["sizes"], file["indices"].astype(np.int64)
            if about["format"] != FORMAT:
                raise DataError(f"{path} has format {about['format']}, not {FORMAT}")
            indices = tuple(np.split(joined, np.cumsum(sizes)[:-1]))
            spec, data, digest = about["spec"], about["data"], about["digest"]
        except FileNotFoundError:
            raise DataError(f"there is no split {path}") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is not a split file: {error}") from error
        if _digest(indices, spec, data) != digest:
            raise DataError(f"{path} does not match its own digest: it was damaged or changed")
        return cls(indices, spec, data, digest)


def make_split(
    spec: SplitRule, data: Dataset | Images, data_digest: str | None, clients: int, seed: int
) -> Split:
    """Share the training pictures of `data` out among `clients`.

    Args:
        spec: the rule.
        data: a data set, of which the training part is shared out, or the pictures themselves.
        data_digest: what identifies the pictures; None takes the data set's own.
        clients: how many.
        seed: the run's seed; the same seed gives the same split.

    >>> pictures = Images(np.zeros((6, 8, 8, 1), np.uint8), np.array([0, 0, 1, 1, 2, 2]))
    >>> split = make_split(ByClass(classes_per_client=1), pictures, "six", clients=3, seed=0)
    >>> [index.tolist() for index in split.indices]
    [[0, 1], [2, 3], [4, 5]]
    """
    images = data.train if isinstance(data, Dataset) else data
    if data_digest is None:
        data_digest = data.digest if isinstance(data, Dataset) else ""
    spec.check(images, clients, data.name if isinstance(data, Dataset) else "this data set")
    indices = tuple(spec.assign(images, clients, numpy_rng(seed, "split")))
    for index in indices:
        index.flags.writeable = False
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    about = {"name": spec.name, **settings, "clients": clients, "seed": seed}
    return Split(indices, about, data_digest, _digest(indices, about, data_digest))


def _digest(indices: Sequence[Integers], spec: Mapping[str, Any], data: str) -> str:
    total = hashlib.sha256(json.dumps([spec, data], sort_keys=True).encode())
    for index in indices:
        total.update(len(index).to_bytes(8, "little"))
        total.update(index.astype("<i8").tobytes())
    return total.hexdigest()
