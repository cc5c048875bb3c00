"""Transfer: the whole network is fine-tuned on another data set, and compared with scratch.

FedCA (Zhang et al., 2020, Table 3): an encoder that learnt from one data set without labels is the
start for another with all its labels. With a head of one hidden layer, everything is trained for
100 epochs by Adam. The difference to a network from scratch is the gain from the federation.
Images are resized to the shape of the run's images, as FedCA enlarges CIFAR images for encoders of
larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harmonium.core.errors import ConfigError, counted, suggest
from harmonium.core.settings import plain
from harmonium.data.datasets import datasets
from harmonium.measures import Figures, Shown, measures
from harmonium.measures.eval_data import THEIRS, EvalData
from harmonium.measures.probing import barred, by_set, called, columns
from harmonium.measures.run_reader import Run
from harmonium.measures.training import Tunes


@measures("transfer")
@dataclass(frozen=True)
class Transfer(Tunes):
    """Accuracy after training on another data set, beside training from scratch."""

    data: str = ""  # the other data set; none: those that `on` names
    draws: int = 1  # times that it is trained, each with other orders and heads

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(draws=1)
        if self.data and self.data not in datasets.table() and ":" not in self.data:
            near = suggest(self.data, datasets.table())
            raise ConfigError(f"transfer.data is '{self.data}', which is unknown: {near}")

    def needs(self, names: Sequence[str]) -> list[str]:
        """The data set of its settings, or all that are not the runs' own."""
        needed = [self.data] if self.data else [name for name in names if name not in THEIRS]
        if not needed:
            raise ConfigError("transfer needs another data set: transfer.data=mnist, or on=mnist")
        return needed

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """The figures on one set."""
        one = self.both(run, data, [data.bank] * self.draws, "all labels")
        plainly = {
            "how": plain(self.how(run)),
            "labels": len(data.bank),
            "chance": data.chance(data.part(self.part)),
            **one,
        }
        notes = [
            f"{whose} network diverged in {counted(count, 'draw')}"
            for whose, values in (("its", one), ("an untrained", one["untrained"]))
            if (count := sum(value is None for value in values["draws"]))
        ]
        return Figures(plainly, notes)

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run and set, then the same for every reference."""
        each = []
        for label, name, one in by_set(results):
            which = columns(label, name, results)
            each.append(({**which, "labels": one["labels"]}, which, one))
        title = f"Trained on another data set, {self.head} head, {self.part} images, percent"
        return self.side_by_side(title, each, "from scratch")

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Two bars per run and set."""
        groups = {
            called(label, name, results): {
                kind: (100 * some["accuracy"], 100 * (some["stderr"] or 0) or None)
                for kind, some in (("from the run", one), ("from scratch", one["untrained"]))
                if some["accuracy"] is not None
            }
            for label, name, one in by_set(results)
        }
        return barred(path, groups, f"Trained on another data set: {self.part} images")
