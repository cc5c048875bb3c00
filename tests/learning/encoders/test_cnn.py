import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.learning.encoders.cnn import Cnn5, CnnSmall


def test_the_small_one_is_drawn_as_ever() -> None:
    """Runs that are published hold these weights: their names, their order and their draws."""
    torch.manual_seed(5)
    found = CnnSmall(width=16, out=128).build(1, 8)
    torch.manual_seed(5)
    expected = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.GroupNorm(16, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, 2, 1, bias=False), nn.GroupNorm(8, 128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128)),
    )
    weights = found.state_dict()
    assert list(weights) == list(expected.state_dict())
    assert all(torch.equal(weights[key], value) for key, value in expected.state_dict().items())
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(found(x), expected(x))


def test_five_layers_have_the_published_size() -> None:
    with torch.device("meta"):
        network = Cnn5(norm="batch").build(3, 84)
    assert sum(p.numel() for p in network.parameters()) == 3_651_136
    assert Cnn5().features == 2048


@pytest.mark.parametrize("side", [8, 15, 84])
def test_five_layers_by_hand(side: int) -> None:
    network = Cnn5(width=4, out=6, norm="none").build(3, side)
    x = torch.randn(2, 3, side, side)
    weights = list(network.parameters())
    assert torch.allclose(network(x), five_layers(x, weights), atol=1e-6)


def five_layers(x: Tensor, weights: list[Tensor]) -> Tensor:
    for layer in range(1, 6):
        kernel, bias, *weights = weights
        x = functional.conv2d(x, kernel, bias, padding=1).clamp(min=0)
        if layer in (1, 2, 5):
            half = x.shape[2] // 2
            x = x[:, :, : 2 * half, : 2 * half].unflatten(3, (half, 2)).unflatten(2, (half, 2))
            x = x.amax((3, 5))
    quarters = functional.adaptive_avg_pool2d(x, 2).flatten(1)
    return (quarters @ weights[0].T + weights[1]).clamp(min=0)


def test_five_layers_need_eight_pixels() -> None:
    with pytest.raises(ConfigError, match="8 pixels.* 7"):
        Cnn5().build(3, 7)
