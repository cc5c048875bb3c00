"""Letters as Flower's messages: the server's side of the post."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import httpx
from flwr.app import Message

from harmonium.core.errors import WireError
from harmonium.engines.flower.internals import Grid
from harmonium.engines.flower.link import Link
from harmonium.engines.flower.messages import records, unpack
from harmonium.engines.remote import Answer, Letter

AT_ONCE = 8  # answers that are asked for together
_FAULTS = {  # by Flower's codes
    3: "the ask expired before it was answered",
    5: "its node is gone",
    8: "its process died",
}


class FlowerPost:
    """Letters as Flower's messages."""

    def __init__(self, link: Link) -> None:
        """Send over a link."""
        self._link = link

    def push(self, letters: Sequence[Letter]) -> list[str | None]:
        """Push messages; equal bodies are packed once and travel to the SuperLink once."""
        grid = self._link.grid()
        messages = []
        for letter in letters:
            content = records(letter.sealed, letter.bodies)
            messages.append(Message(content, letter.node, letter.kind, ttl=letter.seconds))
        try:
            return list(grid.push_messages(messages)) or [None] * len(messages)
        except httpx.HTTPError:
            self._again(grid)
            return [None] * len(messages)

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """Pull replies, a few at a time, so that memory does not grow with the cohort."""
        waiting, grid = list(tickets), self._link.grid()
        for start in range(0, len(waiting), AT_ONCE):
            some = waiting[start : start + AT_ONCE]
            try:
                for ticket, reply in grid.replies(some):
                    yield ticket, _came(reply)
            except httpx.HTTPError:
                self._again(grid)
                yield from ((ticket, "the SuperLink was gone") for ticket in waiting[start:])
                return

    def online(self) -> dict[int, str]:
        """The nodes that Flower hears of, with the time when each connected."""
        grid = self._link.grid()
        try:
            return self._link.online()
        except httpx.HTTPError:
            self._again(grid)
            return {}

    def _again(self, grid: Grid) -> None:
        """After a fault of the link: wait until it is back; if our run ended, begin another."""
        time.sleep(1.0)
        try:
            grid.get_node_ids()
        except httpx.HTTPStatusError:  # it is there, but does not know this run as running
            self._link.grid(anew=True)
        except httpx.HTTPError:
            return


def _came(reply: Message | None) -> Answer | str:
    if reply is None:
        return "its answer broke off"
    if reply.has_error():
        return _FAULTS.get(reply.error.code, f"its node reports: {reply.error.reason}")
    try:
        return unpack(reply.content)
    except WireError as error:
        return str(error)
