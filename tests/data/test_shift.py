"""Images turned once by their holders' angles."""

import numpy as np
from PIL import Image

from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Shares, SplitRule, make_split
from harmonium.data.shift import turned, with_split_angles
from harmonium.data.splits.iid import IID
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime

RNG = np.random.default_rng(0)


class Leaning(SplitRule):
    """Two clients; image k is turned by k degrees."""

    name = "leaning"

    def assign(self, images, clients, rng):
        rows = np.array_split(rng.permutation(len(images)), clients)
        rows = [np.sort(own) for own in rows]
        return Shares(rows, [own.astype(np.float32) for own in rows])


def dataset(count=30, channels=3) -> Dataset:
    pixels = RNG.integers(0, 256, (count, 9, 9, channels), np.uint8)
    images = Images(pixels, np.arange(count) % 3, {"size": np.arange(count)})
    nothing = images.subset([])
    return Dataset("made", images, nothing, nothing, ("a", "b", "c"), f"digest-{RNG.random()}")


def test_each_image_is_turned_by_its_own_angle_and_nothing_else_changes(home):
    for channels in (1, 3):
        data = dataset(channels=channels)
        split = make_split(Leaning(), data, None, 2, 0)
        held = with_split_angles(data, split)
        for row in range(30):
            image = Image.fromarray(data.train.pixels[row].squeeze())
            want = np.asarray(image.rotate(row, Image.Resampling.BILINEAR))
            np.testing.assert_array_equal(held.train.pixels[row].squeeze(), want)
        np.testing.assert_array_equal(held.train.labels, data.train.labels)
        np.testing.assert_array_equal(held.train.factors["size"], np.arange(30))
        assert held.digest == data.digest and held.test is data.test


def test_without_angles_nothing_is_written(home):
    data = dataset()
    assert with_split_angles(data, make_split(IID(), data, None, 2, 0)) is data
    assert not (home / "cache").exists()


def test_zero_degrees_is_the_image_itself():
    pixels = RNG.integers(0, 256, (4, 8, 6, 3), np.uint8)
    np.testing.assert_array_equal(turned(pixels, np.zeros(4, np.float32)), pixels)


def test_client_tasks_see_the_turned_images(tmp_path, home):
    recipe = Recipe.of("fedavg", "clients=3", "split=rotation", "split.alpha=0.1")
    data = recipe.data.load()
    split = make_split(recipe.split, data, None, 3, 0)
    host = make_runtime(recipe, data, split, tmp_path)
    angles = np.zeros(len(data.train), np.float32)
    for rows, own in zip(split.indices, split.angles, strict=True):
        angles[rows] = own
    np.testing.assert_array_equal(host.images.pixels, turned(data.train.pixels, angles))
    assert (host.images.pixels != data.train.pixels).any()
