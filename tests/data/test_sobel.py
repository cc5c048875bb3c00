"""Sobel's filter by hand on tiny images, and against its formula on random ones."""

import numpy as np
import pytest
import torch
from torch import Tensor

from harmonium.core.errors import DataError
from harmonium.data.augment.sobel import sobel
from harmonium.data.augment.views import preset

ACROSS = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])


def grey(*rows: list[int]) -> Tensor:
    return torch.tensor([rows], dtype=torch.uint8)[..., None]


def steepness(plane: np.ndarray) -> np.ndarray:
    """The formula pixel by pixel, on one plane."""
    wide, found = np.pad(plane.astype(float), 1, mode="edge"), np.zeros(plane.shape)
    for y, x in np.ndindex(*plane.shape):
        window = wide[y : y + 3, x : x + 3]
        found[y, x] = np.hypot((window * ACROSS).sum(), (window * ACROSS.T).sum())
    return found


def test_edges_and_corners_by_hand() -> None:
    upright = sobel(grey([0, 0, 10, 10], [0, 0, 10, 10]))
    assert upright[0, :, :, 0].tolist() == [[0, 255, 255, 0]] * 2
    lying = sobel(grey([0, 0], [0, 0], [7, 7], [7, 7]))
    assert lying[0, :, :, 0].tolist() == [[0, 0], [255, 255], [255, 255], [0, 0]]
    # Beside a single bright pixel the slope is 2 ways by 2; at a corner 1 by 1; in itself none.
    dot = sobel(grey(*[[0] * 5, [0] * 5, [0, 0, 9, 0, 0], [0] * 5, [0] * 5]))[0, :, :, 0]
    corner = round(255 / 2**0.5)
    ring = [[corner, 255, corner], [255, 0, 255], [corner, 255, corner]]
    assert dot[1:4, 1:4].tolist() == ring and int(dot.long().sum()) == 4 * 255 + 4 * corner
    # The border repeats: a slope at the edge of the image is half as steep as within it.
    assert sobel(grey([0, 10, 20, 30]))[0, 0, :, 0].tolist() == [128, 255, 255, 128]


def test_an_image_without_edges_is_black_and_others_beside_it_are_not() -> None:
    flat = torch.full((1, 4, 4, 3), 77, dtype=torch.uint8)
    flat[..., 1] = 200
    rising = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1).expand(1, 4, 4, 3)
    both = sobel(torch.cat([flat, rising]))
    assert both[0].max() == 0 and both[1].max() == 255
    assert torch.equal(both[1:], sobel(rising))
    assert sobel(torch.zeros(0, 4, 4, 3, dtype=torch.uint8)).shape == (0, 4, 4, 3)
    assert sobel(torch.full((1, 1, 1, 1), 9, dtype=torch.uint8)).item() == 0


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_are_the_formulas_to_half_a_step(channels: int) -> None:
    made = torch.Generator().manual_seed(channels)
    pixels = torch.randint(0, 256, (5, 7, 6, channels), generator=made, dtype=torch.uint8)
    before, found = pixels.clone(), sobel(pixels)
    assert found.dtype == torch.uint8 and found.is_contiguous() and torch.equal(pixels, before)
    weights = (0.299, 0.587, 0.114) if channels == 3 else (1.0,)
    for image, edges in zip(pixels.numpy(), found.numpy(), strict=True):
        steep = steepness(image @ np.array(weights))
        off = edges / 255 - (steep / steep.max())[..., None]
        assert np.abs(off).max() <= 0.5 / 255 + 1e-9
        assert (edges == edges[..., :1]).all()


def test_each_channel_by_itself_over_the_maximum_of_all() -> None:
    made = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 5, 5, 3), generator=made, dtype=torch.uint8)
    found = sobel(pixels, "channels")
    for image, edges in zip(pixels.numpy(), found.numpy(), strict=True):
        steep = np.stack([steepness(image[..., c]) for c in range(3)], -1)
        assert np.abs(edges / 255 - steep / steep.max()).max() <= 0.5 / 255 + 1e-9
    assert torch.equal(sobel(pixels[..., :1], "channels"), sobel(pixels[..., :1]))


def test_copies_are_sized_and_normalised_as_images_are() -> None:
    pixels = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    pixels[:, :, 2:] = 50
    views = preset("simclr", mean=[0.1, 0.2, 0.3], std=[0.5, 1.0, 2.0])
    plain = views.plain(sobel(pixels))
    assert plain[0, :, 0, 1].tolist() == pytest.approx([0.9 / 0.5, 0.8, 0.7 / 2])
    assert preset("simclr", size=8).plain(sobel(pixels)).shape == (1, 3, 8, 8)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(DataError, match="views need torch.uint8"):
        sobel(torch.zeros(1, 4, 4, 3))
