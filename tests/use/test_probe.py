"""Classifiers from labels: how labels find images; how probes are validated, kept and used."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.runs.export import load_encoder
from harmonium.use import probe as probes
from harmonium.use.embedding import embed
from harmonium.use.labels import Columns, Label, match, read_labels
from harmonium.use.probe import apply_probe, fit_probe, read_probe
from harmonium.use.sources import open_images
from harmonium.use.unfinished import Unfinished, folder_of

from .conftest import save_image

Call = Callable[..., tuple[str, str]]
KINDS = ("across", "down", "plain")


@pytest.fixture(scope="module")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 images in three folders, striped across, down or not at all, and a table of labels."""
    folder = tmp_path_factory.mktemp("stripes")
    lines, rng = ["path,label,group"], np.random.default_rng(0)
    waves = 90 * np.sign(np.sin(np.arange(12) * np.pi / 2 + 0.1))
    for number in range(36):
        name = KINDS[number % 3]
        pixels = rng.normal(128, 10, (12, 12, 3))
        pixels += {"across": waves[:, None, None], "down": waves[None, :, None]}.get(name, 0)
        path = folder / name / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        lines.append(f"{name}/{number:02d}.png,{name},patient-{number // 6}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


# ---- labels and images ---------------------------------------------------------------------------


def test_labels_find_their_images_by_name_path_file_or_stem(photos: Path) -> None:
    source = open_images(photos)
    forms = ["north/01.png", str(photos / "north" / "03.png"), "05.png", "07", "./north/09.png"]
    labelled = match([Label(form, form) for form in forms], source, photos, print)
    assert [source.names[row] for row in labelled.rows] == [
        f"north/{number}.png" for number in ("01", "03", "05", "07", "09")
    ]
    assert labelled.groups is None
    inside = match([Label("01.png", "x")], source, photos / "north", print)
    assert source.names[inside.rows[0]] == "north/01.png"


def test_labels_of_nothing_or_of_several_images_are_listed(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/1.png", "b/2.png"):
        save_image(tmp_path / name, 0)
    source, notes = open_images(tmp_path), list[str]()
    match([Label("2.png", "x"), Label("gone.png", "y")], source, tmp_path, notes.append)
    assert "gone.png" in notes[0] and "1 label of 2" in notes[0]
    for labels, named in (
        ([Label("1.png", "x"), Label("2.png", "y")], r"1\.png \(a/1\.png, b/1\.png\)"),
        ([Label("a/1.png", "x"), Label("a/1.png", "y")], r"a/1\.png \(x, y\)$"),
        ([Label("other.png", "x")], r"other\.png"),
    ):
        with pytest.raises(DataError, match=named):
            match(labels, source, tmp_path, print)
    twice = match([Label("2.png", "x"), Label("b/2.png", "x")], source, tmp_path, print)
    assert twice.rows == [2]


def test_tables_of_labels_name_their_columns(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("file;finding;patient\na;yes;1\nb;;2\nc;no;\n")
    rows = read_labels(table, Columns("file", "finding", "patient"))
    assert rows == [Label("a", "yes", "1"), Label("c", "no", "")]
    for columns, named in (
        (Columns(), "--path-column"),
        (Columns("file"), "--label-column"),
        (Columns("file", "finding", "site"), "--group-column"),
    ):
        with pytest.raises(DataError, match=named):
            read_labels(table, columns)
    with pytest.raises(DataError, match=r"none\.csv"):
        read_labels(tmp_path / "none.csv", Columns())


# ---- validation ----------------------------------------------------------------------------------


def test_folds_are_stratified_and_keep_groups_together() -> None:
    columns = np.arange(120) % 3
    parts = probes._folds(columns, None, 5, 0, print, "abc")
    counts = np.array([np.bincount(columns[parts == part]) for part in range(5)])
    assert counts.tolist() == [[8, 8, 8]] * 5
    groups = [f"p{row // 5}" for row in range(120)]
    parts = probes._folds(columns, groups, 5, 0, print, "abc")
    assert set(parts) == set(range(5))
    for group in set(groups):
        assert len({parts[row] for row in range(120) if groups[row] == group}) == 1
    alone = ["p" if row < 60 else "" for row in range(120)]
    parts = probes._folds(columns, alone, 5, 0, print, "abc")
    assert len(set(parts[:60])) == 1 and len(set(parts[60:])) > 1
    again = probes._folds(columns, groups, 5, 1, print, "abc")
    assert not np.array_equal(again, probes._folds(columns, groups, 5, 0, print, "abc"))


def test_labels_that_cannot_be_validated_are_refused_or_noted() -> None:
    for columns, groups, named in (
        (np.zeros(9, int), None, "two classes"),
        (np.arange(3), None, "labels of a class"),
        (np.arange(8) % 2, ["p"] * 8, "groups"),
    ):
        with pytest.raises(DataError, match=named):
            probes._folds(columns, groups, 5, 0, print, "abcdefgh")
    notes = list[str]()
    probes._folds(np.array([0, 0, 0, 1, 1, 2]), None, 5, 0, notes.append, ["a", "b", "rare"])
    assert "rare (1)" in notes[0] and "b (2)" in notes[0] and len(notes) == 1
    probes._folds(np.array([0, 0, 0, 1, 1, 1, 2]), None, 5, 0, notes.append, ["a", "b", "rare"])
    assert "rare" in notes[1] and "a," not in notes[1]


def test_figures_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 3, 200)
    chances = probes._softmax(rng.normal(size=(200, 3)) + 2 * np.eye(3)[columns])
    figures = probes._figures(chances, columns)
    predicted = chances.argmax(1)
    assert figures["accuracy"] == pytest.approx((predicted == columns).mean())
    assert figures["balanced"] == pytest.approx(balanced_accuracy_score(columns, predicted))
    area = roc_auc_score(columns, chances, multi_class="ovr", average="macro")
    assert figures["auroc"] == pytest.approx(area)
    assert figures["loss"] == pytest.approx(log_loss(columns, chances))
    two = probes._figures(chances[:, :2], columns.clip(0, 1))
    assert two["auroc"] == pytest.approx(
        np.mean([roc_auc_score(columns.clip(0, 1) == c, chances[:, c]) for c in (0, 1)])
    )


def test_labels_without_meaning_are_validated_at_chance() -> None:
    """A probe that had seen what it predicts would be right nearly always in 40 directions."""
    rng = np.random.default_rng(0)
    columns, accuracies = np.arange(60) % 2, []
    for seed in range(4):
        features = rng.normal(size=(60, 40)).astype(np.float32)
        parts = probes._folds(columns, None, 5, seed, print, "ab")
        validation = probes._Validation.of(features, columns, parts, [0.1, 0.001])
        accuracies.append(validation.figures(columns, parts)[0]["accuracy"])
    assert abs(np.mean(accuracies) - 0.5) < 0.12


def test_the_temperature_is_the_best_one() -> None:
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 4, 400)
    scores = 3 * (rng.normal(size=(400, 4)) + np.eye(4)[columns])
    found = probes._temperature(scores, columns)
    grid = np.exp(np.linspace(*np.log(probes.TEMPERATURES), 400))
    best = grid[np.argmin([probes._losses(scores, columns, one).mean() for one in grid])]
    assert found == pytest.approx(best, rel=0.02) and found > 2


# ---- probes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(trained: Path, stripes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved probe of the three kinds."""
    out = tmp_path_factory.mktemp("probe")
    fit_probe(trained, stripes, labels=stripes / "labels.csv", out=out)
    return out


def test_a_probe_knows_its_encoder_its_labels_and_what_it_is_worth(
    trained: Path, fitted: Path, stripes: Path
) -> None:
    probe, encoder = read_probe(fitted), load_encoder(trained)
    assert probe.classes == KINDS
    about = probe.about
    assert about["encoder"] == encoder.digest and about["size"] == [12, 12]
    assert about["labels"] == [12, 12, 12] and about["validation"]["groups"] == 6
    assert np.sum(about["validation"]["confusion"]) == 36
    assert probe.figures["accuracy"] > 0.6 > about["references"]["commonest class"]["accuracy"]
    assert json.loads((fitted / "probe.json").read_text()) == about
    everything = b"".join(path.read_bytes() for path in fitted.iterdir())
    assert str(stripes).encode() not in everything and b"patient-" not in everything


def test_predictions_are_the_heads_of_the_encoders_features(
    trained: Path, fitted: Path, stripes: Path
) -> None:
    probe = read_probe(fitted)
    predictions = apply_probe(probe, stripes, encoder=trained)
    with torch.no_grad():
        wanted = probe.head(load_encoder(trained).embed(stripes)).numpy()
    np.testing.assert_allclose(predictions.probabilities, wanted, atol=1e-5)
    np.testing.assert_allclose(wanted.sum(1), 1, atol=1e-5)
    truth = [name.partition("/")[0] for name in predictions.names]
    assert np.mean(np.array(predictions.predicted) == truth) > 0.7


def test_labels_may_come_from_folders_archives_and_mappings(
    trained: Path, stripes: Path, tmp_path: Path, home: Path
) -> None:
    of_folders = fit_probe(trained, stripes)
    assert of_folders.about["labels"] == [12, 12, 12]
    named = fit_probe(
        trained, stripes, labels={"across/00.png": "a", "down/01.png": "b", "across/03.png": "a"}
    )
    assert named.about["labels"] == [2, 1]
    pixels = np.repeat([30, 220], 8).astype(np.uint8)[:, None, None, None] + np.zeros(
        (16, 12, 12, 3), np.uint8
    )
    np.savez(tmp_path / "set.npz", x=pixels, y=np.repeat([0, 1], 8), classes=["low", "high"])
    assert fit_probe(trained, tmp_path / "set.npz").classes == ("high", "low")
    np.savez(tmp_path / "bare.npz", x=pixels)
    with pytest.raises(DataError, match="--labels"):
        fit_probe(trained, tmp_path / "bare.npz")


def test_a_probe_refuses_another_encoder_and_finds_its_own(
    trained: Path, other: Path, fitted: Path, stripes: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=str(fitted)):
        apply_probe(fitted, stripes, encoder=other)
    with pytest.raises(StoreError, match="--encoder"):
        apply_probe(fitted, stripes)
    white = fit_probe(trained, stripes, whiten=3)
    with pytest.raises(StoreError, match="encoder"):
        white.encoder(load_encoder(trained))
    assert white.encoder(trained).features == 3
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "encoder.safetensors").write_bytes((trained / "encoder.safetensors").read_bytes())
    (bundle / "probes").mkdir()
    read_probe(fitted).save(bundle / "probes" / "stripes")
    assert len(apply_probe(bundle / "probes" / "stripes", stripes / "down").names) == 12
    (bundle / "encoder.safetensors").write_bytes((other / "encoder.safetensors").read_bytes())
    with pytest.raises(StoreError, match="--encoder"):
        apply_probe(bundle / "probes" / "stripes", stripes)


@pytest.mark.parametrize("damage", ["flipped", "short", "foreign", "weights", "format"])
def test_a_damaged_probe_is_one_error(fitted: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "probe.safetensors"
    data = bytearray((fitted / "probe.safetensors").read_bytes())
    data[-5] ^= damage == "flipped"
    path.write_bytes(data[:-40] if damage == "short" else data)
    if damage in ("foreign", "weights", "format"):
        tensors = safetensors.torch.load_file(path)
        if damage == "weights":
            tensors["weights"] = tensors["weights"][:2].clone()
        about = dict(read_probe(fitted).about) | ({"format": 99} if damage == "format" else {})
        metadata = {} if damage == "foreign" else {"harmonium": json.dumps(about)}
        safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(StoreError, match=r"probe\.safetensors") as refused:
        read_probe(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_probe_is_not_replaced(
    trained: Path, stripes: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.safetensors"
    mine.write_text("my own")
    with pytest.raises(StoreError, match="mine"):
        fit_probe(trained, stripes, out=mine)
    assert mine.read_text() == "my own"
    with pytest.raises(ConfigError, match="folds"):
        fit_probe(trained, stripes, folds=1)


def test_predictions_are_continued_after_a_kill(
    trained: Path, fitted: Path, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, out = tmp_path / "calm.csv", tmp_path / "predictions.csv"
    how: dict[str, Any] = {"encoder": trained, "batch": 2}
    apply_probe(fitted, stripes, out=calm, **how)
    add = Unfinished.add

    class Killed(BaseException):
        pass

    def once(self: Unfinished, *part: Any) -> None:
        add(self, *part)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Unfinished, "add", once)
        apply_probe(fitted, stripes, out=out, **how)
    assert folder_of(out).exists()
    notes = list[str]()
    apply_probe(fitted, stripes, out=out, note=notes.append, **how)
    assert "continuing" in notes[0] and out.read_bytes() == calm.read_bytes()
    features = tmp_path / "features.csv"
    embed(trained, stripes, out=features)
    with pytest.raises(StoreError, match=r"features\.csv"):
        apply_probe(fitted, stripes, out=features, **how)


def test_the_commands(trained: Path, stripes: Path, tmp_path: Path, call: Call) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "encoder.safetensors").write_bytes((trained / "encoder.safetensors").read_bytes())
    table = stripes / "labels.csv"
    said, _ = call("classify", "fit", bundle, stripes, "--labels", table)
    probe = bundle / "probes" / "labels"
    assert (probe / "probe.safetensors").is_file() and str(probe) in said
    for word in ("raw pixels", "commonest class", "balanced", "AUROC", "6 groups", "across"):
        assert word in said
    few = tmp_path / "few.csv"
    few.write_text("file,label\nacross/00.png,across\nacross/03.png,across\ndown/01.png,down\n")
    said, told = call("classify", "fit", bundle, stripes, "--labels", few, "--out", tmp_path / "p")
    assert "down (1)" in told and "Too few" in said and "100.0" not in said.split("verdict")[1]
    _, told = call("classify", "fit", bundle, stripes, "--out", tmp_path / "folders")
    assert "folders across, down, plain (3 in all)" in told
    said, told = call("classify", "fit", bundle, stripes, "--labels", table, "--json")
    assert told == "" and json.loads(said)["classes"] == list(KINDS)
    out = tmp_path / "predictions.csv"
    said, _ = call("classify", "apply", probe, stripes, "--out", out)
    assert "36" in said and str(out) in said
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["name", "predicted", "p_across", "p_down", "p_plain"]
    assert rows[0]["name"] == "across/00.png" and len(rows) == 36
    said, told = call("classify", "apply", probe, stripes, "--out", out, "--json")
    assert told == "" and sum(map(len, json.loads(said)["predicted"].values())) == 36
    for words, named in (
        (("fit", bundle, stripes, "--labels", tmp_path / "none.csv"), "none.csv"),
        (("fit", bundle, stripes, "--labels", table, "--folds", 1), "folds"),
        (("apply", tmp_path / "no", stripes, "--out", out), "probe.safetensors"),
        (("apply", bundle, stripes, "--out", out), str(probe)),
        (("apply", probe, stripes, "--out", tmp_path / "x.npz"), "x.npz"),
    ):
        said, told = call("classify", *words, code=2)
        assert said == "" and named in told and len(told.strip().splitlines()) == 1
