import hashlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.encoders.cnn import Cnn5, CnnSmall
from harmonium.errors import ConfigError


def test_the_small_one_is_drawn_as_ever() -> None:
    """Runs that are published hold these weights: names, order and draws."""
    torch.manual_seed(5)
    weights = CnnSmall(width=16, out=128).build(1, 8).state_dict()
    found = hashlib.sha256(b"".join(k.encode() + v.numpy().tobytes() for k, v in weights.items()))
    assert found.hexdigest()[:16] == "?"


def test_five_layers_have_the_published_size() -> None:
    with torch.device("meta"):
        network = Cnn5(norm="batch").build(3, 84)
    assert sum(p.numel() for p in network.parameters()) == 3_651_136
    assert Cnn5().features == 2048


@pytest.mark.parametrize("side", [8, 15, 84])
def test_five_layers_by_hand(side: int) -> None:
    network = Cnn5(width=4, out=6, norm="none").build(3, side)
    x = torch.randn(2, 3, side, side)
    weights = [p for p in network.parameters()]
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
    with pytest.raises(ConfigError, match="needs pictures of 8 pixels or more; these have 7"):
        Cnn5().build(3, 7)
