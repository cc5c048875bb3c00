"""Sets of several styles: folders of styles, folders of classes inside, two spellings of one."""

import io

import pytest
from PIL import Image

from harmonium.data.datasets import datasets
from harmonium.data.decoding import pool


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def photo(value, size):
    file = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(file, "JPEG", quality=95)
    return file.getvalue()


def tree(styles, classes, count=5, base=""):
    """Images of many sizes; their level is 50 for each style, 25 for a class, 4 for an image."""
    return {
        f"{base}{style}/{name}/{number:05d}.jpg": photo(
            50 * row + 25 * label + 4 * number, (30 + 7 * number, 40)
        )
        for row, style in enumerate(styles)
        for label, name in enumerate(classes)
        for number in range(count)
    }


OFFICE = ("Art", "Clipart", "Product", "Real World")


def check(data, styles, classes):
    assert data.names == {"style": styles} and data.classes == classes
    for part in (data.train, data.test):
        levels = part.pixels[:, 0, 0, 0]
        assert part.factors["style"].tolist() == (levels // 50).tolist()
        assert part.labels.tolist() == (levels % 50 // 25).tolist()


@pytest.mark.parametrize("spelling", ["Real World", "RealWorld", "Real_World"])
def test_office_home(fetched, spelling):
    files = tree((*OFFICE[:3], spelling), ("Alarm_Clock", "TV"))
    fetched("office-home", {**files, "ImageInfo.csv": b"1,2\n"})
    data = datasets["office-home"](size=16, validation=0).load()
    check(data, OFFICE, ("Alarm_Clock", "TV"))
    assert (len(data.train), len(data.test)) == (28, 12)  # 70 and 30 per cent
    assert data.notes == ()


def test_adaptiope(fetched):
    styles = ("product_images", "real_life", "synthetic")
    fetched("adaptiope", tree(styles, ("acoustic guitar", "axe"), count=2))
    data = datasets["adaptiope"](validation=0).load()
    assert data.train.shape == (224, 224, 3)
    check(data, styles, ("acoustic guitar", "axe"))


def test_trees_that_lack_something(fetched, refused):
    fetched("adaptiope", tree(("product_images", "synthetic"), ("axe",)))
    assert "lacks the folder 'real_life'" in refused("adaptiope")
    files = tree(OFFICE, ("Bed",), 1)
    fetched("office-home", {**files, "Product/stray.jpg": photo(0, (9, 9))})
    assert "stray.jpg" in refused("office-home", size=16)
