import pytest
import torch
from torch.nn import functional

from harmonium.learning.encoders.fixup import FixupBlock, FixupResNet20, thin


@pytest.mark.parametrize(("width", "parameters"), [(8, 17_108_399), (1, 267_743)])
def test_sizes_are_the_published_ones(width: int, parameters: int) -> None:
    with torch.device("meta"):
        network = FixupResNet20(width=width).build(3, 32)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert FixupResNet20(width=width).features == 64 * width
    widths = [stage[-1].conv2.out_channels for stage in network[1:4]]
    assert widths == [16 * width, 32 * width, 64 * width]


def test_a_fresh_network_is_its_stem_and_shortcuts() -> None:
    network = FixupResNet20().build(3, 13)
    x = torch.randn(2, 3, 13, 13)
    stem = functional.conv2d(x, network.stem[0].weight, padding=1).relu()
    features = network(x)
    # Rows and columns 0, 4, 8, ... of the stem's channels, and nothing in the channels beyond.
    assert torch.allclose(features[:, :16], stem[:, :, ::4, ::4].mean((2, 3)), atol=1e-6)
    assert not features[:, 16:].any()


@pytest.mark.parametrize("side", [1, 7, 8])
def test_a_fresh_block_is_its_shortcut(side: int) -> None:
    x = torch.randn(2, 4, side, side)
    assert torch.equal(FixupBlock(4, 1, 9)(x), x.relu())
    found = FixupBlock(4, 2, 9)(x)
    assert found.shape == (2, 8, (side + 1) // 2, (side + 1) // 2)
    assert torch.equal(found[:, :4], x[:, :, ::2, ::2].relu())
    assert not found[:, 4:].any()


def test_the_shortcut_picks_and_pads() -> None:
    x = torch.arange(18.0).view(1, 2, 3, 3)
    expected = [[0, 2, 6, 8], [9, 11, 15, 17], [0] * 4, [0] * 4]
    assert thin(x, 2).flatten(2).tolist() == [expected]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_trained_block_by_hand(stride: int) -> None:
    block = FixupBlock(3, stride, 9).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    inner = functional.conv2d(x + block.b1a, block.conv1.weight, None, stride, 1) + block.b1b
    outer = functional.conv2d(inner.relu() + block.b2a, block.conv2.weight, None, 1, 1)
    shortcut = x
    if stride == 2:
        picked = functional.avg_pool2d(x + block.b1a, 1, stride=2)
        shortcut = torch.cat([picked, torch.zeros_like(picked)], dim=1)
    expected = (block.scale * outer + block.b2b + shortcut).relu()
    assert torch.allclose(block(x), expected, atol=1e-12)


def test_the_first_convolution_starts_smaller_with_depth() -> None:
    torch.manual_seed(0)
    for depth in (1, 9):
        found = FixupBlock(32, 2, depth).conv1.weight.std().item()
        assert found == pytest.approx((2 / (9 * 64)) ** 0.5 * depth**-0.5, rel=0.05)
    stages = FixupResNet20(width=4).build(3, 8)
    found = stages[3][2].conv1.weight.std().item()
    assert found == pytest.approx((2 / (9 * 256) / 9) ** 0.5, rel=0.05)
