"""A SuperLink and one node for this process, for checks that both engines agree.

Messages, seals, states and roll-back are those of a real federation; only the node is a thread of
this process, so that many short runs cost one start.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.engines.flower.link import Link, free_port
from harmonium.engines.flower.messenger import FlowerMessenger
from harmonium.engines.flower.node import answer_messages
from harmonium.engines.remote import RemoteEngine, RemoteSite, Waits
from harmonium.engines.runtime import ClientRuntime
from harmonium.engines.seal import unverified_header
from harmonium.recipe.schema import Recipe
from harmonium.sites.plan import frame_of
from harmonium.sites.site import Identity, Site


class FlowerPair:
    """A context manager; every `engine` is a separate run over the same link."""

    def __init__(self) -> None:
        """Make the keys; `with` starts the link and the node."""
        self._stack, self._ended = ExitStack(), threading.Event()
        self._server = ec.generate_private_key(ec.SECP384R1())
        self._node = ec.generate_private_key(ec.SECP384R1())
        self._about = {"federation": secrets.token_hex(16)}
        self._sites: dict[tuple[str, int], Site] = {}
        self.asked = 0  # messages that the node has answered

    def __enter__(self) -> FlowerPair:
        """Start the link and the node."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        link = Link(folder, "127.0.0.1", port, in_memory=True)  # much faster
        self._link = self._stack.enter_context(link)
        self._number = self._link.admit({0: self._node.public_key()})[0]
        arguments = (self._answer, f"127.0.0.1:{port}", self._node, None, _quiet, self._ended)
        thread = threading.Thread(target=answer_messages, args=arguments, daemon=True)
        thread.start()
        self._stack.callback(thread.join, 10.0)
        self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *why: object) -> None:
        """Stop both."""
        self._stack.close()

    def engine(self, recipe: Recipe, runtime: ClientRuntime, folder: Path) -> RemoteEngine:
        """An engine whose clients answer over Flower's messages."""
        run = secrets.token_hex(16)
        keys = {c: ec.generate_private_key(ec.SECP384R1()) for c in range(len(runtime.indices))}
        for client, key in keys.items():
            identity = Identity(self._about["federation"], client, key, self._server.public_key())
            self._sites[run, client] = Site(identity, folder / f"site-{client}", _always(runtime))
        members = {
            client: RemoteSite(f"client {client}", client, self._number, key.public_key())
            for client, key in keys.items()
        }
        return RemoteEngine(
            FlowerMessenger(self._link),
            members,
            self._server,
            {**self._about, "run": run, "plan": recipe.digest},
            frame_of(recipe),
            Waits(),
            read_state=runtime.read_state,
        )

    def _answer(self, sealed: bytes, bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
        header = unverified_header(sealed)  # its site checks the rest
        self.asked += 1
        return self._sites[header["run"], header["client"]].answer(sealed, bodies)


def _always(runtime: ClientRuntime) -> Callable[..., ClientRuntime]:
    return lambda *_: runtime


def _quiet(text: str) -> None:
    """Ignore the notes of the node."""
