"""The wire between server and clients: declared fields, and the asks that carry them.

An exchange is declared directly above the client handler that answers it. Undeclared values do not
leave a client: both engines check every message against the declaration, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor

from harmonium.core.errors import WireError, suggest
from harmonium.core.types import ClientId, Kind, Of, Weights

if TYPE_CHECKING:
    from harmonium.federation.method import Server

Value = Tensor | Weights | float | int
Fold = Literal["parts", "mean", "sum", "concat", "each"]  # how uploads combine

Size = int | range  # how long a tensor is along one axis: exactly, or any length of a range
Shape = Callable[[Any, int], tuple[Size, ...]]  # by the method and a client's number of examples

STEPS = ("mask_keys", "mask_shares", "unmask")  # asks of secure aggregation, around a method's own
MOST_GROWTH = 1e6  # largest ratio of an uploaded weight to the largest of the received model
MOST_VALUE = 1e12  # largest absolute value of any other number
SCORE = "appraise"  # the ask for the tuning score
LABELLED = ("can_evaluate", "measure_sums", "measure_counts")  # may read labels (evaluate.sites)
MEASURING = (  # no method's part
    SCORE,
    "measure_objective",
    "measure_gradient",
    "measure_moments",
    *LABELLED,
)
CALIBRATE = "calibrate"  # the ask for BatchNorm's statistics
MASKS = "masks"  # the value that goes down with the method's own ask under secure aggregation
EXAMPLES = "examples"  # the one weight that is not uploaded: the registered number of examples


@dataclass(frozen=True)
class Field:
    """One named value of a message: what it reveals and how the server combines it."""

    kind: Kind
    fold: Fold = "each"
    by: str | None = None  # what weights a mean: EXAMPLES, an uploaded scalar, or None (uniform)
    guarded: bool = False  # must come out of Client.release
    of: Of = "model"  # of a `parts` fold: which of the shared tensors
    # Of a tensor that is uploaded: its shape, and its type where the shape is declared.
    shape: Shape | None = field(default=None, compare=False, metadata={"plain": False})
    dtype: torch.dtype = field(default=torch.float32, metadata={"plain": False})


def weights(by: str | None = None, *, of: Of = "model") -> Field:
    """Parts of the model, combined by each part's own rule.

    `of="parameters"` is one tensor for each trained one, such as a control variate.
    """
    return Field("weights", "parts", by, of=of)


def statistic(
    fold: Fold = "mean",
    *,
    by: str | None = None,
    guarded: bool = False,
    of: Of = "model",
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
) -> Field:
    """A tensor computed over many examples, such as a centroid or a correlation matrix.

    `shape` says what an uploaded tensor looks like, by the method's settings and the client's
    registered number of examples: `lambda method, examples: (range(9), method.width)` is a table
    of at most 8 rows. A real federation runs only methods that declare it.
    """
    return Field("statistic", fold, by, guarded, of, shape, dtype)


def per_example(
    fold: Fold = "concat", *, guarded: bool = False, shape: Shape | None = None
) -> Field:
    """Rows that each belong to one example: the most revealing thing a method can send."""
    return Field("per_example", fold, guarded=guarded, shape=shape)


def scalar(fold: Fold = "each", *, by: str | None = None) -> Field:
    """A single number, such as a loss."""
    return Field("scalar", fold, by)


def public() -> Field:
    """Something that reveals nothing about a client's data."""
    return Field("public")


@dataclass(frozen=True)
class Exchange:
    """A client handler's name and exactly what it receives and returns, for given settings."""

    name: str
    down: Mapping[str, Field]
    up: Mapping[str, Field]


FromSettings = Callable[[Any], Any] | property  # of a method: a function of it, or its property
Fields = Mapping[str, Field | FromSettings] | FromSettings


@dataclass(frozen=True)
class Declaration:
    """The declaration of a client handler; `resolved` gives the exchange of one method."""

    name: str
    down: Fields
    up: Fields
    when: FromSettings | None = None  # whether a method has the exchange; none: always
    handler: str = ""  # for messages

    def applies(self, method: Any) -> bool:
        """Whether a method with these settings has the exchange."""
        return self.when is None or bool(_from_settings(self.when, method))

    def resolved(self, method: Any) -> Exchange:
        """The exchange of a method with these settings, whether it applies or not."""
        down, up = (_resolved_fields(side, method) for side in (self.down, self.up))
        _check_fields(self.handler or self.name, down, up)
        return Exchange(self.name, down, up)


Handler = TypeVar("Handler", bound=Callable[..., Any])


def exchange(
    handler: None = None,
    /,
    *,
    down: Fields | None = None,
    up: Fields | None = None,
    when: FromSettings | None = None,
) -> Callable[[Handler], Handler]:
    """Declare, right above a client handler, exactly what it receives and returns.

    Where a field depends on the method's settings, a function of the method stands in its place,
    or in place of all fields: `up={"rows": lambda method: statistic(guarded=method.noise > 0)}`.
    A property of the method will do as well.

    Args:
        handler: nothing; the decorator is written with brackets.
        down: the fields that a client receives, by name; none: it receives nothing.
        up: the fields that it returns, by name; none: it returns nothing.
        when: whether a method with its settings has this exchange at all; none: always.
    """
    if handler is not None:
        raise WireError(
            "@exchange stands without brackets: write @exchange(down=..., up=...) with the fields"
        )
    if when is not None and not _is_from_settings(when):
        raise WireError(
            f"@exchange(when={when!r}) must be a function of the method, e.g. "
            "@exchange(when=lambda method: method.strength > 0)"
        )

    def mark(handler: Handler) -> Handler:
        if handler.__name__ in STEPS:
            raise WireError(
                f"`{handler.__name__}` is reserved for secure aggregation: choose another name"
            )
        received, returned = ({} if side is None else side for side in (down, up))
        _check_fields(handler.__qualname__, received, returned)
        handler.exchange = Declaration(  # type: ignore[attr-defined]
            handler.__name__, received, returned, when, handler.__qualname__
        )
        return handler

    return mark


def declarations(cls: type) -> list[Declaration]:
    """What the handlers of a class declare, in the order of their names."""
    attributes = (getattr(getattr(cls, name), "exchange", None) for name in dir(cls))
    return [one for one in attributes if isinstance(one, Declaration)]


def _is_from_settings(value: object) -> TypeGuard[FromSettings]:
    return callable(value) or isinstance(value, property)


def _from_settings(value: FromSettings, method: Any) -> Any:
    """What a function or a property makes of a method; a property may be overridden."""
    if isinstance(value, property):
        return getattr(method, value.fget.__name__)  # type: ignore[union-attr]
    return value(method)


def _resolved_fields(fields: Fields, method: Any) -> Any:
    known = _from_settings(fields, method) if _is_from_settings(fields) else fields
    if not isinstance(known, Mapping):
        return known  # which is refused
    return {
        name: _from_settings(value, method) if _is_from_settings(value) else value
        for name, value in known.items()
    }


def _check_fields(handler: str, down: Any, up: Any) -> None:
    """Refuse fields that cannot be declared; functions of settings are checked once resolved."""
    for side, fields in (("down", down), ("up", up)):
        if _is_from_settings(fields):
            continue
        if not isinstance(fields, Mapping):
            raise WireError(
                f"{handler}: @exchange({side}={fields!r}) must map names to fields, e.g. "
                f'@exchange({side}={{"model": weights()}})'
            )
        for name, declared in fields.items():
            if _is_from_settings(declared):
                continue
            if not isinstance(declared, Field):
                raise WireError(
                    f"{handler}: `{name}` is declared as {declared!r}: a field is made by "
                    "weights(), statistic(), per_example(), scalar() or public()"
                )
            weighted = side == "up" and declared.by not in (None, EXAMPLES)
            if weighted and declared.by not in fields:
                raise WireError(
                    f"{handler}: `{name}` is weighted by `{declared.by}`, which is not in `up`"
                )
    if isinstance(down, Mapping) and MASKS in down:
        raise WireError(f"{handler}: `{MASKS}` is reserved for secure aggregation")


@dataclass(frozen=True)
class Ask:
    """One request from the server's plan to some clients for one exchange.

    `down` is the same for all of them; `each` adds values per client. Clients that do not answer
    are simply absent from the result, so a second ask of a round goes to `got.ids`.
    """

    step: str
    to: Sequence[ClientId]
    down: Mapping[str, Value] = field(default_factory=dict)
    each: Mapping[ClientId, Mapping[str, Value]] = field(default_factory=dict)
    least: int | None = None  # fewest answers it needs; none: the recipe's quorum

    def message_to(self, client: ClientId) -> dict[str, Value]:
        """All values that one client is sent."""
        return {**self.down, **self.each.get(client, {})}


def changes_model(declared: Exchange) -> bool:
    """Whether an exchange sends a model to clients and takes a changed one back."""
    down, up = declared.down.get("model"), declared.up.get("model")
    return bool(down and up and down.of == up.of == "model" and up.fold == "parts")


def is_measuring(step: str, round: int) -> bool:
    """Whether an ask only measures for the log, and does not count as traffic of the method.

    Before round 1 there is no encoder to export, so recalibration of BatchNorm is measuring, too.

    >>> is_measuring("measure_objective", 3), is_measuring("calibrate", 0), is_measuring("train", 1)
    (True, True, False)
    """
    return step in MEASURING or (step == CALIBRATE and round == 0)


class MissingField(WireError, AttributeError):
    """Code that reads a field which a message does not have."""


class Folded(SimpleNamespace):
    """A message by field: what a handler received, or the combined replies to a plan's ask.

    A plan gets `.ids`, who answered, in order, and one attribute per `up` field.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingField(
            f"`got.{name}`: this message has no such field: {suggest(name, vars(self))}"
        )


Plan = Generator[Ask, Folded, "Server"]


def check(
    method: str, declared: Exchange, side: Literal["down", "up"], got: Mapping[str, Any]
) -> None:
    """Refuse a message that does not carry exactly the declared fields, each of its kind."""
    fields: Mapping[str, Field] = getattr(declared, side)
    where = f"{method}.{declared.name}"
    way = "to the client" if side == "down" else "to the server"
    extra, missing = sorted(set(got) - set(fields)), sorted(set(fields) - set(got))
    if extra:
        raise WireError(
            f"{where} sends {_quoted(extra)} {way} without declaring it. Add it to "
            f"@exchange({side}=...) above `{declared.name}`, or stop sending it."
        )
    if missing:
        raise WireError(
            f"{where} declares {_quoted(missing)} {way} but does not send it. Remove it from "
            f"@exchange({side}=...) above `{declared.name}`, or send it."
        )
    for name, value in got.items():
        wanted = _TYPES["weights" if fields[name].fold == "parts" else fields[name].kind]
        if not isinstance(value, wanted[1]) or isinstance(value, bool):
            raise WireError(
                f"{where} sends `{name}` {way} as {type(value).__name__}, but it is declared "
                f"{fields[name].kind}, which is {wanted[0]}."
            )
        if isinstance(value, dict) and not all(isinstance(t, Tensor) for t in value.values()):
            raise WireError(f"{where} sends `{name}` {way} with a value that is not a tensor.")


_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "weights": ("a dict of named tensors", (dict,)),
    "statistic": ("a tensor", (Tensor,)),
    "per_example": ("a tensor", (Tensor,)),
    "scalar": ("a number", (int, float)),
    "public": ("a tensor, a dict of tensors or a number", (Tensor, dict, int, float)),
}


NOT_FINITE = "is not finite"
BEYOND = "lies beyond any sane range"


def fault(value: Any, most: float = math.inf) -> str | None:
    """What is wrong with an uploaded value's numbers, if anything.

    Args:
        value: a number, a tensor, or a dict of tensors by name.
        most: how far from 0 a number may lie; counters may lie within `MOST_VALUE` in any case.

    >>> fault({"w": torch.tensor([1.0, 3e38])}, most=1e6)
    'w lies beyond any sane range'
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if reason := fault(item, most):
                return f"{key} {reason}"
        return None
    if isinstance(value, Tensor):
        if value.is_complex():
            return "is complex"
        if not value.numel() or value.dtype == torch.bool:
            return None
        most = most if value.is_floating_point() else max(most, MOST_VALUE)
        least, greatest = (float(end) for end in torch.aminmax(value.detach()))  # NaN stays NaN
    else:
        try:
            least = greatest = float(value)
        except OverflowError:  # a whole number beyond any float
            return NOT_FINITE
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return NOT_FINITE
    return None if max(-least, greatest) <= most else BEYOND


def is_spoiled(why: str) -> bool:
    """Whether an answer was refused for its numbers, as those of a diverged model are."""
    return why.endswith((NOT_FINITE, BEYOND))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
