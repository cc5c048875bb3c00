"""The ledger: a record of all messages between server and clients, one line per client and ask.

It has no times and no host names, so two runs of the same recipe have the same ledger to the byte,
also after a crash.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harmonium.core import codec
from harmonium.federation.wire import is_measuring


@dataclass
class LedgerEntry:
    """One ask to one client: what was sent each way, and the outcome."""

    round: int
    ask: int
    step: str
    client: int
    outcome: Literal["answered", "no answer", "refused"]
    why: str = ""
    down: dict[str, int] = field(default_factory=dict)  # bytes by field
    up: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # way, field, part
    releases: list[Mapping[str, Any]] = field(default_factory=list)
    of: str = ""  # the step that an ask of secure aggregation is about
    note: str = ""  # in plain words, e.g. that rows of single images left the client


class Ledger:
    """Entries since the last checkpoint, with running totals."""

    def __init__(self) -> None:
        """Start empty."""
        self.lines: list[str] = []
        self.totals: Counter[str] = Counter()
        self.answered: set[int] = set()
        self.missing: set[int] = set()
        self.last_reason = ""

    def write(self, entry: LedgerEntry, *, aside: bool = False) -> None:
        """Add an entry.

        Args:
            entry: what was sent and the outcome. Bytes of asks that only measure are counted
                separately, because no method needs them.
            aside: whether it is not the method's own ask; answers to it are not participation.
        """
        record = {k: v for k, v in asdict(entry).items() if v != "" and v != []}
        record["parts"] = {way: entry.parts[way] for way in sorted(entry.parts) if entry.parts[way]}
        if not record["parts"]:
            del record["parts"]
        self.lines.append(json.dumps(record))
        if entry.why:
            self.last_reason = f"Client {entry.client}: {entry.why}."
        if is_measuring(entry.of or entry.step, entry.round):
            self.totals["measuring"] += sum(entry.down.values()) + sum(entry.up.values())
            return
        self.totals["down"] += sum(entry.down.values())
        self.totals["up"] += sum(entry.up.values())
        if entry.outcome != "answered":
            self.missing.add(entry.client)
        elif not aside:
            self.answered.add(entry.client)

    def take(self) -> list[str]:
        """Return the lines written so far and start empty."""
        lines = self.lines
        self.__init__()  # type: ignore[misc]
        return lines


def sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by field."""
    return {name: codec.payload_bytes(value) for name, value in values.items()}


def by_part(values: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes by field and part, for fields that hold tensors of more than one part.

    >>> by_part({"model": {"encoder.a": 1, "encoder.b": 2, "head.a": 3}, "loss": 0.5})
    {'model': {'encoder': 16, 'head': 8}}
    """
    parts = {}
    for name, value in values.items():
        if not isinstance(value, Mapping) or not all("." in str(key) for key in value):
            continue
        counts = Counter[str]()
        for key, tensor in value.items():
            counts[str(key).partition(".")[0]] += codec.payload_bytes(tensor)
        if len(counts) > 1:
            parts[name] = dict(counts)
    return parts
