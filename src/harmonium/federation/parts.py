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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmonium.errors import ConfigError, WireError, suggest
from harmonium.federation.fold import Layout, Slot
from harmonium.federation.wire import ClientId, Rule, Weights


@dataclass(frozen=True)
class Part:
    """A named piece of the model and its share rule."""

    module: nn.Module
    share: Rule = "mean"


class Parts(nn.ModuleDict):
    """All parts of a model; `rules` maps each part's name to its rule."""

    def __init__(self, parts: Mapping[str, Part], overrides: Mapping[str, Rule]) -> None:
        """Collect parts; `overrides` replaces rules by part name, `*` stands for all others."""
        super().__init__({name: part.module for name, part in parts.items()})
        self.rules: dict[str, Rule] = {
            name: overrides.get(name, overrides.get("*", part.share))
            for name, part in parts.items()
        }

    def tensors(self) -> Iterator[tuple[str, Rule, Tensor]]:
        """Every parameter and buffer with its dotted name and its rule."""
        for key, tensor in self.state_dict().items():
            yield key, self.rules[key.partition(".")[0]], tensor

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

    def layout(self) -> Layout:
        """What a client's upload of this model must look like."""
        return {
            key: Slot(
                rule, tuple(tensor.shape[1:] if rule == "row" else tensor.shape), tensor.dtype
            )
            for key, rule, tensor in self.tensors()
            if rule in ("mean", "row")
        }

    def copy_from(self, *sources: Mapping[str, Tensor]) -> Parts:
        """A fresh model: this one's values overlaid by the sources', in order."""
        fresh = copy.deepcopy(self)
        own = fresh.state_dict()
        with torch.no_grad():
            for source in sources:
                for key, value in source.items():
                    if key not in own:
                        raise WireError(f"the model has no `{key}`: {suggest(key, own)}")
                    if own[key].shape != value.shape:
                        raise WireError(
                            f"`{key}` has shape {tuple(value.shape)}, the model's has "
                            f"{tuple(own[key].shape)}"
                        )
                    own[key].copy_(value)
        return fresh


def join(*groups: Mapping[str, Part]) -> dict[str, Part]:
    """Parts of several owners as one table; two owners must not use the same name."""
    joined: dict[str, Part] = {}
    for group in groups:
        if twice := sorted(set(joined) & set(group)):
            raise ConfigError(f"two pieces of this recipe both make a part called '{twice[0]}'")
        joined.update(group)
    return joined
