"""Geometry without labels: the distribution of features, and the drift of clients' models.

- Features of two views of each image: alignment, uniformity (Wang and Isola, 2020), effective
  rank (Garrido et al., 2023), spread, and the number of directions that carry the variance.
- Clients train once more from the committed model, as a further round would. Angles between their
  features of the same images are those of `angles`.
- Client drift: the distance of each client's model from the federation's, relative to the size of
  the federation's, by part; and the angles between clients' updates. Orthogonal updates (90
  degrees) have nothing in common; a smaller angle means that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.devices import current, on_current_device, to_device, to_host, without_gradients
from harmonium.core.errors import DataError
from harmonium.core.threads import single_thread
from harmonium.core.types import Weights
from harmonium.data.images import Images
from harmonium.evaluation.evaluator import average
from harmonium.evaluation.features import evaluating
from harmonium.evaluation.geometry import health
from harmonium.measures import Figures, Shown, measures
from harmonium.measures.angles import Angles, angles
from harmonium.measures.eval_data import EvalData
from harmonium.measures.extra_round import encoder_of, sends_model, trained
from harmonium.measures.probing import ProbeMeasure, by_set
from harmonium.measures.run_reader import Run

WORDS = {
    "alignment": "alignment",
    "uniformity": "uniformity",
    "effective_rank": "rank",
    "spread": "spread",
}
WHOLE = "all"  # parts together


@measures("geometry")
@dataclass(frozen=True)
class Geometry(ProbeMeasure):
    """Alignment, uniformity, rank and spread of features; drift of clients' models."""

    pictures: int = 512  # of each set, at most
    clients: int = 5  # that train once more, at most; fewer than 2: none
    seed: int = 0  # of the choice of images and clients, and of the views

    def __post_init__(self) -> None:
        self.at_least(pictures=2, clients=0, seed=0)

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """Geometry of the features of one set; the mean over encoders if clients have their own."""
        images = self._images(data)
        pixels = to_device(torch.from_numpy(np.array(images.pixels)), current())
        views = run.method.views(pixels, seeds.torch_rng(self.seed, "measure", "views"))
        views = views if len(views) > 1 else views * 2
        healths = []
        for encoder in (*run.final_encoders.values(), run.untrained):
            with (
                on_current_device(encoder) as at,
                evaluating(encoder),
                single_thread(),
                without_gradients(at),
            ):
                first, second = to_host([encoder(view) for view in views[:2]])
            healths.append(asdict(health(first, second)))
        if not all(one["finite"] for one in healths):
            raise DataError(f"{run.path}: features are not finite: its training diverged")
        plain = {**average(healths[:-1]), "untrained": healths[-1]}
        return Figures(plain)

    def _images(self, data: EvalData) -> Images:
        images: Images = getattr(data.dataset, self.part)
        if len(images) < 2:
            raise DataError(f"{data.dataset.name} has {len(images)} {self.part} images; needs 2")
        rng = seeds.numpy_rng(self.seed, "measure", "pictures")
        return images.subset(np.sort(rng.permutation(len(images))[: self.pictures]))

    def compute(self, run: Run) -> Figures:
        """Features on every set, then clients' local models."""
        figures = super().compute(run)
        if self.clients < 2:
            return figures
        local, notes = self._local(run)
        return Figures({**figures.plain, "local": local}, [*figures.notes, *notes], figures.arrays)

    def _local(self, run: Run) -> tuple[dict[str, Any], list[str]]:
        """Angles between clients' features, and drift of what they send."""
        chosen = run.clients(self.clients, self.seed, "geometry", least=2)
        images = self._images(run.eval_data())
        sends, models = sends_model(run.method), dict[int, Weights]()
        encoders = run.encoders(chosen) if run.keeps_encoders or not sends else {}
        features = {
            client: run.features(encoder, images, f"client {client}")
            for client, encoder in encoders.items()
        }
        for client, one in trained(run, chosen) if sends else ():
            models[client] = one.model
            if not run.keeps_encoders:
                features[client] = run.features(encoder_of(run, one), images, f"client {client}")
        notes = [] if sends else [f"{run.method.name} sends no model, so there is no drift"]
        local: dict[str, Any] = {"clients": sorted(features), "angles": None, "drift": None}
        if len(features) > 1:
            local["angles"], _, more = Angles(seed=self.seed).between(features, run)
            notes += more
        if len(models) > 1:
            local["drift"] = drift(run.server.model, models, _learnt(run))
        elif sends:
            notes.append("fewer than 2 clients could train, so there is no drift")
        return local, notes

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """Features by run and set, then drift by run and part."""
        rows = [
            {"run": label, "on": name, "of": of, **{w: some[k] for k, w in WORDS.items()}}
            for label, name, one in by_set(results)
            for of, some in (("run", one), ("untrained", one["untrained"]))
        ]
        shown = [Shown(f"Geometry of features, {self.part} images", rows, 3)]
        drifts: list[dict[str, Any]] = []
        for label, figures in results.items():
            local = figures.plain.get("local", {})
            between = (local.get("angles") or {}).get("mean")
            for part, one in (local.get("drift") or {}).items():
                row = {"run": label, "part": part, "distance": one["distance"]}
                row |= {"farthest": one["farthest"], "angle of updates": one["angle"]}
                if part == WHOLE:
                    row["angle of features"] = between
                drifts.append(row)
        if drifts:
            title = "Clients' models after a further round: relative distance, degrees"
            shown.append(Shown(title, drifts, 3))
        return shown


def _learnt(run: Run) -> dict[str, list[str]]:
    """The keys of the averaged parameters, by part."""
    travel = set(run.server.model)
    parts: dict[str, list[str]] = {}
    for key, parameter in run.method.blueprint.named_parameters():
        if (
            key in travel
            and parameter.requires_grad
            and run.method.blueprint.rule_of(key) == "mean"
        ):
            parts.setdefault(key.partition(".")[0], []).append(key)
    return parts


def drift(
    model: Weights, local: Mapping[int, Weights], parts: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Distances of clients' models from the federation's, and angles between their updates.

    Args:
        model: the federation's.
        local: clients'.
        parts: keys by part; all of them together are a part of their own.

    >>> theirs = {0: {"e.w": torch.tensor([3.0, 5.0])}, 1: {"e.w": torch.tensor([5.0, 4.0])}}
    >>> drifts = drift({"e.w": torch.tensor([3.0, 4.0])}, theirs, {"e": ["e.w"]})["e"]
    >>> round(drifts["distance"], 3), round(drifts["farthest"], 3), drifts["angle"]
    (0.3, 0.4, 90.0)
    """
    drifts = {}
    every = [key for keys in parts.values() for key in keys]
    for name, keys in {**parts, WHOLE: every}.items():
        start = _flat(model, keys)
        updates = {client: _flat(sent, keys) - start for client, sent in local.items()}
        size = float(start.norm())
        far = {c: float(one.norm()) / size if size else None for c, one in updates.items()}
        known = [value for value in far.values() if value is not None]
        drifts[name] = {
            "distance": float(np.mean(known)) if known else None,
            "farthest": max(known) if known else None,
            "angle": _mean_angle(list(updates.values())),
            "clients": {str(client): value for client, value in far.items()},
        }
    return drifts


def _flat(weights: Weights, keys: list[str]) -> Tensor:
    return torch.cat([weights[key].reshape(-1).double() for key in keys])


def _mean_angle(updates: list[Tensor]) -> float | None:
    """The mean angle between two clients' updates in degrees; none where no model changed."""
    pairs = [angles(one[None], two[None]) for one, two in combinations(updates, 2)]
    values = torch.cat(pairs)
    values = values[values.isfinite()]
    return float(values.mean()) if len(values) else None
