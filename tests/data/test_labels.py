"""Which labels may be seen, and by whom: chosen by class, and gone where nobody declared them."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.images import UNKNOWN, Images
from harmonium.data.labels import stratified
from harmonium.data.partition import Split, make_split
from harmonium.data.sets.digits import Digits
from harmonium.data.sets.shapes import Shapes
from harmonium.data.splits.dirichlet import Dirichlet
from harmonium.data.splits.iid import IID
from harmonium.data.splits.styles import StyleSplit
from harmonium.federation.method import Method
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import load_public, make_runtime


def make_images(labels) -> Images:
    labels = np.asarray(labels)
    pixels = np.arange(len(labels) * 16, dtype=np.uint8).reshape(-1, 4, 4, 1)
    return Images(pixels, labels, {"style": labels % 2})


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_the_same_share_of_every_class_and_at_least_one(share):
    labels = np.repeat([0, 3, 5, UNKNOWN], [200, 31, 2, 40])
    chosen = stratified(labels, share, np.random.default_rng(0))
    assert (np.diff(chosen) > 0).all()
    for value, held in ((0, 200), (3, 31), (5, 2)):
        assert (labels[chosen] == value).sum() == max(1, round(share * held))
    assert UNKNOWN not in labels[chosen]


def test_every_client_has_its_own_labelled_part():
    images = make_images(np.arange(400) % 4)
    split = make_split(Dirichlet(alpha=0.5, labels=0.1), images, "x", 5, 0)
    for rows, own in zip(split.indices, split.labelled, strict=True):
        held, seen = images.labels[rows], images.labels[rows[own]]
        for value in np.unique(held):
            assert (seen == value).sum() == max(1, round(0.1 * (held == value).sum()))
    again = make_split(Dirichlet(alpha=0.5, labels=0.1), images, "x", 5, 0)
    assert again.digest == split.digest
    # How many labels are seen changes nobody's images.
    full = make_split(Dirichlet(alpha=0.5), images, "x", 5, 0)
    assert all(map(np.array_equal, full.indices, split.indices))
    assert full.labelled is None


def test_a_labelled_part_survives_the_file_and_is_part_of_the_digest(tmp_path):
    images = make_images(np.arange(60) % 3)
    split = make_split(IID(labels=0.2), images, "x", 3, 0)
    split.save(tmp_path / "split.npz")
    loaded = Split.load(tmp_path / "split.npz")
    assert all(map(np.array_equal, loaded.labelled, split.labelled))
    with np.load(tmp_path / "split.npz") as file:
        changed = dict(file) | {"labelled": file["labelled"][::-1]}
    np.savez(tmp_path / "other.npz", **changed)
    with pytest.raises(DataError, match="digest"):
        Split.load(tmp_path / "other.npz")


def test_only_the_labelled_part_is_seen():
    images = make_images(np.arange(60) % 3)
    split = make_split(IID(labels=0.2), images, "x", 3, 0)
    seen = split.seen(images)
    allowed = np.concatenate(
        [rows[own] for rows, own in zip(split.indices, split.labelled, strict=True)]
    )
    np.testing.assert_array_equal(seen.labels[allowed], images.labels[allowed])
    assert (np.delete(seen.labels, allowed) == UNKNOWN).all()
    assert not seen.factors


def test_merged_clients_keep_images_labels_and_order():
    images = make_images(np.arange(120) % 4)
    apart = make_split(Dirichlet(alpha=0.3, labels=0.2), images, "x", 6, 1)
    together = make_split(Dirichlet(alpha=0.3, labels=0.2, merge=3), images, "x", 2, 1)
    for k, (rows, own) in enumerate(zip(together.indices, together.labelled, strict=True)):
        parts = range(3 * k, 3 * k + 3)
        joined = np.concatenate([apart.indices[p] for p in parts])
        seen = np.concatenate([apart.indices[p][apart.labelled[p]] for p in parts])
        np.testing.assert_array_equal(rows, np.sort(joined))
        np.testing.assert_array_equal(rows[own], np.sort(seen))


def test_copies_of_an_image_share_one_label():
    """A style of 50 images brought to 500: a tenth of the images, not of the places."""
    labels = np.concatenate([np.arange(950) % 5, np.arange(50) % 5])
    images = Images(
        np.zeros((1000, 4, 4, 1), np.uint8), labels, {"style": np.repeat([0, 1], [950, 50])}
    )
    split = make_split(StyleSplit(labels=0.1), images, "x", 2, 0)
    seen = split.seen(images).labels
    for rows, own in zip(split.indices, split.labelled, strict=True):
        distinct = np.unique(rows)
        assert (seen[distinct] != UNKNOWN).sum() == round(0.1 * len(distinct))
        np.testing.assert_array_equal(np.flatnonzero(seen[rows] != UNKNOWN), own)


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan")])
def test_a_wrong_share_of_labels_is_refused(value):
    with pytest.raises(ConfigError, match="split.labels"):
        IID(labels=value)


def test_a_share_of_no_labels_is_refused():
    with pytest.raises(DataError, match="split.labels=0.1, but .* has no labels"):
        make_split(IID(labels=0.1), make_images(np.full(20, UNKNOWN)), "x", 2, 0)


# ---- labels cannot reach a task that did not declare them ----------------------------------------


class Curious(Method):
    """Looks for labels everywhere a handler could."""

    name = "curious"


class Declared(Curious):
    name = "declared"
    uses_labels = True


def found_by_a_task(method, tmp_path, **sections):
    """Every array of whole numbers within reach of a client's examples and public images."""
    recipe = Recipe.from_tree({"data": {"name": "shapes", "count": 60, "test_count": 8, "size": 8}})
    recipe = recipe.changed(method=method, clients=2, **sections)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, 2, 0)
    host = make_runtime(recipe, dataset, split, tmp_path, load_public(recipe, dataset.train.shape))
    found = []
    for images in filter(None, (host.images, host.public)):
        found += [images.labels, *images.factors.values()]
    return dataset, split, found


def test_labels_are_gone_where_nobody_declared_them(tmp_path):
    public = {"name": "shapes", "count": 30, "test_count": 8, "size": 8, "seed": 1}
    _, _, found = found_by_a_task(Curious, tmp_path, public=public)
    assert len(found) == 2
    assert all((column == UNKNOWN).all() for column in found)


def test_declared_labels_are_those_of_the_labelled_part_alone(tmp_path):
    dataset, split, found = found_by_a_task(
        Declared, tmp_path, split={"name": "iid", "labels": 0.25}
    )
    (labels,) = found
    known = np.flatnonzero(labels != UNKNOWN)
    allowed = [rows[own] for rows, own in zip(split.indices, split.labelled, strict=True)]
    np.testing.assert_array_equal(known, np.sort(np.concatenate(allowed)))
    np.testing.assert_array_equal(labels[known], dataset.train.labels[known])


# ---- held-out labelled parts ---------------------------------------------------------------------


def test_a_labelled_part_is_held_out_by_class():
    whole, data = Digits().load(), Digits(labelled=0.1).load()
    assert whole.labelled is None
    assert len(data.labelled) + len(data.train) == len(whole.train)
    counts = np.bincount(whole.train.labels)
    assert np.bincount(data.labelled.labels).tolist() == [round(0.1 * n) for n in counts]
    for name in ("validation", "test"):  # the other parts are the same for every protocol
        np.testing.assert_array_equal(getattr(data, name).pixels, getattr(whole, name).pixels)
    rows = {row.tobytes() for row in data.labelled.pixels}
    clients = {row.tobytes() for row in data.train.pixels}
    both = {row.tobytes() for row in whole.train.pixels}
    assert rows | clients == both
    assert data.digest != whole.digest


def test_a_labelled_part_of_unlabelled_data_is_refused():
    with pytest.raises(DataError, match="data.labelled=0.1.*shapes.*no labels"):
        Shapes(count=20, test_count=4, size=8, unlabelled=True, labelled=0.1).load()
    with pytest.raises(ConfigError, match="data.labelled=1.0: a share"):
        Digits(labelled=1.0).load()


# ---- public images -----------------------------------------------------------------------------


def test_public_images_take_the_shape_of_the_clients(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 10, 3), np.uint8)
    np.savez(tmp_path / "x.npz", x=pixels)
    recipe = Recipe.of("fedavg", "data=digits")
    data = recipe.data.load()
    for public in (
        {"name": "npz", "path": str(tmp_path / "x.npz")},
        {"name": "shapes", "count": 9},
    ):
        assert load_public(recipe.changed(public=public), data.train.shape).train.shape == (8, 8, 1)
    with pytest.raises(ConfigError, match=r"^data set 'folder' needs public.path=FOLDER$"):
        load_public(recipe.changed(public="folder"), data.train.shape)
