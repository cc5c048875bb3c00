"""Attacks on the noise itself: what it is by its draws, and how well neighbours can be told."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from harmonium.data.augment.views import preset
from harmonium.learning.client import Client
from harmonium.privacy.budget import epsilon
from harmonium.privacy.mechanisms import Noise, Randomness

SIGMA, FAR, DELTA = 0.02, 0.02, 1e-5  # one image moves the value by one standard deviation
CLAIM = epsilon([{"sensitivity": FAR, "sigma": SIGMA}], DELTA)


def released(value: Tensor, source: Randomness, key: int, weaker: float = 1.0) -> Tensor:
    """Many releases of one value at once, a row each; `weaker` noise than the ledger says."""
    rng = torch.Generator().manual_seed(key)
    client = Client(0, 1, 1, None, preset("digits"), rng, Noise(source, rng))  # type: ignore[arg-type]
    sigma = SIGMA / weaker
    return client.release("value", value, sensitivity=FAR, sigma=sigma)


def scores(source: Randomness, rows: int, weaker: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood ratios of releases from neighbours, up to a line that changes no threshold."""
    torch.manual_seed(0)
    way = torch.nn.functional.normalize(torch.randn(4, dtype=torch.float64), dim=0)
    here = torch.randn(4, dtype=torch.float64).expand(rows, 4)
    drawn = (
        released(value, source, key, weaker) for key, value in enumerate((here, here + FAR * way))
    )
    without, with_it = (((value - here) @ way).numpy() for value in drawn)
    return without, with_it


def least_epsilon(without: np.ndarray, with_it: np.ndarray) -> float:
    """An epsilon that the mechanism surely exceeds, at 95% for each of nine thresholds."""
    count, found = len(without), 0.0
    for threshold in np.quantile(with_it, np.linspace(0.05, 0.99, 9)):
        hits, alarms = int((with_it > threshold).sum()), int((without > threshold).sum())
        low = stats.beta.ppf(0.05 / 18, hits, count - hits + 1)
        high = stats.beta.ppf(1 - 0.05 / 18, alarms + 1, count - alarms)
        if low > DELTA:
            found = max(found, math.log((low - DELTA) / high))
    return found


def least_shift(without: np.ndarray, with_it: np.ndarray) -> float:
    """How far apart neighbours surely are, in deviations of normal noise, at 99.9%."""
    count = len(without)
    spread = math.sqrt((without.var(ddof=1) + with_it.var(ddof=1)) / 2)
    most = spread * math.sqrt((2 * count - 2) / stats.chi2.ppf(5e-4, 2 * count - 2))
    apart = with_it.mean() - without.mean() - stats.norm.ppf(1 - 5e-4) * most * math.sqrt(2 / count)
    return float(apart / most)


@pytest.mark.parametrize("source", ["simulated", "system"])
def test_noise_is_normal_and_of_its_size(source: Randomness) -> None:
    for attempt in range(3):  # system noise cannot be repeated: one bad draw in a million
        noise = released(torch.zeros(100_000, dtype=torch.float64), source, attempt).numpy()
        good = (
            abs(noise.std() / SIGMA - 1) < 0.01
            and abs(noise.mean()) < 4 * SIGMA / math.sqrt(len(noise))
            and stats.kstest(noise, "norm", args=(0, SIGMA)).pvalue > 0.01
            and abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.015
        )
        if good:
            return
    pytest.fail("the noise is not what it should be, three times")


@pytest.mark.parametrize("source", ["simulated", "system"])
def test_neighbours_are_no_easier_to_tell_than_is_claimed(source: Randomness) -> None:
    for _ in range(3):
        without, with_it = scores(source, 100_000)
        if 2.0 < least_epsilon(without, with_it) <= CLAIM and least_shift(without, with_it) <= 1:
            return
    pytest.fail("releases reveal more than is claimed, three times")


def test_half_the_noise_is_found_out() -> None:
    without, with_it = scores("simulated", 100_000, weaker=2.0)
    assert least_epsilon(without, with_it) > CLAIM


def test_noise_a_tenth_too_small_is_found_out() -> None:
    """By its shape, for which few draws are enough."""
    without, with_it = scores("simulated", 20_000, weaker=1 / 0.9)
    assert least_shift(without, with_it) > FAR / SIGMA


def test_system_noise_does_not_follow_from_the_seed() -> None:
    value = torch.zeros(8, dtype=torch.float64)
    again: Any = [released(value, "simulated", 3) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(released(value, "system", 3), released(value, "system", 3))
