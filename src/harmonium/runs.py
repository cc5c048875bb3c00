"""The life of a run: begin, rounds, evaluations, checkpoints, resume, end."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import nn

from harmonium import store
from harmonium.checkpoint import Commit, Folder
from harmonium.data.images import Dataset
from harmonium.data.partition import make_split
from harmonium.data.shift import as_held
from harmonium.engines.host import Host
from harmonium.engines.local import LocalEngine
from harmonium.engines.unreliable import Unreliable
from harmonium.errors import ConfigError, NotEnoughReplies, StoreError
from harmonium.evaluate.judge import Judge, average
from harmonium.federation.batch_norm import measure
from harmonium.federation.card import card
from harmonium.federation.drive import Driver, Engine, Reply
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import fault
from harmonium.handover import save_encoder
from harmonium.home import home, make_folder
from harmonium.hosts import (
    load_public,
    make_host,
    opened,
    public_notes,
    read_about,
    read_recipe,
)
from harmonium.recipe import Recipe
from harmonium.recipe_text import apply_changes, load_tree
from harmonium.threads import single_thread


class Watcher:
    """What a caller may want to see of a run while it goes; does nothing unless overridden."""

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """The run starts or continues after `done` rounds."""

    def task(self, reply: Reply) -> None:
        """A client answered, or did not."""

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """A round was committed; `row` is its line in metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def end(self, result: Result) -> None:
        """The run is complete."""

    def close(self) -> None:
        """Nothing more will come, also after an error."""


@dataclass(frozen=True)
class Result:
    """What a finished run has to show."""

    folder: Path
    recipe: Recipe
    figures: Mapping[str, Any]  # of the final encoder, on the test part
    untrained: Mapping[str, Any]  # of the encoder as first drawn, on the same
    rounds: tuple[Mapping[str, Any], ...] = field(repr=False)  # the lines of metrics.jsonl
    notes: tuple[str, ...] = ()  # on the data, e.g. files that were left out
    batch_norm: str = ""  # what became of BatchNorm; empty where there is none


def run(
    recipe: Recipe | str,
    *changes: str,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """Run a recipe to its end and return what it has to show.

    `run("fedavg", "rounds=5", out="runs/first")` does what the command line does with the same
    words; whole sections can be given by name: `run("fedavg", data="digits", rounds=5)`, and single
    settings as `**{"encoder.width": 8}`. If `out` holds this very run already, it is continued, or
    simply returned when it is complete.
    """
    dotted = {key: settings.pop(key) for key in list(settings) if "." in key}
    changes = (*changes, *(f"{key}={json.dumps(value)}" for key, value in dotted.items()))
    if isinstance(recipe, str):
        recipe = Recipe.from_tree({**apply_changes(load_tree(recipe), changes), **settings})
    elif changes or settings:
        recipe = Recipe.from_tree({**apply_changes(recipe.tree(), changes), **settings})
    folder = Path(out) if out is not None else _new_folder(recipe)
    with _lock(folder):
        _begin(folder, recipe)
        return _Run(folder, recipe, watcher or Watcher()).complete()


def resume(folder: str | Path, *changes: str, watcher: Watcher | None = None) -> Result:
    """Continue a run that stopped; only settings that cannot change its result may change."""
    folder = Path(folder)
    recipe = read_recipe(folder)
    changed = Recipe.from_tree(apply_changes(recipe.tree(), changes))
    if changed.digest != recipe.digest:
        raise ConfigError(
            "a resumed run keeps its recipe, else its result would belong to neither: only "
            "engine.* may change. Start a new run with --out instead."
        )
    with _lock(folder):
        return _Run(folder, changed, watcher or Watcher()).complete()


def _new_folder(recipe: Recipe) -> Path:
    choices = (recipe.method.name, recipe.objective.name, recipe.data.name, recipe.digest[:8])
    name = "-".join(choice.rpartition(":")[2] for choice in choices if choice)
    return home() / "runs" / f"{datetime.now():%Y-%m-%d-%H%M%S}-{name}"


def _begin(folder: Path, recipe: Recipe) -> None:
    """Write what a run needs to be resumable; the recipe last, for then the run exists."""
    path = folder / "recipe.yaml"
    if path.exists():
        held = read_recipe(folder)
        if held.digest != recipe.digest:
            raise ConfigError(
                f"{folder} holds another run (recipe {held.digest[:8]}, not {recipe.digest[:8]}): "
                f"name another folder with --out"
            )
        return
    for torn in folder.glob("*.part"):  # left by a kill while an earlier attempt began
        torn.unlink()
    ours = {".lock", "split.npz", "about.json"}
    if foreign := sorted({p.name for p in folder.iterdir()} - ours):
        raise ConfigError(f"{folder} is not empty ({foreign[0]}): name a new folder with --out")
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    public = load_public(recipe, dataset)
    explained = card(recipe.build_method(dataset))
    about = {
        "recipe": recipe.digest,
        "data": dataset.digest,
        "public": public.digest if public else None,
        "split": split.digest,
        "cache": {"data": dataset.key, "public": public.key if public else None},
        "versions": {name: version(name) for name in ("harmonium", "torch", "numpy")},
        "python": platform.python_version(),
        "card": explained.text().splitlines(),
        "batch_norm": explained.batch_norm,
        "clients": list(split.names),
        "notes": [*dataset.notes, *split.notes, *public_notes(recipe, public)],
    }
    split.save(folder / "split.npz")
    store.write_atomic(folder / "about.json", json.dumps(about, indent=1).encode())
    store.write_atomic(path, recipe.yaml().encode())


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time may write to a run; the lock goes when its holder does."""
    new = not folder.exists()
    make_folder(folder)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StoreError(f"another process is running {folder}: wait for it, or stop it") from None
    try:
        yield
    finally:
        lock.release()
        if new and not (folder / "recipe.yaml").exists():  # refused before it began
            shutil.rmtree(folder, ignore_errors=True)


def _untrained(method: Method, dataset: Dataset) -> nn.Module:
    """The encoder as first drawn; statistics of its BatchNorms fit the pictures, to be fair."""
    encoder = method.blueprint.copy_from().eval()["encoder"]
    pixels = torch.from_numpy(
        np.array(dataset.train.batch(np.arange(min(512, len(dataset.train)))))
    )
    with single_thread():
        measure(encoder, [method.views.plain(pixels)])
    return encoder


class _Run:
    """One process's work on a run."""

    def __init__(self, folder: Path, recipe: Recipe, watcher: Watcher) -> None:
        self.folder, self.recipe, self.watcher = Folder(folder), recipe, watcher
        self.path = folder

    def complete(self) -> Result:
        """Do whatever is left of the run."""
        recipe, path = self.recipe, self.path
        if (path / "result.json").exists():
            self.watcher.note(f"{path} is complete already")
            return self._result()
        dataset, public, split = opened(recipe, path)
        host = make_host(recipe, dataset, split, path, public)
        dataset = as_held(dataset, split)
        notes = [*split.notes, *public_notes(recipe, public)]
        workers = recipe.engine.workers
        untrained = _untrained(host.method, dataset)
        judge = Judge(recipe.evaluate, dataset, host.method.views, recipe.seed, untrained)
        with LocalEngine(host, path, os.cpu_count() or 1 if workers is None else workers) as engine:
            server = self._rounds(host, engine, judge, notes)
            self.watcher.note("judging the final encoder on the test part")
            figures = average(
                [judge.verdict(e) for e in self._encoders(host.method, server, engine)]
            )
        before = judge.verdict(untrained)
        if not host.method.has_own_encoders:
            save_encoder(
                path / "encoder.safetensors", host.method.represent(server), recipe, dataset
            )
        self._picture()
        shutil.rmtree(path / "scratch", ignore_errors=True)
        text = json.dumps({"figures": figures, "untrained": before}, indent=1)
        store.write_atomic(path / "result.json", text.encode())
        return self._result()

    def _rounds(
        self, host: Host, engine: LocalEngine, judge: Judge, notes: Sequence[str]
    ) -> Server:
        """From the last committed round to the last of all."""
        recipe, watcher, method = self.recipe, self.watcher, host.method
        commit = self._restore(engine)
        examples = {client: len(index) for client, index in enumerate(host.indices)}
        asked: Engine = engine
        if recipe.participation.unreliable:
            asked = Unreliable(engine, recipe.participation, recipe.seed, examples)
        driver = Driver(method, asked, Ledger(), recipe.participation.quorum, watcher.task)
        server = Server(examples, method.blueprint.shared(), public=host.public)
        cohort_size = recipe.participation.asked(recipe.clients)
        watcher.begin(recipe, self.path, commit.round if commit else 0, cohort_size)
        for note in (*notes, *judge.notes):
            watcher.note(note)
        if commit is None:
            started = time.perf_counter()
            cohort = recipe.participation.cohort(server.everyone, 0, recipe.seed)
            figures = judge.look(judge.untrained)
            server = driver.drive(method.play(server, cohort), server)
            server = self._finish(server, driver, engine, started, figures)
        else:
            server = Server(examples, public=host.public, **commit.server)
        for number in range(server.round + 1, recipe.rounds + 1):
            started = time.perf_counter()
            server = replace(server, round=number)
            cohort = recipe.participation.cohort(server.everyone, number, recipe.seed)
            judged = recipe.evaluate.due(number, recipe.rounds)
            held, failed = engine.snapshot(), False
            try:
                server = driver.drive(method.play(server, cohort), server)
            except NotEnoughReplies as error:
                if not recipe.participation.unreliable:
                    raise
                failed = True
                engine.restore(held)  # who had answered already trained for nothing
                driver.reported.clear()
                watcher.note(f"round {number} changes nothing. {error}")
            if reason := fault(server.model):
                raise ConfigError(
                    f"round {number}: the model broke: {reason}. Lower server.lr or local.lr."
                )
            figures = {"failed": True} if failed else {}
            if judged:
                server = driver.drive(method.settle(server, cohort), server)
                encoders = self._encoders(method, server, engine)
                figures |= average([judge.look(encoder) for encoder in encoders])
            server = self._finish(server, driver, engine, started, figures)
        if all(row.get("failed") for row in self.folder.read_log("metrics.jsonl")[1:]):
            raise NotEnoughReplies(
                "no round had enough answers, so nothing was learned: see participation.* and why "
                f"clients were left out in {self.path / 'ledger.jsonl'}"
            )
        return server

    def _restore(self, engine: LocalEngine) -> Commit | None:
        commit, faults = self.folder.last()
        for why in faults:
            self.watcher.note(f"{why}; continuing from the round before")
        self.folder.rewind(commit)
        engine.restore(commit.clients if commit else {})
        engine.prune(*self.folder.snapshots())
        return commit

    def _finish(
        self,
        server: Server,
        driver: Driver,
        engine: LocalEngine,
        started: float,
        figures: Mapping[str, Any],
    ) -> Server:
        """Log and commit a round, tell of it, and go on with what a resumed run would go on with.

        Times have a log of their own, so that those of two runs can be compared to the byte.
        """
        ledger, folder = driver.ledger, self.folder
        means = dict(driver.reported)
        driver.reported.clear()
        row: dict[str, Any] = {
            "round": server.round,
            "loss": means.pop("loss", None),
            **({"reported": means} if means else {}),
            "answered": len(ledger.answered),
            "missing": len(ledger.missing - ledger.answered),
            "bytes_down": ledger.totals["down"],
            "bytes_up": ledger.totals["up"],
            **figures,
        }
        seconds = time.perf_counter() - started
        folder.log("metrics.jsonl", [json.dumps(row)])
        folder.log("ledger.jsonl", ledger.take())
        folder.log("timings.jsonl", [json.dumps({"round": server.round, "seconds": seconds})])
        kept = {key: getattr(server, key) for key in ("model", "round", "memory", "moments")}
        stored = folder.commit(server.round, kept, engine.snapshot())
        engine.prune(*folder.snapshots())
        if server.round:
            self.watcher.round(row, seconds)
        return replace(server, **stored)

    def _encoders(self, method: Method, server: Server, engine: LocalEngine) -> list[nn.Module]:
        """What to judge: the federation's encoder, or those of some clients that took part."""
        if not method.has_own_encoders:
            return [method.represent(server)]
        clients = sorted(engine.snapshot())[: self.recipe.evaluate.clients]
        return [method.represent(server, engine.state_of(client)) for client in clients or [0]]

    def _picture(self) -> None:
        from harmonium.report.plots import run_picture

        recipe = self.recipe
        title = f"{recipe.method.name} on {recipe.data.name}, seed {recipe.seed}"
        run_picture(self.path / "run.png", self.folder.read_log("metrics.jsonl"), title)

    def _result(self) -> Result:
        held = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        rounds = tuple(self.folder.read_log("metrics.jsonl"))
        about = read_about(self.path)
        result = Result(
            self.path,
            self.recipe,
            held["figures"],
            held["untrained"],
            rounds,
            tuple(about["notes"]),
            about["batch_norm"],
        )
        self.watcher.end(result)
        return result
