"""Workers change nothing but the time; a dead one is replaced."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from harmonium.cli.main import main
from harmonium.core import codec, files
from harmonium.core.errors import ConfigError, EngineError, WireError
from harmonium.engines.local import LocalEngine
from harmonium.engines.workers import Worker, early_workers, shared_workers
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, exchange, scalar, weights
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import open_runtime
from harmonium.runs.start import _begin, run
from harmonium.testing import TINY

MODEL = {"down": {"model": weights()}, "up": {"model": weights(), "loss": scalar()}}


@dataclass(frozen=True)
class Personal(Method):
    """Keeps its projector and a count at the client."""

    share = {"projector": "local"}
    keeps = {"count": "scalar"}

    @exchange(**MODEL)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        client.state["count"] = client.state.get("count", 0) + 1
        return super().train(client, got)


@dataclass(frozen=True)
class Mortal(Method):
    """Kills its own process as often as a file says."""

    deaths: str = ""

    @exchange(**MODEL)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        left = Path(self.deaths)
        if client.id == 1 and (count := int(left.read_text())):
            left.write_text(str(count - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(client, got)


@dataclass(frozen=True)
class Talkative(Method):
    """Prints where frames travel."""

    @exchange(**MODEL)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        print("a method may print")
        os.write(1, b"even past Python\n")
        return super().train(client, got)


@dataclass(frozen=True)
class Faulty(Method):
    """Breaks its declaration at client 0 and simply breaks at client 1."""

    @exchange(**MODEL)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        if client.id == 1:
            raise ZeroDivisionError("a bug of the method")
        extra = {} if client.id else {"extra": 1}
        return {"model": got.model, "loss": 0.0, **extra}


def digest(
    folder: Path, method: type[Method], workers: int, rounds: int = 2, **settings: object
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{__name__}:{method.__name__}"
    recipe = Recipe.from_tree({**TINY, "method": {"name": name, **settings}})
    _begin(folder, recipe)
    host = open_runtime(folder)
    examples = {client: len(index) for client, index in enumerate(host.indices)}
    server = Server(examples, host.method.blueprint.shared())
    with LocalEngine(host, folder, workers) as engine:
        driver = Driver(host.method, engine, Ledger())
        for number in range(1, rounds + 1):
            server = replace(server, round=number)
            server = driver.drive(host.method.round(server, server.everyone), server)
        states = {client: engine.state_of(client) for client in server.everyone}
    assert not list((folder / "scratch").glob("*"))
    return files.digest_of(codec.encode([server.model, states]))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import this module by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_any_number_of_workers_gives_the_same_bits(tmp_path: Path) -> None:
    results = {digest(tmp_path / str(n), Personal, workers=n) for n in (0, 2)}
    assert len(results) == 1


def test_a_dead_worker_is_replaced_and_its_task_run_again(tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("0")
    deaths = str(tmp_path / "deaths")
    calm = digest(tmp_path / "calm", Mortal, 0, deaths=deaths)
    (tmp_path / "deaths").write_text("1")
    assert digest(tmp_path / "grim", Mortal, 2, deaths=deaths) == calm
    assert (tmp_path / "deaths").read_text() == "0"


def test_a_task_that_always_kills_its_worker_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("9")
    with pytest.raises(EngineError, match="client 1 .*3 times.*round 1"):
        digest(tmp_path / "run", Mortal, 1, deaths=str(tmp_path / "deaths"))
    assert (tmp_path / "deaths").read_text() == "6"


def test_what_methods_print_does_not_disturb_the_frames(tmp_path: Path) -> None:
    assert digest(tmp_path / "a", Talkative, 1) == digest(tmp_path / "b", Talkative, 0)


def test_errors_of_workers_arrive_as_what_they_are_and_end_no_worker(tmp_path: Path) -> None:
    _begin(tmp_path, Recipe.from_tree({**TINY, "method": f"{__name__}:Faulty"}))
    host = open_runtime(tmp_path)
    with LocalEngine(host, tmp_path, workers=1) as engine:

        def ask(client: int) -> list[Reply]:
            down = {"model": host.method.blueprint.shared()}
            return list(engine.deliver(Ask("train", [client], down), Turn(1, 0)))

        with pytest.raises(WireError, match="sends `extra` to the server"):
            ask(0)
        (worker,) = engine._pool._all  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug of the method"):
            ask(1)
        assert [reply.client for reply in ask(2)] == [2]
        assert set(engine._pool._all) == {worker}  # type: ignore[union-attr]


def test_workers_use_one_thread_and_wait_quietly(tmp_path: Path) -> None:
    from harmonium.core.threads import single_thread

    torch.set_num_threads(2)
    with single_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Slow(Method):
    """Does nothing for a long time."""

    @exchange(**MODEL)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        time.sleep(60)


def test_leaving_ends_tasks_under_way_and_starts_no_workers(tmp_path: Path) -> None:
    _begin(tmp_path, Recipe.from_tree({**TINY, "method": f"{__name__}:Slow"}))
    host = open_runtime(tmp_path)
    model = host.method.blueprint.shared()
    engine = LocalEngine(host, tmp_path, workers=2)
    asked = engine.deliver(Ask("train", [0, 1, 2, 3], {"model": model}), Turn(1, 0))
    waiting = threading.Thread(target=lambda: pytest.raises(EngineError, next, asked))
    waiting.start()
    deadline = time.monotonic() + 30
    while len(engine._pool._all) < 2 and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.05)
    started = time.monotonic()
    workers = list(engine._pool._all)  # type: ignore[union-attr]
    engine.__exit__(None, None, None)
    waiting.join()
    assert time.monotonic() - started < 10
    assert len(workers) == 2 and not any(worker.alive for worker in workers)
    assert not engine._pool._all  # type: ignore[union-attr]


def test_a_worker_that_cannot_begin_says_why(tmp_path: Path) -> None:
    class Hidden(Method):
        """Nobody else can import this."""

    recipe = Recipe.from_tree({**TINY, "method": Hidden, "engine": {"workers": 1}})
    with pytest.raises(ConfigError, match="cannot import method"):
        run(recipe, out=tmp_path / "run")


def pids(engine: LocalEngine) -> list[int]:
    return sorted(worker.process.pid for worker in engine._pool._all)  # type: ignore[union-attr]


def test_runs_that_share_workers_have_the_bits_of_runs_that_do_not(tmp_path: Path) -> None:
    """Also where another method ran in the same process before, and where a folder is another's."""
    alone = digest(tmp_path / "alone", Personal, workers=0)
    with shared_workers(1) as spares:
        (first,) = spares._idle
        assert digest(tmp_path / "before", Talkative, workers=1) != alone
        assert spares._idle == [first] and first.alive
        shutil.rmtree(tmp_path / "before")
        assert digest(tmp_path / "before", Personal, workers=1) == alone
        assert digest(tmp_path / "after", Personal, workers=1) == alone
        assert spares._idle == [first] and first.answered
    assert not first.alive


def test_a_worker_that_died_waiting_is_replaced(tmp_path: Path) -> None:
    with shared_workers(2) as spares:
        dead, alive = spares._idle
        dead.process.kill()
        dead.process.wait()
        digest(tmp_path / "run", Personal, workers=1)
        assert spares._idle == [alive]


def test_shared_workers_in_the_middle_of_a_task_are_not_kept(tmp_path: Path) -> None:
    _begin(tmp_path, Recipe.from_tree({**TINY, "method": f"{__name__}:Slow"}))
    host = open_runtime(tmp_path)
    down = {"model": host.method.blueprint.shared()}
    with shared_workers(1) as spares:
        (worker,) = spares._idle
        engine = LocalEngine(host, tmp_path, workers=1)
        asked = engine.deliver(Ask("train", [0], down), Turn(1, 0))
        waiting = threading.Thread(target=lambda: pytest.raises(EngineError, next, asked))
        waiting.start()
        while not pids(engine):
            time.sleep(0.05)
        engine.__exit__(None, None, None)
        waiting.join()
        assert not worker.alive and spares._idle == []


def test_a_refused_run_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Although workers start before the command has read its settings."""
    started: list[Worker] = []
    monkeypatch.setattr(
        Worker, "__init__", lambda self, init=Worker.__init__: (started.append(self), init(self))[1]
    )
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", "fedavg", "rounds=none"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and "rounds" in capfd.readouterr().err
    assert len(started) == early_workers([]) and not any(worker.alive for worker in started)


@pytest.mark.parametrize("words", [["engine.workers=0"], ["engine=flower"], ["engine.device=cpu"]])
def test_commands_that_may_need_no_worker_start_none_early(words: list[str]) -> None:
    assert early_workers(words) == 0


def test_workers_that_a_recipe_does_not_need_are_ended(tmp_path: Path) -> None:
    recipe = Recipe.from_tree({**TINY, "method": "fedavg", "engine": {"workers": 0}})
    with shared_workers(1) as spares:
        (worker,) = spares._idle
        run(recipe, out=tmp_path / "run")
        assert spares._idle == [] and not worker.alive


def test_workers_start_without_torch() -> None:
    """A command starts them first and loads torch afterwards."""
    code = (
        "import sys, harmonium.cli.main, harmonium.engines.workers; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
