"""The server's SuperLink: a process that it starts, watches and restarts."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import EngineError
from harmonium.core.files import digest_of
from harmonium.core.paths import make_folder
from harmonium.core.types import ClientId
from harmonium.engines.flower import internals
from harmonium.engines.flower.internals import Grid, build_fab_from_files
from harmonium.engines.flower.superlink import SECRET_HEADER, LinkSettings

HEARTBEAT = 10.0  # seconds
START = 60.0  # seconds that a SuperLink has to answer
NO_CODE = b"""[project]
name = "harmonium"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "harmonium"
[tool.flwr.app.components]
serverapp = "no_code_travels:here"
clientapp = "no_code_travels:here"
"""


class Link:
    """The server's SuperLink: a process that is started, watched and restarted when it dies."""

    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        certificate: tuple[Path, Path] | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        """Keep the database in `folder`, or in memory; listen for sites at `host` and `port`."""
        make_folder(folder)
        self.settings = LinkSettings(
            database=internals.IN_MEMORY_DATABASE if in_memory else str(folder / "flower.db"),
            private_port=free_port(),
            secret=secrets.token_hex(32),
            host=host,
            port=port,
            certificate=str(certificate[0]) if certificate else None,
            certificate_key=str(certificate[1]) if certificate else None,
            parent=os.getpid(),
        )
        self._folder = folder
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._grid: Grid | None = None
        self._presence_client: Any = None

    def __enter__(self) -> Link:
        self._await_port()
        self._start()
        threading.Thread(target=self._watch, daemon=True).start()
        self._await_control()
        return self

    def __exit__(self, *why: object) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError, EngineError):
            self._finish_run(completed=why[0] is None)
        if self._presence_client is not None:
            self._presence_client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self.settings.private_port}"

    @property
    def _headers(self) -> dict[str, str]:
        return {SECRET_HEADER: self.settings.secret}

    def _start(self) -> None:
        command = [sys.executable, "-m", "harmonium.engines.flower.superlink"]
        with (self._folder / "link.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        settings = json.dumps(asdict(self.settings)).encode()
        if self._process.stdin is not None:
            with suppress(OSError), self._process.stdin as stream:  # it may have ended at once
                stream.write(settings)

    def _watch(self) -> None:
        """Restart the SuperLink when it dies; its database has all pending messages."""
        while not self._ended.wait(0.5):
            if self._process is not None and self._process.poll() is not None:
                self._start()

    def _await_port(self) -> None:
        """Wait for the port, which the SuperLink of a killed server holds a moment longer."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for left in reversed(range(30)):
            try:
                with socket.socket(family) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind((host, port))
                return
            except OSError as error:
                if not left or error.errno != errno.EADDRINUSE:
                    raise EngineError(
                        f"cannot listen at {host}:{port}: {error.strerror}. Stop the process that "
                        "listens there, or use another address with --listen HOST:PORT"
                    ) from None
            time.sleep(0.1)

    def _await_control(self) -> None:
        """Wait until the SuperLink answers; one that fails to start is restarted for a while."""
        began, code = time.monotonic(), None
        while (waited := time.monotonic() - began) < START:
            with suppress(httpx.HTTPError):
                with self._control() as control:
                    internals.online_nodes(control)
                return
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                if waited > START / 6:
                    break
            time.sleep(0.1)
        last_line = (self._folder / "link.log").read_text(errors="replace").splitlines()[-1:]
        ended = "did not start" if code is None else f"ended at once (exit code {code})"
        raise EngineError(
            f"the SuperLink {ended}: {''.join(last_line)} See {self._folder / 'link.log'}"
        )

    @contextmanager
    def _control(self) -> Iterator[Any]:
        client = internals.control_client(self._address, self._headers)
        try:
            yield client
        finally:
            client.close()

    def online(self) -> dict[int, str]:
        """The nodes that are connected now, with the time when each connected.

        It is called often, so its HTTP client stays open.
        """
        if self._presence_client is None:
            self._presence_client = internals.control_client(self._address, self._headers)
        return internals.online_nodes(self._presence_client)

    def admit(self, keys: Mapping[ClientId, ec.EllipticCurvePublicKey]) -> dict[ClientId, int]:
        """Admit only these sites; return the node number by which each is reached."""
        with self._control() as control:
            return {client: internals.register_node(control, key) for client, key in keys.items()}

    def grid(self, *, new_run: bool = False) -> Grid:
        """The grid that reaches the nodes: of a Flower run whose only executor is this process."""
        if self._grid is None or new_run:
            self._grid = self._begin_run()
        return self._grid

    def _begin_run(self) -> Grid:
        fab = build_fab_from_files({"pyproject.toml": NO_CODE})
        with self._control() as control:
            run = internals.start_run(control, fab, digest_of(fab))
        grid = Grid(self._address, self._headers, self._acquire(run))
        threading.Thread(target=self._send_heartbeats, args=(grid,), daemon=True).start()
        return grid

    def _acquire(self, run: int) -> str:
        """The token of the executor of a run, once the SuperLink hands it out."""
        with closing(internals.runtime_client(self._address, self._headers)) as runtime:
            for _ in range(100):
                offered = internals.acquire_run(runtime)
                if offered is not None and offered[0] == run:
                    return offered[1]
                time.sleep(0.1)
        raise EngineError("the SuperLink does not offer its run to this process")

    def _send_heartbeats(self, grid: Grid) -> None:
        while not self._ended.wait(HEARTBEAT) and self._grid in (None, grid):
            with suppress(httpx.HTTPError):
                grid.send_heartbeat()

    def _finish_run(self, *, completed: bool) -> None:
        if self._grid is not None:
            self._grid.finish_run(completed=completed)


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
