"""The two-level split: coarse classes, then fine ones, as one image after another would be."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.partition import make_split
from harmonium.data.splits.pachinko import Pachinko


@pytest.fixture
def uneven(make_images):
    """Three coarse classes with 1, 2 and 3 fine ones of unequal size."""
    labels = np.repeat([4, 0, 2, 1, 3, 5], [40, 10, 20, 30, 15, 5])
    return make_images(labels, coarse=np.array([7, 3, 7, 3, 3, 9])[labels])


def one_at_a_time(images, clients, alpha, beta, rng):
    """The algorithm as it was published: mean coarse and fine classes of a client."""
    coarse, fine = images.factors["coarse"], images.labels
    tree = {c: dict.fromkeys(np.unique(fine[coarse == c]).tolist()) for c in np.unique(coarse)}
    for c, leaves in tree.items():
        for leaf in leaves:
            leaves[leaf] = int(((coarse == c) & (fine == leaf)).sum())
    held = []
    for _ in range(clients):
        top = dict(zip(tree, rng.dirichlet([alpha] * len(tree)), strict=True))
        below = {
            c: dict(zip(leaves, rng.dirichlet([beta] * len(leaves)), strict=True))
            for c, leaves in tree.items()
        }
        mine = set()
        for _ in range(len(images) // clients):
            open_ = {c: w + 1e-300 for c, w in top.items() if sum(tree[c].values())}
            c = rng.choice(list(open_), p=np.array(list(open_.values())) / sum(open_.values()))
            leaves = {f: w + 1e-300 for f, w in below[c].items() if tree[c][f]}
            f = rng.choice(list(leaves), p=np.array(list(leaves.values())) / sum(leaves.values()))
            tree[c][f] -= 1
            mine.add((c, f))
        held.append((len({c for c, _ in mine}), len(mine)))
    return np.mean(held, 0)


def test_in_blocks_it_draws_like_one_at_a_time(uneven):
    def fast(seed):
        split = make_split(Pachinko(0.5, 2.0), uneven, "d", 10, seed)
        coarse = [len(np.unique(uneven.factors["coarse"][own])) for own in split.indices]
        return np.mean(coarse), np.mean([len(np.unique(uneven.labels[o])) for o in split.indices])

    slow = [one_at_a_time(uneven, 10, 0.5, 2.0, np.random.default_rng(s)) for s in range(40)]
    found = [fast(seed) for seed in range(40)]
    spread = np.hypot(np.std(slow, 0), np.std(found, 0)) / 40**0.5
    assert (np.abs(np.mean(slow, 0) - np.mean(found, 0)) < 4 * spread).all()


def test_cifar100_has_few_coarse_classes_and_nearly_all_fine_ones_of_them(make_images):
    fine = np.repeat(np.arange(100), 500)
    images = make_images(fine, coarse=fine % 20)
    split = make_split(Pachinko(), images, "d", 500, 0)
    assert {len(own) for own in split.indices} == {100}
    assert len(np.unique(np.concatenate(split.indices))) == 50_000
    first = split.indices[:250]  # before the classes run out
    coarse = np.mean([len(np.unique(fine[own] % 20)) for own in first])
    leaves = np.mean([len(np.unique(fine[own])) for own in first])
    # A class that n draws from Dir(0.1) of 20 missed is missed again with (1.9 + n) / (2 + n).
    missed = np.prod([(1.9 + n) / (2 + n) for n in range(100)])
    assert coarse == pytest.approx(20 * (1 - missed), abs=0.5)
    assert 3 < leaves / coarse < 5


def test_a_client_of_one_coarse_class_takes_its_fine_ones_evenly(make_images):
    fine = np.repeat(np.arange(12), 200)
    images = make_images(fine, coarse=fine // 3)
    split = make_split(Pachinko(1e-9, 1e9), images, "d", 16, 0)
    held = np.bincount(fine[split.indices[0]], minlength=12)
    assert (held > 0).sum() == 3 and held[held > 0].min() > 35


def test_data_without_coarse_classes_are_refused(make_images):
    fine = np.arange(10) % 3
    with pytest.raises(DataError, match=r"split.column=coarse, but .* choose .* from: group"):
        make_split(Pachinko(), make_images(fine, group=fine), "d", 2, 0)
    with pytest.raises(DataError, match="no such column"):
        make_split(Pachinko(), make_images(fine), "d", 2, 0)
    with pytest.raises(DataError, match=r"3 of 10 images.*split=dirichlet"):
        images = make_images(fine, coarse=np.where(np.arange(10) < 3, -1, 0))
        make_split(Pachinko(), images, "d", 2, 0)
    with pytest.raises(ConfigError, match="split.beta is 0"):
        Pachinko(beta=0)
