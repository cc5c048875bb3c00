"""Shared by the measures that train a whole network with labels: settings, draws, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, suggest
from harmonium.core.settings import plain
from harmonium.data.augment.pipeline import View
from harmonium.data.augment.views import PRESETS, preset
from harmonium.data.images import Images
from harmonium.evaluation.feature_cache import encoder_digest
from harmonium.evaluation.finetune import TUNINGS, Head, Tuning, finetune
from harmonium.evaluation.linear import FEW_STRENGTH, linear_probe
from harmonium.evaluation.metrics import commonest_class
from harmonium.evaluation.references import COMMONEST
from harmonium.measures import Shown
from harmonium.measures.eval_data import EvalData, labels_of
from harmonium.measures.linear import cropped
from harmonium.measures.probing import (
    FIGURES,
    PIXELS,
    Columns,
    ProbeMeasure,
    counted_right,
    identity,
    shown,
    summed,
)
from harmonium.measures.run_reader import Run

PLAIN, CROP = "plain", "crop"


@dataclass(frozen=True)
class Tunes(ProbeMeasure):
    """A measure that fine-tunes encoders."""

    legend = PIXELS

    head: Head = "mlp"  # on the encoder: mlp as FedCA has it, linear as Orchestra
    epochs: int | None = None  # none: 100 with mlp, 50 with linear
    lr: float | None = None  # none: 0.001 of Adam with mlp, 0.1 of SGD and a cosine with linear
    batch: int = 128  # images a step
    hidden: int | None = None  # units of mlp; none: as many as features
    views: str | None = None  # plain, crop or a preset; none: crop with linear, plain with mlp
    clients: int = 3  # whose own encoders are evaluated, at most, where clients end with such
    seed: int = 0  # of which labels are known, of heads, orders and views

    def __post_init__(self) -> None:
        self.at_least(epochs=1, batch=2, hidden=1, clients=1, seed=0)
        self.above_zero("lr")
        known = [PLAIN, CROP, *PRESETS]
        if self.views is not None and self.views not in known:
            near = suggest(self.views, known)
            raise ConfigError(f"{self.name}.views is '{self.views}', which is unknown: {near}")

    def how(self, run: Run) -> Tuning:
        """The training of one run's encoders."""
        base = TUNINGS[self.head]
        return replace(
            base,
            epochs=self.epochs or base.epochs,
            lr=self.lr or base.lr,
            batch=self.batch,
            hidden=self.hidden,
            view=self._view(run),
        )

    def _view(self, run: Run) -> View | None:
        name = self.views or (CROP if self.head == "linear" else PLAIN)
        if name == PLAIN:
            return None
        if name == CROP:
            return cropped(run)
        first = run.method.views.pipelines[0]
        own = {"size": first.size, "mean": first.mean, "std": first.std}
        return preset(name, **own).pipelines[0]

    def some(self, run: Run) -> dict[str, nn.Module]:
        """The encoders that are fine-tuned."""
        return dict(list(run.final_encoders.items())[: self.clients])

    def tuned(
        self,
        run: Run,
        data: EvalData,
        encoder: nn.Module,
        labelled: Sequence[Images],
        what: str,
        whose: str,
    ) -> list[dict[str, Any]]:
        """The figures of a fine-tuned encoder, one for each choice of images."""
        test_images = data.part(self.part)
        how, views = self.how(run), run.method.views
        by_draw = list[dict[str, Any]]()
        for draw, images in enumerate(labelled):
            seed = seeds.seed_of(self.seed, "measure", "tuned", draw)
            about = {
                "encoder": encoder_digest(encoder),
                "network": plain(run.recipe.encoder),  # dropout, say, is not in its weights
                "trained": identity(run, images),
                "tested": identity(run, test_images),
                "how": plain(how),
                "prepared": plain(views.pipelines[0]),
                "seed": seed,
                "figures": list(FIGURES),
            }

            fresh = list[bool]()

            def work(
                images: Images = images, seed: int = seed, fresh: list[bool] = fresh
            ) -> dict[str, Any]:
                fresh.append(True)
                network = finetune(encoder, images, how, views.plain, seed)
                given = network.answers(test_images, views.plain)
                return dict.fromkeys(FIGURES) if given is None else counted_right(given)

            by_draw.append(run.finished(about, work))
            value = by_draw[-1]["accuracy"]
            outcome = "diverged" if value is None else f"{100 * value:.1f} %"
            outcome += "" if fresh else ", found on disk"
            number = f", {draw + 1} of {len(labelled)}" if len(labelled) > 1 else ""
            run.note(f"{run.label}: {self.name} on {data.name}: {what}, {whose}{number}: {outcome}")
        return by_draw

    def both(
        self, run: Run, data: EvalData, labelled: Sequence[Images], what: str
    ) -> dict[str, Any]:
        """The figures of the run's encoders, and of the encoder at initialisation beside them."""
        each = {
            whose: self.tuned(run, data, encoder, labelled, what, whose)
            for whose, encoder in self.some(run).items()
        }
        before = self.tuned(run, data, run.untrained, labelled, what, "untrained")
        return {
            **summed([_mean(some) for some in zip(*each.values(), strict=True)]),
            "untrained": summed(before),
            "references": self._references(run, data, labelled),
            "encoders": list(each),
        }

    def _references(
        self, run: Run, data: EvalData, labelled: Sequence[Images]
    ) -> dict[str, dict[str, Any]]:
        """Linear probes on pixels with the same labels, and predicting the commonest class."""
        test_images = data.part(self.part)
        references = {}
        for name, encoder in run.pixels(data).items():
            tested = run.cached_features(encoder, test_images, name)
            draws = []
            for images in labelled:
                known = run.cached_features(encoder, images, name)
                probe = linear_probe(
                    known,
                    labels_of(images),
                    known[:0],
                    labels_of(images)[:0],
                    tested,
                    labels_of(test_images),
                    strengths=(FEW_STRENGTH,),
                )
                draws.append(counted_right(probe.answers))
            references[name] = summed(draws)
        always = commonest_class(data.bank.labels, test_images.labels)
        return {**references, COMMONEST: summed([counted_right(always)])}

    def side_by_side(
        self, title: str, each: Sequence[tuple[Columns, Columns, Mapping[str, Any]]], before: str
    ) -> list[Shown]:
        """A table of the runs' networks, then one of their references.

        Args:
            title: of the first table.
            each: the columns that identify a training in the first table and in the second, and
                the figures of `both`.
            before: the name of the untrained encoder in tables.
        """
        runs = [
            {**first, **shown(one), before: shown(one["untrained"])["accuracy"]}
            for first, _, one in each
        ]
        beside = [
            (which, {before: one["untrained"], **one["references"]}) for _, which, one in each
        ]
        return [Shown(title, runs, 1), self.beside(beside)]


def _mean(encoders: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The figures of one draw as means over encoders; none where one of them has none."""
    columns = {key: [one[key] for one in encoders] for key in FIGURES}
    return {
        key: None if None in values else float(np.mean(values))  # type: ignore[arg-type]
        for key, values in columns.items()
    }
