"""Guarded fields leave a client with the noise that the method states, and with no other."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from harmonium.core.errors import WireError
from harmonium.federation import spending
from harmonium.federation.filters.base import Filter, Message
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.learning.client import Client


class GuardedFields(Filter):
    """Refuses a reply whose guarded fields have no noise, or noise that was not announced."""

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Compare what was released with the declaration and with the method's `costs`."""
        where = f"{called(self.method)}.{self.exchange.name}"
        for name, field in self.exchange.up.items():
            if field.guarded and not client.was_released(name, up[name]):
                raise WireError(
                    f"{where} declares `{name}` guarded but sends it without noise. Send what "
                    f'client.release("{name}", ...) returns, unchanged.'
                )
        expected = spending.paid_here(self.method, self.exchange.name, len(client.examples))
        if why := spending.fault(expected, [asdict(release) for release in client.releases]):
            raise WireError(f"{where} {why}. Declare in `costs` what client.release does.")
        return up
