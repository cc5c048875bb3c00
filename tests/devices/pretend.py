"""A pretend accelerator, for machines without one.

Its tensors hold real values, computed by the CPU's kernels, but say that they are on the device
`pretend:0`. So code that mixes devices fails as on a GPU, and results must have the CPU's bits.
Whatever would make a GPU wait, or send an index to it in the middle of a step, is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakTensorKeyDictionary

from harmonium.core import devices

NAME = "pretend"
DOUBLE = (torch.float64, torch.complex128)
aten = torch.ops.aten


class Backend:
    """What torch expects of a module named as a device."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


_setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
DEVICE = torch.device(NAME, 0)

waits: Counter[str] = Counter()
"""How often the host waited: `item` (a number was read), `copy` (a tensor came back), `shape` (the
shape of a result depended on values), `index` (an index of the host was used on the device), and
`send` (a tensor went to the device by another way than `to_device`, which pins its memory)."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count from 0 within the block."""
    waits.clear()
    yield waits


class Pretend(Tensor):
    """A tensor of the host that says it is on the device."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Pretend:
        if host.dtype in DOUBLE and not devices.has_double(DEVICE):
            raise TypeError(f"{NAME} has no {host.dtype}")  # as torch says of mps
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self) -> str:
        return f"Pretend({self.host!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(op, *args, **(kwargs or {}))


COPIES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten._copy_from.default,
    aten._copy_from_and_resize.default,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
NUMBERS = {  # of which the host reads one
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten._linalg_check_errors.default,
}
OF_UNKNOWN_SHAPE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute on the host, as the device would: all or nothing is on the device."""
    tensors: list[Tensor] = []
    changed((args, tuple(kwargs.values())), tensors.append)
    ours = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    target = kwargs.get("device")
    to_device = target is not None and torch.device(target).type == NAME
    here = bool(ours) if target is None else to_device
    if op in INDEXING and ours:
        indices = [one for one in args[1] if isinstance(one, Tensor)]
        for index in indices:
            waits["shape"] += index.dtype == torch.bool
            waits["index"] += not isinstance(index, Pretend)
        _refuse_a_mixture(op, [args[0], *args[2:3]])
    elif ours and op not in COPIES:
        _refuse_a_mixture(op, tensors)
    if here and (
        kwargs.get("generator") is not None or torch.Tag.nondeterministic_seeded in op.tags
    ):
        raise RuntimeError(f"{op} draws random numbers on {NAME}: draw them on the CPU")
    waits["item"] += op in NUMBERS and bool(ours)
    waits["shape"] += op in OF_UNKNOWN_SHAPE and bool(ours)
    if op is aten.copy_.default:
        here = isinstance(args[0], Pretend)
        waits["copy"] += not here
    elif target is not None and not to_device:
        waits["copy"] += bool(ours)
    if op in COPIES and here and not all(isinstance(tensor, Pretend) for tensor in tensors):
        waits["send"] += not _is_pinned()
    if target is not None:
        kwargs["device"] = "cpu" if to_device else target
    wrappers = {id(tensor.host): tensor for tensor in ours}
    if op is aten.native_group_norm_backward.default:
        # Autograd hands it contiguous copies on every device but the CPU, which changes the bits.
        args = tuple(UNCOPIED.get(one, one) if isinstance(one, Pretend) else one for one in args)
    args = changed(args, host_of)
    kwargs = {name: changed(value, host_of) for name, value in kwargs.items()}
    result = op(*args, **kwargs)

    def wrapped(tensor: Tensor) -> Tensor:
        known = wrappers.get(id(tensor))  # an operation in place returns what it was given
        return known if known is not None else Pretend(tensor) if here else tensor

    done = changed(result, wrapped)
    if op is aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format and ours:
        UNCOPIED[done] = ours[0]
    return done


UNCOPIED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What contiguous copies were made of."""


JOINING = {aten.cat.default, aten.stack.default}


def _refuse_a_mixture(op: Any, tensors: list[Tensor]) -> None:
    """Only a number of the host may be beside tensors of the device, where it is not changed."""
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, Pretend):
            continue
        changed = place == 0 and op._schema.arguments[0].is_write
        if tensor.dim() > 0 or op in JOINING or changed:
            raise RuntimeError(
                f"{op}: expected all tensors on one device, found {DEVICE} and {tensor.device}"
            )


OF_TORCH = str(Path(torch.__file__).parent)


def _is_pinned() -> bool:
    """Whether a copy to the device was asked for by `to_device`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((OF_TORCH, __file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code is devices.to_device.__code__


def host_of(tensor: Tensor) -> Tensor:
    """What a tensor of the device computes with; one of the host itself."""
    return tensor.host if isinstance(tensor, Pretend) else tensor


def changed(value: Any, change: Any) -> Any:
    """Arguments or results of an operation with other tensors, and devices of the host.

    `torch.utils._pytree` does the same and takes half of the time of these tests.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([changed(one, change) for one in value])
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _computed(operation: Any) -> Any:
    """Torch would make these by resizing an empty tensor, which a wrapper cannot follow."""
    return lambda *args, **kwargs: compute(operation, *args, **kwargs)


_every_operation = torch.library.Library("_", "IMPL")
_every_operation.fallback(compute, "PrivateUse1")
_every_operation.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _overload in ("default", "start", "start_step"):
    _name = "arange" if _overload == "default" else f"arange.{_overload}"
    _aten.impl(_name, _computed(getattr(aten.arange, _overload)), "PrivateUse1")


def _lowered(operation: Any) -> Any:
    """What autocast does for products of matrices and convolutions."""

    def of(*args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            low = torch.get_autocast_dtype(NAME)

            def lowered(tensor: Tensor) -> Tensor:
                return tensor.to(low) if tensor.dtype == torch.float32 else tensor

            args = changed(args, lowered)
            kwargs = {name: changed(value, lowered) for name, value in kwargs.items()}
            return operation(*args, **kwargs)

    return of


for _name in ("conv2d", "linear", "mm", "addmm", "bmm", "matmul", "scaled_dot_product_attention"):
    _aten.impl(_name, _lowered(getattr(aten, _name).default), "AutocastPrivateUse1")
