"""Custom encoders: functions and classes that build a network, and `nn.Module` objects.

A function is named in the recipe as `module:function`, so that every process can build the network:
workers, resumed runs and sites. A network passed as an object exists only in this process. Its
initial weights are stored by their digest; nothing is pickled.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor, nn

from harmonium.core import files
from harmonium.core.errors import ConfigError, StoreError, counted
from harmonium.core.paths import home
from harmonium.core.registry import recipe_name
from harmonium.learning.encoders import Encoder

FACTORY = (
    "a function `def build(channels: int, side: int) -> nn.Module` in a module of yours, named as "
    "encoder=module:build"
)
_NETWORKS: dict[str, nn.Module] = {}  # networks passed to this process, by structure


# ---- functions and classes -----------------------------------------------------------------------


@dataclass(frozen=True)
class Made(Encoder):
    """The base of encoders whose network is built by the user's code."""

    make: ClassVar[Callable[..., Any]]
    any_shape: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))

    def build(self, channels: int, side: int) -> nn.Module:
        """The network that the user's code builds with these settings."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        network = type(self).make(channels, side, settings)
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"encoder {_called(type(self))} made a {type(network).__name__}; it must return an "
                "nn.Module"
            )
        if _is_lazy(network):  # its weights are initialised by the first image
            with torch.no_grad():
                network.eval()(torch.zeros(2, channels, side, side))
        return network.train()

    def features_for(self, channels: int, side: int) -> int:
        """Determined by passing two blank images through a network."""
        return _features(self, channels, side)


def adapt(builder: Any, name: str) -> type[Encoder] | None:
    """An encoder from a function or a class that makes a network; None for anything else.

    Only what is annotated to return an `nn.Module` is called: a recipe comes from outside, and must
    not be able to call whatever can be imported. Keyword arguments with plain defaults are the
    settings of the encoder.
    """
    if isinstance(builder, type):
        built = getattr(builder, "build", None)
        if issubclass(builder, nn.Module) or not callable(built) or not _makes_module(built):
            return None
        factory: Any = builder
        return _adapted(factory, name, skip=0)
    if not isinstance(builder, types.FunctionType) or not _makes_module(builder):
        return None
    return _adapted(builder, name, skip=2)


def _makes_module(function: Any) -> bool:
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # noqa: BLE001  (annotations may name what is not imported)
        return False
    return isinstance(returned, type) and issubclass(returned, nn.Module)


@cache
def _adapted(builder: Any, name: str, skip: int) -> type[Encoder]:
    fields: list[tuple[str, Any, Any]] = []
    parameters = list(inspect.signature(builder).parameters.values())
    for parameter in parameters[skip:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise ConfigError(
                f"encoder {name} has the argument '{parameter.name}' without a default: give it one"
            )
        if _is_plain(parameter.default):
            default = parameter.default
            default = tuple(default) if isinstance(default, list) else default
            wanted = _hint(builder, parameter.name, default)
            fields.append((parameter.name, wanted, dataclasses.field(default=default)))
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if [parameter.kind in placed for parameter in parameters[:skip]] != [True] * skip:
        raise ConfigError(f"encoder {name} must take the arguments channels and side")

    def make(channels: int, side: int, settings: dict[str, Any]) -> Any:
        if skip:
            return builder(channels, side, **settings)
        return builder(**settings).build(channels, side)

    module, _, qualname = name.partition(":")
    space = {"make": staticmethod(make), "__module__": module, "__qualname__": qualname}
    adapted = dataclasses.make_dataclass(
        qualname, fields, bases=(Made,), namespace=space, frozen=True
    )
    adapted.__module__, adapted.__doc__ = module, inspect.getdoc(builder) or f"Made by {name}."
    return adapted


def _hint(builder: Any, name: str, default: Any) -> Any:
    """The type of a setting: its annotation if that is plain, else the type of its default."""
    try:
        target = vars(builder).get("__init__", builder) if isinstance(builder, type) else builder
        hint = typing.get_type_hints(target).get(name)
    except Exception:  # noqa: BLE001
        hint = None
    plain = (int, float, str, bool)
    if hint in plain or typing.get_origin(hint) in (typing.Literal, types.UnionType, typing.Union):
        return hint
    return type(default) if type(default) in plain else Any


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _called(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def named(value: Any) -> dict[str, Any] | None:
    """The settings that name a function or a class of the user's; None for anything else."""
    if not isinstance(value, types.FunctionType | type):
        return None
    name = _called(value)  # type: ignore[arg-type]
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise ConfigError(f"encoder is the class {value.__name__}; give {FACTORY}")
    if "<" in value.__qualname__:
        raise ConfigError(
            f"encoder is {value.__qualname__}, which no other process can find: give {FACTORY}"
        )
    if adapt(value, name) is None:
        raise ConfigError(
            f"encoder is {name}, which is not annotated to return an nn.Module: give {FACTORY}"
        )
    return {"name": name}


# ---- networks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Encoder):
    """A network that was given from Python as an nn.Module.

    It runs in the process that has it (`engine.workers=0`) and begins with its own weights. A run
    that is resumed elsewhere needs it again: `harmonium.resume(RUN, encoder=module)`.
    """

    network: str = ""  # the class of the network
    structure: str = ""  # digest of its layers and the shapes of its weights
    weights: str = ""  # digest of its initial weights

    in_process: ClassVar[bool] = True
    any_shape: ClassVar[bool] = False

    def build(self, channels: int, side: int) -> nn.Module:
        """A copy of the network with its initial weights."""
        original = _NETWORKS.get(self.structure)
        if original is None:
            raise ConfigError(
                f"the encoder was given as an nn.Module ({self.network or 'none'}), which only the "
                "process that made it has: give it again, e.g. harmonium.resume(RUN, "
                f"encoder=module), or use {FACTORY}"
            )
        network = copy.deepcopy(original)
        network.load_state_dict(self._stored())
        return network.train()

    def _stored(self) -> dict[str, Tensor]:
        path = _file(self.weights)
        if not path.exists():
            raise StoreError(
                f"the initial weights of the encoder are not in {path.parent}: they are stored "
                "when a run begins, under HARMONIUM_HOME"
            )
        return safetensors.torch.load(files.read_checked(path, self.weights))

    def features_for(self, channels: int, side: int) -> int:
        """Determined by passing two blank images through the network."""
        return _features(self, channels, side)


def keep_network(network: nn.Module) -> dict[str, Any]:
    """Keep a network in this process and its weights on disk; returns the settings that name it."""
    if _is_lazy(network):
        raise ConfigError(
            f"encoder is a {type(network).__name__} with lazy layers, which have no weights yet: "
            "pass an image through it first"
        )
    values = network.state_dict().items()
    state = {key: value.detach().cpu().contiguous().clone() for key, value in values}
    if not any(value.is_floating_point() for value in state.values()):
        raise ConfigError(f"encoder is a {type(network).__name__} without weights: nothing learns")
    frame = safetensors.torch.save(state)
    structure = structure_of(network)
    _NETWORKS[structure] = copy.deepcopy(network).cpu()
    digest = files.digest_of(frame)
    if not _file(digest).exists():
        files.write_atomic(_file(digest), frame)
    name = type(network).__name__
    return {"name": recipe_name(Given), "network": name, "structure": structure, "weights": digest}


def give_again(encoder: Encoder, network: nn.Module) -> None:
    """Keep the network of a run that began in another process, which is to be resumed here."""
    if not isinstance(encoder, Given):
        raise ConfigError(
            f"the run's encoder is {recipe_name(type(encoder))}, not a network that was given as "
            "an nn.Module: leave `encoder` out"
        )
    if structure_of(network) != encoder.structure:
        raise ConfigError(
            f"the run's encoder is a {encoder.network} with other layers or other sizes than this "
            f"{type(network).__name__}: give the same network again"
        )
    _NETWORKS[encoder.structure] = copy.deepcopy(network).cpu()


def structure_of(network: nn.Module) -> str:
    """SHA-256 over the repr of a network and the names, shapes and types of its weights."""
    state = {key: [str(v.dtype), *v.shape] for key, v in network.state_dict().items()}
    text = json.dumps([type(network).__qualname__, repr(network), state])
    return hashlib.sha256(text.encode()).hexdigest()


def _is_lazy(network: nn.Module) -> bool:
    return any(
        nn.parameter.is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())
    )


def _file(digest: str) -> Path:
    return home() / "data" / "networks" / f"{digest}.safetensors"


# ---- the size of features ------------------------------------------------------------------------


@cache
def _features(encoder: Encoder, channels: int, side: int) -> int:
    """Output size for blank images; the random state of the run is not changed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        network = encoder.build(channels, side).eval()
        name = recipe_text(encoder)
        try:
            output = network(torch.zeros(2, channels, side, side))
        except Exception as error:  # noqa: BLE001  (someone else's network may raise anything)
            line = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"encoder {name} cannot take images of {side} x {side} with "
                f"{counted(channels, 'channel')}: {type(error).__name__}: {line}"
            ) from None
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"encoder {name} makes {shape} of 2 images; it must make (2, features): end with "
            "nn.Flatten() or a mean over height and width"
        )
    return int(output.shape[1])


def recipe_text(encoder: Encoder) -> str:
    """The name of an encoder in messages."""
    return encoder.network if isinstance(encoder, Given) else _called(type(encoder))
