"""A method's card: what crosses, what stays, what that means. Made from declarations alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harmonium.federation.method import Method
from harmonium.federation.wire import Field

LINEAR = ("parts", "mean", "sum")  # what a sum over clients can express


@dataclass(frozen=True)
class Card:
    """The facts that `harmonium explain` shows."""

    name: str
    about: str
    parts: Mapping[str, str]  # part -> rule
    exchanges: Mapping[str, Mapping[str, Mapping[str, Field]]]  # step -> down/up -> fields
    bytes_down: int  # of the shared model, to one client
    bytes_up: int
    keeps: Mapping[str, str]
    settings: Mapping[str, Any]
    secure_aggregation: bool
    per_example: bool
    uses_labels: bool

    def text(self) -> str:
        """The card as plain text."""
        lines = [f"{self.name}: {self.about}", ""]
        lines.append(
            "parts     " + ", ".join(f"{part} {rule}" for part, rule in self.parts.items())
        )
        for step, sides in self.exchanges.items():
            lines.append(f"{step:<9} down: {_fields(sides['down'])}")
            lines.append(f"{'':<9} up:   {_fields(sides['up'])}")
        lines += [
            f"bytes     model to one client {self.bytes_down:,}, from one client {self.bytes_up:,}",
            f"keeps     {', '.join(f'{k} ({v})' for k, v in self.keeps.items()) or 'nothing'}",
            f"labels    {'used at clients' if self.uses_labels else 'never reach a client task'}",
        ]
        if self.settings:
            lines.append("settings  " + ", ".join(f"{k}={v}" for k, v in self.settings.items()))
        lines += ["", *self.meaning()]
        return "\n".join(lines)

    def meaning(self) -> list[str]:
        """What the declarations imply, in plain words."""
        said = []
        if self.per_example:
            said.append("Rows that belong to single pictures leave the clients.")
        if any(f.kind == "weights" for s in self.exchanges.values() for f in s["up"].values()):
            said.append(
                "Model weights leave the clients. Nothing hides them from the server unless the "
                "recipe adds protection; weights can reveal whether a picture was trained on."
            )
        elif not any(sides["up"] for sides in self.exchanges.values()):
            said.append("Nothing leaves the clients.")
        said.append(
            "Everything sent up is a sum over clients, so secure aggregation could hide single "
            "clients."
            if self.secure_aggregation
            else "The server must see single clients' uploads: secure aggregation cannot hide them."
        )
        said.append(
            "Clients must remember something between rounds (cross-silo)."
            if self.keeps
            else "Clients need no memory between rounds (cross-device)."
        )
        return said


def card(method: Method) -> Card:
    """The card of a method, with the recipe's encoder and objective in it."""
    parts = method.blueprint
    exchanges = {
        name: {"down": declared.down, "up": declared.up}
        for name, declared in method.exchanges().items()
    }
    sent = [f for sides in exchanges.values() for f in sides["up"].values()]
    shared = parts.shared()
    rows = {key for key, rule, _ in parts.tensors() if rule == "row"}
    down = sum(t.numel() * t.element_size() for t in shared.values())
    up = sum(
        t.numel() * t.element_size() // (len(t) if key in rows else 1) for key, t in shared.items()
    )
    moves = any(f.kind == "weights" for f in sent)
    own = [f.name for f in fields(method) if f.name not in {g.name for g in fields(Method)}]
    kept: dict[str, str] = dict(method.keeps)
    if local := [name for name, rule in parts.rules.items() if rule == "local"]:
        kept["parts"] = f"weights: {', '.join(local)}"
    module = sys.modules[type(method).__module__]
    about = (inspect.getdoc(module) or inspect.getdoc(type(method)) or "").splitlines()
    return Card(
        name=method.name,
        about=about[0].partition(": ")[2] or about[0] if about else "",
        parts=dict(parts.rules),
        exchanges=exchanges,
        bytes_down=down if moves else 0,
        bytes_up=up if moves else 0,
        keeps=kept,
        settings={name: getattr(method, name) for name in own},
        secure_aggregation=all(f.fold in LINEAR for f in sent),
        per_example=any(f.kind == "per_example" for f in sent),
        uses_labels=method.uses_labels,
    )


def _fields(declared: Mapping[str, Field]) -> str:
    said = []
    for name, part in declared.items():
        words: list[str] = [name, part.kind.replace("_", "-")]
        if part.fold != "each":
            words.append(f"({part.fold}{f' by {part.by}' if part.by else ''})")
        if part.guarded:
            words.append("GUARDED")
        said.append(" ".join(words))
    return ", ".join(said) or "nothing"
