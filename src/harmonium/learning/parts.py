"""The model as named parts, each with a rule that says what becomes of it between rounds.

| rule  | sent to the server         | at the client afterwards        |
|-------|----------------------------|---------------------------------|
| mean  | yes, and averaged          | nothing                         |
| row   | only the client's own row  | nothing                         |
| local | never                      | kept in the client's state      |
| fresh | never                      | nothing: rebuilt each time      |

Sharing is a property of a part, so partial aggregation is a table and not a subclass.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.core.errors import ConfigError, WireError, suggest
from harmonium.core.types import ClientId, Kind, Of, Rule, Weights


@dataclass(frozen=True)
class Slot:
    """What one shared tensor of the model looks like in an upload."""

    rule: Rule
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = Mapping[str, Slot]
Layouts = Mapping[Of, Layout]


@dataclass(frozen=True)
class Part:
    """A named piece of the model, its share rule, and what its tensors reveal."""

    module: nn.Module
    share: Rule = "mean"
    reveals: Kind = "weights"  # per_example for queues and memories, which can then not be sent
    lazy: bool = False  # rows of absent clients rest, whatever the server optimiser's moments say


BatchNorms = Literal["average", "local", "fedbn", "recalibrate"]
"""What becomes of BatchNorm in shared parts.

| policy      | running statistics                              | scale and shift |
|-------------|-------------------------------------------------|-----------------|
| average     | sent and averaged                               | averaged        |
| local       | stay at the client (Andreux et al., 2020)       | averaged        |
| fedbn       | stay at the client (Li et al., FedBN, 2021)     | stay too        |
| recalibrate | never sent; clients measure them on the average | averaged        |
"""
_STATISTICS: Mapping[BatchNorms, Rule] = {"average": "mean", "recalibrate": "fresh"}


class Parts(nn.ModuleDict):
    """All parts of a model; `rules` maps each part's name to its rule."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        overrides: Mapping[str, Rule],
        batch_norm: BatchNorms = "average",
        joint_views: bool = True,
    ) -> None:
        """Collect parts; `overrides` replaces rules by part name.

        `*` stands for all others but those that are `fresh`: what is made anew each time is part
        of how an objective trains, not of who shares what. `joint_views` is for `through`.
        """
        if overrides and not {"*", *parts} & set(overrides):
            raise ConfigError(
                f"`share` names {', '.join(sorted(overrides))}, but the model's parts are "
                f"{', '.join(parts)}"
            )
        super().__init__({name: part.module for name, part in parts.items()})
        self.joint_views = joint_views
        self.rules: dict[str, Rule] = {
            name: overrides.get(
                name, overrides.get("*", part.share) if part.share != "fresh" else "fresh"
            )
            for name, part in parts.items()
        }
        for name, part in parts.items():
            if part.reveals == "per_example" and self.rules[name] in ("mean", "row"):
                raise ConfigError(
                    f"part '{name}' holds rows of single images, so it may be local or fresh, "
                    f"never {self.rules[name]}"
                )
        self.lazy = {name for name, part in parts.items() if part.lazy}
        self.tables = {name for name, part in parts.items() if part.share == "row"}  # by birth
        self.reveals: dict[str, Kind] = {name: part.reveals for name, part in parts.items()}
        self.exceptions: dict[str, Rule] = {}  # tensors with a rule other than their part's
        for path, module in self.named_modules():
            if isinstance(module, _BatchNorm) and self.rules[path.partition(".")[0]] == "mean":
                stays = dict(module.named_buffers())
                stays |= dict(module.named_parameters()) if batch_norm == "fedbn" else {}
                rule = _STATISTICS.get(batch_norm, "local")
                self.exceptions |= {f"{path}.{key}": rule for key in stays if rule != "mean"}

    def through(self, views: Sequence[Tensor], *path: str | nn.Module) -> list[list[Tensor]]:
        """What each module of a path makes of the views, one after the other.

        This is the one place that says what BatchNorm looks at: all views in one pass, or each
        view in a pass of its own (`local.joint_views`). Whatever passes views through networks
        that may have BatchNorm should do it here.

        Args:
            views: each (n, ...); their numbers of rows may differ.
            path: names of parts, or modules; each takes what the one before it made.

        Returns:
            For every module of the path, its outputs, one for each view.
        """
        modules = [self[one] if isinstance(one, str) else one for one in path]
        if self.joint_views:
            rows, sizes = torch.cat(list(views)), [len(view) for view in views]
            made = []
            for module in modules:
                rows = module(rows)
                made.append(list(rows.split(sizes)))
            return made
        made = [[] for _ in modules]
        for view in views:
            rows = view
            for module, outputs in zip(modules, made, strict=True):
                rows = module(rows)
                outputs.append(rows)
        return made

    def rule_of(self, key: str) -> Rule:
        """What becomes of one tensor."""
        return self.exceptions.get(key, self.rules[key.partition(".")[0]])

    def tensors(self) -> Iterator[tuple[str, Rule, Tensor]]:
        """Every parameter and buffer with its dotted name and its rule."""
        for key, tensor in self.state_dict().items():
            yield key, self.rule_of(key), tensor

    @property
    def stays(self) -> bool:
        """Whether anything of this model is kept at the client."""
        return "local" in {rule for _, rule, _ in self.tensors()}

    def statistics(self, part: str) -> Weights:
        """The running means and variances of a part's BatchNorms, by dotted name."""
        return {
            f"{part}.{path}.{key}": buffer
            for path, module in self[part].named_modules()
            if isinstance(module, _BatchNorm)
            for key, buffer in module.named_buffers()
            if buffer.is_floating_point()
        }

    def shared(self, client: ClientId | None = None) -> Weights:
        """Copies of what may travel: whole tables for the server, own rows for a client."""
        return {
            key: (tensor[client] if rule == "row" and client is not None else tensor).clone()
            for key, rule, tensor in self.tensors()
            if rule in ("mean", "row")
        }

    def kept(self) -> Weights:
        """Copies of what stays at the client."""
        return {key: tensor.clone() for key, rule, tensor in self.tensors() if rule == "local"}

    def layouts(self) -> Layouts:
        """What a client's upload must look like: of all that is shared, or of some of it."""
        shared = {
            key: Slot(
                rule, tuple(tensor.shape[1:] if rule == "row" else tensor.shape), tensor.dtype
            )
            for key, rule, tensor in self.tensors()
            if rule in ("mean", "row")
        }
        trained = {key for key, parameter in self.named_parameters() if parameter.requires_grad}
        measured = self.statistics("encoder").items() if "encoder" in self else ()
        return {
            "model": shared,
            "encoder": {key: slot for key, slot in shared.items() if key.startswith("encoder.")},
            "parameters": {
                key: slot for key, slot in shared.items() if key in trained and slot.rule == "mean"
            },
            "statistics": {
                key: Slot("mean", tuple(tensor.shape), tensor.dtype) for key, tensor in measured
            },
        }

    def copy_from(self, *sources: Mapping[str, Tensor]) -> Parts:
        """A fresh model: this one's values overlaid by the sources', in order."""
        own = self.state_dict(keep_vars=True)
        values: dict[int, Tensor] = {}
        for source in sources:
            for key, value in source.items():
                if key not in own:
                    raise WireError(f"the model has no `{key}`: {suggest(key, own)}")
                if own[key].shape != value.shape:
                    raise WireError(
                        f"`{key}` has shape {tuple(value.shape)}, the model's has "
                        f"{tuple(own[key].shape)}"
                    )
                values[id(own[key])] = value
        return _duplicate(self, values, {})


Module = TypeVar("Module", bound=nn.Module)


def _duplicate(module: Module, values: Mapping[int, Tensor], made: dict[int, Any]) -> Module:
    """A deep copy with other values, several times quicker than `copy.deepcopy` and a load.

    Most of what a module holds are empty tables of hooks; only parameters, buffers and submodules
    need care. `values` and `made` are keyed by identity: what a tensor shall hold, and what was
    copied already, so that shared weights stay shared.
    """
    if id(module) in made:
        return typing.cast(Module, made[id(module)])
    fresh = made[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            value = {
                key: None if child is None else _duplicate(child, values, made)
                for key, child in value.items()
            }
        elif name in ("_parameters", "_buffers"):
            value = {key: _copy_tensor(tensor, values, made) for key, tensor in value.items()}
        elif isinstance(value, dict | set) and not value:
            value = type(value)()
        elif not isinstance(value, bool | int | float | str | None):
            value = copy.deepcopy(value, made)
        vars(fresh)[name] = value
    return fresh


def _copy_tensor(
    tensor: Tensor | None, values: Mapping[int, Tensor], made: dict[int, Any]
) -> Tensor | None:
    """A copy in the tensor's own memory layout."""
    if tensor is None:
        return None
    if id(tensor) not in made:
        copied = torch.empty_like(tensor, requires_grad=False)
        copied.copy_(values.get(id(tensor), tensor).detach())
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return typing.cast(Tensor, made[id(tensor)])


def join(*groups: Mapping[str, Part]) -> dict[str, Part]:
    """Parts of several owners as one table; two owners must not use the same name."""
    joined: dict[str, Part] = {}
    for group in groups:
        if twice := sorted(set(joined) & set(group)):
            raise ConfigError(f"two pieces of this recipe both make a part called '{twice[0]}'")
        joined.update(group)
    return joined
