"""Drawn shapes: what they show, that they can be told apart, and that nothing leaks."""

import time

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.sets.shapes import SHAPES, STYLES, TEXTURES, Shapes


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))


def still(shape, style="print", size=64, **settings):
    """One large upright image of a shape in the middle, without grain."""
    scene = {
        "shape": np.array([list(SHAPES).index(shape)]),
        "style": np.array([list(STYLES).index(style)]),
        **{"angle": np.array([0]), "size": np.array([400])},
        **{"x": np.array([500]), "y": np.array([500])},
    }
    made = Shapes(size=size, channels=1, noise=0.0, classes=10, styles=8, **settings)
    return made.draw(scene, np.random.default_rng(0))[0, :, :, 0].astype(float)


def ink(shape):
    """Where the ink lies: from 0 (paper) to 1."""
    image = still(shape)
    return (image.max() - image) / (image.max() - image.min())


# Areas for radius 0.4 of 64 pixels = 25.6 pixels: worked out by hand from the geometry.
RADIUS = 25.6
AREAS = {
    "disc": np.pi * 0.9**2,
    "square": 1.5**2,
    "triangle": 3 * 3**0.5 / 4,
    "cross": 2 * 1.9 * 0.56 - 0.56**2,
    "ring": np.pi * (0.9**2 - 0.5**2),
    "star": 10 * 0.5 * 1.0 * 0.42 * np.sin(np.pi / 5),
    "bars": 3 * 1.7 * 0.36,
}


@pytest.mark.parametrize("shape", AREAS)
def test_a_shape_covers_its_area(shape):
    assert ink(shape).sum() == pytest.approx(AREAS[shape] * RADIUS**2, rel=0.03)


def test_holes_and_gaps_are_paper():
    assert ink("ring")[32, 32] < 0.05 < 0.95 < ink("disc")[32, 32]
    column = ink("bars")[:, 32]
    assert [column[row] > 0.5 for row in (15, 24, 32, 40, 49)] == [True, False, True, False, True]
    assert ink("crescent")[32, 44] < 0.05 < 0.95 < ink("crescent")[32, 11]
    assert ink("corner")[20, 45] < 0.05 < 0.95 < ink("corner")[20, 20]


def test_edges_are_smooth_and_everything_else_is_not():
    """Between a tenth and nine tenths lie only the pixels that the edge runs through."""
    cover = ink("disc")
    soft = (cover > 0.1) & (cover < 0.9)
    around = 2 * np.pi * 0.9 * RADIUS
    assert 0.4 * around < soft.sum() < 1.5 * around


def test_a_turned_shape_is_turned():
    scene = {"shape": np.array([8, 8]), "style": np.array([0, 0]), "angle": np.array([0, 90])}
    scene |= {"size": np.array([400, 400]), "x": np.array([500] * 2), "y": np.array([500] * 2)}
    one, other = Shapes(size=64, channels=1, noise=0.0, classes=10).draw(
        scene, np.random.default_rng(0)
    )
    dark = [image[:, :, 0] < 128 for image in (one, other)]
    np.testing.assert_array_equal(np.rot90(dark[0], -1), dark[1])  # clockwise


def test_an_outlined_disc_is_not_a_ring():
    disc, ring = still("disc", "neon"), still("ring", "neon")
    paper = still("bars", "neon")[24, 32]  # between two bars: the same glow without ink
    assert disc[32, 32] - ring[32, 32] > 20 > abs(ring[32, 32] - paper)


def test_contrast_fades_the_shape():
    levels = [still("disc", "dusk", contrast=c)[32, 32] for c in (1e-6, 0.1, 0.5, 1.0)]
    rise = np.diff(levels)
    assert rise == pytest.approx(np.array([0.1, 0.4, 0.5]) * rise.sum(), abs=1.5)
    assert rise.sum() > 80


def test_textures_stay_in_range_and_differ():
    x, y = np.meshgrid(np.linspace(-0.7, 0.7, 50), np.linspace(-0.7, 0.7, 50))
    fields = {name: texture(x, y) for name, texture in TEXTURES.items()}
    assert all(np.abs(field).max() <= 1 for field in fields.values())
    assert all(field.std() > 0.1 for name, field in fields.items() if name != "flat")
    assert {style.texture for style in STYLES.values()} == set(TEXTURES)


def test_content_and_style_are_independent():
    data = Shapes(count=8000, test_count=1, size=8, classes=8, styles=4, validation=0.0).load()
    shape, factors = data.train.labels, data.train.factors
    table = np.histogram2d(shape, factors["style"], bins=(8, 4))[0]
    expected = 8000 / 32
    assert ((table - expected) ** 2 / expected).sum() < 50  # chi-squared, 21 degrees: p < 0.001
    for name in ("angle", "size", "x", "y"):
        assert abs(np.corrcoef(shape, factors[name])[0, 1]) < 0.05
        assert abs(np.corrcoef(factors["style"], factors[name])[0, 1]) < 0.05
    assert np.ptp(np.bincount(shape)) == 0


def test_style_shows_and_shape_hides_in_the_mean_colour():
    """An image's mean colour tells its style and next to nothing of its shape."""
    data = Shapes(count=2000, test_count=500, size=16, validation=0.0).load()
    means = [part.pixels.mean((1, 2)) for part in (data.train, data.test)]

    def nearest(column, of):
        centres = np.stack([means[0][column == value].mean(0) for value in range(column.max() + 1)])
        guess = np.argmin(((means[1][:, None] - centres) ** 2).sum(2), 1)
        return (guess == of).mean()

    assert nearest(data.train.factors["style"], data.test.factors["style"]) > 0.95
    assert nearest(data.train.labels, data.test.labels) < 0.3


def test_the_seed_decides_and_parts_differ():
    settings = {"count": 60, "test_count": 60, "size": 12, "validation": 0.0}
    one, same, other = (Shapes(**settings, seed=seed).load() for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    order = [np.argsort(part.labels, kind="stable") for part in (one.train, one.test)]
    assert not np.array_equal(one.train.batch(order[0]), one.test.batch(order[1]))


def test_more_images_do_not_change_how_one_is_drawn():
    """An image depends on its own column values and noise only, not on its neighbours' styles."""
    shapes = Shapes(size=16, noise=0.0)
    scene = shapes.scene("train", 6)
    changed = {name: column.copy() for name, column in scene.items()}
    changed["style"][3] = (changed["style"][3] + 1) % 4
    changed["shape"][4] = (changed["shape"][4] + 1) % 8
    one, other = (shapes.draw(s, np.random.default_rng(0)) for s in (scene, changed))
    same = [np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True)]
    assert same == [True, True, True, False, False, True]


def test_settings_shape_the_data():
    data = Shapes(count=50, test_count=20, size=20, classes=3, styles=2, channels=1).load()
    assert data.train.shape == (20, 20, 1) and (len(data.train), len(data.test)) == (45, 20)
    assert data.classes == ("disc", "square", "triangle")
    assert set(data.train.factors) == {"style", "angle", "size", "x", "y"}
    assert set(data.train.factors["style"]) == {0, 1}


def test_unlabelled_hides_everything_but_the_pixels():
    settings = {"count": 30, "test_count": 10, "size": 8}
    hidden, shown = Shapes(**settings, unlabelled=True).load(), Shapes(**settings).load()
    assert hidden.classes == () and not hidden.train.labelled and not hidden.test.factors
    np.testing.assert_array_equal(hidden.train.pixels, shown.train.pixels)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"classes": 11}, "classes=11: between 1 and 10 .disc"),
        ({"styles": 0}, "styles=0: between 1 and 8"),
        ({"channels": 2}, "channels=2"),
        ({"contrast": 0.0}, "contrast=0.0"),
        ({"tilt": 270.0}, "tilt=270"),
        ({"size": 4}, "size=4: at least 8"),
        ({"count": 0}, "count=0"),
        ({"noise": -1.0}, "noise=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Shapes(**settings).load()


def test_limit_above_count_is_refused():
    with pytest.raises(DataError, match="data.limit=40, but shapes has 30 .* data.limit=27"):
        Shapes(count=30, test_count=5, size=8, limit=40).load()


def test_drawing_is_quick():
    shapes = Shapes()
    scene = shapes.scene("train", 512)
    start = time.perf_counter()
    shapes.draw(scene, np.random.default_rng(0))
    assert time.perf_counter() - start < 1.0  # 10,000 images within 20 s on a slow machine
