"""The ONNX graph of images gives the bytes that Pillow gives, whatever their size and mode."""

from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image
from torch import nn

from harmonium.handover.preparation import preparation, vertical_first
from harmonium.handover.programs import _view_matrices, onnx_session

SIZES = [(12, 12), (13, 9), (1, 1), (40, 7), (5, 44), (64, 25), (97, 101)]
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def random(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def graph_of(encoder: Any, **more: Any) -> Any:
    model = preparation(
        encoder.size,
        encoder.channels,
        encoder.fit,
        encoder.mean,
        encoder.std,
        _view_matrices(encoder),
        **more,
    )
    session = onnx_session(model.SerializeToString())
    return lambda images: session.run(None, {"images": images})[0]


@pytest.mark.parametrize("fit", ["cut", "resize", "pad"])
@pytest.mark.parametrize(
    ("channels", "size"), [(1, (10, 17)), (2, (12, 12)), (3, (12, 12)), (4, (17, 10))]
)
def test_prepared_images_are_those_of_pillow(loaded, fit: str, channels: int, size: Any) -> None:
    prepare = {"mean": None, "std": None}
    encoder = loaded(nn.Identity(), size, channels, fit=fit, prepare=prepare)
    graph = graph_of(encoder)
    for height, width in (*SIZES, size):
        for bands in (1, 3, 4) if channels in (1, 3) else (channels,):
            images = random(2, height, width, bands)
            given: Any = images
            if bands != channels and bands == 4:
                given = [Image.fromarray(image, "RGBA") for image in images]
            wanted = encoder.prepare(given).numpy()
            assert np.array_equal(graph(images), wanted), (height, width, bands)


@pytest.mark.parametrize("channels", [1, 3])
def test_normalisation_is_inside(loaded, channels: int) -> None:
    numbers = {"mean": [0.2, 0.5, 0.7][:channels], "std": [0.3, 0.2, 0.1][:channels]}
    encoder = loaded(nn.Identity(), (8, 8), channels, prepare=numbers)
    images = random(3, 20, 11, 3)
    assert np.allclose(graph_of(encoder)(images), encoder.prepare(images), atol=1e-6)


@pytest.mark.parametrize("views", [8, 20])
def test_the_size_of_views_is_inside(loaded, views: int) -> None:
    encoder = loaded(nn.Identity(), (12, 16), 3, views=views)
    for shape in ((2, 12, 16, 3), (1, 30, 9, 3)):
        images = random(*shape)
        found = graph_of(encoder)(images)
        assert found.shape[2:] == (views, views)
        assert np.allclose(found, encoder.prepare(images), atol=1e-5)


@pytest.mark.parametrize(("channels", "others"), [(1, (2, 5)), (3, (2, 5)), (4, (1, 3))])
def test_channels_that_cannot_be_converted_fail(
    loaded, channels: int, others: tuple[int, ...]
) -> None:
    graph = graph_of(loaded(nn.Identity(), (8, 8), channels))
    for wrong in others:
        for side in (8, 9):
            with pytest.raises(Exception, match="(?s)Split"):
                graph(random(1, side, side, wrong))


def test_tall_images_go_by_the_order_of_the_pillow_that_is_named(loaded) -> None:
    encoder = loaded(nn.Identity(), (12, 12), 1)
    before, after = (graph_of(encoder, tall_first=tall) for tall in (False, True))
    tall, wide = random(1, 90, 17, 1), random(1, 17, 90, 1)
    assert np.array_equal(before(wide), after(wide))
    assert not np.array_equal(before(tall), after(tall))
    here = after if vertical_first() else before
    assert np.array_equal(here(tall), encoder.prepare(tall))
    assert (vertical_first("12.3.0"), vertical_first("13.0.0")) == (False, True)


def test_the_graph_is_plain_onnx(loaded) -> None:
    model = preparation((8, 8), 3, "cut", None, None)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 20)]
    assert not model.functions and model.ir_version == 10
    onnx.checker.check_model(model, full_check=True)
