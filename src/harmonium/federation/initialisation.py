"""A model that starts from given weights instead of a random initialisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from harmonium.core.errors import ConfigError, Key
from harmonium.core.types import Weights

ENCODER = "encoder."
COUNTER = "num_batches_tracked"
SHOWN = 3  # names in a message


class Start(Protocol):
    """Where given weights come from."""

    @property
    def digest(self) -> str:
        """SHA-256 of the weights."""

    def weights(self) -> Weights:
        """The weights themselves."""


def load_encoder_weights(encoder: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Load given weights into an encoder; names and shapes must be the encoder's."""
    wanted = encoder.state_dict()
    named = _encoder_weights(given, wanted)
    if mismatch := _mismatch(named, wanted):
        raise ConfigError(
            Key("init"),
            f": the weights do not fit the encoder ({mismatch}). Choose the encoder that they were "
            "made with, and images with as many channels",
        )
    encoder.load_state_dict({name: named[name].to(wanted[name].dtype) for name in wanted})


def _encoder_weights(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Weights:
    """Given weights by the names within the encoder; all of them, if none is marked as its own."""
    own = {name: value for name, value in given.items() if name.startswith(ENCODER)}
    named = {name.removeprefix(ENCODER): value for name, value in own.items()} or dict(given)
    # BatchNorm's counters do not come with statistics that were measured anew.
    counters = {name: value for name, value in wanted.items() if name.endswith(COUNTER)}
    return counters | _unwrapped(named, wanted)


def _mismatch(named: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """How names and shapes differ from the wanted ones, in words; empty where they do not."""
    faults = {
        "missing": [name for name in wanted if name not in named],
        "unexpected": [name for name in named if name not in wanted],
        "of another shape": [
            f"{name} {tuple(named[name].shape)}, not {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in named and named[name].shape != tensor.shape
        ],
    }
    return "; ".join(f"{fault}: {_listed(names)}" for fault, names in faults.items() if names)


def _unwrapped(named: Weights, wanted: Mapping[str, Tensor]) -> Weights:
    """Weights without the name of a module around the encoder, such as `network.` or `module.`."""
    outer = {name.partition(".")[0] for name in named}
    inner = {name.partition(".")[2]: value for name, value in named.items()}
    return (
        inner if len(outer) == 1 and not named.keys() & wanted and inner.keys() & wanted else named
    )


def load_other_parts(parts: nn.ModuleDict, given: Mapping[str, Tensor]) -> list[str]:
    """Load given weights into other parts whose tensors all fit; return the names of the parts."""
    if not any(name.startswith(ENCODER) for name in given):
        return []
    taken = []
    for part, module in parts.items():
        if part == "encoder":
            continue
        wanted = module.state_dict()
        named = {
            n.removeprefix(f"{part}."): v for n, v in given.items() if n.startswith(f"{part}.")
        }
        same = {n: v.shape for n, v in named.items()} == {n: v.shape for n, v in wanted.items()}
        if wanted and same:
            module.load_state_dict({name: named[name].to(wanted[name].dtype) for name in wanted})
            taken.append(part)
    return taken


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
