import pytest
import torch

from harmonium.encoders import encoders, groups_of
from harmonium.encoders.cnn import CnnSmall
from harmonium.errors import ConfigError


@pytest.mark.parametrize("name", encoders.table())
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32), (3, 11)])
def test_encoders_map_pictures_to_features(name: str, channels: int, side: int) -> None:
    settings = encoders[name]()
    network = settings.build(channels, side)
    features = network(torch.randn(2, channels, side, side))
    assert features.shape == (2, settings.features)


def test_group_norm_needs_no_buffers_and_no_modes() -> None:
    network = CnnSmall(width=4, out=6).build(3, 8)
    assert set(network.state_dict()) == {key for key, _ in network.named_parameters()}
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(network.train()(x), network.eval()(x))


def test_a_picture_is_judged_on_its_own() -> None:
    network = CnnSmall(width=4, out=6).build(1, 8)
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(network(x)[2], network(x[2:3])[0], atol=1e-5)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8, 48, 64, 100, 1024])
def test_groups_follow_the_rule(channels: int) -> None:
    groups = groups_of(channels)
    assert channels % groups == 0 and groups <= 32
    assert channels // groups >= 2 or groups == 1


def test_impossible_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder.width"):
        CnnSmall(width=0)
