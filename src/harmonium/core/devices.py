"""Devices: where models, views and losses are computed.

A device has torch's name: `cpu`, `cuda`, `cuda:1`, `mps`. Messages, states and commits stay on the
CPU; `tree_to_device` carries a tree of tensors to a device, and `to_host` brings one back in a
single copy, because each copy waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.core.errors import ConfigError

CPU = torch.device("cpu")
AUTO = "auto"
REAL = ("cuda", "mps", "xpu")  # accelerators that torch itself has generators and clocks of
WITHOUT_DOUBLE = frozenset({"mps"})  # kinds of devices that have no float64
UNKNOWN_MEMORY = 2**30  # bytes of images that may stay on a device whose memory is not known
_current: ContextVar[torch.device] = ContextVar("device", default=CPU)


# ---- which device --------------------------------------------------------------------------------


def resolve(named: str | Sequence[str]) -> tuple[torch.device, ...]:
    """The devices of `engine.device`, each of which is here.

    `auto` is the first CUDA device, or else the CPU. Apple's `mps` is used where it is named.

    >>> resolve("cpu")
    (device(type='cpu'),)
    """
    if named == AUTO:
        here = accelerator()
        return (here if here is not None and here.type == "cuda" else CPU,)
    names = (named,) if isinstance(named, str) else tuple(named)
    devices = tuple(_available(name) for name in names)
    if len(set(devices)) < len(devices):
        raise ConfigError(f"engine.device is {', '.join(names)}: name each device once")
    return devices


def check(named: Any) -> None:
    """Refuse what is no device's name, whether there is one here or not."""
    names = tuple(named) if isinstance(named, list | tuple) else (named,)
    if not names:
        raise ConfigError(f"engine.device is an empty list: {KINDS}")
    for name in names:
        if not isinstance(name, str):  # a bare number, which torch would take for a GPU
            raise ConfigError(f"engine.device is {name}: {KINDS}")
        if named != AUTO:
            _parsed(name)


def accelerator() -> torch.device | None:
    """The accelerator that torch finds here, if any."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else torch.device(found.type, 0)


KINDS = "give auto, cpu, cuda, cuda:1, mps, or a list such as [cuda:0,cuda:1]"


def _parsed(name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"engine.device is {name!r}: {KINDS}") from None


def _available(name: str) -> torch.device:
    """A device by its name, with its number; refused in one line if it is not here."""
    device = _parsed(name)
    if device.type == "cpu":
        return CPU
    here = accelerator()
    if here is None or here.type != device.type:
        other = f"only {here.type} and the CPU are" if here else "only the CPU is"
        build = "" if here else f" to torch {torch.__version__}"
        raise ConfigError(
            f"engine.device is {name}, but {other} available{build} here: set engine.device=auto "
            "or cpu"
        )
    count = torch.accelerator.device_count()
    number = device.index or 0
    if number >= count:
        last = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise ConfigError(f"engine.device is {name}, but the {here.type} devices here are {last}")
    return torch.device(device.type, number)


def device_name(device: torch.device) -> str:
    """A device with its product's name, where torch knows it."""
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return f"{device} ({name})" if name and device.type != "cpu" else str(device)


def current() -> torch.device:
    """Where encoders are evaluated and plans train; the CPU unless `use_device` says otherwise."""
    return _current.get()


def select(device: torch.device) -> None:
    """Make a device the one that this process uses where nothing else is said.

    A process of the second GPU then takes no memory of the first.
    """
    if device.type in REAL and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def synchronise(device: torch.device) -> None:
    """Wait for a device, to measure time."""
    if device.type in REAL:
        torch.accelerator.synchronize(device)


def cache_key() -> dict[str, str]:
    """The kind of the current device for keys of caches, which differ by rounding; CPU: nothing."""
    return {} if current().type == "cpu" else {"device": current().type}


@contextmanager
def use_device(device: torch.device) -> Iterator[torch.device]:
    """Make a device the current one within the block."""
    token = _current.set(device)
    try:
        yield device
    finally:
        _current.reset(token)


@contextmanager
def on_current_device(*modules: nn.Module) -> Iterator[torch.device]:
    """Have modules on the current device within the block, and where they were afterwards."""
    device, before = current(), [device_of(module) for module in modules]
    try:
        for module in modules:
            module.to(device)
        yield device
    finally:
        for module, place in zip(modules, before, strict=True):
            module.to(place)


def without_gradients(device: torch.device) -> AbstractContextManager[object]:
    """Without gradients: torch's inference mode on the CPU, elsewhere a plain `no_grad`."""
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


def allow_tf32(allowed: bool) -> None:
    """Let this process round the inputs of float32 products to 10 bits, on devices that can."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


# ---- moving tensors ------------------------------------------------------------------------------

SHARE = 0.3  # of an accelerator's free memory that images or features may take


def free_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator; None where torch cannot tell."""
    try:
        return int(torch.accelerator.memory.get_memory_info(device)[0])
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def room_for(size: int, device: torch.device) -> bool:
    """Whether so many bytes may stay on a device: on an accelerator, a share of what is free."""
    if device.type == "cpu":
        return True
    free = free_memory(device)
    return size <= (UNKNOWN_MEMORY if free is None else SHARE * free)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what the device is computing.

    >>> values = torch.zeros(2)
    >>> to_device(values, CPU) is values
    True
    """
    if tensor.device == device:
        return tensor
    # Only from pinned memory does a copy run beside the computation.
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A few numbers on a device, sent once for all; not to be changed."""
    return to_device(torch.tensor(values), device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Key torch's own generators, of the CPU and of a device, and restore the CPU's afterwards.

    On a device they serve what torch draws there itself, such as the dropout of its attention.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if device.type in REAL:
            torch.get_device_module(device).manual_seed(seed)
        yield


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are; the CPU if it has none."""
    return next((tensor.device for tensor in module.parameters()), CPU)


def has_double(device: torch.device) -> bool:
    """Whether a device has float64; `mps` has not."""
    return device.type not in WITHOUT_DOUBLE


def to_double(tensor: Tensor) -> Tensor:
    """A tensor in double precision; on the CPU if its device has none, as `mps`."""
    return (tensor if has_double(tensor.device) else tensor.cpu()).double()


def to_widest(tensor: Tensor) -> Tensor:
    """A tensor in double precision, or unchanged if its device has none: for figures of the log."""
    return tensor.double() if has_double(tensor.device) else tensor


def is_counter(tensor: Tensor) -> bool:
    """Whether a tensor counts something: such numbers stay on the CPU, where code reads them."""
    return tensor.dim() == 0 and not tensor.is_floating_point()


def tree_to_device(tree: Any, device: torch.device) -> Any:
    """The same tree with its tensors on a device; whatever is there already stays the same object.

    Counters stay on the CPU.

    >>> tree = {"weights": {"w": torch.zeros(2)}, "round": 3}
    >>> tree_to_device(tree, CPU) is tree
    True
    """
    return _mapped(tree, lambda one: one if is_counter(one) else to_device(one, device))


def to_host(tree: Any) -> Any:
    """The same tree on the CPU, in a single copy.

    >>> to_host({"w": torch.ones(2), "loss": 0.5})
    {'w': tensor([1., 1.]), 'loss': 0.5}
    """
    away: dict[int, Tensor] = {}
    _mapped(tree, lambda tensor: _note(tensor, away))
    if not away:
        return tree
    raw = [one.detach().reshape(-1).view(torch.uint8) for one in away.values()]
    pieces = torch.split(torch.cat(raw).to(CPU), [len(piece) for piece in raw])
    brought = {
        key: piece.clone().view(tensor.dtype).reshape(tensor.shape)
        for (key, tensor), piece in zip(away.items(), pieces, strict=True)
    }
    return _mapped(tree, lambda tensor: brought.get(id(tensor), tensor))


def _note(tensor: Tensor, away: dict[int, Tensor]) -> Tensor:
    if tensor.device.type != "cpu":
        away[id(tensor)] = tensor
    return tensor


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree with changed tensors; a mapping or list in which nothing changes stays the same."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        mapping = {key: _mapped(value, change) for key, value in tree.items()}
        return tree if all(mapping[key] is tree[key] for key in mapping) else mapping
    if isinstance(tree, list | tuple):
        items = [_mapped(value, change) for value in tree]
        same = all(new is old for new, old in zip(items, tree, strict=True))
        return tree if same else type(tree)(items)
    return tree
