"""Local models: clients train once more from the committed model, as in a further round.

The round after the last commit uses the same runtime, engine and driver as any round, so labels
stay out and every random draw is the one that the run itself would make. It runs in a temporary
folder, and the run's folder is not changed.

What differs from the run's own next round changes no client's training:
- only the selected clients train, though the plan asks its whole cohort. Where a round has several
  asks and later ones depend on all answers, they depend on the answers of these clients only.
- answers are neither masked nor dropped on purpose, and their average is thrown away.
- after the last round of a schedule that ends at 0, the rate of the last round is kept.

A run is refused if its recipe would now mean something else than when the run began.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from harmonium.core import codec, files
from harmonium.core.errors import ConfigError, DataError, StoreError, counted
from harmonium.core.progress import work
from harmonium.core.settings import plain
from harmonium.core.types import ClientId, Weights
from harmonium.engines.local import LocalEngine
from harmonium.federation.batch_norm import calibrated
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, Plan
from harmonium.measures.run_reader import Run
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import check_recipe, make_runtime
from harmonium.storage import state_store
from harmonium.storage.run_folder import RECIPE, SPLIT, RunFolder


@dataclass(frozen=True)
class Trained:
    """A client's model and state after a further round."""

    model: Weights  # as sent; parts that were not sent are the federation's
    state: Mapping[str, Any]  # the client's new state


@dataclass
class SelectedClients:
    """Passes asks to selected clients on to `engine`, and stores the models that they send."""

    engine: LocalEngine
    clients: Collection[ClientId]
    folder: Path  # for the models: on disk, because there may be many
    answered: set[ClientId] = field(default_factory=set)
    sent: set[ClientId] = field(default_factory=set)

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Replies without content for the other clients, then those of the selected ones."""
        asked = [client for client in ask.to if client in self.clients]
        for client in ask.to:
            if client not in self.clients:
                yield Reply(client, None, "not selected")
        if asked:
            yield from self.engine.deliver(replace(ask, to=asked), turn)

    def accept(self, reply: Reply) -> None:
        """Accept a counted reply; the last model that a client sends is its local model."""
        self.engine.accept(reply)
        self.answered.add(reply.client)
        if reply.up is not None and "model" in reply.up:
            self.sent.add(reply.client)
            self._path(reply.client).write_bytes(codec.encode(dict(reply.up["model"])))

    def model(self, client: ClientId) -> Weights:
        """The model that a client sent last; empty where it sends none."""
        return codec.decode(self._path(client).read_bytes()) if client in self.sent else {}

    def _path(self, client: ClientId) -> Path:
        return self.folder / f"model-{client}"

    def snapshot(self) -> codec.Tree:
        """The states that clients have now."""
        return self.engine.snapshot()

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the states of a checkpoint."""
        self.engine.restore(snapshot)


def further(run: Run, clients: Sequence[ClientId]) -> dict[ClientId, nn.Module]:
    """The encoder of each of these clients after a further round of training."""
    if not sends_model(run.method):
        raise ConfigError(
            f"{run.method.name} sends no model in a round, so there are no local models"
        )
    return {client: encoder_of(run, one) for client, one in trained(run, clients)}


def encoder_of(run: Run, one: Trained) -> nn.Module:
    """The encoder of a client after a further round."""
    parts = run.method.blueprint.copy_from(one.model, one.state.get("parts", {}))
    return parts.eval()["encoder"]


def trained(
    run: Run, clients: Sequence[ClientId], epochs: int | None = None
) -> Iterator[tuple[ClientId, Trained]]:
    """Models and states of these clients after a further round, one client after another.

    Those who cannot train are left out. `epochs` replaces the recipe's local epochs. Newcomers may
    be among the clients; they start without any state.
    """
    _check_training(run)
    recipe, number = _recipe(run, epochs), run.commit.round + 1
    rules = set(run.method.blueprint.rules.values())
    if "row" in rules and max(clients) >= recipe.clients:
        raise ConfigError(
            f"{run.path}: client {max(clients)} has no row in the federation's table, so it cannot "
            "train there"
        )
    who = counted(len(clients), "client")
    run.note(f"{run.label}: training once more, as in round {number}, {who}")
    with opened_engine(run, recipe, clients) as (engine, folder):
        method = engine.runtime.method
        known = {**run.examples, **{c: len(run.split.indices[c]) for c in clients}}
        server = replace(run.server, examples=known, round=number, public=engine.runtime.public)
        heard = SelectedClients(engine, set(clients), folder)
        cohort = sorted({*run.cohort, *clients})
        with work("a further round", len(clients), "clients") as at:
            driver = Driver(method, heard, Ledger(), watch=_telling(run, heard.clients, at))
            driver.drive(method.run_plan(server, cohort), server)
        done = heard.sent if sends_model(method) else heard.answered
        for client in clients:
            if client in done:
                yield client, _trained(server, heard, client)


def _check_training(run: Run) -> None:
    """Refuse a run whose clients would now train differently.

    This does not end the whole call: measures that do not train are unaffected.
    """
    try:
        check_recipe(run.path, "use measures that do not train, e.g. knn or linear")
    except StoreError as error:
        raise DataError(f"clients cannot train once more: {error}") from None


def _trained(server: Server, heard: SelectedClients, client: ClientId) -> Trained:
    """A client's model and state.

    Of a table with one row per client, the client sent its row only, so the federation's table is
    used. With `batch_norm=recalibrate` the client measures the statistics of BatchNorm itself, on
    its own model and images.
    """
    engine = heard.engine
    method = engine.runtime.method
    of = method.blueprint.rule_of
    sent = {key: value for key, value in heard.model(client).items() if of(key) != "row"}
    own = replace(server, model={**server.model, **sent}, memory={})
    if method.recalibrates:
        alone = Driver(method, SelectedClients(engine, {client}, heard.folder), Ledger())
        own = alone.drive(calibrated(own, [client]), own)
    measured = own.memory.get("statistics", {})
    return Trained({**own.model, **measured}, engine.state_of(client))


def settled(run: Run) -> Server:
    """The server as committed, with statistics of BatchNorm measured where they still have to be.

    With `batch_norm=recalibrate`, a round that was not evaluated has none.
    """
    server, method = run.server, run.method
    if not method.recalibrates or "statistics" in server.memory:
        return server
    run.note(f"{run.label}: BatchNorm's statistics of {counted(len(run.cohort), 'client')}")
    return at_clients(run, run.cohort, lambda _: calibrated(server, run.cohort))


@contextmanager
def opened_engine(
    run: Run, recipe: Recipe, clients: Sequence[ClientId]
) -> Iterator[tuple[LocalEngine, Path]]:
    """An engine with the states of these clients, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="harmonium-") as place:
        folder = Path(place)
        _furnish(folder, run, recipe, clients)
        host = make_runtime(recipe, run.dataset, run.split, folder, run.public)
        settings = recipe.engine
        with LocalEngine(host, folder, _workers(recipe, len(clients)), settings.devices) as engine:
            engine.restore({str(c): run.commit.clients[str(c)] for c in _with_state(run, clients)})
            yield engine, folder


def at_clients(
    run: Run, clients: Sequence[ClientId], plan: Callable[[Method], Plan], **sections: Any
) -> Server:
    """The server after a plan in which clients measure the committed model; none trains.

    Args:
        run: the run, whose folder stays as it is.
        clients: whom the plan asks.
        plan: the plan, given the method.
        sections: of the recipe, in place of the run's own.
    """
    recipe = _recipe(run).changed(**sections)
    with opened_engine(run, recipe, clients) as (engine, _):
        driver = Driver(engine.runtime.method, engine, Ledger())
        return driver.drive(plan(engine.runtime.method), run.server)


def _recipe(run: Run, epochs: int | None = None) -> Recipe:
    """The run's recipe without masks, which would hide the models; clients train all the same."""
    recipe, done = run.recipe, run.commit.round
    bare = {**plain(recipe.privacy), "secure_aggregation": False}
    local: dict[str, Any] = {}
    if done >= recipe.rounds and recipe.local.schedule != "constant":
        rate = recipe.local.rate(done, recipe.rounds)
        local = {"lr": rate, "schedule": "constant", "warmup": 0}
    if epochs is not None:
        local |= {"epochs": epochs, "for_clients": None}
    return recipe.changed(privacy=bare, local={**plain(recipe.local), **local})


def _furnish(folder: Path, run: Run, recipe: Recipe, clients: Sequence[ClientId]) -> None:
    """Write what a runtime is built from, here or in a worker, and the states of these clients.

    States are copied, because new ones are written beside them.
    """
    about = RunFolder(run.path).about()
    RunFolder(folder).write_about({key: value for key, value in about.items() if key != "files"})
    run.split.save(folder / SPLIT)
    files.write_atomic(folder / RECIPE, recipe.yaml().encode())
    for client in _with_state(run, clients):
        entry = run.commit.clients[str(client)]
        version = state_store.read(run.path / "clients" / entry["file"], entry["digest"])
        state_store.write(folder / "clients" / entry["file"], version.state, version)


def _with_state(run: Run, clients: Sequence[ClientId]) -> list[ClientId]:
    return [client for client in clients if str(client) in run.commit.clients]


def _workers(recipe: Recipe, clients: int) -> int:
    return min(recipe.workers, clients)


def _telling(
    run: Run, clients: Collection[ClientId], at: Callable[[int], None]
) -> Callable[[Reply], None]:
    heard = set[ClientId]()

    def watch(reply: Reply) -> None:
        heard.update({reply.client} & set(clients))
        at(len(heard))
        if reply.up is None and reply.client in clients:
            run.note(f"{run.label}: client {reply.client} did not train: {reply.why}")

    return watch


def sends_model(method: Method) -> bool:
    """Whether clients send a model in a round."""
    return any("model" in declared.up for declared in method.exchanges().values())
