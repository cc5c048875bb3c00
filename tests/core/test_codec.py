import contextlib
import math
import random

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from harmonium.core import codec
from harmonium.core.errors import WireError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
tensors = st.builds(
    lambda shape, dtype: (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(), st.text(max_size=5)
)
trees = st.recursive(
    st.one_of(plain, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


@given(trees)
def test_what_goes_in_comes_out(tree: object) -> None:
    assert same(tree, codec.decode(codec.encode(tree)))


@given(trees)
def test_equal_trees_have_equal_bytes(tree: object) -> None:
    assert codec.encode(tree) == codec.encode(codec.decode(codec.encode(tree)))


def test_frames_are_safetensors_files() -> None:
    frame = codec.encode({"a": torch.arange(6.0).reshape(2, 3)})
    assert torch.equal(safetensors.torch.load(frame)["0"], torch.arange(6.0).reshape(2, 3))


def test_other_layouts_are_written_in_reading_order() -> None:
    picture = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert torch.equal(codec.decode(codec.encode(picture)), picture)
    assert torch.equal(codec.decode(codec.encode(picture.transpose(1, 2))), picture.transpose(1, 2))


def test_decoded_tensors_are_aligned_and_independent() -> None:
    frame = codec.encode({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(7)})
    first, second = codec.decode(frame), codec.decode(frame)
    assert first["b"].data_ptr() % 16 == 0
    first["b"].zero_()
    assert second["b"].sum() == 7


@pytest.mark.parametrize("value", [object(), {1.5: 2}, torch.ones(2, dtype=torch.complex64), {1}])
def test_what_cannot_be_encoded_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        codec.encode({"x": value})


def test_damaged_frames_raise_nothing_but_wire_errors() -> None:
    good = codec.encode({"w": torch.randn(5, 5), "deep": {3: [1, 2.5, None]}, "n": 4})
    rng = random.Random(0)
    for _ in range(3000):
        frame = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        cut = rng.choice([len(frame), rng.randrange(len(frame))])
        with contextlib.suppress(WireError):
            codec.decode(bytes(frame[:cut]))
    deep = b'{"__metadata__":{"tree":"' + b"[" * 100_000 + b'"}}'
    with pytest.raises(WireError):
        codec.decode(len(deep).to_bytes(8, "little") + deep)


def test_bytes_follow_the_accounting_rule() -> None:
    value = {"a": torch.ones(10), "n": torch.tensor(3), "x": 0.5, "rows": {1: torch.ones(2).half()}}
    assert codec.payload_bytes(value) == 40 + 8 + 8 + 4
