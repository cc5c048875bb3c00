"""Epsilon of releases: published rows, and the definition itself by other means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harmonium.core.errors import ConfigError
from harmonium.privacy.budget import _one, _power, epsilon, epsilon_rdp

# clip, sigma, images, releases; epsilon at 1e-5 for removed and for replaced images
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


@settings(max_examples=300)
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
        {"sensitivity": 0.5, "scale": 1.0, "mechanism": "discrete-laplace"},
        {"sensitivity": 10**6, "scale": 1.0, "mechanism": "discrete-laplace"},
        {"sensitivity": 1.0, "scale": 1.0, "count": 0},
        {"sensitivity": 1.0, "scale": 1.0, "count": 1.5},
        {"sensitivity": 1.0, "scale": 1.0, "neighbours": "swap"},
        {"sensitivity": 1.0, "scale": 1.0, "neighbours": ["replace"]},
    ],
)
def test_a_release_that_cannot_be_counted_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="release"):
        epsilon([odd], 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_is_between_0_and_1(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        epsilon([], delta)


# ---- discrete Laplace noise -------------------------------------------------------------------


def counts(scale: float, count: int = 1, sensitivity: float = 1) -> dict[str, object]:
    mechanism = {"mechanism": "discrete-laplace", "neighbours": "add-remove"}
    return {"sensitivity": sensitivity, "scale": scale, "count": count, **mechanism}


def sums(sigma: float, count: int = 1) -> dict[str, object]:
    return {"sensitivity": 1.0, "scale": sigma, "count": count, "neighbours": "add-remove"}


def clustering(a: float, times: int = 1) -> list[dict[str, object]]:
    """Leaf sums and twenty-one levels of counts."""
    return [sums(a, times), counts(20 * a, 21 * times)]


def test_one_count_reveals_at_most_its_step() -> None:
    """Moved by one, discrete Laplace noise is a randomised answer: its curve is known."""
    step, delta = 0.7, 0.01
    truth = 1 / (1 + math.exp(-step))
    expected = step + math.log(1 - delta / truth)
    assert epsilon([counts(1 / step)], delta) == pytest.approx(expected, rel=1e-9)
    assert epsilon([counts(1 / step)], 1e-12) == pytest.approx(step, rel=1e-9)
    assert epsilon([counts(1 / step, sensitivity=3)], 1e-12) == pytest.approx(3 * step, rel=1e-9)
    assert epsilon([counts(0.0)], delta) == math.inf
    assert epsilon([counts(1.0, sensitivity=0)], delta) == 0
    assert epsilon([counts(1e-200)], delta) == math.inf


@pytest.mark.parametrize(
    ("a", "once", "fifty", "more"),
    [(3.19, 0.8, 9.0, 14.6), (2.644, 1.0, 11.6, 19.0), (0.417, 10.0, 204.6, 382.0)],
)
def test_clusterings_compose(a: float, once: float, fifty: float, more: float) -> None:
    for times, expected in ((1, once), (50, fifty), (101, more)):
        assert epsilon(clustering(a, times), 1e-3) == pytest.approx(expected, rel=0.02)
    one_by_one = [one for _ in range(50) for one in clustering(a)]
    assert epsilon(one_by_one, 1e-3) == pytest.approx(epsilon(clustering(a, 50), 1e-3), rel=1e-9)


@pytest.mark.parametrize("sensitivity", [1, 2, 5])
def test_a_library_of_privacy_losses_says_the_same(sensitivity: int) -> None:
    """Its losses are rounded up on a grid: it may say a little more, and no less."""
    library = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    gaussian = library.from_gaussian_mechanism(2.0)
    laplace = library.from_discrete_laplace_mechanism(1 / 30.0, sensitivity=sensitivity)
    theirs = gaussian.compose(laplace.self_compose(40))
    for delta in (1e-2, 1e-6):
        ours = epsilon([sums(2.0), counts(30.0, 40, sensitivity)], delta)
        other = theirs.get_epsilon_for_delta(delta)
        assert ours <= other + 1e-6 and ours == pytest.approx(other, rel=0.005)


def test_unlike_counts_are_rounded_up_a_little() -> None:
    """Three kinds on a common grid, against the exact sum over all combinations of two."""
    kinds = [counts(30.0, 30), counts(47.0, 20)]
    some, other = (kind["scale"] for kind in kinds)
    total = np.array([[0.0, 1.0]])
    for scale, count in ((some, 30), (other, 20)):
        p = 1 / (1 + math.exp(-1 / float(scale)))  # type: ignore[arg-type]
        atoms = [
            ((count - 2 * k) / scale, math.comb(count, k) * p ** (count - k) * (1 - p) ** k)  # type: ignore[operator]
            for k in range(count + 1)
        ]
        total = np.array([(x + y, v * w) for x, v in total for y, w in atoms])
    found = epsilon(kinds, 1e-5)
    needed = (total[:, 1] * -np.expm1(np.minimum(0, found - total[:, 0]))).sum()
    assert needed == pytest.approx(1e-5, rel=1e-6)
    crowd = [counts(20.0 + kind / 7, 100) for kind in range(5)]
    least = epsilon([counts(20.0 + 4 / 7, 500)], 1e-5)
    most = epsilon([counts(20.0, 500)], 1e-5)
    assert least < epsilon(crowd, 1e-5) < most
    assert epsilon(crowd, 1e-5) == pytest.approx((least + most) / 2, rel=0.01)


def test_what_is_cut_off_is_counted_as_revealed() -> None:
    """Against binomial chances: no loss is made smaller, and no chance is lost."""
    step, count, spare = 0.1, 300, 0.1
    values, chances, beyond = _power(_one(step, 1), count, spare)
    assert len(values) < count and 0 < beyond < spare
    assert 1 - 1e-12 <= chances.sum() + beyond <= 1 + spare**2
    truth = stats.binom(count, 1 / (1 + math.exp(-step)))
    for loss in values:
        above = beyond + chances[values > loss - step / 2].sum()
        exact = truth.sf((loss / step + count) / 2 - 0.75)
        assert exact * (1 - 1e-9) <= above <= exact + spare


def test_more_is_never_less() -> None:
    found = [epsilon(clustering(2.0, times), 1e-4) for times in (1, 2, 3, 50, 51, 5_000)]
    assert found == sorted(set(found))
    assert epsilon([*clustering(2.0), counts(50.0)], 1e-4) > found[0]
    assert epsilon([*clustering(2.0), release(1e-200, 1.0)], 1e-4, neighbours="replace") > found[0]


# ---- neighbours -------------------------------------------------------------------------------


def test_unlike_neighbours_are_not_added_as_they_are() -> None:
    """To replace an image is to remove one and to add one."""
    replaced = {**release(1.0, 4.0), "neighbours": "replace"}
    removed = {**replaced, "neighbours": "add-remove"}
    assert epsilon([removed], 1e-5) == epsilon([replaced], 1e-5)  # each by its own neighbours
    twice = epsilon([release(2.0, 4.0)], 1e-5)
    assert epsilon([removed], 1e-5, neighbours="replace") == twice
    assert epsilon([release(0.0, 1.0), removed], 1e-5) == twice  # which says nothing: replace
    moved = [release(1.0, 4.0), counts(30.0, 10, sensitivity=2) | {"neighbours": "replace"}]
    assert epsilon([replaced, counts(30.0, 10)], 1e-5) == epsilon(moved, 1e-5)
    with pytest.raises(ConfigError, match="`replace`.*`add-remove`"):
        epsilon([replaced], 1e-5, neighbours="add-remove")


# ---- by Renyi divergences ---------------------------------------------------------------------

# clip, sigma, releases, images, delta; epsilon for removed and replaced images, exact for those
PUBLISHED = [
    (2, 0.0034, 100, 10_000, 1e-2, 1.96, 2.87, 1.81),
    (2, 0.0018, 100, 10_000, 1e-2, 3.99, 6.00, 4.29),
    (2, 0.0048, 100, 10_000, 1e-4, 1.88, 2.70, 2.05),
    (2, 0.0018, 100, 10_000, 1e-4, 5.39, 7.98, 6.57),
    (4, 0.010, 50, 5_000, 1e-2, 1.88, 2.75, 1.72),
    (4, 0.0052, 50, 5_000, 1e-2, 3.89, 5.85, 4.16),
    (4, 0.012, 50, 5_000, 1e-4, 2.13, 3.08, 2.37),
    (4, 0.0051, 50, 5_000, 1e-4, 5.38, 7.96, 6.56),
    (5, 0.013, 50, 2_500, 1e-2, 3.89, 5.85, 4.16),
    (5, 0.0075, 50, 2_500, 1e-2, 7.50, 11.65, 9.05),
    (5, 0.040, 50, 2_500, 1e-4, 1.58, 2.27, 1.70),
    (5, 0.013, 50, 2_500, 1e-4, 5.26, 7.79, 6.40),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_gaussian_releases_by_divergences(row: tuple[float, ...]) -> None:
    clip, sigma, times, pictures, delta, removed, replaced, exact = row
    one = {**release(clip / pictures, sigma), "count": int(times)}
    assert epsilon_rdp([one], delta) == pytest.approx(removed, abs=0.006)
    one["sensitivity"] = math.sqrt(2) * clip / pictures
    assert epsilon_rdp([one], delta) == pytest.approx(replaced, abs=0.006)
    assert epsilon([one], delta) == pytest.approx(exact, abs=0.006)


def test_counts_by_divergences() -> None:
    """Against the divergence of two discrete Laplace distributions, summed over whole numbers."""
    scale, moved, count, delta = 6.0, 2, 15, 1e-4
    x = np.arange(-2_000, 2_001)
    p, q = (np.exp(-np.abs(x - at) / scale) for at in (0, moved))
    p, q = p / p.sum(), q / q.sum()
    orders = np.linspace(1.05, 60, 20_000)
    divergences = [np.log((p * (p / q) ** (a - 1)).sum()) / (a - 1) for a in orders[::40]]
    best = min(
        count * d + a / 8 - math.log(delta) / (a - 1)
        for a, d in zip(orders[::40], divergences, strict=True)
    )
    told = [release(1.0, 2.0) | {"neighbours": "add-remove"}, counts(scale, count, moved)]
    assert epsilon_rdp(told, delta) == pytest.approx(best, rel=1e-3)
    for times in (1, 30):
        some = clustering(2.0, times)
        assert epsilon(some, 1e-3) <= epsilon_rdp(some, 1e-3) < 2 * epsilon(some, 1e-3)
    assert epsilon_rdp([counts(0.0)], delta) == math.inf
