"""A method's card: what is sent, what is kept, and its implications, from declarations alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.core.errors import counted, shown
from harmonium.federation import global_objective, site_evaluation, whitening
from harmonium.federation.filters.rounding import size
from harmonium.federation.method import Method
from harmonium.federation.secure_aggregation.client import traffic
from harmonium.federation.secure_aggregation.fixed_point import FEWEST, Masks, obstacles
from harmonium.federation.site_evaluation import READY
from harmonium.federation.spending import paid_here
from harmonium.federation.wire import MASKS, MEASURING, STEPS, Field
from harmonium.learning import dpsgd
from harmonium.learning.training import Local

EXAMPLE = 1000  # images of a client, where noise depends on them
SCALES = {"gaussian": "standard deviation", "discrete-laplace": "scale"}
NUMBER = 8  # bytes of a scalar, and of any value under masks
BATCH_NORM = {
    "average": "statistics are sent and averaged",
    "local": "statistics stay at the client, scale and shift are averaged",
    "fedbn": "all of it stays at the client",
    "recalibrate": "statistics are measured by the clients on the average before it is evaluated",
}


@dataclass(frozen=True)
class Card:
    """The facts that `harmonium explain` shows."""

    name: str
    about: str
    paper: str
    objective: str
    terms: str  # losses beside it; empty where there are none
    encoder: str
    start: str  # what the model starts from; empty: a random initialisation
    local: str  # how a client trains in a round
    parameters: Mapping[str, int]  # part -> how many; values of a part that has none
    parts: Mapping[str, str]  # part -> rule
    exchanges: Mapping[str, Mapping[str, Mapping[str, Field]]]  # step -> down/up -> fields
    bytes: Mapping[str, Mapping[str, int]]  # step -> down/up -> bytes that are known beforehand
    noise: Mapping[str, Mapping[str, str]]  # step -> field -> what it gets before it leaves
    extents: Mapping[str, str]  # field -> how large it gets, where the method says so
    batch_norm: str  # its treatment; empty where there is none
    transport: str  # how weights are rounded; empty if they are not
    aggregation: str  # empty where nothing of the model is sent
    keeps: Mapping[str, str]  # at a client
    remembers: Mapping[str, str]  # at the server
    settings: Mapping[str, Any]
    obstacles: Mapping[str, Mapping[str, str]]  # step -> field -> why it cannot be summed, or empty
    secure_aggregation: bool  # whether it could hide everything that single clients send
    masks: Masks | None  # secure aggregation, if it is on
    per_example: bool
    uses_labels: bool
    reveals: tuple[str, ...]  # further sentences of the method and its terms

    def text(self) -> str:
        """The card as plain text."""
        lines = [f"{self.name}: {self.about}"]
        lines += [f"paper     {self.paper}"] if self.paper else []
        lines += ["", *self._model(), *self._exchanges(), *self._hidden(), *self._kept_lines()]
        return "\n".join([*lines, "", *self.meaning()])

    def _model(self) -> list[str]:
        """What is trained, and how."""
        parts = [f"{part} {rule} ({self.parameters[part]:,})" for part, rule in self.parts.items()]
        lines = [f"encoder   {self.encoder}"]
        lines += [f"starts    {self.start}"] if self.start else []
        lines += [f"objective {self.objective}"]
        lines += [f"adds      {self.terms}"] if self.terms else []
        return [*lines, f"trains    {self.local}", f"parts     {', '.join(parts)}"]

    def _exchanges(self) -> list[str]:
        """What is sent, exchange by exchange, and the noise on it."""
        lines = []
        for step, sides in self.exchanges.items():
            for word, side in (("down:", "down"), ("up:  ", "up")):
                name = step if side == "down" else ""
                lines.append(f"{name:<9} {word} {_fields(sides[side])}{self._size(step, side)}")
        noise = [f"{step}.{n}: {how}" for step, by in self.noise.items() for n, how in by.items()]
        return [*lines, *(f"{'' if n else 'noise':<9} {line}" for n, line in enumerate(noise))]

    def _kept_lines(self) -> list[str]:
        """What clients and server keep, and further settings."""
        used = "used at clients" if self.uses_labels else "never reach a client task"
        used = "used at clients to evaluate only" if READY in self.exchanges else used
        settings = ", ".join(f"{key}={shown(value)}" for key, value in self.settings.items())
        optional = {
            "combines": self.aggregation,
            "batchnorm": self.batch_norm,
            "transport": self.transport,
            "labels": used,
            "settings": settings,
        }
        return [
            f"client    keeps {_listed(self.keeps)} between rounds",
            f"server    keeps {_listed(self.remembers)}; knows each client's number of images",
            *(f"{name:<9} {value}" for name, value in optional.items() if value),
        ]

    def _size(self, step: str, side: str) -> str:
        declared = self.exchanges[step][side]
        if not declared:
            return ""
        rest = [n for n, f in declared.items() if f.fold != "parts" and f.kind != "scalar"]
        sizes = [f"{self.bytes[step][side]:,} bytes"] if len(rest) < len(declared) else []
        sizes += [f"{name}: {self.extents[name]}" for name in rest if name in self.extents]
        sizes += ["what depends on the data"] if set(rest) - set(self.extents) else []
        known = " and ".join(sizes)
        return f"; {known}, masked" if self.masks and side == "up" else f"; {known}"

    def _hidden(self) -> list[str]:
        """The fields that secure aggregation hides or could hide, by exchange."""
        lines = []
        for step, reasons in self.obstacles.items():
            if can := [name for name, why in reasons.items() if not why]:
                word = "hides" if self.masks else "could hide"
                lines.append(f"{step}: {word} {', '.join(can)}")
            lines += [f"{step}: cannot hide {name}: {why}" for name, why in reasons.items() if why]
        if self.masks:
            both = (sum(self.bytes[one][side] for one in STEPS) for side in ("down", "up"))
            sizes = "{:,} bytes down, {:,} up".format(*both)
            lines.append(f"{', '.join(STEPS)}: {sizes} around each ask whose answers are hidden")
        return [f"{'' if n else 'secure':<9} {line}" for n, line in enumerate(lines)]

    def meaning(self) -> list[str]:
        """What the declarations imply, in plain words."""
        sentences = []
        if self.per_example:
            sentences.append("Rows that belong to single images leave the clients.")
        sentences += [*self.reveals, *self._about_weights(), self._about_secure_aggregation()]
        sentences.append(
            "Clients must remember something between rounds (cross-silo)."
            if self.keeps
            else "Clients need no memory between rounds (cross-device)."
        )
        if any("per_example" in what for what in self.keeps.values()):
            sentences.append("What clients keep includes rows that belong to single images.")
        return sentences

    def _about_weights(self) -> list[str]:
        sent = [f for sides in self.exchanges.values() for f in sides["up"].values()]
        if not sent:
            return ["Nothing leaves the clients."]
        if not any(field.kind == "weights" and not field.guarded for field in sent):
            return []
        if self.masks:
            return [
                "Model weights leave the clients, and the server sees only their sum; a sum, too, "
                "can reveal whether an image was trained on."
            ]
        return [
            "Model weights leave the clients. Nothing hides them from the server unless the recipe "
            "adds protection; weights can reveal whether an image was trained on."
        ]

    def _about_secure_aggregation(self) -> str:
        if self.masks:
            return (
                "Secure aggregation is on: the server sees who took part, and sums over at least "
                f"{FEWEST} clients and {self.masks.threshold:.0%} of those who began; it sees no "
                "single client's answer, as long as it keeps to the protocol. Clients that join it "
                "know their own answers, and so the sum over the others."
            )
        if self.secure_aggregation:
            return (
                "Everything sent up is a sum over clients, so secure aggregation could hide single "
                "clients: privacy.secure_aggregation=true."
            )
        shown = [f"{s}.{n}" for s, f in self.obstacles.items() for n, why in f.items() if why]
        return (
            f"As it stands, the server must see {', '.join(shown)} of single clients: secure "
            "aggregation cannot hide that, for the reasons above."
        )


def card(method: Method, masks: Masks | None = None, cohort: int = 0) -> Card:
    """The card of a method, with the recipe's encoder and objective in it.

    Args:
        method: as the recipe makes it.
        masks: secure aggregation, if it is on.
        cohort: clients that are asked in a round, which sizes what secure aggregation adds.
    """
    parts, exchanges = method.blueprint, method.exchanges()
    hindered = _hindered(method)
    return Card(
        name=method.name,
        about=_about(method),
        paper=method.paper,
        objective=_named(method.objective),
        terms="; ".join(_named(term) for term in method.terms),
        encoder=_named(method.encoder),
        start=f"from given weights, SHA-256 {method.initial.digest}" if method.initial else "",
        local=_trains(method.local),
        parameters={name: _parameters(module) for name, module in parts.items()},
        parts=dict(parts.rules),
        exchanges={name: {"down": one.down, "up": one.up} for name, one in exchanges.items()},
        bytes=_sizes(method, cohort if masks else 0),
        noise={step: noise for step in exchanges if (noise := _noise(method, step))},
        extents=_extents(method),
        batch_norm=_batch_norm(method),
        transport=method.transport.words(),
        aggregation=_combines(method) if parts.layouts()["model"] else "",
        keeps=_kept_at_client(method),
        remembers=_remembered(method),
        settings=_own_settings(method),
        obstacles=hindered,
        secure_aggregation=not any(why for fields in hindered.values() for why in fields.values()),
        masks=masks,
        per_example=any(
            field.kind == "per_example" for one in exchanges.values() for field in one.up.values()
        ),
        uses_labels=method.reads_labels,
        reveals=_reveals(method),
    )


def _hindered(method: Method) -> dict[str, dict[str, str]]:
    """Why a sum cannot express a field, by exchange and field; empty text where it can.

    Measuring asks send a mean in place of each client's number where secure aggregation is on.
    """
    exchanges, hindered = method.exchanges(), obstacles(method)
    for step in (one for one in hindered if one in MEASURING):
        hindered[step] = {
            name: why if exchanges[step].up[name].fold != "each" else ""
            for name, why in hindered[step].items()
        }
    return hindered


def _parameters(module: nn.Module) -> int:
    """The number of parameters of a part, or of its buffers if it has none."""
    return sum(tensor.numel() for tensor in [*module.parameters()] or module.buffers())


def _extents(method: Method) -> dict[str, str]:
    return {
        **(global_objective.EXTENTS if method.measures_objective else {}),
        **(whitening.EXTENTS if method.whitening else {}),
        **(site_evaluation.EXTENTS if method.site_evaluation else {}),
        **method.extents(),
    }


def _own_settings(method: Method) -> dict[str, Any]:
    """The settings that a method has beside those of every method."""
    common = {field.name for field in fields(Method)}
    own = (field.name for field in fields(method) if field.init and field.name not in common)
    return {name: getattr(method, name) for name in own}


def _reveals(method: Method) -> tuple[str, ...]:
    """What leaves, in sentences of the method, its terms and its protections."""
    return (
        *method.revealed(),
        *global_objective.words(method),
        *whitening.words(method),
        *site_evaluation.words(method),
        *(term.reveals for term in method.terms if term.reveals),
        *(method.updates.words() if method.updates else ()),
        *dpsgd.words(method.local),
    )


def _sizes(method: Method, masked: int) -> dict[str, dict[str, int]]:
    """Bytes by ask and direction; a masked ask is for `masked` clients that all stay."""
    sizes = {}
    for step, declared in method.exchanges().items():
        way = bool(masked and declared.up)
        extra = traffic(masked)[MASKS]["down"] if way else 0
        sizes[step] = {
            "down": _bytes(method, declared.down, "down") + extra,
            "up": _bytes(method, declared.up, "up", way),
        }
    return sizes | {step: traffic(masked)[step] for step in STEPS if masked}


def _bytes(method: Method, declared: Mapping[str, Field], side: str, masked: bool = False) -> int:
    """The part of a message's size that is known in advance: weights and numbers."""
    parts, total = method.blueprint, 0
    shared = parts.shared()
    for one in declared.values():
        if one.kind == "scalar":
            total += NUMBER
        elif one.fold == "parts":
            for key, slot in parts.layouts()[one.of].items():
                whole = side == "down" and slot.rule == "row"
                shape = shared[key].shape if whole else torch.Size(slot.shape)
                how = method.transport.down if side == "down" else method.transport.up
                total += shape.numel() * NUMBER if masked else size(key, shape, slot.dtype, how)
    return total


def _noise(method: Method, step: str) -> dict[str, str]:
    """The noise on guarded fields of a step, in words; with `EXAMPLE` images if these matter."""
    releases = paid_here(method, step, EXAMPLE)
    varies = releases != paid_here(method, step, 2 * EXAMPLE)
    noise = {}
    for name in (n for n, one in method.exchanges()[step].up.items() if one.guarded):
        releases_in_words = [
            (f"{one.count} times " if one.count > 1 else "")
            + f"{one.mechanism}, {SCALES[one.mechanism]} {one.scale:.4g} for a sensitivity of "
            + f"{one.sensitivity:.4g}"
            for one in releases
            if one.field == name
        ]
        where = f", of a client with {EXAMPLE:,} images" if releases_in_words and varies else ""
        noise[name] = ("; ".join(releases_in_words) or "added before it leaves") + where
    return noise


def _about(method: Method) -> str:
    module = sys.modules[type(method).__module__]
    lines = (inspect.getdoc(module) or inspect.getdoc(type(method)) or "").splitlines()
    return lines[0].partition(": ")[2] or lines[0] if lines else ""


def _named(choice: Any) -> str:
    changed = [
        f"{f.name}={getattr(choice, f.name)}"
        for f in fields(choice)
        if getattr(choice, f.name) != f.default
    ]
    name = choice.name or type(choice).__name__
    paper = getattr(choice, "paper", "")
    return name + (f" ({', '.join(changed)})" if changed else "") + (f", {paper}" if paper else "")


def _batch_norm(method: Method) -> str:
    """The treatment of BatchNorm, if some part has it."""
    parts = method.blueprint
    of = {key.partition(".")[0] for key in parts.state_dict() if key.endswith("running_mean")}
    if not of:
        return ""
    if all(parts.rules[name] != "mean" for name in of):
        return "stays at the client with its part"
    shared = [name for name in parts.rules if name in of and parts.rules[name] == "mean"]
    return f"{method.batch_norm} (in {', '.join(shared)}): {BATCH_NORM[method.batch_norm]}"


def _trains(local: Local) -> str:
    rate = f"{local.optimiser} at {local.lr:g}, {local.schedule} over rounds"
    most = f", at most {counted(local.max_steps, 'step')}" if local.max_steps else ""
    return f"{counted(local.epochs, 'epoch')} a round in batches of {local.batch}{most}, {rate}"


def _combines(method: Method) -> str:
    by = method.server_optimiser.weighting
    weights = "weighted by examples where the method says so" if by == "examples" else "all alike"
    way = method.aggregation.name
    return f"{way}, clients {weights}; server optimiser {method.server_optimiser.name}"


def _kept_at_client(method: Method) -> dict[str, str]:
    """What stays at a client: what is declared, and local parts or tensors."""
    parts, kept = method.blueprint, dict[str, str](method.keeping())
    kept |= method.transport.keeping(method)
    for name, rule in parts.rules.items():
        if rule == "local":
            kept[name] = parts.reveals[name]
    norms = {key.partition(".")[0] for key, rule in parts.exceptions.items() if rule == "local"}
    what = "weights" if method.batch_norm == "fedbn" else "statistic"
    return kept | {f"BatchNorm of {name}": what for name in sorted(norms)}


def _remembered(method: Method) -> dict[str, str]:
    """What the server keeps; one step of the optimiser shows which moments it has."""
    if not method.blueprint.layouts()["model"]:
        return dict[str, str](method.remembers)
    one = {"w": torch.ones(1)}
    _, moments = method.server_optimiser.step(one, {"w": torch.zeros(1)}, {"w"}, {}, 1.0)
    optimiser_state = {
        name: "weights"
        for name, moment in moments.items()
        if isinstance(moment, Mapping)
        and all(isinstance(value, Tensor) for value in moment.values())
    }
    measured = {"statistics": "statistic"} if method.recalibrates else {}
    measured |= {"measured": "statistic"} if method.measured else {}
    measured |= {"global_objective": "scalar"} if method.measures_objective else {}
    measured |= {whitening.KEY: "statistic"} if method.whitening else {}
    measured |= {site_evaluation.KEY: "statistic"} if method.site_evaluation else {}
    return {
        "the model": "weights",
        **dict[str, str](method.remembers),
        **optimiser_state,
        **measured,
    }


def _listed(entries: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({what})" for name, what in entries.items()) or "nothing"


def _fields(declared: Mapping[str, Field]) -> str:
    phrases = []
    for name, part in declared.items():
        words: list[str] = [name, part.kind.replace("_", "-")]
        if part.fold != "each":
            words.append(f"({part.fold}{f' by {part.by}' if part.by else ''})")
        if part.guarded:
            words.append("with noise")
        phrases.append(" ".join(words))
    return ", ".join(phrases) or "nothing"
