"""Style and content of a FedStyle run: the groups of neighbouring images.

Yang et al., More Generalized and Personalized Unsupervised Representation Learning in a Distributed
System, 2022, Figure 4: a t-SNE map of style features, where each client's training images are
embedded by its own style network. A second map embeds them with the federation's encoder.

Clients' style networks are different networks, so their features may be separated by client
whatever the images look like. Therefore a third map, the control, embeds all images with the style
network of one client: groups that are separated there differ in their images.

For each of the three, and with images grouped by client, by style and by class:

- purity: the share of an image's 10 nearest neighbours that are of its group; `chance` is what it
  would be if features did not depend on groups. In a smaller group, the number of neighbours is
  that of its other images
- silhouette of the groups, from -1 to 1; about 0 where features do not depend on them

Labels and styles are used for these numbers only: no client's task sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, DataError, counted
from harmonium.data.catalogue import name_of
from harmonium.data.images import UNKNOWN, Images, Integers
from harmonium.data.shift import with_split_angles
from harmonium.measures import Figures, Measure, Shown, measures
from harmonium.measures.run_reader import Run
from harmonium.measures.tsne import FEWEST, NEIGHBOURS, laid_out
from harmonium.methods.fedstyle import FedStyle

KINDS = {"own": "own style networks", "control": "one style network", "content": "content"}
CHUNK = 1024  # rows whose neighbours are searched at once


@measures("styles")
@dataclass(frozen=True)
class StyleMeasure(Measure):
    """Maps of style features and of content features, and how well they separate groups."""

    legend = "chance: the purity of features that do not depend on the groups"

    clients: int = 30  # whose images are used, at most
    pictures: int = 100  # of each client's training part, at most
    control: int | None = None  # client whose style network sees all; none: the first of them
    column: str = "style"  # the name of the style factor in the data
    perplexity: float = 30.0  # of t-SNE; at most a third of the images
    seed: int = 0  # of the choice of clients and images, and of t-SNE

    def __post_init__(self) -> None:
        least = {"clients": 2, "pictures": 2, "control": 0, "perplexity": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"styles.{name} is {value}; it must be at least {low}")

    def compute(self, run: Run) -> Figures:
        """The maps of one run, and how well each separates clients, styles and classes."""
        clients, control = self._clients(run)
        train = with_split_angles(run.dataset, run.split).train
        chosen = {client: train.subset(self._rows(run, client)) for client in clients}
        owner = np.concatenate([np.full(len(chosen[c]), c, np.int64) for c in clients])
        if len(owner) < FEWEST:
            raise DataError(f"{run.path}: {len(owner)} images are too few; a map needs {FEWEST}")
        groups = {"client": owner, "class": _joined(chosen, lambda images: images.labels)}
        if self.column in train.factors:
            groups["style"] = _joined(chosen, lambda images: images.factors[self.column])
        features = self._features(run, chosen, control)
        plain = {
            "round": run.commit.round,
            "clients": clients,
            "control": control,  # whose network saw all images
            "pictures": len(owner),
            "apart": {
                kind: {by: apart(rows, of) for by, of in sorted(groups.items())}
                for kind, rows in features.items()
            },
        }
        run.note(f"{run.label}: styles, {len(KINDS)} maps of {counted(len(owner), 'image')}")
        maps = {kind: laid_out(rows, self.perplexity, self.seed) for kind, rows in features.items()}
        named = np.array(self._names(run, chosen), str)
        return Figures(plain, self._notes(run, groups), {**maps, "owner": owner, "names": named})

    def _clients(self, run: Run) -> tuple[list[int], int]:
        """The clients whose images are used, and the client of the control network."""
        if not isinstance(run.method, FedStyle):
            raise ConfigError(
                f"styles needs the style networks of fedstyle's clients, but {run.path} is a run "
                f"of {run.method.name}"
            )
        styled = sorted(int(client) for client in run.commit.clients)
        if len(styled) < 2:
            raise ConfigError(
                f"styles needs at least 2 clients that took part; {run.path} has {len(styled)}"
            )
        if self.control is not None and self.control not in styled:
            raise ConfigError(
                f"styles.control is {self.control}, which has no style network in {run.path}: "
                f"choose one of {', '.join(map(str, styled))}"
            )
        rng = seeds.numpy_rng(self.seed, "measure", "clients")
        chosen = rng.permutation(styled)[: self.clients]
        clients = sorted(int(client) for client in chosen)
        return clients, clients[0] if self.control is None else self.control

    def _rows(self, run: Run, client: int) -> Integers:
        """Some of a client's images; one that it holds several times counts once."""
        own = np.unique(run.split.indices[client])
        rng = seeds.numpy_rng(self.seed, "measure", "pictures", client)
        return np.sort(rng.permutation(own)[: self.pictures])

    def _features(self, run: Run, chosen: Mapping[int, Images], control: int) -> dict[str, Tensor]:
        """Unit features of all images by each kind of network."""

        def style(client: int) -> nn.Module:
            local = run.state(client)["parts"]
            return run.method.blueprint.copy_from(run.server.model, local).eval()["style"]

        one, encoder = style(control), run.method.represent(run.server)
        by_kind: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for number, (client, images) in enumerate(chosen.items(), 1):
            if run.method.has_own_encoders:  # in its BatchNorms
                encoder = run.method.represent(run.server, run.state(client))
            for kind, network in zip(KINDS, (style(client), one, encoder), strict=True):
                by_kind[kind].append(run.features(network, images, f"client {client}"))
            if number % 10 == 0 or number == len(chosen):
                run.note(f"{run.label}: styles, features of {number} of {len(chosen)} clients")
        return {kind: functional.normalize(torch.cat(rows)) for kind, rows in by_kind.items()}

    def _names(self, run: Run, chosen: Mapping[int, Images]) -> list[str]:
        """Names of clients in the legend: the number, and the style where a client has one."""
        names = [f"client {client}" for client in range(max(chosen) + 1)]
        for client, images in chosen.items():
            own = np.unique(images.factors.get(self.column, ()))
            if len(own) == 1 and own[0] != UNKNOWN:
                called = name_of(run.dataset.names.get(self.column, ()), int(own[0]))
                names[client] += f" ({called})"
        return names

    def _notes(self, run: Run, groups: Mapping[str, Integers]) -> list[str]:
        notes = []
        if "style" not in groups:
            notes.append(f"these images have no column '{self.column}': no figures by style")
        if not (groups["class"] != UNKNOWN).any():
            notes.append("no image has a label: no figures by class")
        if missing := len(run.examples) - len(run.commit.clients):
            notes.append(f"no style network yet: {counted(missing, 'client')} did not take part")
        return notes

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """A row for each kind of features and each grouping."""
        rows = [
            {"run": label, "features": words, "by": by, **numbers}
            for label, one in results.items()
            for kind, words in KINDS.items()
            for by, numbers in one.plain["apart"][kind].items()
            if numbers["purity"] is not None
        ]
        return [Shown("Groups among nearest neighbours, by style and by content", rows, 3)]

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Three maps per run, side by side, coloured by client."""
        from harmonium.report.measure_plots import Panel, maps

        panels = {}
        for label, one in results.items():
            names = [str(name) for name in one.arrays["names"]]
            for kind, words in KINDS.items():
                whose = f" (client {one.plain['control']}'s)" if kind == "control" else ""
                panel = Panel(one.arrays[kind], one.arrays["owner"], names, ())
                panels[f"{label}: {words}{whose}"] = panel
        maps(path, panels, "Training images of clients by their features, by t-SNE")
        return True


def _joined(chosen: Mapping[int, Images], column: Any) -> Integers:
    return np.concatenate([column(images) for images in chosen.values()])


def apart(features: Tensor, groups: Integers) -> dict[str, float | None]:
    """How well unit rows `(n, dim)` separate groups; rows of no known group are left out.

    >>> rows = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    >>> apart(rows, np.array([0, 0, 0, 1, 1, 1]))
    {'purity': 1.0, 'chance': 0.4, 'silhouette': 1.0}
    """
    known = groups != UNKNOWN
    rows = features[torch.from_numpy(known)].double()
    _, place, counts = np.unique(groups[known], return_inverse=True, return_counts=True)
    if not 2 <= len(counts) < len(rows):
        return dict.fromkeys(("purity", "chance", "silhouette"))
    from sklearn.metrics import silhouette_score

    others = counts[place] - 1  # of its own group, for each row
    most = min(NEIGHBOURS, len(rows) - 1)
    pieces = torch.split(torch.arange(len(rows)), CHUNK)
    nearest = torch.cat([_nearest(rows, some, most) for some in pieces])
    alike = place[nearest.numpy()] == place[:, None]
    counted_neighbours = np.minimum(others, most)  # else a small group could never be pure
    near = alike & (np.arange(most) < counted_neighbours[:, None])
    some = others > 0
    return {
        "purity": float((near.sum(1)[some] / counted_neighbours[some]).mean()),
        "chance": float(others[some].mean() / (len(rows) - 1)),
        "silhouette": float(silhouette_score(rows.numpy(), place, metric="cosine")),
    }


def _nearest(rows: Tensor, some: Tensor, count: int) -> Tensor:
    """The nearest other rows of some rows, nearest first."""
    near = rows[some] @ rows.T
    near[torch.arange(len(some)), some] = -torch.inf
    return near.topk(count, dim=1).indices
