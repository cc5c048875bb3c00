"""Checks of contributed methods; each error is one line that says how to correct it.

`check_class` looks at declarations before anything runs. The other checks are called where a piece
of someone else's code has just returned something.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any, get_args

from torch import Tensor, nn

from harmonium.core import codec
from harmonium.core.errors import ConfigError, WireError, suggest
from harmonium.core.types import Kind, Rule
from harmonium.federation.wire import Ask, Declaration, Exchange, Field
from harmonium.learning.contract import called


def check_class(cls: type) -> None:
    """Refuse a method whose declarations cannot be read."""
    for name, kinds, what in (
        ("keeps", get_args(Kind), "what it reveals"),
        ("remembers", get_args(Kind), "what it reveals"),
        ("share", get_args(Rule), "a share rule"),
    ):
        _check_table(cls, name, kinds, what)
    _check_final(cls)
    _check_exchanges(cls)


def _check_table(cls: type, name: str, kinds: tuple[str, ...], what: str) -> None:
    table = getattr(cls, name, {})
    if isinstance(table, property) or callable(table):  # decided by the settings
        return
    if not isinstance(table, Mapping):
        listed = isinstance(table, tuple | list | set | frozenset)
        one = next(iter(table), "NAME") if listed else "NAME"
        raise ConfigError(
            f"{called(cls)}.{name} is {table!r}: it must be a mapping from names to {what}, e.g. "
            f'{name} = {{"{one}": "{kinds[0]}"}} ({", ".join(kinds)})'
        )
    for key, kind in table.items():
        if kind not in kinds:
            raise ConfigError(
                f'{called(cls)}.{name}["{key}"] is {kind!r}: {suggest(str(kind), kinds)}'
            )


def _check_final(cls: type) -> None:
    """Refuse a class that overrides a method marked `@final`."""
    for place, owner in enumerate(cls.__mro__):
        above = cls.__mro__[place + 1 :]
        for name in vars(owner):
            if any(_is_final(vars(base).get(name)) for base in above):
                raise ConfigError(
                    f"{called(cls)}.{name} overrides a final method: "
                    + INSTEAD.get(name, f"choose another name for `{name}`")
                )


def _is_final(member: object) -> bool:
    for wrapped in ("fget", "func"):  # of a property and of a cached one
        member = getattr(member, wrapped, member)
    return getattr(member, "__final__", False) is True


INSTEAD = {
    "exchanges": "declare fields that depend on settings by @exchange(up=lambda method: {...}), "
    "and whether there is an exchange by @exchange(when=lambda method: ...)",
    "declared_exchanges": "declare fields by @exchange(down=..., up=...) above a handler",
    "fit": "override `score` for another loss, or `train` for another training",
    "loss": "override `score` for another loss",
    "total": "override `score` for another loss",
    "blueprint": "override `extra_parts` for more parts",
}


def _check_exchanges(cls: type) -> None:
    """Refuse a handler that overrides another without its own declaration."""
    for name in dir(cls):
        own = getattr(cls, name, None)
        if not callable(own) or isinstance(getattr(own, "exchange", None), Declaration):
            continue
        above = [one for one in cls.__mro__ if _declares(one, name)]
        if above:
            raise ConfigError(
                f"{called(cls)}.{name} overrides an exchange without declaring what it receives "
                f'and sends: put @exchange(down={{"model": weights()}}, up=TRAINED) above '
                f"`{name}`, or whatever its fields are"
            )


def _declares(cls: type, name: str) -> bool:
    return isinstance(getattr(vars(cls).get(name), "exchange", None), Declaration)


def checked_plan(plan: Any, method: object, name: str) -> Generator[Any, Any, Any]:
    """What `setup` or `round` returned, which must be a generator."""
    if not isinstance(plan, Generator):
        raise ConfigError(
            f"{called(method)}.{name} is not a plan, because it never yields: write "
            f'`got = yield Ask("train", cohort, {{"model": server.model}})` in `{name}`'
        )
    return plan


def check_finished(server: Any, wanted: type, method: object, name: str) -> None:
    """Refuse a plan that does not end with the server's new state."""
    if not isinstance(server, wanted):
        got = "without a value" if server is None else f"with a {type(server).__name__}"
        raise ConfigError(
            f"{called(method)}.{name} ends {got}: it must return the server's new state, e.g. "
            f"`return self.merge(server, got.model)` at the end of `{name}`"
        )


def checked_context(context: Any, method: Any) -> Any:
    """What a handler passes to `fit`, which must be of the method's class `context`."""
    wanted = method.context
    if not isinstance(context, wanted):
        raise ConfigError(
            f"{called(method)} trains with a context of {type(context).__name__}: its class "
            f"variable `context` is {wanted.__name__}, so write `self.fit(parts, client, "
            f"context={wanted.__name__}(me=client.id, ...))`"
        )
    return context


def check_ask(ask: Any, method: object) -> None:
    """Refuse a plan that yields anything but asks."""
    if not isinstance(ask, Ask):
        raise ConfigError(
            f"a plan of {called(method)} yields a {type(ask).__name__}: it must yield asks, e.g. "
            '`yield Ask("train", cohort, {"model": server.model})`'
        )


def checked_answer(answer: Any, method: object, declared: Exchange) -> dict[str, Any]:
    """What a handler returned, which must be its declared fields by name."""
    if answer is None and not declared.up:
        return {}
    if not isinstance(answer, Mapping):
        got = "nothing" if answer is None else f"a {type(answer).__name__}"
        fields = ", ".join(f'"{name}": ...' for name in declared.up)
        raise WireError(
            f"{called(method)}.{declared.name} returns {got}: it must return its declared fields, "
            f"`return {{{fields}}}`"
        )
    return {name: _plain(value, declared.up.get(name)) for name, value in answer.items()}


def _plain(value: Any, declared: Field | None) -> Any:
    """A scalar that was computed as a tensor, as a number; anything else as it is."""
    scalar = declared is not None and declared.kind == "scalar"
    return value.item() if scalar and isinstance(value, Tensor) and value.numel() == 1 else value


def checked_numbers(numbers: Any, method: object) -> dict[str, float]:
    """What `noted` returned, which must be numbers by name."""
    example = 'return {"drift": 0.5}'
    if not isinstance(numbers, Mapping):
        got = "nothing" if numbers is None else f"a {type(numbers).__name__}"
        raise ConfigError(
            f"{called(method)}.noted returns {got}: it must return numbers by name, e.g. "
            f"`{example}`, or {{}}"
        )
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise ConfigError(
                f'{called(method)}.noted returns a {type(value).__name__} as "{name}": it must be '
                "a number, e.g. `.item()` of a tensor"
            )
    return dict(numbers)


def checked_encoder(encoder: Any, method: object) -> nn.Module:
    """What `represent` returned, which must be a module."""
    if not isinstance(encoder, nn.Module):
        got = "nothing" if encoder is None else f"a {type(encoder).__name__}"
        raise ConfigError(
            f"{called(method)}.represent returns {got}: it must return the encoder, an nn.Module, "
            "e.g. `return super().represent(server, state)`"
        )
    return encoder


def check_kept(
    values: Mapping[str, Any], allowed: Collection[str], where: str, declared: str
) -> None:
    """Refuse state that is kept between rounds without a declaration, or cannot be stored.

    Args:
        values: the state, by name.
        allowed: the names that are declared.
        where: who keeps it, `Method.step`.
        declared: the class variable that declares it, `keeps` or `remembers`.
    """
    place = "client" if declared == "keeps" else "server"
    if extra := sorted(map(str, set(values) - set(allowed))):
        raise WireError(
            f"{where} keeps `{extra[0]}` at the {place} without declaring it. Add it to "
            f"`{declared}` with what it reveals, or do not keep it."
        )
    for name, value in values.items():
        try:
            codec.check(value)
        except WireError as error:
            raise WireError(f"{where} keeps `{name}` at the {place}: {error}") from None
