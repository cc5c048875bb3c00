"""Settings from plain values: a chosen dataclass, whose fields are checked one by one.

Every error names the dotted key, what was seen and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic_core import PydanticKnownError

from harmonium.core.errors import ConfigError, Key, UnknownSetting, suggest
from harmonium.core.registry import Registry, recipe_name

T = TypeVar("T")

OTHER_WORDS = {  # of other libraries -> ours
    "amp": "precision",
    "autocast": "precision",
    "gpu": "device",
    "learning_rate": "lr",
}


def choose(section: str, registry: Registry[T], value: Any) -> T:
    """A registered choice from its name, or from a mapping with `name` and settings."""
    if isinstance(value, registry.base):
        return value
    cls, options = named(section, registry, value)
    return cls(**check_fields(cls, options, section, others=registry.table()))


def named(section: str, registry: Registry[T], value: Any) -> tuple[type[T], dict[str, Any]]:
    """The class a section names, or is given, and the settings beside the name."""
    if isinstance(value, str | type):
        value = {"name": value}
    name = value.get("name") if isinstance(value, Mapping) else None
    if isinstance(name, type) and issubclass(name, registry.base):
        cls: type[T] = name
    elif isinstance(name, str):
        cls = registry[name]
    else:
        raise UnknownSetting(
            f"{section} is {_brief(value)}; give one of these names: {', '.join(registry.table())}"
        )
    check_dataclass(cls, registry.base)
    return cls, {k: v for k, v in value.items() if k != "name"}


def check_dataclass(cls: type[Any], base: type[Any]) -> None:
    """Refuse a class with settings that is not a dataclass: they would silently be ignored."""
    for one in cls.__mro__:
        if one is base or not issubclass(one, base) or "__dataclass_fields__" in vars(one):
            continue
        for name, hint in vars(one).get("__annotations__", {}).items():
            if "ClassVar" not in str(hint):
                raise ConfigError(
                    f"{one.__name__} has the setting `{name}` but is not a dataclass: put "
                    "@dataclass(frozen=True) above the class"
                )


def _brief(value: Any) -> str:
    """A value in a message; a long one is named by its type."""
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"of type {type(value).__name__}"


def make(cls: type[T], options: Mapping[str, Any], section: str, skip: Collection[str] = ()) -> T:
    """An instance of a settings dataclass from plain values."""
    return cls(**check_fields(cls, options, section, skip))


def check_fields(
    cls: type[Any],
    options: Mapping[str, Any],
    section: str,
    skip: Collection[str] = (),
    others: Mapping[str, type[Any]] | None = None,
) -> dict[str, Any]:
    """The options as values of the dataclass's field types; unknown names are refused.

    `others` are the choices that the section could name instead, for a better message.
    """
    if not isinstance(options, Mapping):
        raise UnknownSetting(
            f"{section} is {options!r}; it takes settings such as {section}.key=value"
        )
    hashable: Any = cls  # mypy does not take a class for hashable
    hints = _hints(hashable)
    known = [name for name in _names(cls) if name not in skip]
    checked = {}
    for key, value in options.items():
        if key not in known:
            raise _unknown_field(cls, section, key, known, skip, others or {})
        checked[key] = _read(f"{section}.{key}", hints[key], _adapter(hashable, key), value)
    return checked


def _unknown_field(
    cls: type[Any],
    section: str,
    key: str,
    known: list[str],
    skip: Collection[str],
    others: Mapping[str, type[Any]],
) -> UnknownSetting:
    """The error for a key that a section does not have: where it is, or what was meant."""
    name = getattr(cls, "name", "") or "as chosen"
    if elsewhere := [other for other in others if key in _names(others[other])]:
        return UnknownSetting(
            f"unknown key '{section}.{key}': {section}={name} does not have it, "
            f"{section}={elsewhere[0]} does"
        )
    everywhere = {name for other in others.values() for name in _names(other)}
    near = difflib.get_close_matches(key, everywhere - set(skip), n=1, cutoff=0.75)
    if not known and not near:
        return UnknownSetting(f"unknown key '{section}.{key}': {section}={name} has no settings")
    keys = (f"{section}.{field}" for field in (*known, *near))
    return UnknownSetting(unknown(f"{section}.{key}", keys))


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache  # an adapter takes a hundred times as long to make as to use
def _adapter(cls: Any, field: str) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(_counting(_hints(cls)[field]))


def _names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def coerce(key: str, wanted: Any, value: Any) -> Any:
    """A plain value as the wanted type."""
    return _read(key, wanted, pydantic.TypeAdapter(_counting(wanted)), value)


def _read(key: str, wanted: Any, kind: pydantic.TypeAdapter[Any], value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("none", "null", "") and _takes_none(wanted):
        value = None
    try:
        return kind.validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if isinstance(value, str):  # from Python, "[5, 10]" reads as the word of a command does
            try:
                return kind.validate_python(yaml.safe_load(value))
            except yaml.YAMLError:
                pass
            except pydantic.ValidationError as again:
                first = again.errors()[0]
        shown = {None: "", True: "true", False: "false"}[value] if _is_word(value) else value
        section, _, name = key.rpartition(".")
        named = Key(section, name) if section else Key(name)
        raise UnknownSetting(named, f"={shown}: {_plainly(first)}") from None


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _counting(wanted: Any) -> Any:
    """The wanted type, with numbers that refuse truth values: pydantic would read true as 1."""
    if wanted in (int, float):
        refused = PydanticKnownError("int_type" if wanted is int else "float_type")

        def check(value: Any) -> Any:
            if isinstance(value, bool):
                raise refused
            return value

        return Annotated[wanted, pydantic.BeforeValidator(check)]
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_counting, inner))
    return origin[tuple(map(_counting, inner))] if origin in (tuple, list, dict) else wanted


def unknown(key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist, naming the one that was probably meant.

    >>> unknown("alpha", ["rounds", "split.alpha", "method.alpha"])
    "unknown key 'alpha': did you mean 'method.alpha' or 'split.alpha'?"
    >>> unknown("semi.shares", ["semi.seed", "semi.fractions", "rounds"])
    "unknown key 'semi.shares': semi has fractions, seed"
    >>> unknown("local.amp", ["local.warmup", "local.precision"])
    "unknown key 'local.amp': did you mean 'local.precision'?"
    """
    names = sorted(known)
    by_word: dict[str, list[str]] = {}  # by the last word of a key
    for name in names:
        by_word.setdefault(name.rpartition(".")[2], []).append(name)
    section, _, last = key.rpartition(".")
    inside = [word for word, keys in by_word.items() if section and f"{section}.{word}" in keys]
    near = [f"{section}.{word}" for word in difflib.get_close_matches(last, inside, n=1)]
    if (meant := f"{section}.{OTHER_WORDS.get(last)}" if section else "") in names:
        return f"unknown key '{key}': did you mean '{meant}'?"
    if inside and not near and last not in by_word:
        return f"unknown key '{key}': {section} has {', '.join(inside)}"
    if near := near or _nearest(key, names, by_word):
        either = " or ".join(f"'{name}'" for name in near)
        return f"unknown key '{key}': did you mean {either}?"
    short = [name for name in names if "." not in name] or names
    return f"unknown key '{key}': {suggest(key, short)}"


def _nearest(key: str, names: list[str], by_word: Mapping[str, list[str]]) -> list[str]:
    """The keys like this one, or with a last word like its own: `alpha` finds `split.alpha`."""
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        return near
    words = difflib.get_close_matches(key.rpartition(".")[2], by_word, n=1, cutoff=0.6)
    return [name for word in words for name in by_word[word]]


def plain(value: Any) -> Any:
    """Settings as plain values for YAML and JSON; registered choices carry their name.

    A field whose metadata say `plain: False` has no plain value and is left out.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = (f for f in dataclasses.fields(value) if f.init and f.metadata.get("plain", True))
        fields = [f.name for f in shown]
        values = {field: plain(getattr(value, field)) for field in fields}
        name = recipe_name(type(value))
        return {"name": name, **values} if name else values
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _takes_none(wanted: Any) -> bool:
    union = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    return union and type(None) in typing.get_args(wanted)


_WORDS = {
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "string_type": "should be text",
    "tuple_type": "should be a list, e.g. [1, 2] or [one, other]",
    "missing": "has too few values",
    "too_long": "has too many values",
}


def _plainly(error: Any) -> str:
    if error["type"] == "literal_error":
        return f"should be one of {error['ctx']['expected']}"
    return _WORDS.get(error["type"], str(error["msg"]).lower())
