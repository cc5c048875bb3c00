"""Private clustering: what it does without noise, and whether its noise is what it says."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.privacy.budget import epsilon as spent
from harmonium.privacy.kmeans import (
    COUNTS,
    Leaf,
    clipped,
    multiplier,
    private_centroids,
    public_matrix,
    tree,
    weighted_kmeans,
)
from harmonium.privacy.mechanisms import Noise

DELTA = 1e-3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(seed: int = 1) -> Noise:
    return Noise("simulated", rng(seed))


def groups(count: int, columns: int = 16, k: int = 4, spread: float = 0.3) -> Tensor:
    """Unit rows around some axes."""
    axes = torch.eye(columns)[torch.arange(count) % k]
    draws = torch.randn(count, columns, generator=rng(7)) / math.sqrt(columns)
    return functional.normalize(axes + spread * draws, dim=1)


def cluster(rows: Tensor, k: int = 4, epsilon: float = math.inf, **settings: Any) -> Tensor:
    settings = {"delta": DELTA, "noise": noise(), "rng": rng()} | settings
    return private_centroids(rows, k, epsilon=epsilon, **settings)[0]


# ---- without noise ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 50, 400])
def test_without_noise_leaves_part_the_rows(count: int) -> None:
    rows = groups(count).double()
    leaves = tree(rows, 4, 0.0, noise(), rng(), 200)
    assert sorted(torch.cat([leaf.index for leaf in leaves]).tolist()) == list(range(count))
    assert all(leaf.count == len(leaf.index) and 1 <= leaf.count < 3 for leaf in leaves)


def test_without_noise_leaves_share_their_sides() -> None:
    """A leaf is a prefix: nobody outside it is on the same sides of its first hyperplanes."""
    rows, depth = groups(300).double(), 6
    sides = rows @ torch.randn(depth, 16, generator=rng(5), dtype=torch.float64).T >= 0
    leaves = tree(rows, 4, 0.0, noise(), rng(5), depth)
    assert len(leaves) > 8
    for leaf in leaves:
        inside, first = sides[leaf.index], sides[leaf.index[0]]
        shared = int((inside == first).all(0).long().cumprod(0).sum())
        alike = (sides[:, :shared] == first[:shared]).all(1)
        assert sorted(leaf.index.tolist()) == alike.nonzero()[:, 0].tolist()


def test_without_noise_means_of_leaves_are_exact() -> None:
    rows = 3 * groups(40)  # all beyond the radius
    centroids = cluster(rows, k=100)
    leaves = tree(clipped(rows.double(), 1.0), 100, 0.0, noise(), rng(), 20)
    means = torch.stack([functional.normalize(rows[leaf.index]).mean(0) for leaf in leaves])
    distances = torch.cdist(means, centroids)
    assert len(centroids) == len(means)
    assert distances.min(0).values.max() < 1e-6 and distances.min(1).values.max() < 1e-6


def test_without_noise_groups_are_found() -> None:
    centroids = functional.normalize(cluster(groups(400)), dim=1)
    assert len(centroids) == 4
    cosines = centroids @ torch.eye(16)[:4].T
    assert cosines.max(0).values.min() > 0.95 and cosines.max(1).values.min() > 0.95


def test_no_noise_is_told_as_no_protection() -> None:
    _, told = private_centroids(
        groups(9), 2, epsilon=math.inf, delta=DELTA, noise=noise(), rng=rng()
    )
    assert spent(map(asdict, told), DELTA) == math.inf


def test_a_public_matrix_keeps_what_lies_in_it() -> None:
    matrix = public_matrix(64, 8)
    assert torch.equal(matrix, public_matrix(64, 8))
    assert torch.allclose(matrix.T @ matrix, torch.eye(8, dtype=torch.float64), atol=1e-12)
    axes = matrix[:, :3].T  # rows within the subspace come back as they were, but for their length
    rows = axes[torch.arange(60) % 3] / math.sqrt(8)
    found = cluster(rows.float(), k=3, dims=8)
    assert found.shape == (3, 64)
    assert (functional.normalize(found, dim=1) @ axes.T.float()).max(0).values.min() > 0.999
    assert found.norm(dim=1).max() == pytest.approx(1.0, abs=1e-5)
    whole = groups(30)
    assert torch.equal(cluster(whole, dims=16), cluster(whole))


# ---- any noise --------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.5, 10.0, math.inf])
@pytest.mark.parametrize("dims", [None, 4])
def test_few_long_and_equal_rows(epsilon: float, dims: int | None) -> None:
    odd = torch.full((3, 16), math.nan)
    odd[1:, 0] = torch.tensor([math.inf, 1e30])
    some = [groups(count) for count in (0, 1, 2, 30)]
    for number, rows in enumerate([*some, torch.ones(50, 16), torch.zeros(5, 16), odd]):
        for radius in (0.1, 1.0):
            centroids = cluster(rows, 3, epsilon, dims=dims, radius=radius, noise=noise(number))
            assert 1 <= len(centroids) <= 3 and centroids.shape[1] == 16
            assert centroids.dtype == rows.dtype and bool(centroids.isfinite().all())
            assert centroids.norm(dim=1).max() <= radius * (1 + 1e-6)
    assert len(cluster(torch.ones(50, 16), 3)) == 1  # there is one point only


def test_the_same_generators_give_the_same_centroids() -> None:
    first, again = (cluster(groups(200), 4, 5.0) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, cluster(groups(200), 4, 5.0, noise=noise(2)))


def test_system_noise_is_used_where_it_is_asked_for() -> None:
    system = {"noise": Noise("system", rng()), "epsilon": 5.0, "delta": DELTA}
    (first, told), (second, _) = (
        private_centroids(groups(60), 2, rng=rng(), **system)
        for _ in range(2)  # type: ignore[arg-type]
    )
    assert first.shape != second.shape or not torch.equal(first, second)
    assert {one.noise for one in told} == {"system"}


@pytest.mark.parametrize("bad", [{"k": 0}, {"dims": 0}, {"depth": -1}, {"radius": 0.0}])
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        cluster(groups(5), **{"k": 2, **bad})


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1.0, 0)])
def test_an_impossible_budget_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        cluster(groups(5), 2, epsilon, delta=delta)


def test_weights_count() -> None:
    points = torch.tensor([[0.0], [4.0], [5.0]], dtype=torch.float64)
    for weights, expected in (([1, 1, 1], 3.0), ([1, 0.5, 3], 17 / 4.5)):
        found = weighted_kmeans(points, torch.tensor(weights, dtype=torch.float64), 1, rng())
        assert found.tolist() == [[pytest.approx(expected)]]
    drawn = [
        float(weighted_kmeans(points, torch.tensor([1e-9, 1e-9, 1.0]).double(), 1, rng(seed)))
        for seed in range(5)
    ]
    assert drawn == [pytest.approx(5.0, abs=1e-6)] * 5


# ---- what is claimed --------------------------------------------------------------------------


def test_noise_is_as_calibrated_elsewhere() -> None:
    """By losses rounded up on a grid; exact ones need a thousandth less."""
    for epsilon, expected in ((0.8, 3.19), (1.0, 2.644), (10.0, 0.417)):
        assert multiplier(epsilon, 1e-3) == pytest.approx(expected, rel=2e-3)
    assert multiplier(math.inf, 1e-3) == 0
    assert multiplier(1.0, 1e-3, 5) < multiplier(1.0, 1e-3) < multiplier(1.0, 1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 0.8, 3.0, 50.0])
@pytest.mark.parametrize("depth", [0, 20])
def test_records_spend_what_was_asked_for_and_no_more(epsilon: float, depth: int) -> None:
    settings = {"delta": 1e-4, "noise": noise(), "rng": rng(), "radius": 0.3, "depth": depth}
    _, told = private_centroids(groups(50), 4, epsilon=epsilon, **settings)  # type: ignore[arg-type]
    records = [asdict(one) for one in told]
    assert epsilon * (1 - 1e-5) <= spent(records, 1e-4) <= epsilon
    assert spent(records * 2, 1e-4) > epsilon
    assert {one.neighbours for one in told} == {"add-remove"}


class Scripted(Noise):
    """Gives the same answers whatever the rows, and remembers what it was asked to cover."""

    def __init__(self) -> None:
        super().__init__("simulated", torch.Generator())
        self.covered: list[tuple[str, Tensor, float]] = []

    def gaussian(self, value: Tensor, sigma: float) -> Tensor:
        self.covered.append(("gaussian", value, sigma))
        return torch.ones_like(value)

    def discrete_laplace(self, value: Tensor, scale: float) -> Tensor:
        self.covered.append(("discrete-laplace", value, scale))
        pattern = torch.tensor([10**6, 10**6, 0])  # one of three parts is dropped
        return pattern[torch.arange(len(value)) % 3]


@pytest.mark.parametrize("dims", [None, 4])
def test_one_row_moves_no_release_by_more_than_its_record_says(dims: int | None) -> None:
    """Given the same earlier answers, neighbours differ by at most the stated sensitivities."""
    rows = torch.cat([100 * groups(20), 0.1 * groups(20), torch.full((1, 16), math.nan)])
    radius, depth, worst = 0.5, 5, 0.0

    def run(some: Tensor) -> tuple[Scripted, list[Any]]:
        scripted = Scripted()
        settings = {"epsilon": 2.0, "delta": DELTA, "noise": scripted, "rng": rng()}
        both = private_centroids(some, 2, radius=radius, dims=dims, depth=depth, **settings)  # type: ignore[arg-type]
        return scripted, both[1]

    whole, told = run(rows)
    gaussian, laplace = told
    names = [name for name, _, _ in whole.covered]
    assert names == ["discrete-laplace"] * laplace.count + ["gaussian"] * gaussian.count
    for _, _, scale in whole.covered[:-1]:
        assert scale == laplace.scale == COUNTS * multiplier(2.0, DELTA, depth)
    assert whole.covered[-1][2] == gaussian.scale == radius * multiplier(2.0, DELTA, depth)
    for left_out in range(len(rows)):
        kept = torch.arange(len(rows)) != left_out
        for one, other in zip(whole.covered, run(rows[kept])[0].covered, strict=True):
            change = one[1] - other[1]
            if one[0] == "gaussian":
                worst = max(worst, float(change.norm()))
            else:
                assert change.abs().sum() <= laplace.sensitivity
    assert worst <= gaussian.sensitivity + 1e-9
    assert worst > 0.9 * gaussian.sensitivity  # and some row does move it so far


def test_dropped_parts_are_left_out_and_nothing_is_counted_twice() -> None:
    rows = groups(100).double()
    leaves = tree(rows, 2, 1.0, Scripted(), rng(), 5)
    held = torch.cat([leaf.index for leaf in leaves]).tolist()
    assert len(held) == len(set(held)) < 100

    class Nobody(Scripted):
        def discrete_laplace(self, value: Tensor, scale: float) -> Tensor:
            return torch.full_like(value, 999 if len(value) == 1 else -5)

    (whole,) = tree(rows, 2, 1.0, Nobody(), rng(), 5)  # both halves dropped: it stays
    assert isinstance(whole, Leaf) and len(whole.index) == 100


class Even(Scripted):
    """Says of every part that it is as large as its depth allows: 960, 480, 240 and so on."""

    def discrete_laplace(self, value: Tensor, scale: float) -> Tensor:
        return torch.full_like(value, 960 // len(value))


@pytest.mark.parametrize(
    ("k", "a", "leaves"),
    [
        (16, 100.0, 16),  # at least 960 / 32 = 30: parts of 120 still branch, of 60 no more
        (32, 100.0, 32),  # at least 15
        (960, 100.0, 512),  # at least 1: until parts have less than 3
        (8, 1.0, 32),  # at least 10 sqrt(4) = 20, for the noise of means, not 60
        (16, 0.1, 256),  # at least 2
    ],
)
def test_a_part_branches_as_long_as_counts_allow(k: int, a: float, leaves: int) -> None:
    assert len(tree(torch.zeros(5, 4).double(), k, a, Even(), rng(), 12)) == leaves


class Weak(Noise):
    """Ten times less noise than it is asked for."""

    def gaussian(self, value: Tensor, sigma: float) -> Tensor:
        return super().gaussian(value, sigma / 10)


@pytest.mark.parametrize("kind", [Noise, Weak])
def test_an_attacker_finds_no_more_than_epsilon(kind: type[Noise]) -> None:
    """Guess from the sign whether there was a row; weak noise is found out.

    Bounds of the two chances hold together with 99.9 %.
    """
    epsilon, times = 3.0, 600
    source = kind("simulated", rng(3))
    settings = {"epsilon": epsilon, "delta": DELTA, "noise": source, "rng": rng(), "depth": 0}
    below = []
    for rows in (torch.zeros(0, 1), torch.ones(1, 1)):
        found = [private_centroids(rows, 1, **settings)[0] for _ in range(times)]  # type: ignore[arg-type]
        below.append(sum(float(one[0, 0]) < 0 for one in found))
    likely = stats.beta.ppf(0.0005, below[0], times - below[0] + 1)
    unlikely = stats.beta.ppf(0.9995, below[1] + 1, times - below[1])
    attack = math.log((likely - DELTA) / unlikely)
    assert 0.3 < attack < epsilon if kind is Noise else attack > epsilon
