"""Noise has the distribution that the accountant counts with."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from harmonium.core.errors import ConfigError, WireError
from harmonium.privacy.mechanisms import Noise, Randomness


def noise(source: Randomness = "simulated", seed: int = 0) -> Noise:
    return Noise(source, torch.Generator().manual_seed(seed))


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize("scale", [0.3, 1.0, 7.5, 60.0])
@pytest.mark.parametrize(("source", "count"), [("simulated", 200_000), ("system", 10_000)])
def test_discrete_laplace_noise_has_its_chances(
    source: Randomness, count: int, scale: float
) -> None:
    """Chi-square over the values that are likely enough; system noise may fail once in 1e6."""
    draws = noise(source).discrete_laplace(zeros(count), scale).numpy()
    q = math.exp(-1 / scale)
    edge = next(k for k in range(10_000) if count * q**k / (1 + q) < 20)  # the tail beyond it
    values = np.arange(-edge + 1, edge)
    expected = count * (1 - q) / (1 + q) * q ** np.abs(values)
    tails = count * q**edge / (1 + q)
    seen = [int((draws == value).sum()) for value in values]
    observed = [int((draws <= -edge).sum()), *seen, int((draws >= edge).sum())]
    assert stats.chisquare(observed, [tails, *expected, tails]).pvalue > 1e-6


@pytest.mark.parametrize(("source", "count"), [("simulated", 100_000), ("system", 100_000)])
def test_gaussian_noise_is_normal(source: Randomness, count: int) -> None:
    draws = noise(source).gaussian(torch.zeros(count, dtype=torch.float64), 2.5)
    assert stats.kstest(draws.numpy(), "norm", args=(0, 2.5)).pvalue > 1e-6
    halves = draws.reshape(2, -1).numpy()
    assert abs(np.corrcoef(halves)[0, 1]) < 5 / math.sqrt(count / 2)


def test_noise_is_added_to_the_value_and_leaves_it_alone() -> None:
    value = torch.tensor([[5, -3], [10**12, 0]])
    noisy = noise().discrete_laplace(value, 2.0)
    assert noisy.shape == value.shape and noisy.dtype == torch.int64
    assert torch.equal(noisy - value, noise().discrete_laplace(torch.zeros_like(value), 2.0))
    assert torch.equal(noise().discrete_laplace(value, 0.0), value)
    assert noise("system").discrete_laplace(value[:0], 3.0).shape == (0, 2)


def test_only_simulated_noise_can_be_repeated() -> None:
    first = noise(seed=3).discrete_laplace(zeros(50), 9.0)
    assert torch.equal(first, noise(seed=3).discrete_laplace(zeros(50), 9.0))
    assert not torch.equal(first, noise(seed=4).discrete_laplace(zeros(50), 9.0))
    system = [noise("system", 3).discrete_laplace(zeros(50), 9.0) for _ in range(2)]
    assert not torch.equal(*system)


def test_discrete_noise_needs_whole_numbers_and_a_size() -> None:
    with pytest.raises(WireError, match="int64"):
        noise().discrete_laplace(torch.zeros(3), 1.0)
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="scale"):
            noise().discrete_laplace(zeros(3), scale)
