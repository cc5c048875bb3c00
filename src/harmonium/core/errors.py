"""Errors that a user can correct; each is shown as one clear line, never a traceback.

The command line prints the message and exits with code 2. Any other exception is a bug in Harmonium
and keeps its traceback.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Key:
    """The key of a setting in an error message.

    It is kept apart from the text until the message is shown: the settings of a data set may be
    those of `data`, of `public` or of a set to evaluate on, which the code that raises the error
    cannot know.
    """

    section: str
    name: str = ""  # empty: the section itself

    def __str__(self) -> str:
        return f"{self.section}.{self.name}" if self.name else self.section


class HarmoniumError(Exception):
    """A mistake that the message names, together with what would be right.

    The message is made of texts and keys.

    >>> error = DataError(Key("data", "path"), "=/data.old/x: there is no such file")
    >>> str(error.within("public")), error.key
    ('public.path=/data.old/x: there is no such file', 'data.path')
    """

    def __init__(self, *parts: str | Key) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    @property
    def key(self) -> str | None:
        """The key of the first setting in the message, if there is one."""
        return next((str(part) for part in self.args if isinstance(part, Key)), None)

    def with_keys(self, rename: Callable[[Key], Key]) -> Self:
        """The same error about other keys; its texts stay as they are."""
        return type(self)(*(rename(p) if isinstance(p, Key) else p for p in self.args))

    def within(self, section: str, instead_of: str = "data") -> Self:
        """The same error about the settings of another section."""
        return self.with_keys(
            lambda key: Key(section, key.name) if key.section == instead_of else key
        )


class ConfigError(HarmoniumError):
    """A recipe, key or value that does not exist or does not fit."""


class UnknownSetting(ConfigError):
    """A key, name or type of value that no setting has, whatever the other settings are."""


class DataError(HarmoniumError):
    """Images, labels, splits or downloads that are missing or not what they should be."""


class WireError(HarmoniumError):
    """A message carried something its exchange does not declare, or lacked something it does."""


class StoreError(HarmoniumError):
    """A file of a run is missing, damaged or cannot be written."""


class NotEnoughReplies(HarmoniumError):
    """Fewer clients answered than the recipe's quorum."""


class Diverged(NotEnoughReplies):
    """No answer has finite numbers only: training again would give the same."""


class EngineError(HarmoniumError):
    """An engine failed in a way that trying again does not repair."""


class BudgetSpent(HarmoniumError):
    """A client's next noisy release would spend more than the recipe's privacy budget."""


class CallbackError(HarmoniumError):
    """A callback of the user's raised an exception; all committed rounds are kept."""


class NoneFinished(HarmoniumError):
    """No run of any method of a comparison finished."""


class PolicyRefusal(HarmoniumError):
    """A plan asks a site for something that its policy does not allow."""


def undefined(owner: object, name: str) -> ConfigError:
    """The error for a class that does not define a required method, with its signature.

    >>> class Mine:
    ...     def build(self, dim): raise undefined(self, "build")
    >>> str(undefined(Mine(), "build"))
    'Mine must define `build`: write `def build(self, dim)` in the class'
    """
    cls = type(owner)
    member = getattr(cls, name)
    if isinstance(member, property):
        head = f"@property def {name}(self)"
    else:
        head = f"def {name}({', '.join(inspect.signature(member).parameters)})"
    return ConfigError(f"{cls.__name__} must define `{name}`: write `{head}` in the class")


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest valid word, or all of them if none is near.

    >>> suggest("dirichlit", ["iid", "dirichlet"])
    "did you mean 'dirichlet'?"
    >>> suggest("x", ["iid", "dirichlet"])
    'choose from: dirichlet, iid'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(names)}"


def counted(count: int, word: str) -> str:
    """A number and a noun, in the plural where it needs one.

    >>> counted(1, "seed"), counted(2, "seed"), counted(1200, "image")
    ('1 seed', '2 seeds', '1,200 images')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def shown(value: object) -> str:
    """A value as written in a recipe.

    >>> shown(None), shown(True), shown([1, "a"])
    ('none', 'true', '[1,a]')
    """
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


LONGEST = 1000  # characters of a text from another process or machine


def one_line(words: object) -> str:
    r"""Text from another process or machine as one short line, without control characters.

    >>> one_line("no\x1b[2J\nsuch file")
    'no?[2J such file'
    """
    text = " ".join(str(words).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
