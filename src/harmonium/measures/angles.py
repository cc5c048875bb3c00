"""Angles between features of the same image under clients' local encoders.

Zhang et al., Federated Unsupervised Representation Learning, 2020, Figure 4. Clients train once
more from the committed model; then every test image has a unit feature under each of their
encoders, and the angle between two of these features measures how far the two models differ.

An angle alone can mislead: an encoder that gives all images the same feature has angles of 0, and
features after a ReLU lie in a narrow cone anyway. So the angle between different images under
the same encoder is reported too, and the ratio of the two: near 0, the models agree; near 1, a
change of model changes a feature as much as a change of image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, DataError
from harmonium.measures import Figures, Headline, Measure, Shown, measures
from harmonium.measures.run_reader import Run


def angles(first: Tensor, second: Tensor) -> Tensor:
    """Degrees between rows of two tables `(n, dim)`; not a number where a row is 0.

    By half-angles, because the arc cosine of a number near 1 is mostly rounding.

    >>> angles(torch.eye(2), torch.tensor([[2.0, 0.0], [3.0, 0.0]])).tolist()
    [0.0, 90.0]
    """
    u, v = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (first, second))
    return 2 * torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1)) * (180 / math.pi)


@measures("angles")
@dataclass(frozen=True)
class Angles(Measure):
    """Angles between features of the same images under clients' local encoders."""

    clients: int = 5  # whose encoders are compared, at most
    pictures: int = 1000  # of the test part, at most
    pairs: int = 45  # of encoders, at most; of more, a sample is drawn
    seed: int = 0  # of the choice of clients, images and pairs

    def __post_init__(self) -> None:
        for name, least in (("clients", 2), ("pictures", 2), ("pairs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ConfigError(f"angles.{name} is {value}; it must be at least {least}")

    def compute(self, run: Run) -> Figures:
        """Angles of one run, by pair and over all pairs."""
        images = run.images(self.pictures, self.seed)
        chosen = run.clients(self.clients, self.seed, "angles", least=2)
        encoders = run.encoders(chosen)
        if len(encoders) < 2:
            raise ConfigError(f"{run.path}: fewer than 2 of the clients {chosen} could train")
        features = {
            client: run.features(encoder, images, f"client {client}")
            for client, encoder in encoders.items()
        }
        plain, whole, notes = self.between(features, run)
        return Figures({"round": run.commit.round, **plain}, notes, {"angles": whole})

    def between(
        self, features: Mapping[int, Tensor], run: Run
    ) -> tuple[dict[str, Any], np.ndarray, list[str]]:
        """Figures of features by client, all angles, and notes."""
        by_pair = {
            pair: _known(angles(*(features[c] for c in pair))) for pair in self._pairs(features)
        }
        if not all(len(some) for some in by_pair.values()):
            raise DataError(f"{run.path}: some client's features are all 0, which have no angle")
        whole = torch.cat(list(by_pair.values())).numpy()
        others = float(np.mean([_between(rows, self.seed) for rows in features.values()]))
        count = len(next(iter(features.values())))
        plain = {
            "trained": not run.keeps_encoders,
            "clients": sorted(features),
            "pictures": count,
            **_summary(whole),
            "others": others,  # degrees between different images under one encoder
            "ratio": float(whole.mean()) / others if others else None,
            "pairs": [
                {"clients": list(pair), **_summary(a.numpy())} for pair, a in by_pair.items()
            ],
        }
        left_out = len(by_pair) * count - len(whole)
        return (
            plain,
            whole,
            [f"{left_out} angles are left out: a feature is 0"] if left_out else [],
        )

    def _pairs(self, features: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        every = list(combinations(sorted(features), 2))
        if len(every) <= self.pairs:
            return every
        rng = seeds.numpy_rng(self.seed, "measure", "pairs")
        places = np.sort(rng.choice(len(every), self.pairs, replace=False))
        return [every[int(place)] for place in places]

    def headlines(self) -> dict[str, Headline]:
        """The mean angle, and its ratio to the angle between different images."""
        return {
            "angle": Headline("angle (degrees)", percent=False, less_is_better=True),
            "angle_ratio": Headline("angle ratio", percent=False, less_is_better=True),
        }

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """Both of a run; references have no clients."""
        if reference:
            return {}
        ratio = {} if plain["ratio"] is None else {"angle_ratio": plain["ratio"]}
        return {"angle": plain["mean"], **ratio}

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run, then one row per pair."""
        runs = [{"run": label, **_row(one.plain)} for label, one in results.items()]
        pairs = [
            {"run": label, "clients": "{}, {}".format(*pair["clients"]), **_row(pair)}
            for label, one in results.items()
            for pair in one.plain["pairs"]
        ]
        title = "Degrees between features of an image under two clients' local encoders"
        few = len(pairs) <= PAIRS * len(results)  # more are in eval.json
        return [Shown(title, runs, 2), *([Shown("By pair of clients", pairs, 2)] if few else [])]

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """One box per run."""
        from harmonium.report.measure_plots import boxes

        title = "Angles between features of an image under two clients' local encoders"
        boxes(
            path,
            {label: one.arrays["angles"] for label, one in results.items()},
            "degrees",
            title,
            {label: one.plain["others"] for label, one in results.items()},
            "between different images under one encoder (mean)",
        )
        return True


PAIRS = 10  # of a run, that a table shows
_WORDS = {
    "mean": "mean",
    "lower": "25 %",
    "median": "median",
    "upper": "75 %",
    "others": "other images",
    "ratio": "ratio",
}


def _row(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {words: plain[key] for key, words in _WORDS.items() if key in plain}


def _summary(values: np.ndarray) -> dict[str, float]:
    lower, median, upper = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    return {"mean": float(values.mean()), "lower": lower, "median": median, "upper": upper}


def _known(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def _between(features: Tensor, seed: int) -> float:
    """The mean angle between different images under one encoder, from one shuffle of them."""
    order = torch.randperm(len(features), generator=seeds.torch_rng(seed, "measure", "others"))
    ring = features[order]
    return float(_known(angles(ring, ring.roll(1, 0))).mean())
