"""One encoding for everything that is sent or stored: a tree of tensors and plain values.

A frame is a safetensors file whose metadata hold the tree with a number in place of each tensor.
It carries data only: no type names, no code. Frames are written here (a plain concatenation, some
twenty times quicker than the library's writer) and read with the library's checked parser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from harmonium.core.errors import WireError

Tree = Any  # Tensor | None | bool | int | float | str | list[Tree] | dict[str | int, Tree]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Limits:
    """The largest sizes that a frame from elsewhere may have."""

    frame: int  # bytes of all of it
    header: int  # bytes of its tree and the shapes of its tensors

    def check(self, frame: bytes | bytearray | memoryview) -> None:
        """Refuse a frame that is larger, by its length or the stated length of its header."""
        header = int.from_bytes(frame[:8], "little")
        for part, size, most in (
            ("frame", len(frame), self.frame),
            ("header", header, self.header),
        ):
            if size > most:
                raise WireError(
                    f"its {part} of {size:,} bytes is too large: at most {most:,} are allowed"
                )


LIMITS = Limits(frame=2**31, header=2**24)  # for frames with no limits of their own


def encode(tree: Tree) -> bytes:
    """The frame of a tree; equal trees give equal bytes.

    >>> decode(encode({"loss": 0.5, "rows": {3: torch.ones(2)}}))
    {'loss': 0.5, 'rows': {3: tensor([1., 1.])}}
    """
    tensors: list[Tensor] = []
    skeleton = _strip(tree, tensors)
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(skeleton, separators=(",", ":"))}}
    chunks, offset = [], 0
    for number, tensor in enumerate(tensors):
        dense = tensor.detach().cpu().contiguous()
        size = dense.numel() * dense.element_size()
        header[str(number)] = {
            "dtype": _NAMES[dense.dtype],
            "shape": list(dense.shape),
            "data_offsets": [offset, offset + size],
        }
        # Bytes of any dtype, bfloat16 included, without a copy.
        chunks.append(dense.reshape(-1).view(torch.uint8).numpy().data if size else b"")
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def check(tree: Tree) -> None:
    """Refuse a tree that cannot be encoded."""
    _strip(tree, [])


def decode(frame: bytes | bytearray | memoryview, limits: Limits | None = None) -> Tree:
    """The tree of a frame; every tensor is a fresh, aligned copy that its owner may change.

    Alignment matters: vectorised kernels may round differently on unaligned memory, and the same
    tensor must give the same bits wherever it was unpacked. The tree holds each tensor once, so a
    frame never becomes more tensors than it has bytes for. `limits` are checked before anything is
    unpacked.
    """
    if limits is not None:
        limits.check(frame)
    size, data = int.from_bytes(frame[:8], "little"), bytes(frame)
    try:
        tensors = safetensors.torch.load(data)
        # The parser has checked lengths and offsets by now; it does not hand out the metadata.
        tree = _fill(json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tree"]), tensors)
        if tensors:
            raise WireError(
                f"not a Harmonium frame: tensor {next(iter(tensors))} is not in its tree"
            )
        return tree
    except (
        safetensors.SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise WireError(f"not a Harmonium frame: {type(error).__name__}: {error}") from None


def outline(path: Path) -> Tree:
    """The tree of a frame in a file, with None for its tensors, which are not read."""
    try:
        with path.open("rb") as file:
            size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
            header = json.loads(file.read(size))
        return _fill(json.loads(header["__metadata__"]["tree"]), None)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"not a Harmonium frame: {type(error).__name__}: {error}") from None


def payload_bytes(tree: Tree) -> int:
    """The size of a value as the ledger counts it: its tensors' bytes, 8 for a plain number."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(payload_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(payload_bytes(value) for value in tree)
    return 8


def _strip(value: Tree, tensors: list[Tensor]) -> Any:
    """Plain JSON of a tree: tensors become {"$": number}, integer keys become {"#": pairs}."""
    if isinstance(value, Tensor):
        return _strip_tensor(value, tensors)
    if isinstance(value, Mapping):
        return _strip_mapping(value, tensors)
    if isinstance(value, list | tuple):
        return [_strip(item, tensors) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": {"nan": 0, "inf": 1, "-inf": 2}[str(value)] - 3}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise WireError(
        f"cannot encode a value of type {type(value).__name__}; use tensors, numbers, text, lists "
        "and dicts"
    )


def _strip_tensor(tensor: Tensor, tensors: list[Tensor]) -> dict[str, int]:
    if tensor.dtype not in _NAMES:
        raise WireError(f"cannot encode a tensor of {tensor.dtype}; use one of {list(_NAMES)}")
    tensors.append(tensor)
    return {"$": len(tensors) - 1}


def _strip_mapping(mapping: Mapping[Any, Tree], tensors: list[Tensor]) -> dict[str, Any]:
    if all(isinstance(key, str) for key in mapping) and not {"$", "#"} & set(mapping):
        return {key: _strip(item, tensors) for key, item in mapping.items()}
    if all(isinstance(key, str | int) for key in mapping):
        return {"#": [[key, _strip(item, tensors)] for key, item in mapping.items()]}
    raise WireError("only text and whole numbers can be keys")


def _fill(value: Any, tensors: dict[str, Tensor] | None) -> Tree:
    """The tree of its plain JSON; tensors are taken out of `tensors`, so none is used twice."""
    if isinstance(value, dict):
        if "$" in value:
            number = value["$"]
            if number < 0:
                return (math.nan, math.inf, -math.inf)[number + 3]
            return None if tensors is None else tensors.pop(str(number)).clone()
        if "#" in value:
            return {key: _fill(item, tensors) for key, item in value["#"]}
        return {key: _fill(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, tensors) for item in value]
    return value
