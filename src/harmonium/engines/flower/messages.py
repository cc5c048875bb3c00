"""Sealed letters in Flower's records, and the fetching of a message whose content may be late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
)

from harmonium.core.errors import WireError
from harmonium.engines.flower import CHUNK

INLINE = 64 << 10  # bytes of a body that is not worth a request of its own
SOON, LATER = 0.05, 1.0  # seconds between two looks for something: at first, and after a while


def records(sealed: bytes, bodies: Sequence[bytes], *, together: int = INLINE) -> RecordDict:
    """An envelope and its bodies as Flower's records.

    Every record is an object of its own, and every object costs a request or two at either end. So
    small bodies travel in the envelope's record. A body of more than `together` bytes has its own,
    which goes to the SuperLink once for all nodes; a large one is an array, which goes in chunks.
    """
    small = {str(n): body for n, body in enumerate(bodies) if len(body) <= together}
    found: dict[str, Any] = {"letter": ConfigRecord({"seal": sealed, **small})}
    for number, body in enumerate(bodies):
        if len(body) > together:
            found[str(number)] = _record(body)
    return RecordDict(found)


def fetched(client: Any, node: Node, run: int, tree: Any) -> Message:
    """The whole of a message whose content may still be on its way.

    Flower's own loop waits a second before it looks again for an object that is not there yet.
    """
    contents = pull_objects(
        [one.object_id for one in iterate_object_tree(tree)],
        make_pull_object_fn_protobuf(client.PullObject, node, run),
        initial_backoff=SOON,
        backoff_cap=LATER,
    )
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(
        tree.object_id
    )
    message = inflate_object_from_contents(tree.object_id, contents)
    if not isinstance(message, Message):
        raise TypeError(type(message).__name__)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _record(body: bytes) -> ConfigRecord | ArrayRecord:
    if len(body) <= CHUNK:
        return ConfigRecord({"": body})
    return ArrayRecord({"": Array("uint8", (len(body),), "harmonium.frame", body)})


def unpack(content: RecordDict) -> tuple[bytes, list[bytes]]:
    """The envelope and its bodies; refuses what is no message of Harmonium's."""
    try:
        held: dict[str, Any] = dict(content["letter"])
        sealed = held.pop("seal")
        for name in content:
            if name != "letter":
                value: Any = content[name][""]
                held[name] = value.data if isinstance(value, Array) else value
        bodies = [held.pop(str(number)) for number in range(len(held))]
        if not all(isinstance(value, bytes) for value in (sealed, *bodies)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise WireError("the message is not one of Harmonium's") from None
    return sealed, bodies
