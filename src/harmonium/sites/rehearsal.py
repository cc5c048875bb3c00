"""A rehearsal: a whole federation on one machine, for a run whose images are all here.

`engine=flower` performs a run over a real SuperLink on loopback, with node processes that each
answer for some of the clients, under keys that exist as long as the run's process. Messages, seals,
states and roll-back are those of a real federation; the result has the same bits as on the local
engine. A node that dies is started again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import ConfigError, EngineError, WireError
from harmonium.core.types import ClientId
from harmonium.engines.remote import NEEDS_FLOWER, RemoteEngine, RemoteSite, Waits
from harmonium.engines.runtime import ClientRuntime
from harmonium.engines.seal import unverified_header
from harmonium.engines.workers import task_environment
from harmonium.federation.filters import arrival
from harmonium.recipe.schema import Recipe
from harmonium.sites.plan import frame_of
from harmonium.sites.site import Identity, Site

TRIES = 5  # how often one node may be started again


@contextmanager
def rehearsal(
    folder: Path, recipe: Recipe, runtime: ClientRuntime, nodes: int, note: Callable[[str], None]
) -> Iterator[RemoteEngine]:
    """An engine whose clients answer over Flower's messages, on this machine."""
    try:
        from harmonium.engines.flower.link import Link, free_port
        from harmonium.engines.flower.messenger import FlowerMessenger
    except ImportError:
        raise ConfigError(f"engine=flower: {NEEDS_FLOWER}") from None
    clients = range(len(runtime.indices))
    keys = {client: ec.generate_private_key(ec.SECP384R1()) for client in clients}
    server, port = ec.generate_private_key(ec.SECP384R1()), free_port()
    shares = [
        list(clients[start :: max(nodes, 1)]) for start in range(min(max(nodes, 1), len(keys)))
    ]
    about = {"federation": secrets.token_hex(16), "run": secrets.token_hex(16)}
    facts = {"folder": str(folder), "port": port, "server": _public(server), **about}
    place = folder / "flower"
    shutil.rmtree(place, ignore_errors=True)  # left by a killed run, whose keys are gone
    with Link(place, "127.0.0.1", port) as link:
        nodes_by_client = link.admit({share[0]: keys[share[0]].public_key() for share in shares})
        members = {
            client: RemoteSite(
                f"client {client}", client, nodes_by_client[share[0]], keys[client].public_key()
            )
            for share in shares
            for client in share
        }
        places = recipe.engine.devices
        identities = [
            {
                **facts,
                "device": str(places[number % len(places)]),
                "keys": {str(client): _private(keys[client]) for client in share},
            }
            for number, share in enumerate(shares)
        ]
        with _nodes(identities, place, note):
            yield RemoteEngine(
                FlowerMessenger(link),
                members,
                server,
                {**about, "plan": recipe.digest},
                frame_of(recipe),
                Waits(recipe.engine.deadline, recipe.engine.patience),
                read_state=runtime.read_state,
                note=note,
                limits=lambda step, client: arrival.limits(
                    runtime.method, step, len(runtime.indices[client]), len(clients)
                ),
            )
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _nodes(
    identities: list[dict[str, Any]], folder: Path, note: Callable[[str], None]
) -> Iterator[None]:
    """Node processes, watched: one that dies is started again."""
    with (folder / "nodes.log").open("ab") as log:
        running = {number: _start(facts, log) for number, facts in enumerate(identities)}
        ended = threading.Event()

        def watch() -> None:
            starts = dict.fromkeys(running, 1)
            while not ended.wait(0.5):
                for number, process in running.items():
                    if process.poll() is not None and starts[number] <= TRIES:
                        note(f"a node died ({process.returncode}) and is started again")
                        starts[number] += 1
                        running[number] = _start(identities[number], log)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            for process in running.values():
                process.kill()
                process.wait()


def _start(facts: Mapping[str, Any], log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harmonium.sites.rehearsal"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=task_environment()
    )
    if process.stdin is None:
        raise EngineError("a node has no input")
    process.stdin.write(json.dumps(facts).encode() + b"\n")
    process.stdin.flush()  # left open: it closes when the process that started the node is gone
    return process


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def _private(key: ec.EllipticCurvePrivateKey) -> str:
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, none).decode()


def main() -> None:
    """Run a node: read its identity from standard input, then answer until the input ends."""
    facts = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def exit_with_parent() -> None:
        sys.stdin.read()
        ended.set()
        time.sleep(5.0)  # a task under way is not waited for
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    import torch

    from harmonium.core.devices import select
    from harmonium.engines.flower.node import answer_messages
    from harmonium.runs.open_run import open_runtime

    folder = Path(facts["folder"])
    select(device := torch.device(facts["device"]))
    runtime = open_runtime(folder).on(device)
    server: Any = serialization.load_pem_public_key(facts["server"].encode())
    sites: dict[ClientId, Site] = {}
    keys: dict[ClientId, Any] = {}
    for text, pem in facts["keys"].items():
        client = int(text)
        keys[client] = serialization.load_pem_private_key(pem.encode(), None)
        identity = Identity(facts["federation"], client, keys[client], server)
        sites[client] = Site(identity, folder / "flower" / f"site-{client}", lambda *_: runtime)

    def answer(sealed: bytes, bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
        client = unverified_header(sealed)["client"]  # its site checks the rest
        if client not in sites:
            raise WireError(f"client {client} does not run on this node: it has {sorted(sites)}")
        return sites[client].answer(sealed, bodies)

    answer_messages(answer, f"127.0.0.1:{facts['port']}", keys[min(keys)], None, print, ended)


if __name__ == "__main__":
    main()
