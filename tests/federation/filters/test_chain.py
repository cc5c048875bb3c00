"""The order of the message filters: the same list out and, in reverse, in."""

from collections.abc import Mapping
from typing import Any

import pytest

from harmonium.core.errors import WireError
from harmonium.core.types import ClientId
from harmonium.federation.filters import ORDER, Asked, Chain, Filter, filters_of
from harmonium.federation.filters.declared_fields import DeclaredFields
from harmonium.federation.method import Method
from harmonium.federation.wire import Ask, Folded
from harmonium.learning.client import Client

METHOD = Method()
TRAIN = METHOD.exchanges()["train"]
SEEN: list[str] = []


class Named(Filter):
    """A filter that says when it is passed."""

    def _note(self, hook: str) -> None:
        SEEN.append(f"{hook} {type(self).__name__}")

    def outgoing(self, ask: Ask) -> Ask:
        self._note("outgoing")
        return ask

    def received(self, down: Mapping[str, Any]) -> Mapping[str, Any]:
        self._note("received")
        return down

    def reply(
        self, client: Client, down: Mapping[str, Any], up: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        self._note("reply")
        return up

    def arrived(self, asked: Asked, up: Mapping[str, Any]) -> Mapping[str, Any]:
        self._note("arrived")
        return up

    def folded(
        self, folded: Folded, examples: Mapping[ClientId, int], turn: tuple[int, int]
    ) -> Folded:
        self._note("folded")
        return folded


class Inner(Named): ...


class Outer(Named): ...


def test_messages_leave_in_order_and_arrive_in_reverse() -> None:
    SEEN.clear()
    chain = Chain(METHOD, TRAIN, (Inner(METHOD, TRAIN), Outer(METHOD, TRAIN)))
    none: Any = None
    chain.outgoing(Ask("train", []))
    chain.received({})
    chain.reply(none, {}, {})
    chain.arrived(none, {})
    chain.folded(Folded(ids=[]), {}, (1, 0))
    hooks = {"outgoing": "Inner Outer", "received": "Outer Inner", "reply": "Inner Outer"}
    hooks |= {"arrived": "Outer Inner", "folded": "Outer Inner"}
    assert [f"{hook} {name}" for hook, names in hooks.items() for name in names.split()] == SEEN


def test_a_filter_leaves_messages_alone_unless_it_says_otherwise() -> None:
    plain, none, message = Filter(METHOD, TRAIN), None, {"model": {}}
    ask, folded = Ask("train", []), Folded(ids=[])
    assert plain.outgoing(ask) is ask and plain.folded(folded, {}, (1, 0)) is folded
    assert plain.received(message) is message
    client: Any = none
    assert plain.reply(client, {}, message) is message and plain.arrived(client, message) is message


def test_every_filter_meets_messages_with_their_declared_fields_only() -> None:
    """The check stands next to the wire, and before all that changes a reply."""
    changing = [kind for kind in ORDER if kind.reply not in (Filter.reply, DeclaredFields.reply)]
    assert ORDER[-1] is DeclaredFields
    assert ORDER.index(DeclaredFields) < min(map(ORDER.index, changing))
    filters, client = filters_of(METHOD, TRAIN), None
    missing: Any = client
    for step in (
        lambda: filters.outgoing(Ask("train", [0], {"secret": 1.0})),
        lambda: filters.received({"secret": 1.0}),
        lambda: filters.reply(missing, {}, {"secret": 1.0}),
        lambda: filters.arrived(missing, {"secret": 1.0}),
    ):
        with pytest.raises(WireError, match="`secret`"):
            step()
