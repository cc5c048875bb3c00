"""The preparation of images as an ONNX graph: the same bytes that Pillow gives, for any size.

The graph computes what `LoadedEncoder.prepare` does: conversion between grey, colour and colour
with transparency, scaling to the size of training in Pillow's fixed-point arithmetic, and
normalisation. ONNX's own Resize rounds differently, so the graph builds the coefficients of
Pillow's bicubic filter from height and width and multiplies by them.

Pillow scales one axis after the other with 22 bits after the point, and rounds to bytes after each.
All sums are whole numbers below 2 ** 53, so doubles hold them exactly, in any order. One image is
scaled at a time, whatever the size of the batch.

The decorated functions are graphs in the syntax of `onnxscript`, which reads their source: they are
never executed as Python. This module is imported for exports to ONNX only.
"""

# Inputs and outputs of graphs have no types in Python; their axes are texts, which are no names,
# and branches must be statements.
# ruff: noqa: F821, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, valid-type, name-defined"

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import PIL
from onnx import inliner, numpy_helper
from onnxscript import graph, onnx_types, opset20, optimizer, script, values

OPSET = 20
IR_VERSION = 10  # the newest that onnxruntime 1.20 reads
VERTICAL_FIRST = 13  # the version of Pillow from which on it scales the height of tall images first
op: Any = opset20
FLOAT: Any = onnx_types.FLOAT
UINT8: Any = onnx_types.UINT8
_LOCAL = values.Opset("harmonium.preparation", 1)

Floats = npt.NDArray[np.float32]


def vertical_first(version: str = PIL.__version__) -> bool:
    """Whether a version of Pillow scales the height of tall images before their width.

    >>> vertical_first("12.1.0"), vertical_first("13.0.0")
    (False, True)
    """
    return int(version.partition(".")[0]) >= VERTICAL_FIRST


@script(_LOCAL, default_opset=op)
def _cubic(distance):
    """Keys' cubic with a = -0.5."""
    x = op.Abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return op.Where(x < 1.0, near, op.Where(x < 2.0, far, 0.0 * x))


@script(_LOCAL, default_opset=op)
def _coefficients(side, box, new, place, total):
    """Matrix `(total, side)` that scales an axis of `side` pixels, as whole numbers.

    The pixels of `box` are scaled to `new` pixels, which begin at `place`; others of the result are
    black. Pillow keeps the ends of the box, and takes their difference, as floats.
    """
    zero = op.CastLike(0.0, side)
    one = op.CastLike(1.0, side)
    begin, end = op.Split(op.Cast(box, to=1), num_outputs=2)
    scale = op.Squeeze(op.Cast(end - begin, to=11)) / new
    stretch = op.Max(scale, one)
    support = 2.0 * stretch
    steps = (op.Range(zero, new, one) + 0.5) * scale
    centres = op.Unsqueeze(op.Cast(begin, to=11) + steps, op.Constant(value_ints=[1]))
    pixels = op.Range(zero, side, one)
    least = op.Max(op.Floor(centres - support + 0.5), zero)
    most = op.Floor(centres + support + 0.5)
    near = op.And(pixels >= least, pixels < most)
    weights = op.Where(near, _cubic((pixels - centres + 0.5) * (1.0 / stretch)), zero)
    weights = weights / op.ReduceSum(weights, op.Constant(value_ints=[1]), keepdims=1)
    whole = op.Sign(weights) * op.Floor(op.Abs(weights) * 4194304.0 + 0.5)
    before = op.Reshape(op.Cast(place, to=7), op.Constant(value_ints=[1]))
    after = op.Reshape(op.Cast(total - new - place, to=7), op.Constant(value_ints=[1]))
    none = op.Constant(value_ints=[0])
    return op.Pad(whole, op.Concat(before, none, after, none, axis=0))


@script(_LOCAL, default_opset=op)
def _rounded(sums):
    """Sums with 22 bits after the point, as the nearest bytes."""
    nearest = op.Floor((sums + 2097152.0) / 4194304.0)
    return op.Clip(nearest, op.CastLike(0.0, sums), op.CastLike(255.0, sums))


@script(_LOCAL, default_opset=op)
def _luma(image):
    """Colour to grey: ITU-R 601 with 16 bits after the point; other than 3 channels fail."""
    red, green, blue = op.Split(op.Cast(image, to=6), op.Constant(value_ints=[1, 1, 1]), axis=2)
    return op.Cast((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536, to=2)


@script(_LOCAL, default_opset=op)
def _on_white(image):
    """Colour with transparency, on white paper, as Pillow composes it; fails unless 4 channels."""
    colour, alpha = op.Split(op.Cast(image, to=6), op.Constant(value_ints=[3, 1]), axis=2)
    share = 128 * alpha  # of 255 * 128
    mixed = colour * share + 255 * (32640 - share) + 16384
    return op.Cast((mixed / 256 + mixed) / 256 / 128, to=2)


@script(_LOCAL, default_opset=op)
def _to_grey(image, channels):
    if channels == 1:
        grey = op.Identity(image)
    else:
        if channels == 4:
            grey = _luma(_on_white(image))
        else:
            grey = _luma(image)
    return grey


@script(_LOCAL, default_opset=op)
def _to_colour(image, channels):
    if channels == 1:
        colour = op.Concat(image, image, image, axis=2)
    else:
        if channels == 4:
            colour = _on_white(image)
        else:
            red, others = op.Split(image, op.Constant(value_ints=[1, 2]), axis=2)
            colour = op.Concat(red, others, axis=2)
    return colour


@script(_LOCAL, default_opset=op)
def _cut(down, across, height, width):
    """For rows and columns: the box that is scaled, the pixels that it becomes, their place."""
    narrow = across * height <= down * width
    long = op.Where(narrow, across, down * width / height)
    high = op.Where(narrow, across * height / width, down)
    left = op.Reshape((across - long) / 2.0, op.Constant(value_ints=[1]))
    top = op.Reshape((down - high) / 2.0, op.Constant(value_ints=[1]))
    rows = op.Concat(top, top + high, axis=0)
    columns = op.Concat(left, left + long, axis=0)
    return rows, height, 0.0 * height, columns, width, 0.0 * width


@script(_LOCAL, default_opset=op)
def _stretch(down, across, height, width):
    """The same, where the whole image is scaled to height and width."""
    nothing = op.Reshape(0.0 * down, op.Constant(value_ints=[1]))
    rows = op.Concat(nothing, nothing + down, axis=0)
    columns = op.Concat(nothing, nothing + across, axis=0)
    return rows, op.Identity(height), 0.0 * height, columns, op.Identity(width), 0.0 * width


@script(_LOCAL, default_opset=op)
def _inside(down, across, height, width):
    """The same, where the whole image is scaled to fit inside, in the middle."""
    rows, _, _, columns, _, _ = _stretch(down, across, height, width)
    narrow = across * height <= down * width
    one = op.CastLike(1.0, down)
    long = op.Where(narrow, op.Max(op.Round(across * height / down), one), width)
    high = op.Where(narrow, height, op.Max(op.Round(down * width / across), one))
    above = op.Floor((height - high) / 2.0)
    before = op.Floor((width - long) / 2.0)
    return rows, high, above, columns, long, before


@script(_LOCAL, default_opset=op)
def _across_first(image, rows, columns):
    return _rounded(op.MatMul(rows, _rounded(op.MatMul(image, columns))))


@script(_LOCAL, default_opset=op)
def _down_first(image, rows, columns):
    return _rounded(op.MatMul(_rounded(op.MatMul(rows, image)), columns))


_FITS = {"cut": _cut, "resize": _stretch, "pad": _inside}


def preparation(
    size: tuple[int, int],
    channels: int,
    fit: str,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    views: tuple[Floats, Floats] | None = None,
    tall_first: bool | None = None,
) -> onnx.ModelProto:
    """The graph from images, uint8 `(n, height, width, channels)`, to float32 for the network.

    Grey becomes colour and colour grey, and transparency white, where the network has 1 or 3
    channels; other numbers of channels must be those of the network, or the graph fails.

    Args:
        size: height and width to which images are scaled.
        channels: of the network.
        fit: `cut`, `resize` or `pad`, as for data sets.
        mean: subtracted from values between 0 and 1, one or one for each channel; none: nothing is.
        std: divided by, likewise.
        views: matrices `(new height, height)` and `(new width, width)` that bring images to the
            size of views; none: they keep theirs.
        tall_first: see `vertical_first`; none: as the installed Pillow does.
    """
    shape = [*size, channels]
    rows, columns = (len(matrix) for matrix in views) if views else size
    scaled = _scaling(size, channels, fit, vertical_first() if tall_first is None else tall_first)
    numbers = [
        numpy_helper.from_array(np.array(each, np.float32).reshape(-1, 1, 1))
        for each in ((0.0,) if mean is None else mean, (1.0,) if std is None else std)
    ]
    mean_tensor, std_tensor = numbers
    resized = _of_views(*views) if views else _unchanged

    @script(_LOCAL, default_opset=op)
    def prepare(images: UINT8["n", "height", "width", "channels"]) -> FLOAT[...]:
        seen = op.Shape(images, start=1)
        equal = op.Cast(seen == op.Constant(value_ints=shape), to=6)
        if op.ReduceMin(equal, keepdims=0) == 1:
            fitting = op.Identity(images)
        else:
            fitting = scaled(images)
        pixels = op.Cast(fitting, to=1) / 255.0
        planes = resized(op.Transpose(pixels, perm=[0, 3, 1, 2]))
        centred = planes - op.Constant(value=mean_tensor)
        return centred / op.Constant(value=std_tensor)

    return _plain_model(prepare.to_model_proto(), ["n", channels, rows, columns])


def _scaling(size: tuple[int, int], channels: int, fit: str, tall_first: bool) -> Any:
    """The graph that scales images of one size, and converts their channels."""
    target, convert = _FITS[fit], {1: _to_grey, 3: _to_colour}.get(channels, _only(channels))
    high, wide = (numpy_helper.from_array(np.array(side, np.float64)) for side in size)
    steep_first = _down_first if tall_first else _across_first

    @script(_LOCAL, default_opset=op)
    def scaled(images):
        count, down_, across_, bands = op.Split(op.Shape(images), num_outputs=4)
        down = op.Squeeze(op.Cast(down_, to=11))
        across = op.Squeeze(op.Cast(across_, to=11))
        height = op.Constant(value=high)
        width = op.Constant(value=wide)
        upright, tall, above, level, long, before = target(down, across, height, width)
        rows = _coefficients(down, upright, tall, above, height)
        columns = op.Transpose(_coefficients(across, level, long, before, width), perm=[1, 0])
        steep = op.And(down > tall, down - tall > 2.0 * (across - long))

        @graph()
        def one(image: UINT8["height", "width", "channels"]) -> UINT8["down", "across", "bands"]:
            planes = op.Cast(op.Transpose(convert(image, bands), perm=[2, 0, 1]), to=11)
            if steep:
                bytes_ = steep_first(planes, rows, columns)
            else:
                bytes_ = _across_first(planes, rows, columns)
            return op.Transpose(op.Cast(bytes_, to=2), perm=[1, 2, 0])

        return op.Scan(images, body=one, num_scan_inputs=1)

    return scaled


def _only(channels: int) -> Any:
    """The graph that fails unless an image has so many channels."""

    @script(_LOCAL, default_opset=op)
    def same(image, seen):
        return op.Split(image, op.Constant(value_ints=[channels]), axis=2)

    return same


@script(_LOCAL, default_opset=op)
def _unchanged(planes):
    return op.Identity(planes)


def _of_views(rows: Floats, columns: Floats) -> Any:
    """The graph that brings planes `(n, channels, height, width)` to the size of views."""
    down, across = numpy_helper.from_array(rows), numpy_helper.from_array(columns.T.copy())

    @script(_LOCAL, default_opset=op)
    def resized(planes):
        wide = op.MatMul(planes, op.Constant(value=across))
        return op.Clip(op.MatMul(op.Constant(value=down), wide), 0.0, 1.0)

    return resized


def _plain_model(model: onnx.ModelProto, shape: list[str | int]) -> onnx.ModelProto:
    """The model without local functions, with an output of this shape."""
    for function in model.functions:  # those with branches lack it
        if all(one.domain != _LOCAL.domain for one in function.opset_import):
            function.opset_import.append(onnx.helper.make_opsetid(_LOCAL.domain, 1))
    model = inliner.inline_local_functions(model)
    used = [one for one in model.opset_import if one.domain != _LOCAL.domain]
    del model.opset_import[:]
    model.opset_import.extend(used)
    _forget_shapes(model.graph)
    model = optimizer.optimize(model)
    model.ir_version = IR_VERSION
    prepared = onnx.helper.make_tensor_value_info("prepared", onnx.TensorProto.FLOAT, shape)
    prepared.name = model.graph.output[0].name
    model.graph.output[0].CopyFrom(prepared)
    onnx.checker.check_model(model, full_check=True)
    return model


def _forget_shapes(inner: onnx.GraphProto) -> None:
    """Remove what was noted on shapes inside a graph, which branches and loops make wrong."""
    del inner.value_info[:]
    for node in inner.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                for output in attribute.g.output:
                    output.ClearField("type")
                _forget_shapes(attribute.g)
