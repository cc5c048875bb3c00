"""Which version of its state each client has: references that move only with a counted reply.

The state itself is stored where the client runs. A lost reply does not move the reference, so the
next task starts from the version before: rolling back needs no message.
"""

from __future__ import annotations

from dataclasses import asdict

from harmonium.core import codec
from harmonium.core.types import ClientId
from harmonium.engines.runtime import StateRef
from harmonium.federation.driver import Reply


class StateVersions:
    """The part of an engine that accepts, snapshots and restores state versions."""

    def __init__(self) -> None:
        """Start without a state for any client."""
        self._states: dict[ClientId, StateRef] = {}

    def accept(self, reply: Reply) -> None:
        """Make the new state of a counted reply the client's current one."""
        if reply.state is not None:
            self._states[reply.client] = reply.state

    def snapshot(self) -> dict[int, dict[str, str]]:
        """The current state version of each client."""
        return {client: asdict(self._states[client]) for client in sorted(self._states)}

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the versions of a checkpoint."""
        self._states = {int(client): StateRef(**version) for client, version in snapshot.items()}
