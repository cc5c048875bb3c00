"""The network of an encoder as programs that run without Harmonium: torch.export's, and ONNX.

Both begin as one trace of the network. The trace keeps where each line of code was and example
inputs; they are removed, because they would tell paths of the machine that exported.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from harmonium.core.errors import ConfigError, one_line
from harmonium.core.threads import single_thread
from harmonium.data.augment import operations, parameters
from harmonium.handover.inert import checked_archive
from harmonium.runs.export import LoadedEncoder

IMAGES, FEATURES = "images", "features"  # input and output of the ONNX graph
NEEDED = ("onnx", "onnxscript")  # to write ONNX
_NOISY = "torch.onnx._internal.exporter._registration"  # reports that torchvision is missing


class Untraceable(ConfigError):
    """A network that cannot become a program, with the reason."""


def traced(encoder: LoadedEncoder) -> ExportedProgram:
    """The encoder's network on prepared images, of any batch size, with its whitening."""
    network: nn.Module = encoder.network
    if encoder.whitening is not None:
        network = nn.Sequential(network, encoder.whitening)
    shape = encoder.prepare(np.zeros((2, *encoder.size, encoder.channels), np.uint8)).shape
    try:
        with torch.no_grad():
            program = torch.export.export(
                network.eval(),
                (torch.zeros(shape),),
                dynamic_shapes=({0: torch.export.Dim("n")},),
                strict=False,
            )
    except Exception as error:  # noqa: BLE001  (a network of one's own may do anything)
        raise Untraceable(f"torch.export cannot trace it: {one_line(error)[:300]}") from None
    for node in program.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == "val"}
    program._guards_code = []  # checks of the input as source text, which loading would execute
    program._example_inputs = None
    return program


def program_bytes(program: ExportedProgram) -> bytes:
    """The program in torch.export's format, without pickle; refused if it needs more than data."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    try:
        checked_archive(buffer.getvalue())
    except ValueError as error:
        raise Untraceable(
            f"its program is more than numbers and known operations: {error}"
        ) from None
    return buffer.getvalue()


def run_program(data: bytes, prepared: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Features of prepared images by a program; one that could execute other code is refused."""
    program = torch.export.load(io.BytesIO(checked_archive(data)))
    with torch.inference_mode(), single_thread():
        features: Tensor = program.module()(torch.from_numpy(prepared))
    return features.numpy()


def lacking() -> tuple[str, ...]:
    """The packages for writing ONNX that are not installed."""
    return tuple(name for name in NEEDED if importlib.util.find_spec(name) is None)


def onnx_bytes(program: ExportedProgram, encoder: LoadedEncoder) -> bytes:
    """The encoder as an ONNX graph from uint8 images of any size to features."""
    import onnx

    from harmonium.handover.preparation import OPSET, preparation

    prepare = preparation(
        encoder.size,
        encoder.channels,
        encoder.fit,
        encoder.mean,
        encoder.std,
        _view_matrices(encoder),
    )
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=["prepared"],
                output_names=[FEATURES],
                verbose=False,
            )
    except Exception as error:  # noqa: BLE001
        raise Untraceable(f"torch.onnx cannot write it: {one_line(error)[:300]}") from None
    # The prefix keeps names apart; it must not reach the name of the output.
    network: Any = exported
    network = onnx.compose.add_prefix(network.model_proto, "network.", rename_outputs=False)
    network.ir_version = prepare.ir_version
    joint = [(prepare.graph.output[0].name, network.graph.input[0].name)]
    model = onnx.compose.merge_models(prepare, network, io_map=joint)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    model.producer_name, model.producer_version = "harmonium", ""
    model.graph.name = "encoder"
    _forget_notes(model)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _forget_notes(message: Any) -> None:
    """Remove what exporters note beside a graph, such as where its code was."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string", "value_info"):
            message.ClearField(field.name)
        elif field.message_type is not None and field.name not in ("initializer", "t"):
            for inner in value if field.is_repeated else (value,):
                _forget_notes(inner)


def _view_matrices(
    encoder: LoadedEncoder,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
    """The matrices that bring rows and columns to the size of views, if they have one."""
    side = encoder.about["prepare"]["size"]
    if side is None or (side, side) == encoder.size:
        return None
    matrices = []
    for length in encoder.size:
        start, whole = np.zeros(1, np.float32), np.full(1, length, np.float32)
        points = parameters.crop_points(start, whole, np.zeros(1, bool), side)
        first, many = (torch.from_numpy(each)[:, None] for each in (start, whole))
        weights = operations.crop_weights(torch.from_numpy(points), first, many, length, "bilinear")
        matrices.append(weights[0].numpy())
    return matrices[0], matrices[1]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence remarks of torch's exporter that say nothing about the encoder."""
    noisy = logging.getLogger(_NOISY)
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)


def run_onnx(data: bytes, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Features of images by an ONNX graph, on the CPU."""
    features: npt.NDArray[np.float32] = onnx_session(data).run(None, {IMAGES: images})[0]
    return features


def onnx_session(data: bytes) -> Any:
    """A session of onnxruntime on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
