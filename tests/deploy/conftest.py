"""A stage for deployments: the commands of server and sites as processes of their own.

`make test` plays one short deployment. `make test-deploy` plays all of them and writes their table.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HARMONIUM = [sys.executable, "-m", "harmonium"]
SITES = ("north", "south", "west")
PLAN = {
    "method": "fedavg",
    "data": "digits",  # what the server judges with
    "views": "digits",
    "rounds": "3",
    "local.epochs": "1",
    "encoder.width": "8",
    "evaluate.every": "1000",
    "evaluate.labels_per_class": "[]",
    "engine.patience": "30",
}


class Actor:
    """One command that runs for a while."""

    def __init__(self, name: str, command: list[str], log: Path, cwd: Path) -> None:
        self.name, self.log, self._began = name, log, log.stat().st_size if log.exists() else 0
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
        environment["HOME"] = str(cwd / "house")
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=cwd, env=environment, start_new_session=True
            )

    @property
    def text(self) -> str:
        """What it has said."""
        return self.log.read_bytes()[self._began :].decode(errors="replace")

    def says(self, *words: str, seconds: float = 120.0) -> None:
        """Wait until it has said something."""
        end = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            gone = self.process.poll() is not None and not all(word in self.text for word in words)
            assert not gone, f"{self.name} ended without saying {words}:\n{self.text}"
            assert time.monotonic() < end, f"{self.name} never said {words}:\n{self.text}"
            time.sleep(0.05)

    def ends(self, code: int | None = 0, seconds: float = 180.0) -> str:
        """Wait until it ends, as it should."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end:\n{self.text}")
        assert code is None or found == code, f"{self.name} ended with {found}:\n{self.text}"
        return self.text

    def kill(self) -> None:
        """As the kernel would: -9."""
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def clear(self) -> None:
        """End it and everything that it started."""
        for pid in [*children(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(stat.parent.name), *children(int(stat.parent.name))]
    return found


class Stage:
    """A federation's folder and its actors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.inside: dict[str, list[str]] = {}  # words before a command: its network namespace
        self.actors: list[Actor] = []

    def say(self, *words: str, code: int = 0) -> str:
        """A command that ends soon; what it says."""
        done = subprocess.run(
            [*HARMONIUM, *words], cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def init(self, *more: str, sites: tuple[str, ...] = SITES) -> None:
        self.say("server", "init", *sites, "--port", str(self.port), *more)

    def server(self, *changes: str, options: tuple[str, ...] = ()) -> Actor:
        """The server with the short plan, changed."""
        words = PLAN | dict(change.split("=", 1) for change in changes)
        method = words.pop("method")
        if "init" in words:  # sites start from given weights that their policies name
            self.allow("initial_weights: []", f"initial_weights: [{words['init']}]")
        plan = [f"{key}={value}" for key, value in words.items()]
        return self.act("server", "server", "start", method, *plan, "--out", "run", *options)

    def allow(self, key: str, other: str, site: str = "*") -> None:
        """Change a line in the policies of some sites."""
        for policy in (self.folder / "federation" / "kits").glob(f"{site}/policy.yaml"):
            policy.write_text(policy.read_text().replace(key, other))

    def resume(self, *words: str) -> Actor:
        return self.act("server", "server", "resume", "run", *words)

    def site(self, name: str, *words: str, once: bool = True) -> Actor:
        """A site with its share of the digits."""
        place = SITES.index(name) + 1 if name in SITES else 1
        kit = ["--kit", f"federation/kits/{name}", *(["--once"] if once else [])]
        pictures = ["--data", "digits", "--part", f"{place}/3"]
        return self.act(name, "client", "start", *kit, *pictures, *words)

    def sites(self, *words: str, once: bool = True) -> dict[str, Actor]:
        return {name: self.site(name, *words, once=once) for name in SITES}

    def act(self, name: str, *words: str) -> Actor:
        """A command of ours as an actor."""
        return self.command(name, [*self.inside.get(name, []), *HARMONIUM, *words])

    def command(self, name: str, command: list[str]) -> Actor:
        """Any command as an actor."""
        self.actors.append(Actor(name, command, self.folder / f"{name}.log", self.folder))
        return self.actors[-1]

    def ledger(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "ledger.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def encoder(self) -> bytes:
        return (self.folder / "run" / "encoder.safetensors").read_bytes()

    def committed(self) -> int:
        """Rounds whose commits are on disk."""
        found = (self.folder / "run" / "commits").glob("*.json")
        return max((int(path.stem) for path in found), default=-1)

    def until(self, round: int, seconds: float = 120.0) -> None:
        """Wait until a round is committed."""
        end = time.monotonic() + seconds
        while self.committed() < round:
            assert time.monotonic() < end, self.actors[0].text
            time.sleep(0.05)

    def clear(self) -> None:
        for actor in self.actors:
            actor.clear()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    try:
        yield made
    finally:
        made.clear()


@pytest.fixture(scope="session")
def play() -> Callable[..., bytes]:
    """Play a deployment in which nothing goes wrong; the encoder's bytes."""

    def played(folder: Path, *changes: str) -> bytes:
        made = Stage(folder)
        try:
            made.init()
            server, _ = made.server(*changes), made.sites()
            server.ends()
            return made.encoder()
        finally:
            made.clear()

    return played


@pytest.fixture(scope="session", name="free_port")
def _free_port() -> Callable[[], int]:
    return free_port


@pytest.fixture(scope="session", name="children")
def _children() -> Callable[[int], list[int]]:
    return children


# ---- the table -----------------------------------------------------------------------------------

HEAD = """# Deployments

Figures of commit `{commit}`.

What `make test-deploy` played: real processes of a server and its sites, over TLS with the keys of
a federation, on one machine with 2 cores. Seconds are wall time of the whole test.

"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="Write a table of deployments here.")


ROWS: list[tuple[str, str, str, float]] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        words = (item.function.__doc__ or item.name).strip().partition("\n")[0]  # type: ignore[attr-defined]
        seen = "; ".join(str(value) for key, value in item.user_properties if key == "seen")
        ROWS.append((words, seen, report.outcome, report.duration))


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--table")
    if path is None or not ROWS:
        return
    lines = ["| what happens | seen | outcome | seconds |", "| --- | --- | --- | ---: |"]
    lines += [f"| {what} | {seen} | {how} | {took:.0f} |" for what, seen, how, took in ROWS]
    path.parent.mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).parent)
    git = ("git", "-C", here, "describe", "--always", "--dirty", "--exclude=*")
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    path.write_text(HEAD.format(commit=commit) + "\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Put something into the table's column of what was seen."""
    return lambda text: record_property("seen", text)
