"""What an answer must look like before it is counted.

A client may send anything. Its answer must carry the declared fields and no others, each of its
kind (`wire.check`), its shape and a sane size (`Field.shape`, `Tally.refusal`), and whatever
else its method can say of an honest answer (`Method.reply_fault`). All that is checked before any
of it is added up. A client whose answer fails, for whatever reason, is refused by name, and the
round goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harmonium.core.codec import Limits
from harmonium.core.errors import ConfigError, WireError
from harmonium.federation.wire import STEPS, Exchange, Field, Size
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.federation.method import Method

WIDEST = 16  # bytes that one number takes at most on its way, under masks as well
ALLOWANCE = 2**16  # bytes for what surrounds the fields of an answer: names, reasons, releases
NAMED = 512  # bytes for the name and shape of one tensor
PER_CLIENT = 2**12  # bytes for what secure aggregation says to one client of another


def refuse_shapes(method: Method, declared: Exchange, examples: int, up: Mapping[str, Any]) -> None:
    """Refuse an answer whose tensors do not have their declared shapes.

    Args:
        method: whose exchange it is.
        declared: the exchange.
        examples: the client's registered number of examples.
        up: the answer, which has the declared fields.
    """
    for name, part in declared.up.items():
        value = up[name]
        if part.shape is None or not isinstance(value, Tensor):
            continue
        wanted = part.shape(method, examples)
        if not _fits(tuple(value.shape), wanted):
            raise WireError(f"`{name}` has shape {tuple(value.shape)}, not {_words(wanted)}")
        if value.dtype != part.dtype:
            raise WireError(f"`{name}` is {value.dtype}, not {part.dtype}")


def limits(method: Method, step: str, examples: int, clients: int) -> Limits:
    """The most bytes that an answer can have; a larger one is refused without being unpacked.

    Args:
        method: whose exchange it is.
        step: what was asked for, be it a step of secure aggregation.
        examples: the client's registered number of examples.
        clients: how many take part, as secure aggregation says something of each.
    """
    declared = method.exchanges().get(step)
    fields = declared.up.values() if declared is not None else ()
    tensors, numbers = 0, 0
    for part in fields:
        some, many = _extent(method, part, examples)
        tensors, numbers = tensors + some, numbers + many
    around = ALLOWANCE + PER_CLIENT * clients
    if declared is None and step not in STEPS:  # a greeting or a farewell
        around = ALLOWANCE
    header = around + NAMED * tensors
    return Limits(header + WIDEST * numbers, header)


def check_declared(method: Method) -> None:
    """Refuse a method for a real federation if a tensor that clients send has no declared shape."""
    for step, one in method.exchanges().items():
        for name, part in one.up.items():
            if part.kind != "scalar" and part.fold != "parts" and part.shape is None:
                raise ConfigError(
                    f"{called(method)}.{step} does not declare the shape of `{name}`, so that the "
                    "server cannot tell an honest answer from another: write, for instance, "
                    f"`{name}=statistic(shape=lambda method, examples: (128,))` above `{step}`"
                )


def _extent(method: Method, part: Field, examples: int) -> tuple[int, int]:
    """The most tensors and numbers of a field; of an undeclared shape, one for each weight."""
    layouts = method.blueprint.layouts()
    if part.fold == "parts":
        sizes = [max(1, math.prod(slot.shape)) for slot in layouts[part.of].values()]
        return 2 * len(sizes), 2 * sum(sizes)  # in 8 bits each tensor comes with scales of its rows
    if part.kind == "scalar":
        return 0, 1
    if part.shape is None:
        return 1, examples * sum(math.prod(slot.shape) for slot in layouts["model"].values())
    return 1, math.prod(_most(size) for size in part.shape(method, examples))


def _fits(shape: tuple[int, ...], wanted: tuple[Size, ...]) -> bool:
    """Whether a shape is as it was declared.

    >>> _fits((3, 128), (range(9), 128)), _fits((9, 128), (range(9), 128))
    (True, False)
    """
    return len(shape) == len(wanted) and all(
        length in size if isinstance(size, range) else length == size
        for length, size in zip(shape, wanted, strict=True)
    )


def _most(size: Size) -> int:
    return max(size, default=0) if isinstance(size, range) else size


def _words(wanted: tuple[Size, ...]) -> str:
    """A declared shape in words.

    >>> _words((range(9), 128))
    '(0 to 8, 128)'
    """
    said = [f"{min(s)} to {max(s)}" if isinstance(s, range) and s else str(s) for s in wanted]
    return f"({', '.join(said)})"
