"""Names for the rows of a comparison, set by `label.fedca="FedCA (ours)"`.

Tables, notes, progress, LaTeX and legends show the name. Folders, JSON and CSV keep the row's own
label, so that a comparison can be continued under other names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harmonium.core.errors import ConfigError, UnknownSetting, suggest

PREFIX = "label."


def slug(label: str) -> str:
    """The name of a row's folder: its label without blanks.

    >>> slug("alone (fedbyol)")
    'alone-fedbyol'
    """
    return re.sub(r"[^\w.,=+-]+", "-", label).strip("-")


def is_label(word: str) -> bool:
    """Whether a word of a command gives a row its name."""
    return word.startswith(PREFIX)


def taken(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings given by name without those of labels, and the labels as words.

    >>> taken({"label": {"fedca": "FedCA (ours)"}, "seeds": 3})
    ({'seeds': 3}, ['label.fedca=FedCA (ours)'])
    """
    rest: dict[str, Any] = {}
    words = []
    for key, value in settings.items():
        if key == PREFIX[:-1]:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"label is {value!r}; it must be a mapping from rows to names, e.g. "
                    "label={'fedca': 'FedCA (ours)'}"
                )
            words += [f"{PREFIX}{row}={name}" for row, name in value.items()]
        elif is_label(key):
            words.append(f"{key}={value}")
        else:
            rest[key] = value
    return rest, words


def names_of(words: Sequence[str], rows: Sequence[str]) -> dict[str, str]:
    """The names that words give to rows; an unknown row is refused with the nearest known one.

    A word refers to a row by its label, which may hold `=` as in `fedavg local.lr=0.1`, or by the
    name of its folder.

    >>> names_of(["label.raw-pixels=pixels", "label.fedavg lr=1=FedAvg, fast"],
    ...     ["raw pixels", "fedavg", "fedavg lr=1"])
    {'raw pixels': 'pixels', 'fedavg lr=1': 'FedAvg, fast'}
    """
    forms = {form: row for row in rows for form in (slug(row), row)}
    names: dict[str, str] = {}
    for word in words:
        form, name = _form_and_name(word, forms, rows)
        if names.setdefault(forms[form], name) != name:
            raise ConfigError(
                f"{PREFIX}{form} is given twice, as {names[forms[form]]} and as {name}: leave one "
                "out"
            )
    shown = [names.get(row, row) for row in rows]
    for row, name in names.items():
        if shown.count(name) > 1:
            other = next(one for one in rows if one != row and names.get(one, one) == name)
            raise ConfigError(f"{PREFIX}{row} is '{name}', which is also the name of {other}")
    return names


def _form_and_name(word: str, forms: Collection[str], rows: Sequence[str]) -> tuple[str, str]:
    """The row as a word refers to it, and the name that the word gives it."""
    text = word.removeprefix(PREFIX)
    fits = [form for form in forms if text.startswith(f"{form}=")]
    if not fits:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' gives no name: write label.METHOD=NAME")
        raise UnknownSetting(
            f"{PREFIX}{key}: no row of this comparison is called '{key}': {suggest(key, rows)}"
        )
    form = max(fits, key=len)
    name = _unquoted(text[len(form) + 1 :])
    if not name:
        raise ConfigError(f"{PREFIX}{form} is empty: write label.METHOD=NAME")
    return form, name


def _unquoted(text: str) -> str:
    """A name without quotes around it, on one line."""
    text = " ".join(text.split())
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1].strip() if quoted else text
