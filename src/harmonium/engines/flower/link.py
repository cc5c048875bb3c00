"""The server's hold on its SuperLink."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NodeStatus, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from harmonium.core.errors import EngineError
from harmonium.core.files import digest_of
from harmonium.core.paths import make_folder
from harmonium.core.types import ClientId
from harmonium.engines.flower.messages import fetched
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


class _Header:
    """Says the secret with every request."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self._secret
        return call_next(context)  # type: ignore[no-any-return]


class Grid(HttpGrid):
    """Flower's grid, for a SuperLink that wants to hear a secret."""

    def __init__(self, address: str, secret: str, token: str) -> None:
        super().__init__(address, insecure=True, token=token)
        self._secret = secret

    def _connect(self) -> None:
        token = RuntimeTokenHttpInterceptor(token=self._token)
        self._client = _client(RuntimeHttpClient, self._addr, self._secret, token)

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Message | None]]:
        """What has come, by ticket; None where its content never did."""
        client, run = self._runtime_client, self.run.run_id
        got = client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
        for proto, tree in zip(got.messages_list, got.message_object_trees, strict=True):
            ticket = proto.metadata.reply_to_message_id
            try:
                yield ticket, fetched(client, self.node, run, tree)
            except (ObjectPullError, ValueError, TypeError, LookupError):
                yield ticket, None


def _client(kind: Any, address: str, secret: str, *more: Any) -> Any:
    version = RuntimeVersionHttpInterceptor(component_name="flwr-serverapp")
    return kind.from_server_address(address, True, None, [version, _Header(secret), *more])


class Link:
    """The server's hold on its SuperLink: a process that is started, watched and started again."""

    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        certificate: tuple[Path, Path] | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        """Keep the database in `folder`, or in memory; listen for sites at `host` and `port`."""
        make_folder(folder)
        self.settings = LinkSettings(
            database=FLWR_IN_MEMORY_DB_NAME if forgets else str(folder / "flower.db"),
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
        self._looking: Any = None

    def __enter__(self) -> Link:
        self._await_port()
        self._start()
        threading.Thread(target=self._watch, daemon=True).start()
        self._await_control()
        return self

    def __exit__(self, *why: object) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError, EngineError):
            self._finish_run(SubStatus.COMPLETED if why[0] is None else SubStatus.STOPPED)
        if self._looking is not None:
            self._looking.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self.settings.private_port}"

    def _start(self) -> None:
        command = [sys.executable, "-m", "harmonium.engines.flower.superlink"]
        with (self._folder / "link.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        told = json.dumps(asdict(self.settings)).encode()
        if self._process.stdin is not None:
            with suppress(OSError), self._process.stdin as stream:  # else it ended at once
                stream.write(told)

    def _watch(self) -> None:
        """Start the SuperLink again when it dies; its database has all that was under way."""
        while not self._ended.wait(0.5):
            if self._process is not None and self._process.poll() is not None:
                self._start()

    def _await_port(self) -> None:
        """Wait for the port: the SuperLink of a server that was killed holds it a moment longer."""
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
                        f"cannot listen at {host}:{port}: {error.strerror}. Stop what listens "
                        "there, or name another place with --listen HOST:PORT"
                    ) from None
            time.sleep(0.1)

    def _await_control(self) -> None:
        """Wait until it answers; one that cannot start is started again for a while."""
        began, code = time.monotonic(), None
        while (waited := time.monotonic() - began) < START:
            with suppress(httpx.HTTPError):
                self._nodes()
                return
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                if waited > START / 6:
                    break
            time.sleep(0.1)
        words = (self._folder / "link.log").read_text(errors="replace").splitlines()[-1:]
        ended = "did not start" if code is None else f"ended at once (exit code {code})"
        raise EngineError(
            f"the SuperLink {ended}: {''.join(words)} See {self._folder / 'link.log'}"
        )

    @contextmanager
    def _control(self) -> Iterator[Any]:
        client = _client(ControlHttpClient, self._address, self.settings.secret)
        try:
            yield client
        finally:
            client.close()

    def _nodes(self) -> list[Any]:
        with self._control() as control:
            return list(control.ListNodes(ListNodesRequest()).nodes_info)

    def online(self) -> list[Any]:
        """What Flower says of each node that is connected now; asked often, by one client."""
        if self._looking is None:
            self._looking = _client(ControlHttpClient, self._address, self.settings.secret)
        found = self._looking.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in found if node.status == NodeStatus.ONLINE]

    def admit(self, keys: Mapping[ClientId, ec.EllipticCurvePublicKey]) -> dict[ClientId, int]:
        """Let these sites in, and no others; the number of the node by which each is reached."""
        with self._control() as control:
            return {
                client: control.RegisterNode(
                    RegisterNodeRequest(public_key=public_key_to_bytes(key))
                ).node_id
                for client, key in keys.items()
            }

    def grid(self, *, anew: bool = False) -> Grid:
        """The way to the nodes: a run of which we are the one executor."""
        if self._grid is None or anew:
            self._grid = self._begin_run()
        return self._grid

    def _begin_run(self) -> Grid:
        content, _ = build_fab_from_files({"pyproject.toml": NO_CODE})
        fab = Fab(digest_of(content), content, {})
        with self._control() as control:
            run = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        executor = _client(RuntimeHttpClient, self._address, self.settings.secret)
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        for _ in range(100):
            got = executor.AcquireTask(wanted)
            if got.token and got.task.run_id == run:
                break
            time.sleep(0.1)
        else:
            raise EngineError("the SuperLink does not hand out its run")
        executor.close()
        grid = Grid(self._address, self.settings.secret, got.token)
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        threading.Thread(target=self._beat, args=(grid,), daemon=True).start()
        return grid

    def _beat(self, grid: Grid) -> None:
        while not self._ended.wait(HEARTBEAT) and self._grid in (None, grid):
            with suppress(httpx.HTTPError):
                grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def _finish_run(self, status: str) -> None:
        if self._grid is not None:
            output = PushTaskOutputRequest(sub_status=status, details="")
            self._grid._runtime_client.PushTaskOutput(output)


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
