"""A run from its first round to its final figures, on any engine, and its `Result`."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, StoreError
from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.data.images import Dataset
from harmonium.evaluation.evaluator import Evaluator, average, figures_of
from harmonium.evaluation.references import GIVEN, references, validation_levels
from harmonium.evaluation.verdict import changes, reasons, verdict
from harmonium.evaluation.whitening import Whitening
from harmonium.federation import global_objective, site_evaluation
from harmonium.federation.batch_norm import measure
from harmonium.federation.method import Method, Server
from harmonium.federation.site_evaluation import named, without_sites
from harmonium.federation.whitening import whitening_of
from harmonium.recipe.schema import Recipe
from harmonium.report import results
from harmonium.report.figure import plots_wanted
from harmonium.runs.export import save_encoder
from harmonium.runs.extend import history_lines
from harmonium.runs.open_run import check_recipe, client_names, read_about
from harmonium.runs.rounds import Rounds, RunEngine, RunInputs
from harmonium.storage.run_folder import ENCODER, RESULT, RunFolder


@dataclass(frozen=True)
class Result:
    """The results of a finished run.

    `print(result.summary())` shows a run in a few lines, and a notebook shows a table. `metrics`
    has one flat row a round, `plot` draws them, `load_encoder(result.folder)` is the encoder.
    """

    folder: Path
    recipe: Recipe
    figures: Mapping[str, Any]  # of the final encoder, on the test part
    untrained: Mapping[str, Any]  # of the encoder at initialisation, on the same
    rounds: tuple[Mapping[str, Any], ...] = field(repr=False)  # the lines of metrics.jsonl
    notes: tuple[str, ...] = ()  # on the data, e.g. files that were left out
    batch_norm: str = ""  # the treatment of BatchNorm; empty where there is none
    references: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """Figures by the same probes of the commonest class, raw pixels and whitened pixels."""
    against: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The comparison with them: `text`, `reasons`, and `probes` with every margin."""
    whitened: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """With `evaluate.whiten`: `figures` of whitened features, and what `changes` by probe."""
    levels: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The validation kNN of the same references, to compare with that of rounds in `metrics`."""
    sites: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """With `evaluate.sites`: figures from counts that clients sent, `by_site` (the worst first), of
    `all` counts together, and their `mean` over clients."""

    @property
    def verdict(self) -> str:
        """Whether the encoder beats its references, in one sentence; empty without labels."""
        return str(self.against.get("text", ""))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Probable reasons if it is not better, from figures that need no labels."""
        return tuple(self.against.get("reasons", ()))

    @property
    def stopped(self) -> str:
        """Why the run ended before its last round; empty if it did not."""
        return self.rounds[-1].get("stopped", "") if self.rounds else ""

    @property
    def bounds(self) -> Mapping[str, Any]:
        """Bounds of mutual information at the end, of a run with user verification; else empty."""
        return self.rounds[-1].get("bounds", {}) if self.rounds else {}

    @property
    def global_objective(self) -> Mapping[str, Any]:
        """The loss over all clients' images at the end, where it was measured; else empty.

        `value` is this loss, `local` the mean over clients of the same loss on their own images,
        `by_client` each of them, `gradient_norm` the norm of its gradient with respect to the
        model. Of InfoNCE with user verification it is the bound of all clients, as a loss.
        """
        return self.rounds[-1].get(global_objective.KEY, {}) if self.rounds else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One flat row for each round: loss, traffic, and figures where the round was evaluated.

        Nested figures have dotted names, such as `health.spread`.
        """
        return [results.tidy(row) for row in self.rounds]

    def to_pandas(self) -> Any:
        """`metrics` as a pandas table; pandas is not installed with Harmonium."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError(
                "to_pandas needs pandas, which is not installed: pip install pandas"
            ) from None
        return pandas.DataFrame(self.metrics)

    def plot(self, path: str | Path | None = None) -> Path:
        """Draw loss and figures over rounds, and return the file.

        Args:
            path: where to, by its ending PNG, PDF or SVG; `run.png` in the run's folder if
                left out.
        """
        place = Path(path) if path is not None else self.folder / "run.png"
        _draw(place, self.recipe, self.rounds, self.levels)
        return place

    def summary(self) -> str:
        """A few lines of text: figures beside those at initialisation, warnings, notes."""
        return results.summary(self)

    def __repr__(self) -> str:
        return results.line(self)

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        return results.html(self)


def local_steps(method: Method, examples: Iterable[int], rounds: int) -> float:
    """How many consecutive local steps the model goes through over all rounds."""
    counts = list(examples)
    return rounds * method.workload * method.local.steps(sum(counts) // max(1, len(counts)))


def initial_encoder(method: Method, dataset: Dataset) -> nn.Module:
    """The encoder at its random initialisation, also where the run starts from given weights.

    The statistics of its BatchNorms are measured on the images, so that the comparison is fair.
    """
    method = method if method.initial is None else replace(method, initial=None)
    encoder = method.blueprint.copy_from().eval()["encoder"]
    pixels = torch.from_numpy(
        np.array(dataset.train.batch(np.arange(min(512, len(dataset.train)))))
    )
    with single_thread():
        measure(encoder, [method.views.plain(pixels)])
    return encoder


def _planned_shape(recipe: Recipe, method: Method) -> tuple[int, int, int]:
    """The shape to which every site resizes its images, as the plan states it."""
    side = recipe.data.size or method.world.side
    return side, side, method.world.channels


def _draw(
    path: Path,
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    levels: Mapping[str, float],
) -> None:
    """The plot of a run: loss and figures over rounds, and the validation kNN of references."""
    from harmonium.report.plots import plot_run

    title = f"{recipe.method.name} on {recipe.data.name}, seed {recipe.seed}"
    plot_run(path, rows, title, levels)


class RunLoop:
    """Runs the remaining rounds of a run, tests the encoder, and writes the final files."""

    def __init__(self, folder: Path, recipe: Recipe, watcher: Callback) -> None:
        self.folder, self.recipe, self.watcher = RunFolder(folder), recipe, watcher
        self.path = folder
        self._levels: dict[str, float] = {}

    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        if not (self.path / RESULT).exists():
            return False
        try:
            self.folder.newest(with_states=not read_about(self.path)["federation"])
            for name in (ENCODER, RESULT):
                self.folder.check(name, "it is made again")
            self._read_result()
        except StoreError as error:
            self.watcher.note(str(error))
            return False
        self.watcher.note(f"{self.path} is complete already")
        return True

    def run(self, inputs: RunInputs, engine: RunEngine, *, simulate: bool = True) -> Result:
        """Run the remaining rounds on any engine, then test the encoder."""
        check_recipe(self.path)
        if "files" not in self.folder.about():
            self.watcher.note(
                f"{self.path} was begun by an earlier version, which recorded no digests of its "
                "files: damage to them may go unnoticed"
            )
        evaluator = self._evaluator(inputs)
        rounds = Rounds(
            self.folder, self.recipe, self.watcher, inputs, engine, evaluator, simulate=simulate
        )
        server = rounds.run()
        whitening = whitening_of(server.memory, self.recipe.evaluate.directions)
        figures: dict[str, Any] = {"figures": {}, "untrained": {}}
        if evaluator is not None:
            self.watcher.note("evaluating the final encoder on the test part")
            encoders = rounds.encoders(server)
            with work("test figures"):
                figures = self._test(evaluator, encoders, inputs, whitening)
            self._levels = figures.get("levels", {})
        if sites := site_evaluation.report(server.memory):
            data_classes = inputs.dataset.classes if inputs.dataset else ()
            classes = self.recipe.evaluate.sites_classes or data_classes
            figures[site_evaluation.FIGURES] = named(sites, client_names(self.path), classes)
        digests: dict[str, str] = {}
        if not inputs.method.has_own_encoders:
            digests[ENCODER] = self._save_encoder(inputs, server, whitening)
        metrics = self.folder.read_log("metrics.jsonl")
        report = {"round": server.round, **without_sites(figures)}
        report["metrics"] = [without_sites(row) for row in metrics]
        engine.finish(server.model, server.memory.get("statistics", {}), report)
        if plots_wanted():
            with work("drawing run.png"):
                self._plot()
        shutil.rmtree(self.path / "scratch", ignore_errors=True)
        text = json.dumps(figures, indent=1).encode()
        self._seal({**digests, RESULT: files.digest_of(text)})
        files.write_atomic(self.path / RESULT, text)
        return self.result()

    def _evaluator(self, inputs: RunInputs) -> Evaluator | None:
        """What evaluates the encoders of this run; none where the server has no images."""
        method, dataset, recipe = inputs.method, inputs.dataset, self.recipe
        if dataset is None:
            return None
        untrained, warns = initial_encoder(method, dataset), not method.reads_labels
        return Evaluator(recipe.evaluate, dataset, method.views, recipe.seed, untrained, warns)

    def _save_encoder(self, inputs: RunInputs, server: Server, whitening: Whitening | None) -> str:
        """Write the final encoder, and return the digest of its file."""
        method, dataset, recipe = inputs.method, inputs.dataset, self.recipe
        name = dataset.name if dataset else recipe.data.name
        shape = dataset.train.shape if dataset else _planned_shape(recipe, method)
        encoder = method.represent(server)
        return save_encoder(self.path / ENCODER, encoder, recipe, method, name, shape, whitening)

    def _seal(self, digests: Mapping[str, str]) -> None:
        """Record the digests of the files that a run ends with, before the last is written."""
        about = self.folder.about()
        if "files" in about:  # else of an earlier version
            self.folder.write_about({**about, "files": {**about["files"], **digests}})

    def _read_result(self) -> dict[str, Any]:
        with files.reading(self.path / RESULT, self.folder.remedy):
            stored: dict[str, Any] = json.loads((self.path / RESULT).read_bytes())
            return {**stored, "figures": stored["figures"], "untrained": stored["untrained"]}

    def _test(
        self,
        evaluator: Evaluator,
        encoders: Sequence[nn.Module],
        inputs: RunInputs,
        whitening: nn.Module | None = None,
    ) -> dict[str, Any]:
        """The test figures of the final encoders and of references, and how they compare."""
        method = inputs.method
        tests = [evaluator.test(encoder) for encoder in encoders]
        untrained = evaluator.test(evaluator.untrained)
        figures = average([test.figures for test in tests]) if tests else {}
        tested: dict[str, Any] = {"figures": figures, "untrained": untrained.figures}
        if method.train is None:  # the method does not train
            return tested
        beside = references(evaluator)
        if beside and method.initial is not None:
            given = method.blueprint.copy_from().eval()["encoder"]
            beside[GIVEN] = evaluator.test(given).answers
        tested["references"] = {name: figures_of(answers) for name, answers in beside.items()}
        tested["levels"] = validation_levels(evaluator)
        answers = [test.answers for test in tests]
        why = self._reasons(inputs, figures.get("health", {}))
        if comparison := verdict(answers, {**beside, "untrained": untrained.answers}, why):
            tested["verdict"] = comparison.plain()
        if whitening is not None and evaluator.has_labels and all(answers):
            whitened = evaluator.answers(nn.Sequential(encoders[0], whitening))
            if whitened is not None:
                changed = changes(answers[0], whitened)
                tested["whitened"] = {"figures": figures_of(whitened), "changes": changed}
        return tested

    def _reasons(self, inputs: RunInputs, health: Mapping[str, Any]) -> tuple[str, ...]:
        """Why the encoder may be no better than its references."""
        losses = [row.get("loss") for row in self.folder.read_log("metrics.jsonl")]
        steps = local_steps(inputs.method, inputs.examples.values(), len(losses) - 1)
        compares_views = inputs.method.objective.views[0] > 1
        return reasons(health, losses, steps, compares_views=compares_views)

    def _plot(self) -> None:
        rows = self.folder.read_log("metrics.jsonl")
        _draw(self.path / "run.png", self.recipe, rows, self._levels)

    def result(self) -> Result:
        """The results of a complete run."""
        stored = self._read_result()
        rounds = tuple(self.folder.read_log("metrics.jsonl"))
        about = read_about(self.path)
        result = Result(
            self.path,
            self.recipe,
            stored["figures"],
            stored["untrained"],
            rounds,
            (*about["notes"], *history_lines(about["history"])),
            about["batch_norm"],
            stored.get("references", {}),  # runs of earlier versions have none
            stored.get("verdict", {}),
            stored.get("whitened", {}),
            stored.get("levels", {}),
            stored.get(site_evaluation.FIGURES, {}),
        )
        self.watcher.end(result)
        return result
