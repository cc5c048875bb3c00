"""Write the tables of choices and settings into the pages, from the classes themselves.

`python docs/tables.py` rewrites what stands between the markers in docs/*.md. A test compares.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.inspection.advice import word as setting_word
from harmonium.data.inspection.kinds import CALLED, RULES, VIEWS
from harmonium.data.partition import SplitRule, splits
from harmonium.engines.settings import EngineSettings
from harmonium.evaluation.evaluator import Evaluation
from harmonium.evaluation.stopping import Stop
from harmonium.federation.aggregation import Aggregation, aggregations
from harmonium.federation.filters.rounding import Transport
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.federation.server_optimisers import ServerOptimiser, optimisers
from harmonium.learning.encoders import Encoder, encoders
from harmonium.learning.objectives import Objective, objectives
from harmonium.learning.terms import Term, terms
from harmonium.learning.training import Local
from harmonium.measures import measures
from harmonium.methods import methods
from harmonium.recipe.initial_weights import Init
from harmonium.recipe.presets import about, baselines, sweeps
from harmonium.recipe.schema import Privacy
from harmonium.studies.choices import CHEAPER, ENOUGH
from harmonium.studies.choices import TABLE as CHOICES
from harmonium.studies.comparison.cells import Settings

HERE = Path(__file__).parent
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
DEFAULTS = {
    "method": "fedavg",
    "objective": "simclr",
    "encoder": "cnn-small",
    "data": "digits",
    "split": "iid",
    "server": "average",
    "aggregation": "mean",
}


@cache
def comments(cls: type) -> dict[str, str]:
    """The comment behind every field in a class's source."""
    source = inspect.getsource(cls)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(inspect.cleandoc(source)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = lines[node.end_lineno - 1].partition("#")[2].strip()
            found[node.target.id] = comment[:1].upper() + comment[1:]
    return found


@cache
def types_of(cls: type) -> dict[str, Any]:
    """The type of every field."""
    return typing.get_type_hints(cls)


def words(kind: Any) -> str:
    """A type as people read it."""
    plain = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    if kind in plain:
        return plain[kind]
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in inside)
    if typing.get_origin(kind) is tuple:
        return f"list of {words(inside[0])}s".replace("texts", "names")
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join("none" if one is type(None) else words(one) for one in inside)
    raise TypeError(f"no words for {kind}")


def shown(default: Any) -> str:
    """A default as it is typed."""
    if default is MISSING or default == "":
        return "(needed)" if default is MISSING else "(none)"
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    if isinstance(default, float):
        return f"{default:.4g}"
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None else str(default)


def row(section: str, cls: type, field: Field[Any]) -> str:
    """One setting."""
    owner = next(k for k in cls.__mro__ if field.name in vars(k).get("__annotations__", {}))
    kind = types_of(owner)[field.name]
    meaning = comments(owner)[field.name].replace("None:", "none:")
    default = shown(field.default)
    if field.name == "path" and default == "(none)":
        default = "(needed)"
    return f"| `{section}.{field.name}` | {words(kind)} | {default} | {meaning} |\n"


def settings(section: str, registry: Any, base: type) -> str:
    """Tables of the common settings and of each choice's own."""
    common = {field.name: field for field in fields(base)}
    shown = {} if base is Method else common  # what other sections give a method
    text = f"Settings of every {registry.kind}:\n\n{HEAD}" if shown else ""
    text += "".join(row(section, base, field) for field in shown.values())
    groups: dict[str, list[str]] = {}
    for name, cls in registry.table().items():
        own = [f for f in fields(cls) if f.init and common.get(f.name) != f and differs(f, common)]
        prefix = f"terms.{name}" if section == "terms" else section
        table = "".join(row(prefix, cls, field) for field in own)
        if table:
            groups.setdefault(table, []).append(name)
    for table, names in groups.items():
        separator = "." if section == "terms" else "="
        listed = ", ".join(f"`{section}{separator}{name}`" for name in names)
        text += f"\nSettings of {listed}:\n\n{HEAD}{table}"
    return text


def differs(field: Field[Any], common: dict[str, Field[Any]]) -> bool:
    """Whether a choice's field is its own or has another default."""
    return field.name not in common or common[field.name].default != field.default


def choices(section: str, registry: Any) -> str:
    """The names and what they are."""
    text = "| choice | what |\n|---|---|\n"
    for name, cls in registry.table().items():
        mark = " (default)" if name == DEFAULTS.get(section) else ""
        text += f"| `{name}`{mark} | {(cls.__doc__ or '').strip().splitlines()[0]} |\n"
    return text


def chosen(section: str, registry: Any, base: type) -> str:
    """Both tables of a section that names a choice."""
    return f"{choices(section, registry)}\n{settings(section, registry, base)}"


def fixed(section: str, cls: type) -> str:
    """The settings of a section without choices."""
    return HEAD + "".join(row(section, cls, field) for field in fields(cls))


def shortcuts() -> str:
    """The baselines of the papers by name."""
    text = "| name | what | paper |\n|---|---|---|\n"
    for name, file in baselines().items():
        text += f"| `{name}` | {' | '.join(about(file))} |\n"
    return text


def measured() -> str:
    """What runs can be measured by, and the settings of each."""
    text = choices("measure", measures)
    for name, cls in measures.table().items():
        text += f"\nSettings of `{name}`:\n\n{fixed(name, cls)}"
    return text


def swept() -> str:
    """The sweeps of the papers by name."""
    text = "| name | what | paper |\n|---|---|---|\n"
    for name, file in sweeps().items():
        text += f"| `{name}` | {' | '.join(about(file))} |\n"
    return text


def sets() -> str:
    """What is known of every data set."""
    text = "| data set | images | shape | classes | licence, as its makers state it |\n"
    text += "|---|---|---|---|---|\n"
    for name, cls in datasets.table().items():
        if (about := cls.about) is None:
            continue
        count = "" if about.train is None else f"{about.train:,}"
        count += f" + {about.test:,}" if about.test else ""
        shape = "x".join(map(str, about.shape)) if about.shape else "any"
        text += f"| `{name}` | {count} | {shape} | {about.classes or ''} | {about.licence} |\n"
    return text


def kinds() -> str:
    """The rules that kinds of image are told by."""
    text = "| kind | needs | preset of views |\n|---|---|---|\n"
    for kind, conditions in RULES:
        needs = "; ".join(f"{c.words} {c.bound}" for c in conditions[2:])
        text += f"| {CALLED[kind]} | {needs} | `{VIEWS[kind]}` |\n"
    return f"{text}| {CALLED['unknown']} | anything else | `{VIEWS['unknown']}` |\n"


def chosen_by() -> str:
    """The rules by which `harmonium start` chooses."""
    text = "| subject | where | choice | settings |\n|---|---|---|---|\n"
    for subject, rules in CHOICES.items():
        for rule in rules:
            words = " ".join(f"`{setting_word(key, one)}`" for key, one in rule.settings.items())
            text += f"| {subject} | {rule.when} | {rule.then} | {words} |\n"
    for rule in CHEAPER:
        words = " ".join(f"`{setting_word(key, one)}`" for key, one in rule.settings.items())
        text += f"| if fewer than {ENOUGH} rounds fit | {rule.when} | {rule.then} | {words} |\n"
    return text


TABLES = {
    "method": lambda: chosen("method", methods, Method),
    "shortcuts": shortcuts,
    "objective": lambda: chosen("objective", objectives, Objective),
    "terms": lambda: chosen("terms", terms, Term),
    "encoder": lambda: chosen("encoder", encoders, Encoder),
    "data": lambda: chosen("data", datasets, DataSpec),
    "split": lambda: chosen("split", splits, SplitRule),
    "server": lambda: chosen("server", optimisers, ServerOptimiser),
    "aggregation": lambda: chosen("aggregation", aggregations, Aggregation),
    "local": lambda: fixed("local", Local),
    "participation": lambda: fixed("participation", Participation),
    "privacy": lambda: fixed("privacy", Privacy),
    "transport": lambda: fixed("transport", Transport),
    "stop": lambda: fixed("stop", Stop),
    "init": lambda: fixed("init", Init),
    "evaluate": lambda: fixed("evaluate", Evaluation),
    "engine": lambda: fixed("engine", EngineSettings),
    "sets": sets,
    "kinds": kinds,
    "choices": chosen_by,
    "compare": lambda: fixed("compare", Settings),
    "sweeps": swept,
    "measures": measured,
}


def filled(text: str) -> str:
    """A page with fresh tables between its markers."""
    for name, make in TABLES.items():
        start, end = f"<!-- {name}: from docs/tables.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda _: f"{start}\n\n{make()}\n{end}", text)  # noqa: B023
    return text


if __name__ == "__main__":
    for page in HERE.glob("*.md"):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
