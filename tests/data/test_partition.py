"""Splits: who holds what, by published numbers and by properties that hold for any input."""

import heapq
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.data.heterogeneity import counts, summary
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split, make_split, splits
from harmonium.data.splits.by_class import ByClass
from harmonium.data.splits.dirichlet import Dirichlet
from harmonium.data.splits.iid import IID


def make_images(labels):
    """Images of no size worth mentioning: splits look at labels only."""
    labels = np.asarray(labels, np.int64)
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (len(labels), 1, 1, 1))
    return Images(pixels, labels)


def even(classes, each):
    return make_images(np.repeat(np.arange(classes), each))


def mean_summary(rule, images, clients, seeds=range(6)):
    found = [summary(make_split(rule, images, "d", clients, s), images.labels) for s in seeds]
    return {key: np.mean([one[key] for one in found]) for key in found[0]}


# ---- the registry --------------------------------------------------------------------------------


def test_rules_are_found_by_name():
    assert {"iid", "dirichlet", "by_class"} <= set(splits.table())
    assert splits["dirichlet"](alpha=0.5).alpha == 0.5
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        splits["dirichlit"]


# ---- Dirichlet -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "clients", "prior", "classes", "dominant"),
    [
        (even(10, 5000), 100, True, 1.63, 0.93),
        (even(10, 5000), 100, False, 4.65, 0.65),
        (even(100, 500), 500, True, 1.66, 0.91),
    ],
    ids=["cifar10-prior", "cifar10", "cifar100-prior"],
)
def test_dirichlet_reaches_the_known_numbers(images, clients, prior, classes, dominant):
    """The known numbers are one draw; seeds differ by about 0.07 (prior) and 0.17 (none)."""
    found = mean_summary(Dirichlet(0.1, prior), images, clients)
    assert found["classes_mean"] == pytest.approx(classes, abs=0.12 if prior else 0.25)
    assert found["dominant_share"] == pytest.approx(dominant, abs=0.02 if prior else 0.05)
    assert found["size_min"] == found["size_max"] == len(images) // clients


def one_at_a_time(labels, clients, concentration, rng):
    """The rule as it was published: one image after another; mean classes of a client."""
    left = np.bincount(labels)
    held = []
    for _ in range(clients):
        shares, mine = rng.dirichlet(np.full(len(left), concentration)), set()
        for _ in range(len(labels) // clients):
            open_ = shares * (left > 0)
            open_ = open_ if open_.sum() else (left > 0).astype(float)
            drawn = rng.choice(len(left), p=open_ / open_.sum())
            left[drawn] -= 1
            mine.add(drawn)
        held.append(len(mine))
    return np.mean(held)


def test_dirichlet_in_blocks_draws_like_one_at_a_time():
    images = even(6, 20)
    rngs = [np.random.default_rng(seed) for seed in range(60)]
    slow = [one_at_a_time(images.labels, 12, 0.3, rng) for rng in rngs]
    fast = [
        summary(make_split(Dirichlet(0.3), images, "d", 12, seed), images.labels)["classes_mean"]
        for seed in range(60)
    ]
    spread = np.hypot(np.std(slow), np.std(fast)) / 60**0.5
    assert np.mean(fast) == pytest.approx(np.mean(slow), abs=4 * spread)


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 1e-3])
def test_tiny_concentration_gives_one_class_while_it_lasts(alpha):
    images = even(20, 30)
    split = make_split(Dirichlet(alpha), images, "d", 20, 0)
    first = counts(split, images.labels)[0]
    assert first.max() == 30
    assert summary(split, images.labels)["dropped"] == 0


def test_large_concentration_is_nearly_even():
    images = even(4, 500)
    held = counts(make_split(Dirichlet(1e6), images, "d", 4, 0), images.labels)
    assert held.min() > 90


def test_prior_follows_the_shares_of_unequal_classes():
    """With a large alpha every client repeats the global shares; without prior it cannot."""
    images = make_images([0] * 900 + [1] * 100)
    share = [
        counts(make_split(Dirichlet(1e5, prior), images, "d", 10, 0), images.labels)[0, 1] / 100
        for prior in (True, False)
    ]
    assert share[0] == pytest.approx(0.1, abs=0.08)
    assert share[1] == pytest.approx(0.5, abs=0.15)


def test_dirichlet_is_quick_for_a_thousand_clients():
    images = even(100, 500)
    start = time.perf_counter()
    make_split(Dirichlet(0.1), images, "d", 1000, 0)
    assert time.perf_counter() - start < 2


# ---- by class ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "clients", "each"), [(10, 10, 1), (100, 20, 5), (10, 5, 2)], ids=str
)
def test_by_class_gives_the_published_blocks(classes, clients, each):
    images = even(classes, 20)
    split = make_split(ByClass(each), images, "d", clients, 0)
    for client, index in enumerate(split.indices):
        expected = range(client * each, (client + 1) * each)
        assert sorted(set(images.labels[index])) == list(expected)
        assert len(index) == 20 * each


def test_by_class_shares_each_class_equally():
    images = even(10, 60)
    held = counts(make_split(ByClass(3), images, "d", 7, 0), images.labels)
    holders = (held > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    assert ((held > 0).sum(1) == 3).all()
    for column in held.T:
        shares = column[column > 0]
        assert shares.sum() == 60 and shares.max() - shares.min() <= 1


@pytest.mark.parametrize("assignment", ["consecutive", "least_used"])
def test_by_class_keeps_unequal_classes_whole(assignment):
    """SVHN's classes are unequal, so its five clients are too."""
    per_class = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    images = make_images(np.repeat(np.arange(10), per_class))
    split = make_split(ByClass(2, assignment=assignment), images, "d", 5, 0)
    assert [len(index) for index in split.indices] == [18809, 19082, 14340, 11322, 9704]


def by_heap(labels, clients, each):
    """FedU's way: cut every class into parts, and hand out those of the least used classes."""
    classes = int(labels.max()) + 1
    parts = -(-clients * each // classes)
    sizes = [
        [len(p) for p in np.array_split(np.flatnonzero(labels == c), parts)] for c in range(classes)
    ]
    heap = [(0, c) for c in range(classes)]
    counts = np.zeros((clients, classes), int)
    for client in range(clients):
        for _ in range(each):
            used, chosen = heapq.heappop(heap)
            counts[client, chosen] += sizes[chosen][used]
            heapq.heappush(heap, (used + 1, chosen))
    return counts


@pytest.mark.parametrize(("clients", "each"), [(5, 2), (7, 3), (4, 10), (13, 4)])
def test_least_used_classes_are_those_of_a_heap(clients, each):
    labels = np.repeat(np.arange(10), np.arange(60, 160, 10))
    rule = ByClass(each, assignment="least_used")
    split = make_split(rule, make_images(labels), "d", clients, 0)
    expected = by_heap(labels, clients, each)
    np.testing.assert_array_equal(counts(split, labels), expected)
    lost = len(labels) - expected.sum()
    assert list(split.notes) == (
        [f"{lost} of 1050 training images are held by no client"] if lost else []
    )


@pytest.mark.parametrize("assignment", ["consecutive", "least_used"])
def test_by_class_is_fedu_s_cifar(assignment):
    """Five clients with 2 of 10 classes and with 20 of 100: both ways give the same."""
    for classes, each in ((10, 2), (100, 20)):
        images = even(classes, 50)
        split = make_split(ByClass(each, assignment=assignment), images, "d", 5, 0)
        held = [np.unique(images.labels[index]).tolist() for index in split.indices]
        assert held == [list(range(k * each, (k + 1) * each)) for k in range(5)]
        assert {len(index) for index in split.indices} == {each * 50}


# ---- any rule ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    clients=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    rule=st.one_of(
        st.just(IID()),
        st.builds(Dirichlet, st.floats(1e-12, 1e4), st.booleans()),
        st.builds(ByClass, st.integers(1, 4)),
    ),
)
def test_no_image_is_held_twice_and_few_are_dropped(labels, clients, seed, rule):
    images = make_images(labels)
    try:
        split = make_split(rule, images, "d", clients, seed)
    except DataError:
        return
    joined = np.concatenate(split.indices)
    assert len(split) == clients
    assert len(np.unique(joined)) == len(joined)
    assert set(joined) <= set(range(len(labels)))
    assert all(len(index) and (np.diff(index) > 0).all() for index in split.indices)
    dropped = len(labels) - len(joined)
    assert summary(split, images.labels)["dropped"] == dropped
    if isinstance(rule, ByClass):
        assert dropped == 0
    else:
        assert dropped == len(labels) % clients
        assert len({len(index) for index in split.indices}) == 1


@pytest.mark.parametrize("rule", [IID(), Dirichlet(), ByClass(2)], ids=lambda rule: rule.name)
def test_the_seed_decides(rule):
    images = even(4, 50)
    one, same, other = (make_split(rule, images, "d", 6, seed) for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    for mine, yours in zip(one.indices, same.indices, strict=True):
        np.testing.assert_array_equal(mine, yours)


PINNED = [[1, 7, 8, 9, 11, 17], [4, 6, 10, 14, 15, 16], [0, 2, 3, 5, 12, 13]]


def test_a_split_is_the_same_everywhere():
    """Pinned: another platform or version that draws otherwise must not pass unnoticed."""
    split = make_split(Dirichlet(0.5), even(3, 6), "d", 3, 7)
    assert [index.tolist() for index in split.indices] == PINNED


@pytest.mark.parametrize(
    ("rule", "labels", "clients", "error", "says"),
    [
        (IID(), [0, 1], 3, DataError, "clients=3, but .* 2 training images"),
        (IID(), [0, 1], 0, ConfigError, "clients=0"),
        (Dirichlet(), [-1, -1], 1, DataError, "'dirichlet' needs labels.*use split=iid"),
        (ByClass(), [-1, -1], 1, DataError, "'by_class' needs labels"),
        (Dirichlet(), [0, -1], 1, DataError, "1 of 2 have none"),
        (ByClass(3), [0, 1], 1, DataError, "classes_per_client=3, but .* 2 classes"),
        (ByClass(1), [0, 1, 2, 3], 3, DataError, "hold 3 of 4 classes.*at least 4 clients"),
        (ByClass(2), [0, 1, 1, 1], 2, DataError, "class 0 has 1 images, but 2 clients"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(rule, labels, clients, error, says):
    with pytest.raises(error, match=says):
        make_split(rule, make_images(labels), "d", clients, 0)


@pytest.mark.parametrize(
    ("rule", "value", "says"),
    [
        (Dirichlet, 0.0, "split.alpha is 0.0"),
        (Dirichlet, float("nan"), "split.alpha is nan"),
        (Dirichlet, float("inf"), "split.alpha is inf"),
        (ByClass, 0, "split.classes_per_client is 0"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_at_once(rule, value, says):
    with pytest.raises(ConfigError, match=says):
        rule(value)


def test_a_refusal_names_the_data_set():
    images = make_images([-1, -1, -1])
    dataset = Dataset("holiday", images, images, images, (), "abc")
    with pytest.raises(DataError, match="'dirichlet' needs labels.*holiday"):
        make_split(Dirichlet(), dataset, None, 2, 0)
    assert make_split(IID(), dataset, None, 3, 0).data == "abc"


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def split():
    return make_split(Dirichlet(0.3), even(4, 10), "data", 5, 3)


def test_saved_and_loaded_is_the_same(split, tmp_path):
    split.save(tmp_path / "deep" / "split.npz")
    back = Split.load(tmp_path / "deep" / "split.npz")
    assert (back.digest, back.data, dict(back.spec)) == (split.digest, "data", dict(split.spec))
    assert back.spec["name"] == "dirichlet" and back.spec["alpha"] == 0.3
    for mine, yours in zip(split.indices, back.indices, strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["split.npz"]


def test_the_digest_covers_everything(split):
    digests = {
        make_split(Dirichlet(0.3), even(4, 10), data, clients, seed).digest
        for data, clients, seed in [("data", 5, 3), ("other", 5, 3), ("data", 4, 3), ("data", 5, 4)]
    }
    assert len(digests) == 4 and split.digest in digests


@pytest.mark.parametrize("part", ["indices", "indices_sizes", "spec", "data"])
def test_a_changed_file_is_refused(split, tmp_path, part):
    path = tmp_path / "split.npz"
    split.save(path)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if part in arrays:
        arrays[part] = arrays[part].copy()
        arrays[part][:2] = arrays[part][:2] + [1, -1]
    else:
        about = json.loads(str(arrays["about"]))
        about[part] = {"name": "iid"} if part == "spec" else "changed"
        arrays["about"] = np.array(json.dumps(about))
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="damaged or changed"):
        Split.load(path)


def test_what_is_not_a_split_is_refused(split, tmp_path):
    with pytest.raises(DataError, match="there is no split"):
        Split.load(tmp_path / "none.npz")
    path = tmp_path / "split.npz"
    split.save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="split file"):
        Split.load(path)
    with pytest.raises(StoreError, match="cannot"):
        split.save(path / "below" / "split.npz")


def test_a_split_of_other_data_is_refused(split):
    images = make_images([0])
    split.check(Dataset("right", images, images, images, (), "data"))
    with pytest.raises(DataError, match="other"):
        split.check(Dataset("wrong", images, images, images, (), "other"))


def test_some_clients_may_have_no_label_at_all() -> None:
    images = Images(np.zeros((60, 2, 2, 1), np.uint8), np.arange(60) % 3)
    half = make_split(IID(labels=0.5, labelled=0.5), images, "sixty", clients=4, seed=0)
    assert half.labelled is not None
    counts = [len(own) for own in half.labelled]
    assert sorted(count > 0 for count in counts) == [False, False, True, True]
    assert max(counts) < 15
    whole = make_split(IID(labelled=0.25), images, "sixty", clients=4, seed=1)
    assert whole.labelled is not None
    assert sorted(len(own) for own in whole.labelled) == [0, 0, 0, 15]  # all labels of one client
    with pytest.raises(ConfigError, match="split.labelled is 0"):
        IID(labelled=0.0)
    with pytest.raises(DataError, match="split.labelled=0.5.*no labels"):
        make_split(IID(labelled=0.5), images.without_labels(), "x", clients=2, seed=0)
