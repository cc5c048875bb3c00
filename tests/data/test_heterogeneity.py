"""Figures of a split, by hand: every expected number is worked out here and not by the code."""

import json
import math
import time

import numpy as np
import pytest

from harmonium.data import heterogeneity as module
from harmonium.data.heterogeneity import (
    counts,
    heterogeneity,
    js_distance,
    pixel_statistics,
    summary,
)
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split


def made(*indices, angles=None, **spec):
    arrays = tuple(np.array(index, np.int64) for index in indices)
    if angles is not None:
        angles = tuple(np.array(own, np.float32) for own in angles)
    return Split(arrays, spec, "d", "x", angles)


def dataset(images, classes=(), names=None):
    return Dataset("d", images, images, images, tuple(classes), "d", names=names or {})


def blank(count, labels=None, **factors):
    labels = np.full(count, -1) if labels is None else np.asarray(labels)
    pixels = np.zeros((count, 2, 2, 1), np.uint8)
    return Images(pixels, labels, {name: np.asarray(column) for name, column in factors.items()})


def js(p, q):
    """From Kullback-Leibler divergences, as it is defined."""
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(a):
        return sum(x * math.log2(x / m) for x, m in zip(a, middle, strict=True) if x)

    return math.sqrt((kl(p) + kl(q)) / 2)


# ---- sizes ---------------------------------------------------------------------------------------


def test_sizes_by_hand():
    found = summary(made([0, 1, 2, 3], [4, 5]), np.zeros(7, np.int64))
    assert {key: found[key] for key in ("clients", "pictures", "dropped", "repeated")} == {
        **{"clients": 2, "pictures": 6, "dropped": 1, "repeated": 0}
    }
    assert (found["size_min"], found["size_mean"], found["size_max"]) == (2, 3, 4)
    assert found["size_gini"] == pytest.approx(1 / 6)  # mean |difference| 1 over twice the mean 3


def test_images_that_are_held_twice_are_counted_twice():
    found = summary(made([0, 0, 1], [1]), np.zeros(3, np.int64))
    assert (found["pictures"], found["dropped"], found["repeated"]) == (4, 1, 2)


def test_one_client_with_nearly_everything_is_gini_near_1():
    found = summary(made(range(1000), *([1000 + k] for k in range(99))), np.zeros(1099, np.int64))
    assert 0.89 < found["size_gini"] < 0.91
    assert summary(made([0], [1]), np.zeros(2, np.int64))["size_gini"] == 0


# ---- labels --------------------------------------------------------------------------------------


def test_labels_by_hand():
    labels = np.array([0, 0, 0, 1, 0, 1, 0])
    split = made([0, 1, 2, 3], [4, 5])
    assert counts(split, labels, 3).tolist() == [[3, 1, 0], [1, 1, 0]]
    found = summary(split, labels, 3)
    whole = (4 / 6, 2 / 6)
    distances = [js((3 / 4, 1 / 4), whole), js((1 / 2, 1 / 2), whole)]
    entropy = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    expected = {
        **{"classes_min": 2, "classes_mean": 2, "classes_max": 2},
        "dominant_share": (0.75 + 0.5) / 2,
        "label_entropy_bits": (entropy + 1) / 2,
        **{"label_js_mean": sum(distances) / 2, "label_js_max": max(distances)},
        "label_emd_mean": (2 * (3 / 4 - 4 / 6) + 2 * (4 / 6 - 1 / 2)) / 2,
        "label_emd_max": 2 * (4 / 6 - 1 / 2),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_one_class_a_client_reaches_the_published_distance():
    """Ten classes, one a client: Zhao et al. (2018) give 1.8 for CIFAR-10."""
    labels = np.repeat(np.arange(10), 5)
    found = summary(made(*np.arange(50).reshape(10, 5)), labels)
    assert found["label_emd_mean"] == found["label_emd_max"] == pytest.approx(1.8)
    assert found["label_js_mean"] == pytest.approx(js([1] + [0] * 9, [0.1] * 10))
    assert found["label_entropy_bits"] == 0 and found["dominant_share"] == 1


def test_classes_below_a_hundredth_are_told_apart():
    labels = np.array([0] * 199 + [1] + [0] * 99 + [1])
    rows = heterogeneity(made(range(200), range(200, 300)), dataset(blank(300, labels))).rows()
    assert [(row["classes"], row["classes_1_percent"]) for row in rows] == [(2, 1), (2, 2)]


def test_the_same_everywhere_is_no_distance_and_disjoint_is_the_greatest():
    labels = np.array([0, 1, 2, 0, 1, 2])
    found = summary(made([0, 1, 2], [3, 4, 5]), labels)
    assert found["label_js_max"] == 0 and found["label_emd_max"] == 0
    assert js_distance(np.array([[1.0, 0]]), np.array([0, 1.0])) == pytest.approx(1)


def test_what_is_not_known_is_left_out_and_counted():
    labels = np.array([0, -1, 1, 1, -1, -1])
    found = heterogeneity(made([0, 1], [2, 3], [4, 5]), dataset(blank(6, labels), "ab"))
    assert found.figures["unlabelled"] == 3
    assert found.figures["classes_min"] == 1 and found.figures["dominant_share"] == 1
    whole = (1 / 3, 2 / 3)
    assert found.figures["label_js_mean"] == pytest.approx(
        (js((1, 0), whole) + js((0, 1), whole)) / 2
    )
    last = found.rows()[2]
    assert last["size"] == 2 and last["classes"] is None and last["label_js"] is None
    assert json.loads(json.dumps(found.rows()))  # no nan, no NumPy numbers


def test_without_labels_there_are_sizes_and_looks():
    found = heterogeneity(made([0, 1], [2, 3]), dataset(blank(5)))
    assert found.classes is None and found.styles is None
    assert found.figures["unlabelled"] == 4 and found.figures["dropped"] == 1
    assert {"style_distance", "style_chance"} <= set(found.figures)
    assert not any("label_" in key or "classes" in key for key in found.figures)


# ---- styles and angles ---------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["style", "domain"])
def test_styles_by_hand(factor):
    images = blank(6, **{factor: [0, 0, 0, 1, 1, -1]})
    names = {factor: ("photo", "sketch", "clip art")}
    found = heterogeneity(made([0, 1], [2, 3], [4, 5]), dataset(images, names=names))
    assert found.styles.tolist() == [[2, 0, 0], [1, 1, 0], [0, 1, 0]]
    whole = (3 / 5, 2 / 5)
    distances = [js(p, whole) for p in ((1, 0), (0.5, 0.5), (0, 1))]
    assert [row["style_js"] for row in found.rows()] == pytest.approx(distances)
    assert found.figures["style_js_mean"] == pytest.approx(np.mean(distances))
    assert (found.figures["styles_min"], found.figures["styles_max"]) == (1, 2)


@pytest.mark.parametrize(("spec", "bins"), [({}, [3, 1]), ({"bins": 4}, [2, 1])])
def test_occupied_angles_are_counted(spec, bins):
    split = made([0, 1, 2], [3, 4], angles=[[0, 36, 359.9], [100, 107]], **spec)
    found = heterogeneity(split, dataset(blank(5)))
    assert [row["angle_bins"] for row in found.rows()] == bins
    assert found.figures["angle_bins_mean"] == np.mean(bins)


# ---- looks ---------------------------------------------------------------------------------------


def test_looks_by_hand():
    bars = np.array([[0, 255], [0, 255]], np.uint8).reshape(1, 2, 2, 1)
    assert pixel_statistics(bars).tolist() == [[0.5, 0.5, 0, 1]]  # mean, deviation, down, across
    assert pixel_statistics(np.zeros((3, 1, 1, 3), np.uint8)).tolist() == [[0] * 8] * 3


def test_bright_and_dark_clients_are_one_deviation_away():
    """Brightness alone differs, so d = 1; chance is 1/50 - 1/100 for 50 of 100 images."""
    pixels = np.full((100, 4, 4, 1), 10, np.uint8)
    pixels[50:] = 200
    images = Images(pixels, np.full(100, -1))
    found = heterogeneity(made(range(50), range(50, 100)), dataset(images))
    for row in found.rows():
        assert row["style_chance"] == pytest.approx(0.1)
        assert row["style_distance"] == pytest.approx(math.sqrt(1 - 0.01))
    assert found.figures["style_distance"] == pytest.approx(math.sqrt(0.99))
    assert found.figures["style_distance_max"] == pytest.approx(math.sqrt(0.99))


def noise(count, seed=0):
    """Images whose brightness and contrast differ at random."""
    rng = np.random.default_rng(seed)
    low, high = rng.integers(0, 100, (count, 1, 1, 1)), rng.integers(120, 255, (count, 1, 1, 1))
    return Images(rng.integers(low, high, (count, 6, 6, 1)).astype(np.uint8), np.full(count, -1))


def test_random_shares_are_no_distance_whatever_their_size():
    images, order = noise(4000), np.random.default_rng(1).permutation(4000)
    for clients in (40, 400):  # few clients differ by more, now and then
        found = heterogeneity(made(*np.split(order, clients)), dataset(images)).figures
        assert found["style_distance"] < 0.4 * found["style_chance"]


def test_large_clients_count_for_more_in_the_whole(monkeypatch):
    """Three quarters dark: the dark client is nearer to the whole, however few are looked at."""
    monkeypatch.setattr(module, "PER_CLIENT", 10)
    pixels = np.full((400, 4, 4, 1), 10, np.uint8)
    pixels[300:] = 200
    images = Images(pixels, np.full(400, -1))
    rows = heterogeneity(made(range(300), range(300, 400)), dataset(images)).rows()
    # In standard deviations of a 3:1 mixture, its parts lie at sqrt(1/3) and sqrt(3).
    chance = [(1 - 2 * w) / 10 + (0.75**2 + 0.25**2) / 10 for w in (0.75, 0.25)]
    expected = [math.sqrt(1 / 3 - chance[0]), math.sqrt(3 - chance[1])]
    assert [row["style_distance"] for row in rows] == pytest.approx(expected)


def test_turned_images_look_as_they_are_held():
    stripes = np.zeros((40, 8, 8, 1), np.uint8)
    stripes[:, :, ::2] = 255
    images = Images(stripes, np.full(40, -1))
    halves = (range(20), range(20, 40))
    upright = heterogeneity(made(*halves), dataset(images)).figures["style_distance"]
    turned = made(*halves, angles=[[0] * 20, [90] * 20])
    assert upright == 0
    assert heterogeneity(turned, dataset(images)).figures["style_distance"] > 0.9


def test_only_a_sample_is_read_and_always_the_same(monkeypatch):
    read = []

    class Counting(Images):
        def batch(self, index):
            read.extend(np.asarray(index).tolist())
            return super().batch(index)

    monkeypatch.setattr(module, "IN_ALL", 30)
    images = noise(600)
    images = Counting(images.pixels, images.labels)
    split = made(*np.arange(600).reshape(10, 60))
    first = heterogeneity(split, dataset(images))
    assert len(read) == 30 and read == sorted(read)
    assert [sum(k * 60 <= row < (k + 1) * 60 for row in read) for k in range(10)] == [3] * 10
    assert heterogeneity(split, dataset(images)).rows() == first.rows()


def test_a_client_without_images_has_no_looks():
    found = heterogeneity(made([0, 1, 2], []), dataset(noise(3)))
    assert found.rows()[1] == {"size": 0, "style_distance": None, "style_chance": None}
    assert math.isfinite(found.figures["style_distance"])


def test_ten_thousand_clients_are_quick():
    images = blank(50_000, np.arange(50_000) % 100)
    split = made(*np.random.default_rng(0).permutation(50_000).reshape(10_000, 5))
    start = time.perf_counter()
    assert len(heterogeneity(split, dataset(images)).rows()) == 10_000
    assert time.perf_counter() - start < 4
