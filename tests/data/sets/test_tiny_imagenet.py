"""Tiny ImageNet: its tree, its list of validation images, and its grey images."""

import io
import re

import pytest
from PIL import Image

from harmonium.data.datasets import datasets
from harmonium.data.decoding import pool


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def jpeg(value, mode="RGB"):
    file = io.BytesIO()
    colour = (value,) * 3 if mode == "RGB" else value
    Image.new(mode, (64, 64), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def tree():
    """Two classes with three training images each, one of them grey, and three for testing."""
    wnids = ("n02124075", "n01443537")
    files = {
        "wnids.txt": "\n".join(wnids).encode() + b"\n",
        "words.txt": b"n00001740\tentity\nn01443537\tgoldfish, Carassius auratus\n"
        b"n02124075\tEgyptian cat\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn02124075\t0\t32\t44\t62\n"
        b"val_1.JPEG\tn01443537\t52\t55\t57\t59\nval_2.JPEG\tn02124075\t4\t0\t60\t55\n",
        "test/images/test_0.JPEG": jpeg(255),
    }
    for start, wnid in ((100, wnids[0]), (0, wnids[1])):
        boxes = "".join(f"{wnid}_{i}.JPEG\t0\t10\t63\t58\n" for i in range(3))
        files[f"train/{wnid}/{wnid}_boxes.txt"] = boxes.encode()
        for i in range(3):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(start + 10 * i)
    files["train/n01443537/images/n01443537_1.JPEG"] = jpeg(10, "L")
    for i in range(3):
        files[f"val/images/val_{i}.JPEG"] = jpeg(200 + 10 * i)
    return files


def test_the_tree_is_read(fetched):
    fetched("tiny-imagenet", tree())
    data = datasets["tiny-imagenet"](validation=0).load()
    assert data.classes == ("goldfish", "Egyptian cat") and data.train.shape == (64, 64, 3)
    values = data.train.pixels[:, 0, 0, 0].tolist()
    assert sorted(values) == [0, 10, 20, 100, 110, 120]
    assert data.train.labels.tolist() == [int(value >= 100) for value in values]
    assert data.test.pixels[:, 0, 0, 0].tolist() == [200, 210, 220]
    assert data.test.labels.tolist() == [1, 0, 1]
    (note,) = data.notes
    assert note.startswith("converted to colour: 1 grey among 9 images: train/n01443537/images/")


def test_classes_of_the_same_name_keep_their_numbers(fetched):
    words = {"words.txt": b"n01443537\tcrane, a bird\nn02124075\tcrane\n"}
    fetched("tiny-imagenet", {**tree(), **words})
    assert datasets["tiny-imagenet"]().load().classes == ("n01443537", "n02124075")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"wnids.txt": b"n01443537\nn02124075\nn09999999\n"}, "wnids.txt names n09999999"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn05\t1\n"}, "line 1: 'n05'"),
        (
            {"val/val_annotations.txt": b"val_7.JPEG\tn01443537\t1\n"},
            r"1 of 7 images cannot be read: val/images/val_7.JPEG \(no such file",
        ),
        ({"val/val_annotations.txt": b"../../../x.JPEG\tn01443537\t1\n"}, "lies outside"),
        ({"val/val_annotations.txt": b"/etc/x.JPEG\tn01443537\t1\n"}, "lies outside"),
        ({"wnids.txt": b"../../../n01443537\n"}, "lies outside"),
        ({"val/images/val_1.JPEG": b""}, r"val_1.JPEG \(empty\).*data.corrupt=skip"),
    ],
)
def test_damaged_trees_are_refused(fetched, refused, files, says):
    fetched("tiny-imagenet", {**tree(), **files})
    assert re.search(says, refused("tiny-imagenet"))
