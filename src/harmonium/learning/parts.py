"""The model as named parts, each with a rule that says how it is shared between rounds.

| rule  | sent to the server         | at the client afterwards        |
|-------|----------------------------|---------------------------------|
| mean  | yes, and averaged          | nothing                         |
| row   | only the client's own row  | nothing                         |
| local | never                      | kept in the client's state      |
| fresh | never                      | nothing: rebuilt each time      |

Sharing is a property of a part, so partial aggregation needs a rule and not a subclass.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.core.devices import is_counter, to_device
from harmonium.core.errors import ConfigError, WireError, suggest
from harmonium.core.joined import Joined, joined
from harmonium.core.types import ClientId, Kind, Of, Rule, Weights
from harmonium.learning import compiling


@dataclass(frozen=True)
class Slot:
    """Share rule, shape and type of one shared tensor of the model in an upload."""

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
    reveals: Kind = "weights"  # per_example for queues and memory banks, which are never sent
    lazy: bool = False  # the server optimiser leaves rows of absent clients unchanged


BatchNorms = Literal["average", "local", "fedbn", "recalibrate"]
"""How BatchNorm in shared parts is treated.

| policy      | running statistics                              | scale and shift |
|-------------|-------------------------------------------------|-----------------|
| average     | sent and averaged                               | averaged        |
| local       | stay at the client (Andreux et al., 2020)       | averaged        |
| fedbn       | stay at the client (Li et al., FedBN, 2021)     | stay too        |
| recalibrate | never sent; clients measure them on the average | averaged        |
"""
_STATISTICS: Mapping[BatchNorms, Rule] = {"average": "mean", "recalibrate": "fresh"}


def _rule(name: str, part: Part, overrides: Mapping[str, Rule]) -> Rule:
    """The share rule of a part; raises ConfigError if it would send rows of single images."""
    default = part.share if part.share == "fresh" else overrides.get("*", part.share)
    rule = overrides.get(name, default)
    if part.reveals == "per_example" and rule in ("mean", "row"):
        raise ConfigError(
            f"part '{name}' holds rows of single images, so it may be local or fresh, never {rule}"
        )
    return rule


class Parts(nn.ModuleDict):
    """All parts of a model; `rules` maps each part's name to its rule."""

    rules: dict[str, Rule]
    exceptions: dict[str, Rule]  # tensors with a rule other than their part's

    def __init__(
        self,
        parts: Mapping[str, Part],
        overrides: Mapping[str, Rule],
        batch_norm: BatchNorms = "average",
        joint_views: bool = True,
    ) -> None:
        """Collect parts; `overrides` replaces rules by part name.

        `*` stands for all others except `fresh` ones: a part that is rebuilt each time belongs to
        how an objective trains, not to what clients share. `joint_views` is for `through`.
        """
        if overrides and not {"*", *parts} & set(overrides):
            raise ConfigError(
                f"`share` names {', '.join(sorted(overrides))}, but the model's parts are "
                f"{', '.join(parts)}"
            )
        super().__init__({name: part.module for name, part in parts.items()})
        self.joint_views = joint_views
        self.low: torch.dtype | None = None  # type that `through` computes in; none: float32
        self.compiled: int | None = None  # images of the batches that it compiles; none: none
        self.rules = {name: _rule(name, part, overrides) for name, part in parts.items()}
        self.lazy = {name for name, part in parts.items() if part.lazy}
        self.tables = {  # parts made with a row for each client, whatever their rule is now
            name for name, part in parts.items() if part.share == "row"
        }
        self.reveals: dict[str, Kind] = {name: part.reveals for name, part in parts.items()}
        self.exceptions = self._batch_norm_rules(batch_norm)

    def _batch_norm_rules(self, policy: BatchNorms) -> dict[str, Rule]:
        """Rules of the tensors of BatchNorm that differ from the rule of their part."""
        rule = _STATISTICS.get(policy, "local")
        if rule == "mean":
            return {}
        rules: dict[str, Rule] = {}
        for path, module in self.named_modules():
            if isinstance(module, _BatchNorm) and self.rules[path.partition(".")[0]] == "mean":
                tensors = dict(module.named_buffers())
                tensors |= dict(module.named_parameters()) if policy == "fedbn" else {}
                rules |= {f"{path}.{key}": rule for key in tensors}
        return rules

    def through(self, views: Sequence[Tensor], *path: str | nn.Module) -> list[list[Tensor]]:
        """Pass the views through a chain of modules; returns the outputs of each module.

        BatchNorm sees all views in one pass, or each view in a pass of its own
        (`local.joint_views`). All code that passes views through networks that may have BatchNorm
        should call this method.

        Args:
            views: each (n, ...); their numbers of rows may differ.
            path: names of parts, or modules; each takes the output of the one before it.

        Returns:
            For every module of the path, its outputs, one for each view; float32.
        """
        modules = [self[step] if isinstance(step, str) else step for step in path]
        if self.low is None:
            return self._through(views, modules)
        with torch.autocast(views[0].device.type, self.low):
            outputs = self._through(views, modules)
        return [[rows.float() for rows in each] for each in outputs]

    def _through(self, views: Sequence[Tensor], modules: Sequence[nn.Module]) -> list[list[Tensor]]:
        full = self.compiled is not None and all(len(view) == self.compiled for view in views)
        call = compiling.through if full else _call
        if self.joint_views:
            rows, sizes = joined(views), [len(view) for view in views]
            outputs: list[list[Tensor]] = []
            for module in modules:
                rows = call(module, rows)
                outputs.append(Joined(rows, sizes))
            return outputs
        outputs = [[] for _ in modules]
        for view in views:
            rows = view
            for module, per_view in zip(modules, outputs, strict=True):
                rows = call(module, rows)
                per_view.append(rows)
        return outputs

    @contextmanager
    def computing(self, low: torch.dtype | None, compiled: int | None = None) -> Iterator[None]:
        """Let `through` compute in another type, or compile batches of this size, in the block."""
        before = self.low, self.compiled
        self.low, self.compiled = low, compiled
        try:
            yield
        finally:
            self.low, self.compiled = before

    def rule_of(self, key: str) -> Rule:
        """The share rule of one tensor, by its dotted name."""
        return self.exceptions.get(key, self.rules[key.partition(".")[0]])

    def tensors(self) -> Iterator[tuple[str, Rule, Tensor]]:
        """Every parameter and buffer with its dotted name and its rule."""
        for key, tensor in self.state_dict().items():
            yield key, self.rule_of(key), tensor

    @cached_property
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
        """Copies of the shared tensors: whole tables for the server, a client's rows for it."""
        return {
            key: (tensor[client] if rule == "row" and client is not None else tensor).clone()
            for key, rule, tensor in self.tensors()
            if rule in ("mean", "row")
        }

    def kept(self) -> Weights:
        """Copies of the tensors that stay at the client."""
        return {key: tensor.clone() for key, rule, tensor in self.tensors() if rule == "local"}

    def layouts(self) -> Layouts:
        """The layout of a client's upload: of the whole shared model and of subsets of it."""
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

    def copy_from(
        self, *sources: Mapping[str, Tensor], device: torch.device | None = None
    ) -> Parts:
        """A copy of this model with the values of the sources, later ones taking precedence.

        The copy is on `device`; none: where this model is.
        """
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
        return _duplicate(self, values, {}, device)


def _call(module: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = module(rows)
    return output


Module = TypeVar("Module", bound=nn.Module)
_AS_IS = frozenset((bool, int, float, str, type(None)))


def _duplicate(
    module: Module,
    values: Mapping[int, Tensor],
    copies: dict[int, Any],
    device: torch.device | None,
) -> Module:
    """A deep copy with other values, several times faster than `copy.deepcopy` and a load.

    Most attributes of a module are empty dictionaries of hooks; only parameters, buffers and
    submodules need care. Both mappings are keyed by `id`: `values` has the new value of a tensor,
    `copies` what was copied already, so that shared weights stay shared.
    """
    if id(module) in copies:
        return typing.cast(Module, copies[id(module)])
    fresh = copies[id(module)] = object.__new__(type(module))
    made = vars(fresh)
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _AS_IS:
            made[name] = value
        elif name == "_modules":
            made[name] = {
                key: None if child is None else _duplicate(child, values, copies, device)
                for key, child in value.items()
            }
        elif name in ("_parameters", "_buffers"):
            made[name] = {
                key: _copy_tensor(tensor, values, copies, device) for key, tensor in value.items()
            }
        elif not value and isinstance(value, (dict, set)):
            made[name] = kind()
        else:
            made[name] = copy.deepcopy(value, copies)
    return fresh


def _copy_tensor(
    tensor: Tensor | None,
    values: Mapping[int, Tensor],
    copies: dict[int, Any],
    device: torch.device | None,
) -> Tensor | None:
    """A copy in the tensor's own memory layout."""
    if tensor is None:
        return None
    if id(tensor) not in copies:
        place = tensor.device if is_counter(tensor) else device
        copied = torch.empty_like(tensor, requires_grad=False, device=place)
        copied.copy_(to_device(values.get(id(tensor), tensor).detach(), copied.device))
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return typing.cast(Tensor, copies[id(tensor)])


def join(*groups: Mapping[str, Part]) -> dict[str, Part]:
    """Parts of several owners in one mapping; raises ConfigError if a name occurs twice."""
    joined: dict[str, Part] = {}
    for group in groups:
        if twice := sorted(set(joined) & set(group)):
            raise ConfigError(f"two pieces of this recipe both make a part called '{twice[0]}'")
        joined.update(group)
    return joined
