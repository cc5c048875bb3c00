"""Which version of its kept state each client has: references that move only with a counted reply.

The state itself lies where the client runs. A reply that was lost leaves its reference behind, so
the next task begins from the version before: rolling back needs no message of its own.
"""

from __future__ import annotations

from dataclasses import asdict

from harmonium.core import codec
from harmonium.core.types import ClientId
from harmonium.engines.runtime import StateRef
from harmonium.federation.driver import Reply


class States:
    """The part of an engine that accepts, snapshots and restores."""

    def __init__(self) -> None:
        """No client has kept anything yet."""
        self._states: dict[ClientId, StateRef] = {}

    def accept(self, reply: Reply) -> None:
        """The client's new state is now its state."""
        if reply.state is not None:
            self._states[reply.client] = reply.state

    def snapshot(self) -> dict[int, dict[str, str]]:
        """Which version of its state each client has."""
        return {client: asdict(self._states[client]) for client in sorted(self._states)}

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the versions of a checkpoint."""
        self._states = {int(client): StateRef(**held) for client, held in snapshot.items()}
