"""The server's messenger: sealed messages travel as Flower's messages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import httpx
from flwr.app import Message

from harmonium.core.errors import WireError
from harmonium.engines.flower.internals import Grid
from harmonium.engines.flower.link import Link
from harmonium.engines.flower.messages import records, unpack
from harmonium.engines.remote import Answer, SealedMessage

BATCH = 8  # replies pulled together
_FAULTS = {  # by Flower's codes
    3: "the ask expired before it was answered",
    5: "its node is gone",
    8: "its process died",
}


class FlowerMessenger:
    """Carries sealed messages as Flower's messages."""

    def __init__(self, link: Link) -> None:
        """Send over a link."""
        self._link = link

    def push(self, messages: Sequence[SealedMessage]) -> list[str | None]:
        """Push messages; equal bodies are packed once and travel to the SuperLink once."""
        grid = self._link.grid()
        outgoing = []
        for message in messages:
            content = records(message.sealed, message.bodies)
            outgoing.append(Message(content, message.node, message.kind, ttl=message.seconds))
        try:
            return list(grid.push_messages(outgoing)) or [None] * len(outgoing)
        except httpx.HTTPError:
            self._recover(grid)
            return [None] * len(outgoing)

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """Pull replies, a few at a time, so that memory does not grow with the cohort."""
        waiting, grid = list(tickets), self._link.grid()
        for start in range(0, len(waiting), BATCH):
            batch = waiting[start : start + BATCH]
            try:
                for ticket, reply in grid.replies(batch):
                    yield ticket, _content(reply)
            except httpx.HTTPError:
                self._recover(grid)
                yield from (
                    (ticket, "the SuperLink could not be reached") for ticket in waiting[start:]
                )
                return

    def online(self) -> dict[int, str]:
        """The nodes that are connected, with the time when each connected."""
        grid = self._link.grid()
        try:
            return self._link.online()
        except httpx.HTTPError:
            self._recover(grid)
            return {}

    def _recover(self, grid: Grid) -> None:
        """Wait for the link after a failure; if our Flower run has ended, start another."""
        time.sleep(1.0)
        try:
            grid.get_node_ids()
        except httpx.HTTPStatusError:  # the link is up, but our run has ended there
            self._link.grid(new_run=True)
        except httpx.HTTPError:
            return


def _content(reply: Message | None) -> Answer | str:
    """The answer in a reply, or why there is none."""
    if reply is None:
        return "its answer is incomplete"
    if reply.has_error():
        return _FAULTS.get(reply.error.code, f"its node reports: {reply.error.reason}")
    try:
        return unpack(reply.content)
    except WireError as error:
        return str(error)
