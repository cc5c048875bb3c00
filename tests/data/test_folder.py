"""Folders of image files: classes, parts, modes, sizes and files that cannot be read."""

import os

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.cache import Writer
from harmonium.data.decoding import image_files, pool
from harmonium.data.decoding.conversion import read_image
from harmonium.data.decoding.image_files import write_images
from harmonium.data.sets.folder import Folder

CORES = pool._cores


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    """A home of its own, and no decoding processes, which take longer to start than to decode."""
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def which(images):
    """The numbers of numbered images."""
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
    (root / "cat" / "notes.txt").write_text("not an image")
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
    for mixed in ("convert", "refuse"):
        with pytest.raises(DataError) as caught:
            Folder(path=str(root), mixed=mixed).load()
        said = str(caught.value)
        assert "1 of 2 images differ in size" in said and "are 8x6: b.png (12x20)" in said
        assert "data.size=6" in said and "data.mixed=skip" in said and "\n" not in said
    data = Folder(path=str(root), size=4, mixed="refuse", validation=0, test=0).load()
    assert data.train.shape == (4, 4, 3) and data.notes == ()


def test_most_images_say_the_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright: 4x8 is meant
    for number in range(3):
        paint(tmp_path / "set" / "x" / f"{number}.png", (number, 0, 0), (4, 8))
    paint(tmp_path / "set" / "x" / "turned.png", (3, 0, 0), (8, 4), exif=exif)
    for number in range(8):
        paint(tmp_path / "set" / "a" / f"{number}.png", (9, 0, 0), (number + 10, 8))
    data = Folder(path=str(tmp_path / "set"), mixed="skip", validation=0, test=0).load()
    assert sorted(which(data.train)) == [0, 1, 2, 3] and data.train.shape == (8, 4, 3)
    assert data.classes == ("a", "x") and set(data.train.labels.tolist()) == {1}
    (note,) = data.notes
    assert note.startswith("left out: 8 of 12 images differ in size from most, which are 4x8: ")
    assert note.count(".png") == 5 and "a/4.png (14x8) and 3 more" in note


def modes(root):
    for number in range(4):
        paint(root / f"{number}.jpg", (number * 60, 0, 0))
    paint(root / "grey.png", 128, mode="L")
    paint(root / "grey.jpg", 128, mode="L")
    paint(root / "clear.png", (10, 10, 10, 0), mode="RGBA")
    (root / "broken.png").write_bytes(b"")
    return root


def test_uncommon_modes_are_converted_and_counted(tmp_path):
    root = modes(tmp_path / "set")
    for size in (None, 6):
        settings = {"path": str(root), "corrupt": "skip", "size": size, "test": 0}
        data = Folder(**settings, validation=0).load()
        assert len(data.train) == 7
        left_out, converted = data.notes
        assert left_out == "left out: 1 of 8 images cannot be read: broken.png (empty)"
        assert converted == (
            "converted to colour: 1 with transparency, 2 grey among 8 images: "
            "clear.png (with transparency), grey.jpg (grey), grey.png (grey)"
        )
    data = Folder(path=str(root), corrupt="skip", channels=1).load()
    assert data.notes[1].startswith("converted to grey: 4 colour, 1 with transparency among 8")


def test_uncommon_modes_are_refused_or_skipped_if_asked(tmp_path):
    root = modes(tmp_path / "set")
    with pytest.raises(DataError) as caught:
        Folder(path=str(root), mixed="refuse").load()
    said = str(caught.value)
    assert "3 of 8 images differ in mode from most, which are colour: clear.png (with t" in said
    assert "data.mixed=convert" in said and "data.mixed=skip" in said
    assert "1 of 8 images cannot be read: broken.png (empty)" in said  # all in one go
    settings = {"mixed": "skip", "corrupt": "skip", "validation": 0, "test": 0}
    data = Folder(path=str(root), size=3, **settings).load()
    assert sorted(which(data.train)) == pytest.approx([0, 60, 120, 180], abs=2)
    assert [note.partition(":")[0] for note in data.notes] == ["left out", "left out"]


def test_processes_decode_unless_told(photos, monkeypatch):
    monkeypatch.setattr(pool, "_cores", CORES)
    started = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda: started.append(start()) or started[-1])
    test_folder_of_classes(photos)
    assert started and all(process.returncode is not None for process in started)


def test_images_of_one_mode_need_no_note(tmp_path):
    for number in range(3):
        paint(tmp_path / "grey" / f"{number}.png", number, mode="L")
    data = Folder(path=str(tmp_path / "grey"), mixed="refuse", validation=0, test=0).load()
    assert data.train.shape == (6, 6, 3) and data.notes == ()


def test_what_was_skipped_before_is_refused_if_asked(tmp_path):
    root = modes(tmp_path / "set")
    Folder(path=str(root), size=4, corrupt="skip", mixed="skip").load()
    with pytest.raises(DataError, match="broken.png"):
        Folder(path=str(root), size=4, mixed="skip").load()
    with pytest.raises(DataError, match="differ in mode"):
        Folder(path=str(root), size=4, corrupt="skip", mixed="refuse").load()


def test_a_file_that_changes_while_it_is_read(photos, monkeypatch):
    run = pool.Decoders.run

    def change(self, paths, order, chunk):
        if not order.head:
            paint(photos / "cat" / "3.png", "red", (9, 7))
        return run(self, paths, order, chunk)

    monkeypatch.setattr(pool.Decoders, "run", change)
    with pytest.raises(DataError, match=r"1 of 20 .* cat/3.png \(changed to 9x7 while"):
        Folder(path=str(photos)).load()


def test_the_number_of_workers_changes_nothing(damaged, tmp_path):
    made = set()
    for workers in (0, 1, 2):
        folder = tmp_path / f"made{workers}"
        folder.mkdir()
        writer = Writer(folder, 5)
        spec = Folder(path=str(damaged), size=5, corrupt="skip")
        write_images(writer, spec._listing().files, spec, workers)
        writer.finish({})
        writer.close()
        made.add(tuple(path.read_bytes() for path in sorted(folder.iterdir())))
    assert len(made) == 1


def test_large_images_are_written_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "CHUNK_BYTES", 6 * 6 * 3 * 2)
    for number in range(5):
        paint(tmp_path / "set" / f"{number}.png", (number, 0, 0))
    pieces = []
    append = Writer.append

    def count(self, part, pixels, *columns):
        pieces.append(len(pixels))
        append(self, part, pixels, *columns)

    monkeypatch.setattr(Writer, "append", count)
    data = Folder(path=str(tmp_path / "set"), validation=0, test=0).load()
    assert pieces == [2, 2, 1] and sorted(which(data.train)) == [0, 1, 2, 3, 4]


# ---- styles --------------------------------------------------------------------------------------


def test_folders_of_styles(tmp_path):
    root = tmp_path / "set"
    for style, base in (("Real World", 100), ("Art", 0)):
        for number in range(4):
            paint(
                root / style / ("cat" if number % 2 else "dog") / f"{number}.png",
                (base + number,) * 3,
            )
    paint(root / "Sketch" / "7.png", (207,) * 3)
    data = Folder(path=str(root), styles=True, validation=0, test=0).load()
    assert data.names == {"style": ("Art", "Real World", "Sketch")}
    assert data.classes == ("cat", "dog")
    order = which(data.train)
    assert sorted(order) == [0, 1, 2, 3, 100, 101, 102, 103, 207]
    assert data.train.factors["style"].tolist() == [number // 100 for number in order]
    labels = [-1 if number == 207 else 1 - number % 2 for number in order]
    assert data.train.labels.tolist() == labels


def test_styles_with_parts_and_strays(tmp_path):
    root = tmp_path / "set"
    for part, styles in (("train", "ab"), ("test", "b")):
        for style in styles:
            paint(root / part / style / "1.png", "red")
    data = Folder(path=str(root), styles=True, validation=0).load()
    assert sorted(data.train.factors["style"].tolist()) == [0, 1] and data.classes == ()
    assert data.test.factors["style"].tolist() == [1] and not data.test.labelled
    paint(root / "train" / "stray.png", "red")
    with pytest.raises(DataError, match=r"stray.png.*data.styles=true"):
        Folder(path=str(root), styles=True).load()


def test_the_middle_is_cut_out():
    image = Image.new("RGB", (30, 10), "red")
    image.paste((0, 0, 255), (10, 0, 20, 10))
    assert (read_image(image, 10, 3) == [0, 0, 255]).all()
    assert (read_image(image, 5, 3)[:, 1:-1] == [0, 0, 255]).all()
    assert read_image(image, None, 3).shape == (10, 30, 3)


def test_modes_of_image_files(tmp_path):
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
    assert "2 of 21 images cannot be read" in said and "corrupt=skip" in said
    assert "cat/3.png" in said and "dog/text.jpg" in said and "\n" not in said


def test_names_that_are_no_text_are_said_in_one_line(photos):
    with open(os.fsencode(photos) + b"/cat/\xff\n\x1b\xc3\xa4.png", "wb"):
        pass
    with pytest.raises(DataError, match=r"cat/\?\?\?ä.png \(empty\)"):
        Folder(path=str(photos)).load()


def test_corrupt_files_are_skipped_if_asked(damaged):
    for _ in range(2):  # from the files, then from the cache
        data = Folder(path=str(damaged), corrupt="skip", validation=0, test=0).load()
        numbers = which(data.train)
        assert sorted(numbers) == [0, 1, 2, *range(4, 10), *range(100, 110)]
        assert data.train.labels.tolist() == [number // 100 for number in numbers]
        assert len(data.notes) == 2 and "2 of 21" in data.notes[0] and "1 .txt" in data.notes[1]


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
        ({"channels": 5}, ConfigError, "channels=5"),
        ({"corrupt": "ignore"}, ConfigError, "refuse or skip"),
        ({"mixed": "ignore"}, ConfigError, "convert, refuse or skip"),
    ],
)
def test_folder_refusals(photos, settings, error, says):
    with pytest.raises(error, match=says):
        Folder(**{"path": str(photos), **settings}).load()


def test_folder_with_nothing_or_too_much(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
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


@pytest.mark.parametrize(("depth", "level"), [(16, 16), (12, 255), (13, 127)])
def test_sixteen_bits_are_read_as_deep_as_they_are(tmp_path, depth, level):
    """Scanners write 12 bits into files of 16: read as 16 they would be nearly black."""
    for number in range(12):
        scan = np.full((8, 8), 4095, np.uint16)
        Image.fromarray(scan).save(tmp_path / f"{number}.png")
    data = Folder(path=str(tmp_path), channels=1, depth=depth).load()
    assert np.unique(data.train.pixels).tolist() == [level]
    assert "12 of 12 images have 16-bit grey" in data.notes[0]
    assert f"data.depth={depth} bits" in data.notes[0]


def test_a_depth_that_no_file_has_is_refused(photos):
    with pytest.raises(ConfigError, match="data.depth=20: between 8 and 16 bits"):
        Folder(path=str(photos), depth=20).load()


def test_decoded_images_are_for_their_owner_alone(photos, home):
    Folder(path=str(photos), size=8).load()
    (folder,) = (home / "cache").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
