"""Search by cosine: exact neighbours, queries of every kind, sheets and pages."""

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.use.embedding import embed
from harmonium.use.search import nearest, search

from .conftest import save_image

Call = Callable[..., tuple[str, str]]


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_the_nearest_rows_are_exact_in_blocks_of_any_size(size: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 6)).astype(np.float32)
    rows[[40, 170, 250]] = rows[3]  # equal ones are found in the order of their rows
    rows[9] = 0
    queries = np.concatenate([rows[:4], rng.normal(size=(3, 6)).astype(np.float32)])
    own = [0, 1, 2, 3, None, None, None]
    blocks = (rows[start : start + size] for start in range(0, 300, size))
    found, cosines = nearest(blocks, queries, 5, own)
    units = rows / np.maximum(np.linalg.norm(rows, axis=1), 1e-12)[:, None]
    scores = queries / np.linalg.norm(queries, axis=1)[:, None] @ units.T
    for query, row in enumerate(own):
        if row is not None:
            scores[query, row] = -np.inf
    for query, one in enumerate(np.round(scores, 5)):
        order = np.lexsort((np.arange(300), -one))[:5]
        assert found[query] == order.tolist()
        np.testing.assert_allclose(cosines[query], scores[query][order], atol=1e-5)
    assert found[3][:3] == [40, 170, 250]
    all_of_them, _ = nearest(iter([rows]), queries[:1], 1000, [0])
    assert len(all_of_them[0]) == 299


def test_queries_by_name_and_by_file_agree(trained: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    embed(trained, photos, out=out)
    by_name = search(out, "north/01.png", "south/04.png", k=4)
    assert by_name.queries == ["north/01.png", "south/04.png"]
    assert "north/01.png" not in by_name.names[0]
    by_file = search(out, photos / "north" / "01.png", encoder=trained, k=5)
    assert by_file.names[0] == ["north/01.png", *by_name.names[0]]
    assert by_file.cosines[0][0] == pytest.approx(1)
    of_images = search(photos, "north/01.png", encoder=trained, k=4)
    assert of_images.names[0] == by_name.names[0]
    white = search(photos, "north/01.png", encoder=trained, k=4, whiten=3)
    assert white.about["whitening"] == 3
    features = embed(trained, photos, whiten=3)
    assert search(features, "north/01.png", k=4).names == white.names
    asked = search(features, photos / "north" / "01.png", encoder=trained, k=5)
    assert asked.names[0][1:] == white.names[0]


def test_what_cannot_be_searched_is_refused(
    trained: Path, other: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.npz"
    embed(trained, photos, out=out)
    for queries, how, kind, named in (
        (["gone.png"], {}, DataError, "gone.png"),
        (["01.png"], {}, DataError, "north/01.png"),
        ([photos / "north" / "01.png"], {}, ConfigError, "--encoder"),
        ([photos / "north" / "01.png"], {"encoder": other}, StoreError, "two encoders"),
        (["north/01.png"], {"k": 0}, ConfigError, "k is 0"),
        ([], {}, ConfigError, "query"),
    ):
        with pytest.raises(kind, match=named):
            search(out, *queries, **how)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--encoder"):
        search(photos, "north/01.png")
    with pytest.raises(ConfigError, match="--images"):
        search(out, "north/01.png").plot(tmp_path / "sheet.png")


class Page(HTMLParser):
    """The images, texts and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))


def test_a_page_is_one_file_that_everybody_can_read(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for number in range(6):
        save_image(folder / f"a<b>&'{number}.png", number, (40, 20))
    name = "a<b>&'0.png"
    query = tmp_path / name  # of the same name as another image
    save_image(query, 77)
    found = search(folder, name, query, encoder=trained, k=3)
    found.write_page(tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    page = Page(text)
    assert not re.search(r"(src|href)=\"(?!data:image/jpeg;base64,)", text)
    assert "script" not in page.tags and "<b>&" not in text and str(tmp_path) not in text
    assert (
        "viewport" in text and "prefers-color-scheme: dark" in text and '<html lang="en">' in text
    )
    assert len(page.images) == 8 and all(image["alt"] for image in page.images)
    assert len({image["alt"] for image in page.images}) == 7  # queries are called alike
    thumbnails = [
        Image.open(io.BytesIO(base64.b64decode(str(image["src"]).partition(",")[2])))
        for image in page.images
    ]
    assert {one.size for one in thumbnails} == {(128, 128)}
    assert thumbnails[0].tobytes() != thumbnails[4].tobytes()  # each query has its own image


def test_images_that_are_gone_have_an_empty_place(
    trained: Path, photos: Path, tmp_path: Path
) -> None:
    features = embed(trained, photos)
    found = search(features, "north/01.png", k=3, images=photos / "south")
    found.write_page(tmp_path / "found.html")
    assert "not shown" in (tmp_path / "found.html").read_text()
    found.plot(tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").width > 500


def test_archives_have_thumbnails(trained: Path, tmp_path: Path, home: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 20, 14), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", x=pixels)
    found = search(tmp_path / "set.npz", "3", encoder=trained, k=2)
    found.write_page(tmp_path / "found.html")
    assert len(Page((tmp_path / "found.html").read_text()).images) == 3


def test_the_command(trained: Path, photos: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "f.npz"
    call("embed", trained, photos, "--out", out)
    sheet, page = tmp_path / "s.svg", tmp_path / "new" / "p.html"
    words = ("search", out, "north/01.png", "-k", 3, "--images", photos)
    said, _ = call(*words, "--sheet", sheet, "--html", page)
    assert "north/01.png" in said and sheet.is_file() and page.is_file()
    said, told = call(*words, "--json")
    answer = json.loads(said)
    assert told == "" and len(answer["queries"][0]["found"]) == 3 and answer["searched"] == 22
    for more, named in (
        (("--sheet", tmp_path / "s.jpg"), "s.jpg"),
        (("--html", tmp_path / "s.png"), "s.png"),
        (("--images", tmp_path / "gone"), "gone"),
    ):
        said, told = call(*words, *more, code=2)
        assert said == "" and named in told and len(told.strip().splitlines()) == 1
