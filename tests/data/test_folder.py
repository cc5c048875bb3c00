"""Folders of picture files: classes, parts, modes, sizes and files that cannot be read."""

import os

import pytest
from PIL import Image

from harmonium.data.folder import Folder, read_picture
from harmonium.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))


def which(images):
    """The numbers of numbered pictures."""
    return images.pixels[:, 0, 0, 0].tolist()


def paint(path, colour, size=(6, 6), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for number in range(10):
        paint(root / "cat" / f"{number}.png", (number, 0, 0))
        paint(root / "dog" / "deep" / f"{number}.png", (100 + number, 0, 0))
    (root / "cat" / "notes.txt").write_text("not a picture")
    paint(root / "cat" / ".hidden.png", (50, 0, 0))
    return root


def test_folder_of_classes(photos):
    data = Folder(path=str(photos)).load()
    assert data.classes == ("cat", "dog") and data.train.shape == (6, 6, 3)
    parts = (data.train, data.validation, data.test)
    numbers = sum((which(part) for part in parts), [])
    assert sorted(numbers) == [*range(10), *range(100, 110)]
    assert all(part.labels.tolist() == [i // 100 for i in which(part)] for part in parts)


def test_flat_folder_has_no_labels(tmp_path):
    for number in range(5):
        paint(tmp_path / "flat" / f"{number}.png", (number, 0, 0))
    data = Folder(path=str(tmp_path / "flat"), validation=0, test=0).load()
    assert sorted(which(data.train)) == list(range(5))
    assert data.classes == () and not data.train.labelled


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("train", "test"), (4, 1, 3)),
        (("train", "val"), (4, 1, 3)),
        (("train", "val", "test"), (5, 3, 3)),
    ],
)
def test_folder_with_parts(tmp_path, names, sizes):
    for name in names:
        for number in range(5 if name == "train" else 3):
            paint(tmp_path / "set" / name / "cat" / f"{number}.png", (number, 0, 0))
    data = Folder(path=str(tmp_path / "set"), validation=0.2).load()
    assert tuple(len(part) for part in (data.train, data.validation, data.test)) == sizes
    assert data.classes == ("cat",)


def test_folder_of_different_sizes_needs_a_size(tmp_path):
    root = tmp_path / "mixed"
    paint(root / "a.png", "red", (8, 6))
    paint(root / "b.png", "red", (12, 20))
    with pytest.raises(DataError, match=r"a.png 8x6 and b.png 12x20\): set data.size=6"):
        Folder(path=str(root)).load()
    for name, size in (("x", 4), ("y", 5)):
        paint(tmp_path / "classes" / name / "1.png", "red", (size, size))
    with pytest.raises(DataError, match=r"x/1.png 4x4 and y/1.png 5x5"):
        Folder(path=str(tmp_path / "classes")).load()
    data = Folder(path=str(root), size=4, validation=0, test=0).load()
    assert data.train.shape == (4, 4, 3)


def test_the_middle_is_cut_out():
    image = Image.new("RGB", (30, 10), "red")
    image.paste((0, 0, 255), (10, 0, 20, 10))
    assert (read_picture(image, 10, 3) == [0, 0, 255]).all()
    assert (read_picture(image, 5, 3)[:, 1:-1] == [0, 0, 255]).all()
    assert read_picture(image, None, 3).shape == (10, 30, 3)


def test_modes_of_picture_files(tmp_path):
    root = tmp_path / "modes"
    paint(root / "grey.png", 128, mode="L")
    paint(root / "bit.png", 1, mode="1")
    paint(root / "wide.png", 0x8080, mode="I;16")
    paint(root / "print.jpg", (0, 0, 0, 127), mode="CMYK")
    paint(root / "clear.png", (10, 10, 10, 0), mode="RGBA")
    paint(root / "half.png", (128, 0), mode="LA")
    palette = Image.new("P", (6, 6), 1)
    palette.putpalette([0, 0, 0, 128, 128, 128])
    palette.save(root / "palette.png")
    palette.save(root / "ghost.gif", transparency=1)
    for channels in (1, 3):
        data = Folder(path=str(root), channels=channels, validation=0, test=0).load()
        assert data.train.shape == (6, 6, channels)
        means = sorted(data.train.pixels.mean((1, 2, 3)).tolist())
        assert means == pytest.approx([128] * 4 + [255] * 4, abs=1.5)


def test_the_cameras_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (8, 4), "red")
    image.paste((0, 0, 255), (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    (tmp_path / "turned").mkdir()
    image.save(tmp_path / "turned" / "a.png", exif=exif)
    pixels = Folder(path=str(tmp_path / "turned"), validation=0, test=0).load().train.pixels[0]
    assert pixels.shape == (8, 4, 3) and pixels[0, 0].tolist() == [0, 0, 255]


@pytest.fixture
def damaged(photos):
    whole = (photos / "cat" / "3.png").read_bytes()
    (photos / "cat" / "3.png").write_bytes(whole[:40])
    (photos / "dog" / "text.jpg").write_text("hello")
    return photos


def test_corrupt_files_are_named_and_counted(damaged):
    with pytest.raises(DataError) as caught:
        Folder(path=str(damaged)).load()
    said = str(caught.value)
    assert "2 of 21 pictures cannot be read" in said and "corrupt=skip" in said
    assert "cat/3.png" in said and "dog/text.jpg" in said and "\n" not in said


def test_corrupt_files_are_skipped_if_asked(damaged):
    for _ in range(2):  # from the files, then from the cache
        data = Folder(path=str(damaged), corrupt="skip", validation=0, test=0).load()
        numbers = which(data.train)
        assert sorted(numbers) == [0, 1, 2, *range(4, 10), *range(100, 110)]
        assert data.train.labels.tolist() == [number // 100 for number in numbers]
        assert len(data.notes) == 1 and "2 of 21" in data.notes[0]


def test_a_folder_changed_is_decoded_again(photos):
    one = Folder(path=str(photos)).load()
    paint(photos / "dog" / "new.png", (200, 0, 0))
    other = Folder(path=str(photos)).load()
    assert one.digest != other.digest
    paint(photos / "dog" / "new.png", (201, 0, 0))
    os.utime(photos / "dog" / "new.png", ns=(1, 1))
    assert Folder(path=str(photos)).load().digest not in (one.digest, other.digest)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"path": ""}, ConfigError, "needs data.path"),
        ({"path": "nowhere"}, DataError, "no such folder"),
        ({"size": 0}, ConfigError, "size=0"),
        ({"channels": 4}, ConfigError, "channels=4"),
        ({"corrupt": "ignore"}, ConfigError, "refuse or skip"),
    ],
)
def test_folder_refusals(photos, settings, error, says):
    with pytest.raises(error, match=says):
        Folder(**{"path": str(photos), **settings}).load()


def test_folder_with_nothing_or_too_much(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no pictures"):
        Folder(path=str(tmp_path / "empty")).load()
    paint(photos / "stray.png", "red")
    with pytest.raises(DataError, match="stray.png.*subfolders"):
        Folder(path=str(photos)).load()


def test_a_validation_part_of_its_own_is_in_random_order(tmp_path):
    for part in ("train", "val", "test"):
        for name in ("cat", "dog"):
            for number in range(20):
                paint(tmp_path / "set" / part / name / f"{number}.png", (number, 0, 0))
    data = Folder(path=str(tmp_path / "set")).load()
    assert sorted(data.validation.labels) == [0] * 20 + [1] * 20
    assert 4 <= data.validation.labels[:20].sum() <= 16  # monitoring looks at the first of them
