"""Local models: clients train once more from the committed model, as a further round would.

The round after the last commit is played with the host, engine and driver that play any round, so
labels stay out and every draw is the one that the run itself would make. It is played in a folder
of its own that goes away afterwards: the run keeps no trace of it.

What differs from the run's own next round changes no client's training:
- only the clients that are looked at train, though the plan asks its whole cohort. Where a round
  asks more than once and later asks depend on all answers, they depend on these alone.
- answers are neither masked nor lost on purpose, and their average is thrown away.
- after the last round of a schedule that ends at 0, the rate of the last round is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from harmonium import codec, store
from harmonium.engines import shelf
from harmonium.engines.local import LocalEngine
from harmonium.errors import ConfigError
from harmonium.federation.drive import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, ClientId, Weights
from harmonium.hosts import make_host
from harmonium.measures.opened import Run
from harmonium.recipe import Recipe
from harmonium.settings import plain


@dataclass
class Only:
    """Hands on to `engine` what some clients are asked, and keeps the models they send."""

    engine: LocalEngine
    clients: Collection[ClientId]
    models: dict[ClientId, Weights] = field(default_factory=dict)

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """First those who are not looked at, then the others as their engine has them."""
        asked = [client for client in ask.to if client in self.clients]
        for client in ask.to:
            if client not in self.clients:
                yield Reply(client, None, "not looked at")
        if asked:
            yield from self.engine.deliver(replace(ask, to=asked), turn)

    def accept(self, reply: Reply) -> None:
        """The reply was counted; the last model that a client sends is its local model."""
        self.engine.accept(reply)
        if reply.up is not None and "model" in reply.up:
            self.models[reply.client] = dict(reply.up["model"])

    def snapshot(self) -> codec.Tree:
        """Which states clients have now."""
        return self.engine.snapshot()

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the states of a checkpoint."""
        self.engine.restore(snapshot)


def further(run: Run, clients: Sequence[ClientId]) -> dict[ClientId, nn.Module]:
    """The encoders of these clients after a further round of training, each its own."""
    recipe, number = _recipe(run), run.commit.round + 1
    run.note(f"{run.label}: {len(clients)} client(s) train once more, as in round {number}")
    with tempfile.TemporaryDirectory(prefix="harmonium-") as place:
        folder = Path(place)
        _furnish(folder, run, recipe, clients)
        host = make_host(recipe, run.dataset, run.split, folder, run.public)
        with LocalEngine(host, folder, _workers(recipe, len(clients))) as engine:
            engine.restore({str(c): run.commit.clients[str(c)] for c in _with_state(run, clients)})
            server = replace(run.server, round=number, public=host.public)
            heard = Only(engine, set(clients))
            driver = Driver(host.method, heard, Ledger(), watch=_telling(run, heard.clients))
            cohort = sorted({*run.cohort, *clients})
            driver.drive(host.method.play(server, cohort), server)
            if not heard.models and "model" not in _sent(host.method):
                raise ConfigError(
                    f"{host.method.name} sends no model in a round, so there are no local models"
                )
            return {c: _encoder(server, heard, c) for c in clients if c in heard.models}


def _encoder(server: Server, heard: Only, client: ClientId) -> nn.Module:
    """A client's encoder: the model it sent, and what it kept of it.

    Statistics of BatchNorm that are measured anew before an encoder is judged are measured by the
    client itself, on its own model and pictures.
    """
    engine = heard.engine
    method = engine.host.method
    sent = {k: v for k, v in heard.models[client].items() if k.startswith("encoder.")}
    own = replace(server, model={**server.model, **sent}, memory={})
    if method.recalibrates:
        alone = Driver(method, Only(engine, {client}), Ledger())
        own = alone.drive(method.settle(own, [client]), own)
    kept = engine.state_of(client).get("parts", {})
    measured = own.memory.get("statistics", {})
    return method.blueprint.copy_from(own.model, measured, kept).eval()["encoder"]


def _recipe(run: Run) -> Recipe:
    """The run's recipe without masks, which would hide the models; clients train all the same."""
    recipe, done = run.recipe, run.commit.round
    bare = {**plain(recipe.privacy), "secure_aggregation": False}
    changes: dict[str, Any] = {"privacy": bare}
    if done >= recipe.rounds and recipe.local.schedule != "constant":
        rate = recipe.local.rate(done, recipe.rounds)
        fixed = {"lr": rate, "schedule": "constant", "warmup": 0}
        changes["local"] = {**plain(recipe.local), **fixed}
    return recipe.changed(**changes)


def _furnish(folder: Path, run: Run, recipe: Recipe, clients: Sequence[ClientId]) -> None:
    """What a host is built from, in this process or in a worker, and the states of these clients.

    States are copied, because new ones are written beside them.
    """
    for name in ("about.json", "split.npz"):
        store.write_atomic(folder / name, (run.path / name).read_bytes())
    store.write_atomic(folder / "recipe.yaml", recipe.yaml().encode())
    for client in _with_state(run, clients):
        held = run.commit.clients[str(client)]
        version = shelf.read(run.path / "clients" / held["file"], held["digest"])
        shelf.write(folder / "clients" / held["file"], version.state, version)


def _with_state(run: Run, clients: Sequence[ClientId]) -> list[ClientId]:
    return [client for client in clients if str(client) in run.commit.clients]


def _workers(recipe: Recipe, clients: int) -> int:
    wanted = recipe.engine.workers
    return min(os.cpu_count() or 1 if wanted is None else wanted, clients)


def _telling(run: Run, clients: Collection[ClientId]) -> Callable[[Reply], None]:
    def watch(reply: Reply) -> None:
        if reply.up is None and reply.client in clients:
            run.note(f"{run.label}: client {reply.client} did not train: {reply.why}")

    return watch


def _sent(method: Method) -> set[str]:
    return {name for declared in method.exchanges().values() for name in declared.up}
