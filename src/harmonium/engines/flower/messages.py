"""Sealed messages in Flower's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from harmonium.core.errors import WireError
from harmonium.engines.flower import CHUNK

INLINE = 64 << 10  # bytes up to which a body gets no record of its own


def records(sealed: bytes, bodies: Sequence[bytes], *, inline: int = INLINE) -> RecordDict:
    """An envelope and its bodies as Flower's records.

    Every record is an object of its own, and every object costs a request or two at either end. So
    small bodies travel in the envelope's record. A body of more than `inline` bytes has its own,
    which goes to the SuperLink once for all nodes; a large one is an array, sent in chunks.
    """
    small = {str(n): body for n, body in enumerate(bodies) if len(body) <= inline}
    contents: dict[str, Any] = {"letter": ConfigRecord({"seal": sealed, **small})}
    for number, body in enumerate(bodies):
        if len(body) > inline:
            contents[str(number)] = _record(body)
    return RecordDict(contents)


def _record(body: bytes) -> ConfigRecord | ArrayRecord:
    if len(body) <= CHUNK:
        return ConfigRecord({"": body})
    return ArrayRecord({"": Array("uint8", (len(body),), "harmonium.frame", body)})


def unpack(content: RecordDict) -> tuple[bytes, list[bytes]]:
    """The envelope and its bodies; a message that is not Harmonium's is refused."""
    try:
        fields: dict[str, Any] = dict(content["letter"])
        sealed = fields.pop("seal")
        for name in content:
            if name != "letter":
                value: Any = content[name][""]
                fields[name] = value.data if isinstance(value, Array) else value
        bodies = [fields.pop(str(number)) for number in range(len(fields))]
        if not all(isinstance(value, bytes) for value in (sealed, *bodies)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise WireError("the message does not come from Harmonium") from None
    return sealed, bodies
