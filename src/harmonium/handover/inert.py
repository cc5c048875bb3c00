"""The check that a program of torch.export is data: loading it can execute no other code.

`torch.export.load` unpickles what an archive marks as pickled, evaluates the texts of shapes and of
guards as Python, and looks operators up by name. So an archive is taken apart first. Every member
must be known, nothing may be pickled, no text may have a form in which anything could be called,
and only operators that compute are allowed. What passes is packed anew, so that what is loaded is
what was checked.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

MODEL = "models/model.json"
_TABLES = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_EXAMPLES = "data/sample_inputs/model.pt"  # pickled if there are any
_MEMBERS = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_format|archive_version|byteorder"
    r"|\.data/version|\.data/serialization_id|"
    + "|".join(map(re.escape, (MODEL, *_TABLES, _EXAMPLES)))
)
_NAME = re.compile(r"[\w.,>+-]*|\[\]", re.ASCII)
_SHAPE = re.compile(  # of sizes, as sympy writes them: sums and products of symbols and numbers
    r"(Mul\(|Add\(|Integer\(-?\d+\)|Symbol\('[su]\d+'(, (positive|integer)=True)*\)|, |\))+",
    re.ASCII,
)
_OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+?)_?\.\w+|_operator\.(add|sub|mul|floordiv|getitem)")
_STRUCTURES = (None, "builtins.tuple", "builtins.list", "builtins.dict")

COMPUTE = frozenset(
    re.findall(
        r"\w+",
        """
    _assert_tensor_metadata
    _adaptive_avg_pool2d abs adaptive_avg_pool2d adaptive_max_pool2d add addmm amax amin arange
    avg_pool2d batch_norm bmm cat celu chunk clamp clamp_min clone constant_pad_nd contiguous
    conv1d conv2d detach div dropout einsum elu embedding exp expand flatten full full_like gelu
    group_norm hardsigmoid hardswish hardtanh index_select instance_norm layer_norm leaky_relu
    linalg_vector_norm linear log log_softmax matmul max max_pool2d mean min mish mm mul narrow
    neg norm ones ones_like pad permute pow prelu relu relu6 repeat reshape rsqrt scalar_tensor
    scaled_dot_product_attention select selu sigmoid silu slice softmax softplus split
    split_with_sizes sqrt square squeeze stack std sub sum sym_size t tanh to transpose type_as
    unbind unflatten unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_nearest2d var
    view where zeros zeros_like
        """,
    )
)
"""Operators of torch that only compute; others, such as `from_file`, might do more."""


def checked_archive(data: bytes) -> bytes:
    """The archive, packed anew from its checked members; ValueError if anything is suspicious.

    >>> checked_archive(b"not an archive")
    Traceback (most recent call last):
    ...
    ValueError: it is not a program of torch.export
    """
    members = _members(data)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in members.items():
            if name == _EXAMPLES and content:
                raise ValueError("it has example inputs, which are pickled")
            if name.endswith(".json"):
                tree = json.loads(content)
                _check(tree)
                if name == MODEL:
                    _check_model(tree)
                content = json.dumps(tree).encode()
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return packed.getvalue()


def _members(data: bytes) -> dict[str, bytes]:
    """The contents of the members of an archive by their names within it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError):
        raise ValueError("it is not a program of torch.export") from None
    if strange := [name for name in members if not _MEMBERS.fullmatch(name)]:
        raise ValueError(f"it has the member {strange[0][:60]!a}")
    if lost := [name for name in (MODEL, *_TABLES) if name not in members]:
        raise ValueError(f"it has no {lost[0]}")
    return members


def _check(tree: Any) -> None:
    """Refuse texts with more than names and numbers in them, and whatever is pickled."""
    for key, value in _leaves(tree):
        if key == "use_pickle" and value is not False:
            raise ValueError("some of it is pickled")
        if isinstance(value, str) and not (_NAME.fullmatch(value) or _SHAPE.fullmatch(value)):
            _check_structure(value)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All keys and values of a tree, the keys as values also."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield "", name
            yield from _leaves(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _leaves(value, key)
    else:
        yield key, tree


def _check_structure(text: str) -> None:
    """Refuse a text that is not the description of nested tuples, lists and dictionaries."""
    try:
        _, tree = json.loads(text)
        left = [tree]
        while left:
            one = left.pop()
            left += one["children_spec"]
            if one["type"] not in _STRUCTURES or one["context"] not in (None, "null", "[]"):
                raise ValueError
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"it has the text {text[:60]!a}") from None


def _check_model(model: dict[str, Any]) -> None:
    """Refuse a model that has anything but operators that compute, and texts to evaluate."""
    try:
        if model["guards_code"]:
            raise ValueError("it has guards, which are source text")
        nodes = model["graph_module"]["graph"]["nodes"]
        if any(node["metadata"] for node in nodes):
            raise ValueError("its operators have metadata")
        targets = [node["target"] for node in nodes]
    except (TypeError, LookupError):
        raise ValueError("it is not a program of torch.export") from None
    for target in targets:
        match = _OPERATOR.fullmatch(target)
        if match is None or (match[1] is not None and match[1] not in COMPUTE):
            raise ValueError(f"it has the operator {target[:60]!a}")
