import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError, DataError
from harmonium.evaluation.features import embed


def prepare(pictures):
    assert pictures.dtype == torch.uint8
    return pictures.permute(0, 3, 1, 2).float() / 255 - 0.5


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    net(torch.randn(16, 3, 6, 6))  # running statistics that differ from the initial ones
    return net


PIXELS = np.random.default_rng(0).integers(0, 256, (23, 6, 6, 3), dtype=np.uint8)


def test_equals_the_direct_forward():
    net = network()
    got = embed(net, PIXELS, prepare)
    with torch.no_grad():
        expected = net.eval()(prepare(torch.from_numpy(PIXELS)))
    assert got.shape == (23, 32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 5, 23, 500])
def test_batches_do_not_matter(batch):
    net = network()
    torch.testing.assert_close(
        embed(net, PIXELS, prepare, batch), embed(net, PIXELS, prepare), rtol=0, atol=1e-6
    )


def test_modes_and_weights_are_as_before():
    net = network().train()
    net[1].eval()  # a layer frozen on purpose
    before = {name: value.clone() for name, value in net.state_dict().items()}
    embed(net, PIXELS, prepare)
    assert [part.training for part in net] == [True, False, True, True, True, True]
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_modes_come_back_after_an_error():
    net = network().train()

    def broken(pictures):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        embed(net, PIXELS, broken)
    assert all(part.training for part in net.modules())


def test_features_may_be_trained_on():
    features = embed(network(), PIXELS, prepare)
    head = nn.Linear(32, 2)
    head(features).sum().backward()
    assert head.weight.grad is not None


def test_read_only_images():
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    assert torch.equal(embed(network(), frozen, prepare), embed(network(), PIXELS, prepare))


def test_refusals():
    with pytest.raises(DataError, match="no images"):
        embed(network(), PIXELS[:0], prepare)
    with pytest.raises(DataError, match="feature vector"):
        embed(network()[:3], PIXELS, prepare)
    with pytest.raises(ConfigError, match="at least 1"):
        embed(network(), PIXELS, prepare, batch=0)
