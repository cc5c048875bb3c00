"""Epsilon of Gaussian releases: published rows, and the definition itself by other means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmonium.errors import ConfigError
from harmonium.privacy.budget import epsilon

# clip, sigma, pictures, releases; epsilon at 1e-5 for removed and for replaced pictures
ROWS = [
    (2, 0.0034, 10_000, 100, 2.39, 3.54),
    (2, 0.0018, 10_000, 100, 4.95, 7.46),
    (4, 0.01, 5_000, 50, 2.29, 3.39),
    (4, 0.0052, 5_000, 50, 4.83, 7.27),
    (5, 0.013, 2_500, 50, 4.83, 7.27),
    (5, 0.0075, 2_500, 50, 9.30, 14.33),
]


def release(sensitivity: float, sigma: float) -> dict[str, object]:
    return {"field": "corr", "mechanism": "gaussian", "sensitivity": sensitivity, "sigma": sigma}


@pytest.mark.parametrize("row", ROWS)
def test_correlation_matrices_cost_what_other_accountants_say(row: tuple[float, ...]) -> None:
    clip, sigma, pictures, count, removed, replaced = row
    for factor, expected in ((1.0, removed), (math.sqrt(2), replaced)):
        some = [release(factor * clip / pictures, sigma)] * int(count)
        assert epsilon(some, 1e-5) == pytest.approx(expected, abs=0.005)


def test_it_is_the_definition_convolved_release_by_release() -> None:
    """The loss log p/q of each release on a grid, convolved, and the part of it above epsilon."""
    releases = [release(0.5, 1.0), release(1.0, 0.8), release(0.3, 0.2)]
    step, size = 0.001, 1 << 17
    total = np.zeros(size)
    total[0] = 1.0
    for one in releases:
        shift = float(one["sensitivity"]) / float(one["sigma"])  # type: ignore[arg-type]
        x = np.linspace(-12, 12, 2_000_001) + shift
        p, q = (np.exp(-((x - mean) ** 2) / 2) for mean in (shift, 0.0))
        loss = np.log(p) - np.log(q)
        bins = np.round(loss / step).astype(np.int64) % size
        mass = np.bincount(bins, weights=p / p.sum(), minlength=size)
        total = np.fft.irfft(np.fft.rfft(total) * np.fft.rfft(mass), size)
    losses = step * ((np.arange(size) + size // 2) % size - size // 2)
    for delta in (1e-2, 1e-5, 1e-7):
        found = epsilon(releases, delta)
        above = losses > found
        needed = (total[above] * -np.expm1(found - losses[above])).sum()
        assert needed == pytest.approx(delta, rel=0.01)


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon([], 1e-5) == 0
    assert epsilon([release(0.0, 1.0)], 1e-5) == 0
    assert epsilon([release(1.0, 5.0), release(1.0, 0.0)], 1e-5) == math.inf
    assert epsilon([release(1e-9, 1.0)], 1e-5) == 0  # within delta alone


@settings(max_examples=300, deadline=None)
@given(
    st.floats(1e-5, 1e160),
    st.one_of(st.floats(1e-12, 1 - 1e-9), st.sampled_from([1e-8, 1e-5, 0.5])),
)
def test_no_size_is_too_large(mu: float, delta: float) -> None:
    found = epsilon([release(mu, 1.0)], delta)
    assert found >= 0
    assert epsilon([release(2 * mu, 1.0)], delta) >= found * (1 - 1e-9)
    assert epsilon([release(mu, 1.0)], delta / 2) >= found * (1 - 1e-9)
    assert epsilon([release(mu, 1.0)] * 4, delta) == pytest.approx(
        epsilon([release(2 * mu, 1.0)], delta), rel=1e-6, abs=1e-12
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"sensitivity": 1.0},
        {"sensitivity": "much", "sigma": 1.0},
        {"sensitivity": -1.0, "sigma": 1.0},
        {"sensitivity": math.nan, "sigma": 1.0},
        {"sensitivity": 1.0, "sigma": math.inf},
        {"sensitivity": 10**400, "sigma": 1.0},
        {"sensitivity": 1.0, "sigma": 1.0, "mechanism": "laplace"},
    ],
)
def test_a_release_that_cannot_be_counted_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="release"):
        epsilon([odd], 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_is_between_0_and_1(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        epsilon([], delta)
