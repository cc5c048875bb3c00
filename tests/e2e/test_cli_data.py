"""The commands about data, called in this process: what they print, write and refuse."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harmonium.data.partition import Split

Call = Callable[..., tuple[str, str]]
OURS = {"split.npz", "split.json", "split.png", "split.pdf", "split.svg"}
SHAPES = ["shapes", "data.count=200", "data.test_count=20", "data.size=12"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the images, which take most of the time."""
    monkeypatch.setattr("harmonium.cli.data._draw", lambda *_: None)


def archive(path: Path, **columns: np.ndarray) -> str:
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=pixels, **columns)
    return f"data.path={path}"


# ---- split ---------------------------------------------------------------------------------------


def test_a_split_is_described_drawn_and_kept(
    call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said, told = call("data", "split", "digits", "split=dirichlet", "clients=5")
    (folder,) = (home / "splits").iterdir()
    assert {path.name for path in folder.iterdir()} == OURS
    kept = Split.load(folder / "split.npz")
    assert folder.name == f"digits-dirichlet-{kept.digest[:8]}" and len(kept) == 5
    for words in ("label EMD", "label JS distance", "style distance", "bits", "images  . 1"):
        assert words in said
    for path in folder.iterdir():
        assert str(path) in said
    assert told == "note: 4 of 1294 training images are held by no client\n"
    assert "\x1b" not in said
    assert max(map(len, said.splitlines()[:-5])) <= 80


@pytest.mark.usefixtures("undrawn", "unprobed")
def test_json_is_one_document_with_figures_clients_and_files(call: Call) -> None:
    said, told = call("data", "split", *SHAPES, "split=by_class", "clients=8", "--json")
    found = json.loads(said)
    assert told == "" and found["figures"]["label_emd_max"] == pytest.approx(1.75, abs=0.05)
    assert [row["client"] for row in found["clients"]] == list(range(8))
    assert found["clients"][0]["classes"] == 1 and found["clients"][0]["styles"] == 4
    assert {"npz", "json", "png", "pdf", "svg"} == set(found["files"])
    written = json.loads(Path(found["files"].pop("json")).read_text())
    assert written == {key: value for key, value in found.items() if key != "files"}
    assert written["recipe"]["split"]["name"] == "by_class"


def test_the_folder_can_be_chosen_and_other_files_stay(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (folder / "split.json").write_text("old")
    words = ["data", "split", "digits", "clients=3", "--out", str(folder)]
    call(*words, "--plot", str(tmp_path / "new" / "s.svg"))
    assert {path.name for path in folder.iterdir()} == {*OURS, "thesis.tex"}
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert json.loads((folder / "split.json").read_text())["figures"]["clients"] == 3
    assert (tmp_path / "new" / "s.svg").stat().st_size > 1000


def test_images_without_labels_are_shared_out_too(call: Call, tmp_path: Path) -> None:
    plot = tmp_path / "s.png"
    said, _ = call(
        "data", "split", *SHAPES, "data.unlabelled=true", "clients=4", "--plot", str(plot)
    )
    assert "style distance" in said and "label EMD" not in said
    assert "######## 45" in said and plot.stat().st_size > 1000


@pytest.mark.usefixtures("undrawn", "unprobed")
def test_styles_without_labels_have_a_map(call: Call, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", style=np.arange(60) % 3)
    said, _ = call("data", "split", "npz", path, "clients=2")
    assert "style JS distance" in said and "each class" not in said
    rows = [line for line in said.splitlines() if line.startswith("client ")]
    assert rows[-1].split() == ["client", "0", "1", "2", "all"]


@pytest.mark.usefixtures("undrawn", "unprobed")
def test_what_is_partly_labelled_says_how_much_is_unknown(call: Call, tmp_path: Path) -> None:
    labels = np.where(np.arange(60) % 2, -1, np.arange(60) % 3)
    path = archive(tmp_path / "a.npz", y=labels)
    said, told = call("data", "split", "npz", path, "clients=2")
    assert "unknow" in said and "note: 30 of 60" in told
    said, told = call("data", "split", "npz", path, "clients=2", "--json")
    found = json.loads(said)
    assert told == ""
    assert 10 < found["figures"]["unlabelled"] < 30 and "30 of 60" in found["notes"][0]


@pytest.mark.usefixtures("undrawn", "unprobed")
def test_of_many_clients_some_are_shown(call: Call) -> None:
    said, _ = call("data", "split", "digits", "clients=200")
    assert "clients 6 to 193 are not shown" in said and "30 of 200 clients" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data", "split", "digts"], "did you mean 'digits'?"),
        (["data", "split", "digits", "clients=5000"], "5000"),
        (["data", "split", "digits", "--plot", "s.jpg"], "as .png, .pdf or .svg, not 's.jpg'"),
        (["data", "split", "digits", "--out", __file__], "cannot create"),
        (["data", "split", *SHAPES, "data.unlabelled=true", "split=dirichlet"], "needs labels"),
        (["data", "show", "digits", "split.alfa=1"], "split.alfa"),
        (["data", "show", "digits", "--plot", "s.jpg"], "as .png, .pdf or .svg, not 's.jpg'"),
        (["data", "show", "npz"], "data.path"),
        (["data", "show"], "NAME"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], says: str, call: Call, home: Path
) -> None:
    said, told = call(*words, code=2)
    assert said == "" and len(told.strip().splitlines()) == 1 and says in told
    assert not (home / "splits").exists()


# ---- show ----------------------------------------------------------------------------------------


def test_a_data_set_is_shown(call: Call, tmp_path: Path) -> None:
    plot = tmp_path / "new" / "sheet.png"
    said, told = call("data", "show", *SHAPES, "--plot", str(plot))
    for words in ("12x12x3", "triangle", "style", "blue", "validation", str(plot)):
        assert words in said
    assert told == "" and plot.stat().st_size > 1000
    found = json.loads(call("data", "show", *SHAPES, "--json")[0])
    assert found["parts"] == {"train": 180, "validation": 20, "test": 20}
    assert sum(row["train"] for row in found["classes"]) == 180 and len(found["channels"]) == 3


def test_images_without_labels_are_shown(call: Call, tmp_path: Path) -> None:
    plot = tmp_path / "sheet.svg"
    said, _ = call("data", "show", *SHAPES, "data.unlabelled=true", "--plot", str(plot))
    assert "unknown" in said and "style" not in said and plot.exists()


def test_a_data_set_is_drawn_in_every_format(call: Call, tmp_path: Path) -> None:
    plot = tmp_path / "sheet.png"
    said, _ = call("data", "show", *SHAPES, "--plot", str(plot), "--formats", "png,pdf,svg")
    assert f"plot     {plot}, .pdf, .svg" in said
    for ending in (".png", ".pdf", ".svg"):
        assert plot.with_suffix(ending).stat().st_size > 1000
    assert "--plot digits.png" in call("data", "show", "digits", "--formats", "pdf", code=2)[1]


# ---- datasets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", ["80", "150"])
def test_data_sets_are_listed(call: Call, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    said, _ = call("datasets")
    known = json.loads(call("datasets", "--json")[0])
    for name, about in known.items():
        assert name in said and about["here"] in said
    assert "1,797" in said and "8x8x1" in said and "10 classes" in said or width == "150"
    assert max(map(len, said.splitlines())) <= int(width)
    assert known["digits"]["shape"] == [8, 8, 1] and known["cifar10"]["what"]


def test_a_runs_folder_is_left_alone(call: Call, tmp_path: Path, undrawn: None) -> None:
    (tmp_path / "recipe.yaml").write_text("method: fedavg")
    _, told = call("data", "split", "digits", "--out", str(tmp_path), code=2)
    assert "holds a run" in told
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["recipe.yaml"]


def test_names_from_outside_are_shown_as_one_line(call: Call, tmp_path: Path) -> None:
    from PIL import Image

    for name in (b"caf\xe9", b"a\x1b[31mb\nc"):
        folder = os.fsencode(tmp_path / "photos") + b"/" + name
        os.makedirs(folder)
        for number in range(8):
            with open(folder + b"/%d.png" % number, "wb") as file:
                Image.new("L", (8, 8), number).save(file, "PNG")
    said, _ = call("data", "split", "folder", f"data.path={tmp_path / 'photos'}", "clients=2")
    assert "\x1b" not in said and "caf?" in said and "a?[31mb?c"[:5] in said


def test_clients_that_the_data_name_keep_their_names(
    call: Call, tmp_path: Path, home: Path
) -> None:
    path = archive(tmp_path / "a.npz", site=np.array(["north", "south", "west"] * 20))
    words = ["npz", path, "split=column", "split.column=site", "clients=3"]
    said = json.loads(call("data", "split", *words, "--json")[0])
    assert [row["name"] for row in said["clients"]] == ["north", "south", "west"]
    assert Split.load(Path(said["files"]["npz"])).names == ("north", "south", "west")
    assert "north" in call("data", "split", *words)[0]
    again = ["npz", path, "split=file", f"split.path={said['files']['npz']}", "clients=3"]
    assert [
        row["name"] for row in json.loads(call("data", "split", *again, "--json")[0])["clients"]
    ]
    shown = json.loads(call("data", "show", "npz", path, "--json")[0])
    assert [row["name"] for row in shown["columns"]["site"]] == ["north", "south", "west"]
    assert "south" in call("data", "show", "npz", path)[0]


def test_two_data_sets_are_refused(call: Call) -> None:
    _, told = call("data", "show", "digits", "data=shapes", code=2)
    assert "the data set is given twice, as digits and by data=shapes" in told


def test_a_stand_in_is_called_so(call: Call, tmp_path: Path, home: Path) -> None:
    np.savez(
        tmp_path / "few.npz",
        **{f"{part}_x": np.zeros((6, 16, 16), np.uint8) for part in ("train", "test")},
        **{f"{part}_y": np.arange(6) for part in ("train", "test")},
    )
    assert json.loads(call("datasets", "--json")[0])["usps"]["here"] == "not here"
    call("data", "fetch", "usps", "--from", str(tmp_path / "few.npz"))
    assert json.loads(call("datasets", "--json")[0])["usps"]["here"] == "stand-in"
