"""Checks of replies on arrival, and the largest reply that the server unpacks at all.

A client may send anything. Its reply must carry the declared fields and no others, each of its kind
(`DeclaredFields`), with the declared shapes and values of a sane size (`Field.shape`,
`Tally.refusal`), and must pass what its method knows of an honest reply (`Method.reply_fault`). All
of it is checked before any of it is added up. A client whose reply fails is refused by name, and
the round continues without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from harmonium.core.codec import Limits
from harmonium.core.errors import ConfigError, WireError
from harmonium.federation.filters.base import Asked, Filter, Message
from harmonium.federation.wire import STEPS, Field, Size
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.federation.method import Method

WIDEST = 16  # most bytes that one number takes in a message, also under masks
ALLOWANCE = 2**16  # bytes of a reply besides its fields: names, reasons, releases
NAMED = 512  # bytes for the name and shape of one tensor
PER_CLIENT = 2**12  # bytes that secure aggregation sends to one client about another


class ValueChecks(Filter):
    """Refuses a reply whose values no honest client would send."""

    def arrived(self, asked: Asked, up: Message) -> Message:
        """Check shapes, then ranges and what the tally needs, then what the method knows."""
        self._check_shapes(asked.examples, up)
        why = asked.tally.refusal(asked.client, up)
        if why := why or self.method.reply_fault(
            self.exchange.name, asked.down, up, asked.examples
        ):
            raise WireError(why)
        return up

    def _check_shapes(self, examples: int, up: Message) -> None:
        """Refuse tensors that do not have the declared shape and type."""
        for name, field in self.exchange.up.items():
            value = up[name]
            if field.shape is None or not isinstance(value, Tensor):
                continue
            wanted = field.shape(self.method, examples)
            if not _fits(tuple(value.shape), wanted):
                raise WireError(f"`{name}` has shape {tuple(value.shape)}, not {_words(wanted)}")
            if value.dtype != field.dtype:
                raise WireError(f"`{name}` is {value.dtype}, not {field.dtype}")


def limits(method: Method, step: str, examples: int, clients: int) -> Limits:
    """The most bytes that a reply can have; a larger one is refused without being unpacked.

    Args:
        method: whose exchange it is.
        step: what was asked for: an exchange, or a step of secure aggregation.
        examples: the client's registered number of examples.
        clients: how many take part, since secure aggregation sends something about each.
    """
    declared = method.exchanges().get(step)
    fields = declared.up.values() if declared is not None else ()
    tensors, numbers = 0, 0
    for field in fields:
        more_tensors, more_numbers = _extent(method, field, examples)
        tensors, numbers = tensors + more_tensors, numbers + more_numbers
    around = ALLOWANCE + PER_CLIENT * clients
    if declared is None and step not in STEPS:  # the handshake, or the end of a run
        around = ALLOWANCE
    header = around + NAMED * tensors
    return Limits(header + WIDEST * numbers, header)


def check_declared(method: Method) -> None:
    """Refuse a method for a real federation if a tensor that clients send has no declared shape."""
    for step, exchange in method.exchanges().items():
        for name, field in exchange.up.items():
            if field.kind != "scalar" and field.fold != "parts" and field.shape is None:
                raise ConfigError(
                    f"{called(method)}.{step} does not declare the shape of `{name}`, so the "
                    "server cannot check what clients send: write, for instance, "
                    f"`{name}=statistic(shape=lambda method, examples: (128,))` above `{step}`"
                )


def _extent(method: Method, field: Field, examples: int) -> tuple[int, int]:
    """The most tensors and numbers in a field; without a shape, one number for each weight."""
    layouts = method.blueprint.layouts()
    if field.fold == "parts":
        sizes = [max(1, math.prod(slot.shape)) for slot in layouts[field.of].values()]
        return 2 * len(sizes), 2 * sum(sizes)  # in 8 bits each tensor comes with scales of its rows
    if field.kind == "scalar":
        return 0, 1
    if field.shape is None:
        return 1, examples * sum(math.prod(slot.shape) for slot in layouts["model"].values())
    return 1, math.prod(_most(size) for size in field.shape(method, examples))


def _fits(shape: tuple[int, ...], wanted: tuple[Size, ...]) -> bool:
    """Whether a shape is the declared one.

    >>> _fits((3, 128), (range(9), 128)), _fits((9, 128), (range(9), 128))
    (True, False)
    """
    return len(shape) == len(wanted) and all(
        length in size if isinstance(size, range) else length == size
        for length, size in zip(shape, wanted, strict=True)
    )


def _most(size: Size) -> int:
    """The greatest length that a declared size allows."""
    return max(size, default=0) if isinstance(size, range) else size


def _words(wanted: tuple[Size, ...]) -> str:
    """A declared shape in words.

    >>> _words((range(9), 128))
    '(0 to 8, 128)'
    """
    sizes = [f"{min(s)} to {max(s)}" if isinstance(s, range) and s else str(s) for s in wanted]
    return f"({', '.join(sizes)})"
