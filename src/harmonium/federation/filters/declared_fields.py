"""Messages carry exactly the fields that their exchange declares, each of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harmonium.federation.filters.base import Asked, Filter, Message
from harmonium.federation.wire import Ask, check
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.learning.client import Client


class DeclaredFields(Filter):
    """Refuses a message with other fields than declared, at the server and at the client."""

    def outgoing(self, ask: Ask) -> Ask:
        """Refuse an ask that sends other fields to a client."""
        for client in ask.to:
            self.received(ask.message_to(client))
        return ask

    def received(self, down: Message) -> Message:
        """Refuse a message without the fields that the handler receives."""
        check(called(self.method), self.exchange, "down", down)
        return down

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Refuse a handler's reply without the fields that it declares."""
        check(called(self.method), self.exchange, "up", up)
        return up

    def arrived(self, asked: Asked, up: Message) -> Message:
        """Refuse a client's reply without the fields that its handler declares."""
        check(called(self.method), self.exchange, "up", up)
        return up
