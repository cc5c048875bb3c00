"""Every encoder becomes a program, and a program that could do more than compute is refused."""

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.evaluation.whitening import Whitening
from harmonium.handover.golden import features_of, golden_images
from harmonium.handover.inert import COMPUTE, MODEL, checked_archive
from harmonium.handover.programs import (
    Untraceable,
    onnx_bytes,
    program_bytes,
    run_onnx,
    run_program,
    traced,
)
from harmonium.learning.encoders import encoders

NAMES = sorted(encoders.table())
QUICK = {"cct-4-3x2": True, "fixup-resnet20": False, "resnet8": False}  # whether with ONNX


def built(name: str, side: int = 12, **settings: Any) -> nn.Module:
    kind = encoders[name]
    if hasattr(kind, "width"):
        settings.setdefault("width", 4)
    return kind(**settings).build(3, side)


def agrees(loaded: Any, network: nn.Module, *, onnx: bool) -> None:
    encoder = loaded(network, (12, 12), 3)
    program = traced(encoder)
    data = program_bytes(program)
    prepared = encoder.prepare(golden_images((12, 12), 3)[1])
    with torch.no_grad():
        for some in (prepared, prepared[:1], prepared[:0]):
            assert np.allclose(run_program(data, some.numpy()), encoder.network(some), atol=1e-4)
    if onnx:
        graph = onnx_bytes(program, encoder)
        for images in golden_images((12, 12), 3):
            assert np.allclose(run_onnx(graph, images), features_of(encoder, images), atol=1e-4)


@pytest.mark.parametrize("name", QUICK)
def test_an_encoder_of_each_kind_becomes_a_program(loaded, name: str) -> None:
    agrees(loaded, built(name), onnx=QUICK[name])


@pytest.mark.deploy
@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_every_encoder_becomes_a_program(loaded, name: str, norm: str) -> None:
    normed = hasattr(encoders[name], "norm")
    if not normed and norm != "group":
        pytest.skip("it has one kind of norm")
    agrees(loaded, built(name, **({"norm": norm} if normed else {})), onnx=True)


def test_whitening_is_inside_and_bytes_repeat_without_paths(loaded) -> None:
    encoder = loaded(built("cnn-small", out=8), (12, 12), 3)
    encoder.whitening = Whitening(torch.randn(8), torch.randn(8, 5))
    images = golden_images((12, 12), 3)[0]
    wanted = features_of(encoder, np.repeat(images, 3, 3))
    assert wanted.shape == (3, 5)
    program, again = traced(encoder), traced(encoder)
    data, graph = program_bytes(program), onnx_bytes(program, encoder)
    assert data == program_bytes(again)
    assert np.allclose(run_onnx(graph, images), wanted, atol=1e-4)
    prepared = encoder.prepare(np.repeat(images, 3, 3)).numpy()
    assert np.allclose(run_program(data, prepared), wanted, atol=1e-4)
    for text in (b".py", b"site-packages", b"harmonium/"):
        assert text not in data and text not in graph


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


class Strange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).cumsum(1)


def test_a_network_that_cannot_be_traced_or_trusted_is_refused_with_the_reason(loaded) -> None:
    with pytest.raises(Untraceable, match="cannot trace"):
        traced(loaded(Branching(), (12, 12), 3))
    assert "cumsum" not in COMPUTE
    with pytest.raises(Untraceable, match="cumsum"):
        program_bytes(traced(loaded(Strange(), (12, 12), 3)))


# ---- attacks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(loaded) -> bytes:
    return program_bytes(traced(loaded(built("cnn-small"), (12, 12), 3)))


def changed(data: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def in_model(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    def apply(members: dict[str, bytes]) -> None:
        model = json.loads(members[f"archive/{MODEL}"])
        change(model)
        members[f"archive/{MODEL}"] = json.dumps(model).encode()

    return apply


def a_guard(model: dict[str, Any]) -> None:
    model["guards_code"] = ["__import__('os').system('true')"]


def an_operator(model: dict[str, Any]) -> None:
    model["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"


def a_function(model: dict[str, Any]) -> None:
    model["graph_module"]["graph"]["nodes"][0]["target"] = "torch.load"


def a_size(model: dict[str, Any]) -> None:
    values = model["graph_module"]["graph"]["tensor_values"]
    sizes = next(iter(values.values()))["sizes"]
    sizes[0] = {"as_expr": {"expr_str": "__import__('os').getpid()", "hint": None}}


def a_structure(model: dict[str, Any]) -> None:
    signature = model["graph_module"]["module_call_graph"][0]["signature"]
    signature["in_spec"] = signature["in_spec"].replace("builtins.dict", "collections.defaultdict")


def metadata(model: dict[str, Any]) -> None:
    model["graph_module"]["graph"]["nodes"][0]["metadata"] = {"source_fn_stack": "x,torch.load"}


def pickled(members: dict[str, bytes]) -> None:
    name = "archive/data/weights/model_weights_config.json"
    members[name] = members[name].replace(b'"use_pickle": false', b'"use_pickle": true', 1)


def examples(members: dict[str, bytes]) -> None:
    members["archive/data/sample_inputs/model.pt"] = b"\x80\x02."


def a_member(members: dict[str, bytes]) -> None:
    members["archive/data/constants/custom_obj_0"] = b"\x80\x02."


@pytest.mark.parametrize(
    "change",
    [
        *map(in_model, (a_guard, an_operator, a_function, a_size, a_structure, metadata)),
        pickled,
        examples,
        a_member,
    ],
    ids=[
        "guard", "operator", "function", "size", "structure", "metadata", "pickled", "examples",
        "member",
    ],
)  # fmt: skip
def test_a_program_that_could_execute_code_is_never_loaded(
    program: bytes, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_archive(program)
    monkeypatch.setattr(torch.export, "load", lambda data: pytest.fail("it was loaded"))
    data = changed(program, change)
    assert data != program
    with pytest.raises(ValueError, match="it has|pickled|its operators"):
        run_program(data, np.zeros((1, 3, 12, 12), np.float32))


def test_what_is_no_archive_is_refused(program: bytes) -> None:
    for data in (b"", b"PK\x03\x04", program[:200], program[len(program) // 2 :]):
        with pytest.raises(ValueError, match="not a program|has no"):
            checked_archive(data)
