"""What can go wrong in a way the user can mend; each is one clear line, never a traceback.

The command line prints the message and leaves with exit code 2. Anything that is not a
`HarmoniumError` is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarmoniumError(Exception):
    """A mistake that the message names, together with what would be right."""


class ConfigError(HarmoniumError):
    """A recipe, key or value that does not exist or does not fit."""


class UnknownSetting(ConfigError):
    """A key, a name or a kind of value that nothing reads: a slip, whatever the other settings."""


class DataError(HarmoniumError):
    """Pictures, labels, splits or downloads that are missing or not what they should be."""


class WireError(HarmoniumError):
    """A message carried something its exchange does not declare, or lacked something it does."""


class StoreError(HarmoniumError):
    """A file of a run is missing, damaged or cannot be written."""


class NotEnoughReplies(HarmoniumError):
    """Fewer clients answered than the recipe's quorum."""


class EngineError(HarmoniumError):
    """A place where clients run failed in a way that trying again does not mend."""


class BudgetSpent(HarmoniumError):
    """A client's next noisy release would spend more than the recipe's privacy budget."""


class CallbackError(HarmoniumError):
    """A callback of the user's failed; the run is as whole as after its last round."""


class NoneFinished(HarmoniumError):
    """No run of any method of a comparison came to its end."""


class PolicyRefusal(HarmoniumError):
    """A plan wants something of a site that the site's policy does not allow."""


def suggest(word: str, known: Iterable[str]) -> str:
    """A closing sentence that names the nearest right word, or all of them when none is near.

    >>> suggest("dirichlit", ["iid", "dirichlet"])
    "did you mean 'dirichlet'?"
    >>> suggest("x", ["iid", "dirichlet"])
    'choose from: dirichlet, iid'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(names)}"


def counted(count: int, word: str) -> str:
    """A number with its word, one or several of them.

    >>> counted(1, "seed"), counted(2, "seed"), counted(1200, "picture")
    ('1 seed', '2 seeds', '1,200 pictures')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"
