"""Messages carry exactly the fields that their exchange declares, each of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harmonium.federation.filters.base import Asked, Filter, Message
from harmonium.federation.wire import Ask, check
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.learning.client import Client


class DeclaredFields(Filter):
    """Refuses a message with other fields than declared, wherever it is."""

    def outgoing(self, ask: Ask) -> Ask:
        """Refuse an ask whose plan sends something else to a client."""
        for client in ask.to:
            self.received(ask.message_to(client))
        return ask

    def received(self, down: Message) -> Message:
        """Refuse a message that does not hold what the handler receives."""
        check(called(self.method), self.exchange, "down", down)
        return down

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Refuse a reply of a handler that does not hold what it says it sends."""
        check(called(self.method), self.exchange, "up", up)
        return up

    def arrived(self, asked: Asked, up: Message) -> Message:
        """Refuse a reply of a client that does not hold what its handler sends."""
        check(called(self.method), self.exchange, "up", up)
        return up
