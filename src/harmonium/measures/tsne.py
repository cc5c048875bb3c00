"""A t-SNE map of one client's local model: are its own classes separated from all others?

Zhang et al., Federated Unsupervised Representation Learning, 2020, Figure 3. One client trains once
more from the committed model; t-SNE draws features of test images in two dimensions. Maps cannot
be compared by eye alone, and t-SNE distorts, so three numbers are computed from the features:

- purity: the share of an image's 10 nearest neighbours that are of the client's own classes, over
  images of these classes; `chance` is what it would be if features did not depend on classes
- silhouette of own classes against the rest, from -1 to 1
- extent: the mean distance between images of own classes over that between all; FedCA's claim is
  that own classes keep to a small part of the space

A client's own classes are those of which it has at least 1.5 times its fair share. Labels are used
for the map and the numbers only: no client's task sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import work
from harmonium.data.catalogue import name_of
from harmonium.data.images import UNKNOWN, Integers
from harmonium.measures import Figures, Measure, Shown, measures
from harmonium.measures.run_reader import Run

NEIGHBOURS = 10
OWN = 1.5  # a class is a client's own from this many times its share among all clients
NUMBERS = ("purity", "chance", "silhouette", "extent")
FEWEST = 10  # images of which a map can be drawn


@measures("tsne")
@dataclass(frozen=True)
class TSNE(Measure):
    """A t-SNE map of test images under one client's local encoder."""

    legend = "chance: the purity of features that do not depend on the classes"

    client: int = 0  # whose encoder
    pictures: int = 1000  # of the test part, at most
    perplexity: float = 30.0  # of t-SNE; at most a third of the images
    seed: int = 0  # of the choice of images and of t-SNE

    def __post_init__(self) -> None:
        for name, least in (("client", 0), ("pictures", FEWEST), ("perplexity", 1), ("seed", 0)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ConfigError(f"tsne.{name} is {value}; it must be at least {least}")

    def compute(self, run: Run) -> Figures:
        """The map of one run, and how well the client's classes are separated from the rest."""
        images = run.images(self.pictures, self.seed)
        if len(images) < FEWEST:
            raise DataError(f"{run.path} has {len(images)} test images; a map needs {FEWEST}")
        encoder = self._encoder(run)
        features = functional.normalize(run.features(encoder, images, f"client {self.client}"))
        labels = np.asarray(images.labels)
        train_labels = run.dataset.train.labels
        own = own_classes(train_labels[run.split.indices[self.client]], train_labels)
        is_own = np.isin(labels, own) & (labels != UNKNOWN)
        plain: dict[str, Any] = {
            "round": run.commit.round,
            "trained": not run.keeps_encoders,
            "client": self.client,
            "pictures": len(images),
            "own_classes": [name_of(run.dataset.classes, int(value)) for value in own],
            **separation(features[labels != UNKNOWN], is_own[labels != UNKNOWN]),
        }
        notes = []
        if not (labels != UNKNOWN).any():
            notes.append("no test image has a label: the map has one colour and no numbers")
        elif not own:
            notes.append(f"client {self.client} holds no class beyond its fair share")
        names = [name_of(run.dataset.classes, value) for value in range(int(labels.max()) + 1)]
        arrays = {
            "map": self._map(features),
            "labels": labels,
            "own": np.array(own, np.int64),
            "names": np.array(names, str),
        }
        return Figures(plain, notes, arrays)

    def _encoder(self, run: Run) -> torch.nn.Module:
        clients, client = len(run.split), self.client
        if client >= clients:
            raise ConfigError(f"tsne.client is {client}; {run.path} has clients 0 to {clients - 1}")
        if run.keeps_encoders and str(client) not in run.commit.clients:
            raise ConfigError(f"{run.path}: client {client} never took part, so it has no encoder")
        encoders = run.encoders([client])
        if client not in encoders:
            raise ConfigError(
                f"{run.path}: client {client} could not train: set another tsne.client"
            )
        return encoders[client]

    def _map(self, features: Tensor) -> np.ndarray:
        return laid_out(features, self.perplexity, self.seed)

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run."""
        rows = []
        for label, one in results.items():
            own = ", ".join(one.plain["own_classes"]) or "none"
            numbers = {key: one.plain[key] for key in NUMBERS if one.plain["purity"] is not None}
            rows.append({"run": label, "client": one.plain["client"], "classes": own, **numbers})
        return [Shown("A client's own classes against the rest, by its local encoder", rows, 3)]

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """One map per run, side by side."""
        from harmonium.report.measure_plots import Panel, maps

        panels = {
            f"{label}, client {one.plain['client']}": Panel(
                one.arrays["map"],
                one.arrays["labels"],
                [str(name) for name in one.arrays["names"]],
                {int(value) for value in one.arrays["own"]},
            )
            for label, one in results.items()
        }
        maps(path, panels, "Test images under a client's local encoder, by t-SNE")
        return True


def laid_out(features: Tensor, perplexity: float, seed: int) -> np.ndarray:
    """Two coordinates per row by t-SNE; one thread, so that they are the same everywhere.

    `perplexity` is at most a third of the rows.
    """
    from sklearn.manifold import TSNE as Mapper
    from threadpoolctl import threadpool_limits

    perplexity = min(perplexity, (len(features) - 1) / 3)
    # Features along a single direction have no second component to start from.
    start = "pca" if int(torch.linalg.matrix_rank(features - features.mean(0))) > 1 else "random"
    mapper = Mapper(perplexity=perplexity, init=start, random_state=seed % 2**32)
    with threadpool_limits(1), work(f"t-SNE of {len(features):,} images"):
        return np.asarray(mapper.fit_transform(features.numpy()))


def own_classes(own_labels: Integers, everyone: Integers) -> list[int]:
    """The classes whose share at a client is at least 1.5 times their share overall.

    >>> own_classes(np.array([0, 0, 1, 1, 2]), np.array([0, 1, 2, 3, 4] * 4))
    [0, 1]
    """
    own_labels, everyone = own_labels[own_labels != UNKNOWN], everyone[everyone != UNKNOWN]
    if not len(own_labels):
        return []
    counts = np.bincount(everyone)
    own = np.bincount(own_labels, minlength=len(counts))
    return [
        int(c)
        for c in np.flatnonzero(own)
        if own[c] / len(own_labels) >= OWN * counts[c] / len(everyone)
    ]


def separation(features: Tensor, own: np.ndarray) -> dict[str, float | None]:
    """How well some unit rows `(n, dim)` are separated from the rest; None where there are too few.

    >>> rows = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    >>> separation(rows, np.array([True] * 3 + [False] * 3))["silhouette"]
    1.0
    """
    count, mine = len(own), int(own.sum())
    if mine < 2 or count - mine < 2:
        return dict.fromkeys(NUMBERS)
    from sklearn.metrics import silhouette_score

    rows = features.double()
    near = (rows @ rows.T).fill_diagonal_(-torch.inf)
    # A group no larger than the neighbourhood could never be pure.
    nearest = near.topk(min(NEIGHBOURS, mine - 1), dim=1).indices.numpy()
    everywhere = _distance(rows)
    return {
        "purity": float(own[nearest[own]].mean()),
        "chance": (mine - 1) / (count - 1),
        "silhouette": float(silhouette_score(rows.numpy(), own, metric="cosine")),
        "extent": _distance(rows[torch.from_numpy(own)]) / everywhere if everywhere > 0 else None,
    }


def _distance(rows: Tensor) -> float:
    """The mean cosine distance between different rows of unit length."""
    count = len(rows)
    alike = (float(rows.sum(0).square().sum()) - count) / (count * (count - 1))
    return max(0.0, 1 - alike)
