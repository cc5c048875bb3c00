"""The base of message filters: five hooks, each of which passes its message on by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harmonium.core.types import ClientId
from harmonium.federation.wire import Ask, Exchange, Folded

if TYPE_CHECKING:
    from harmonium.federation.fold import Tally
    from harmonium.federation.method import Method
    from harmonium.learning.client import Client

Message = Mapping[str, Any]  # values by field


@dataclass(frozen=True)
class Asked:
    """What the server knows about one client's reply before it looks at it."""

    client: ClientId
    examples: int  # the client's registered number of examples
    down: Message  # what the plan asked with
    sent: Message  # the same as it left the server, after all filters
    tally: Tally  # the replies counted before this one


@dataclass(frozen=True)
class Filter:
    """One step that the messages of an exchange pass through, at the server and at the client.

    A hook returns the message to pass on, or raises WireError to refuse it. Hooks do not change the
    mapping that they are given.
    """

    method: Method
    exchange: Exchange

    def outgoing(self, ask: Ask) -> Ask:
        """Server: an ask on its way to the clients."""
        return ask

    def received(self, down: Message) -> Message:
        """Client: a message on its way to the handler."""
        return down

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Client: the handler's reply on its way to the server; `down` is what it replies to."""
        return up

    def arrived(self, asked: Asked, up: Message) -> Message:
        """Server: one client's reply on its way to the tally."""
        return up

    def folded(
        self, folded: Folded, examples: Mapping[ClientId, int], turn: tuple[int, int]
    ) -> Folded:
        """Server: the combined replies on their way to the plan.

        Args:
            folded: the combined replies of at least one client.
            examples: registered number of examples of every client.
            turn: the round, and the number of the ask in it.
        """
        return folded


@dataclass(frozen=True)
class Chain(Filter):
    """Several filters as one: messages leave in the order of the list and arrive in reverse."""

    filters: tuple[Filter, ...]

    def outgoing(self, ask: Ask) -> Ask:
        """From the plan to the wire."""
        for one in self.filters:
            ask = one.outgoing(ask)
        return ask

    def received(self, down: Message) -> Message:
        """From the wire to the handler."""
        for one in reversed(self.filters):
            down = one.received(down)
        return down

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """From the handler to the wire."""
        for one in self.filters:
            up = one.reply(client, down, up)
        return up

    def arrived(self, asked: Asked, up: Message) -> Message:
        """From the wire to the tally."""
        for one in reversed(self.filters):
            up = one.arrived(asked, up)
        return up

    def folded(
        self, folded: Folded, examples: Mapping[ClientId, int], turn: tuple[int, int]
    ) -> Folded:
        """From the tally to the plan."""
        for one in reversed(self.filters):
            folded = one.folded(folded, examples, turn)
        return folded
