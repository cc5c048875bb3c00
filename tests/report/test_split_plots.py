import re
import time

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import ConfigError
from harmonium.report.split_plots import contact_sheet, split_map, split_sizes

COUNTS = np.array([[5, 0, 3], [0, 40, 1]])
MANY = np.random.default_rng(0).multinomial(20, [0.5, 0.3, 0.2], 10_000)
RED, GREY = np.zeros((3, 8, 8, 3), np.uint8), np.full((2, 8, 8, 1), 90, np.uint8)
RED[..., 0] = 255
IMAGES = {
    "few": lambda path: split_map(path, COUNTS, ["cat", "dog", "frog"], "Title"),
    "many": lambda path: split_map(path, MANY[:150]),
    "sizes": lambda path: split_sizes(path, np.array([3, 8, 1])),
    "many sizes": lambda path: split_sizes(path, np.arange(150) + 1),
    "sheet": lambda path: contact_sheet(path, [("red", RED), ("grey", GREY)], "Title", "2 of 9"),
}


def texts(path):
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_images_are_written_and_the_same_twice(name, kind, tmp_path):
    first, second = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
    IMAGES[name](first)
    IMAGES[name](second)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 2000
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}


def test_a_split_names_its_classes_and_carries_its_numbers(tmp_path):
    IMAGES["few"](tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert {"cat", "dog", "frog", "40", "client", "class", "Title"} <= set(words)
    split_map(tmp_path / "b.svg", COUNTS, ["x" * 40] * 3, what="style")
    assert "x" * 23 + "…" in texts(tmp_path / "b.svg") and "style" in texts(tmp_path / "b.svg")


def test_many_clients_are_put_in_order_and_it_says_so(tmp_path):
    IMAGES["many"](tmp_path / "a.svg")
    assert "clients, ordered by their commonest class" in texts(tmp_path / "a.svg")
    IMAGES["many sizes"](tmp_path / "b.svg")
    assert "clients, ordered by size" in texts(tmp_path / "b.svg")
    counts = np.zeros((150, 3), int)
    counts[np.arange(150), np.arange(150) % 3] = np.arange(150) + 1
    split_map(tmp_path / "c.png", counts)
    split_map(tmp_path / "d.png", counts[::-1])
    assert (tmp_path / "c.png").read_bytes() == (tmp_path / "d.png").read_bytes()


def test_ten_thousand_clients_are_drawn_quickly(tmp_path):
    start = time.perf_counter()
    split_map(tmp_path / "a.png", MANY)
    assert time.perf_counter() - start < 10
    assert (tmp_path / "a.png").stat().st_size < 300_000


def test_a_sheet_shows_the_images_with_their_names(tmp_path):
    IMAGES["sheet"](tmp_path / "a.svg")
    assert {"red", "grey", "Title", "2 of 9"} <= set(texts(tmp_path / "a.svg"))
    IMAGES["sheet"](tmp_path / "a.png")
    pixels = np.asarray(Image.open(tmp_path / "a.png"))[..., :3].reshape(-1, 3)
    red, grey = ((pixels == colour).all(1).mean() for colour in ((255, 0, 0), (90, 90, 90)))
    assert red > 0.1 and red == pytest.approx(1.5 * grey, rel=0.1)  # three of them, and two


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="clients, classes"):
        split_map(tmp_path / "a.png", np.zeros(3))
    with pytest.raises(ConfigError, match=r"\.png, \.pdf or \.svg"):
        split_sizes(tmp_path / "a.jpg", np.ones(3))
    assert list(tmp_path.iterdir()) == []
