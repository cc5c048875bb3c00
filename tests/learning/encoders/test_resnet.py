import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.encoders import encoders
from harmonium.learning.encoders.resnet import ResNet, ResNet8, ResNet18, ResNet20, ResNet50


@pytest.mark.parametrize(
    ("name", "side", "parameters", "buffers", "features"),
    [
        ("resnet18", 32, 11_168_832, 9_620, 512),
        ("resnet18", 224, 11_176_512, 9_620, 512),
        ("resnet34", 32, 21_276_992, 17_060, 512),
        ("resnet50", 32, 23_500_352, 53_173, 2048),
        ("resnet20", 32, 271_824, 1_589, 64),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, side: int, parameters: int, buffers: int, features: int
) -> None:
    for norm, extra in (("group", 0), ("batch", buffers)):
        encoder = encoders[name](norm=norm)
        with torch.device("meta"):
            network = encoder.build(3, side)
        assert sum(p.numel() for p in network.parameters()) == parameters
        assert sum(b.numel() for b in network.buffers()) == extra
        assert encoder.features == features


@pytest.mark.parametrize(
    ("encoder", "side"),
    [
        (ResNet8(width=4), 8),
        (ResNet20(width=4), 12),
        (ResNet18(width=4), 16),
        (ResNet50(width=4), 16),
        (ResNet18(width=4, stem="large"), 40),
    ],
)
def test_features_by_hand(encoder: ResNet, side: int) -> None:
    network = encoder.build(3, side).double()
    with torch.no_grad():  # norms that do something
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    found = by_hand(x, network.state_dict(), encoder)
    assert torch.allclose(network(x), found, atol=1e-10)


def by_hand(x: Tensor, weights: dict[str, Tensor], encoder: ResNet) -> Tensor:
    def layer(x: Tensor, key: str, stride: int = 1) -> Tensor:
        place, number = key.rsplit(".", 1)
        kernel = weights[f"{key}.weight"]
        x = functional.conv2d(x, kernel, None, stride, kernel.shape[-1] // 2)
        count, pixels = x.shape[1], x.shape[2] * x.shape[3]
        each = min(count, max(2, count // 32, math.ceil(16 / pixels)))  # channels in a group
        grouped = x.unflatten(1, (count // each, each))
        mean = grouped.mean((2, 3, 4), keepdim=True)
        spread = grouped.var((2, 3, 4), correction=0, keepdim=True)
        x = ((grouped - mean) / (spread + 1e-5).sqrt()).flatten(1, 2)
        gain, bias = (weights[f"{place}.{int(number) + 1}.{w}"] for w in ("weight", "bias"))
        return x * gain[:, None, None] + bias[:, None, None]

    x = layer(x, "stem.0", 2 if encoder.stem == "large" else 1).relu()
    if encoder.stem == "large":
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
    for stage, count in enumerate(encoder.blocks, start=1):
        for block in range(count):
            here = f"stage{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            strides = [stride, 1] if encoder.growth == 1 else [1, stride, 1]
            y = x
            for depth, each in enumerate(strides):
                y = layer(y.relu() if depth else y, f"{here}.branch.{3 * depth}", each)
            if f"{here}.shortcut.0.weight" in weights:
                x = layer(x, f"{here}.shortcut.0", stride)
            x = (x + y).relu()
    return x.mean((2, 3))


@pytest.mark.parametrize(
    ("stem", "side", "after"),
    [("auto", 127, 127), ("auto", 128, 32), ("small", 128, 128), ("large", 32, 8)],
)
def test_large_images_are_quartered_at_once(stem: str, side: int, after: int) -> None:
    network = ResNet18(width=2, stem=stem).build(3, side)  # type: ignore[arg-type]
    assert network.stem(torch.zeros(1, 3, side, side)).shape[-2:] == (after, after)


def test_images_of_224_pixels() -> None:
    features = ResNet50(width=2).build(3, 224)(torch.randn(1, 3, 224, 224))
    assert features.shape == (1, 64) and features.isfinite().all()


def test_convolutions_start_as_kaiming_says() -> None:
    for module in ResNet20().build(3, 8).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
            wide, _, kernel, _ = module.weight.shape
            assert module.weight.std().item() == pytest.approx(
                (2 / (kernel**2 * wide)) ** 0.5, rel=0.1
            )


def test_without_norm_depth_does_not_blow_features_up() -> None:
    torch.manual_seed(0)
    network = ResNet50(width=16, norm="none").build(3, 16)
    x = network.stem(torch.randn(4, 3, 16, 16))
    for stage in (network.stage1, network.stage2, network.stage3, network.stage4):
        before, x = x.square().mean(), stage(x)
        assert before / 10 < x.square().mean() < before * 10


def test_fewer_than_eight_channels_run_channels_first() -> None:
    """In the other layout the shortcut's backward pass corrupts memory on some CPUs."""
    assert ResNet8(norm="batch", width=8).channels_last
    assert not ResNet8(norm="batch", width=7).channels_last
    network = ResNet8(norm="batch", width=2).build(1, 12)
    views = torch.randn(12, 12, 12, 1).permute(0, 3, 1, 2)
    layouts: list[bool] = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.register_forward_pre_hook(
                lambda _, args: layouts.append(args[0].is_contiguous())
            )
    network(views)
    assert layouts == [True, True]


def test_few_channels_with_group_norm_run_channels_first() -> None:
    assert not ResNet20().channels_last and not ResNet8().channels_last
    assert ResNet20(norm="batch").channels_last and ResNet18().channels_last
    network = ResNet20().build(1, 8)
    views = torch.randn(2, 8, 8, 1).permute(0, 3, 1, 2)  # grey: both layouts at once
    assert network.stem(network.layout(views)).is_contiguous()
