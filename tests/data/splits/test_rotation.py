"""Turned images: as many occupied bins as the distribution promises, shares as without angles."""

from math import exp, lgamma

import numpy as np
import pytest

from harmonium.core.errors import ConfigError
from harmonium.data.partition import make_split
from harmonium.data.splits.dirichlet import Dirichlet
from harmonium.data.splits.iid import IID
from harmonium.data.splits.rotation import Joint, RotationSplit


def occupied(split, bins=10):
    """Bins that a client has an image in, mean over the clients."""
    return np.mean([len(np.unique(own // np.float32(360 / bins))) for own in split.angles])


def expected(each, alpha, bins):
    """Bins hit by `each` draws: with weights from Dir(alpha / bins), draw n + 1 misses a bin that
    was missed so far with probability (alpha - alpha / bins + n) / (alpha + n).
    """
    rest = alpha - alpha / bins
    missed = lgamma(alpha) - lgamma(alpha + each) + lgamma(rest + each) - lgamma(rest)
    return bins * (1 - exp(missed))


@pytest.mark.parametrize("each", [100, 500, 1000], ids=["cifar100", "cifar10", "tinyimagenet"])
def test_the_sizes_of_the_paper_occupy_one_or_two_bins(make_images, each):
    split = make_split(RotationSplit(), make_images(np.full(1000 * each, -1)), "d", 1000, 0)
    found = occupied(split)
    assert 1.46 - 0.06 < found < 1.63 + 0.06
    assert found == pytest.approx(expected(each, 0.1, 10), abs=0.06)


@pytest.mark.parametrize(("alpha", "bins"), [(1.0, 10), (0.1, 4), (100.0, 36), (5.0, 1)])
def test_other_concentrations_follow_the_same_law(make_images, alpha, bins):
    split = make_split(RotationSplit(alpha, bins), make_images(np.full(100_000, -1)), "d", 1000, 0)
    found = expected(100, alpha, bins) if bins > 1 else 1
    assert occupied(split, bins) == pytest.approx(found, abs=0.15)


def test_angles_are_even_within_a_bin(make_images):
    split = make_split(RotationSplit(0.1, 4), make_images(np.full(40_000, -1)), "d", 20, 0)
    within = np.sort(np.concatenate(split.angles) % 90)
    even = (np.arange(len(within)) + 0.5) * 90 / len(within)
    assert np.abs(within - even).max() < 90 * 1.95 / len(within) ** 0.5  # Kolmogorov, 0.1 %


def test_a_tiny_concentration_is_one_bin_each(make_images):
    split = make_split(RotationSplit(1e-300), make_images(np.full(500, -1)), "d", 50, 0)
    assert occupied(split) == 1
    assert len({int(own[0] // 36) for own in split.angles}) > 5


def test_angles_do_not_change_who_holds_what(make_images):
    images = make_images(np.arange(600) % 6)
    pairs = [
        (RotationSplit(), IID()),
        (Joint(0.3), Dirichlet(0.3, prior=True)),
        (Joint(0.3, prior=False, angle_alpha=50), Dirichlet(0.3)),
    ]
    for turned, plain in pairs:
        one, other = (make_split(rule, images, "d", 12, 4) for rule in (turned, plain))
        assert all(map(np.array_equal, one.indices, other.indices))
        assert one.angles is not None and other.angles is None


def test_joint_can_draw_its_angles_otherwise(make_images):
    images = make_images(np.arange(5000) % 10)
    few = occupied(make_split(Joint(), images, "d", 50, 0))
    many = occupied(make_split(Joint(angle_alpha=100.0), images, "d", 50, 0))
    assert few < 2.2 and many > 9


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RotationSplit(0.0), "split.alpha is 0.0"),
        (lambda: RotationSplit(bins=0), "split.bins is 0"),
        (lambda: Joint(bins=0), "split.bins is 0"),
        (lambda: Joint(angle_alpha=float("nan")), "split.angle_alpha is nan"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
