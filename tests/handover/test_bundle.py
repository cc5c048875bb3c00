"""A bundle holds all that its user needs, checks itself, and tells nothing that it should not."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid
from torch import nn

import harmonium
from harmonium.core import files
from harmonium.core.errors import ConfigError, HarmoniumError, StoreError
from harmonium.data.decoding import dicom
from harmonium.data.decoding.conversion import Levels
from harmonium.handover import export as exporting
from harmonium.handover.account import left_by_client, read_account
from harmonium.handover.bundle import SIGNATURE, SUMS
from harmonium.handover.card import card, grey_levels
from harmonium.handover.export import Bundle, export
from harmonium.handover.golden import difference, golden_images
from harmonium.handover.verify import verify
from harmonium.recipe.schema import Recipe
from harmonium.sites.folder import init
from harmonium.sites.kit import keygen
from harmonium.storage.run_folder import RunFolder

ALL = {
    "MODEL_CARD.md",
    "SHA256SUMS",
    "SIGNATURE",
    "config.json",
    "encoder.onnx",
    "encoder.pt2",
    "encoder.safetensors",
    "golden.npz",
}


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    shutil.copytree(bundle.folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles without programs, which take most of an export's time."""
    monkeypatch.setattr(exporting, "_programs", lambda *_: ({}, {}))


def outcomes(folder: Path, **how: Any) -> dict[str, bool | None]:
    return {check.name: check.passed for check in verify(folder, **how)}


def test_a_bundle_is_whole_and_verifies(bundle: Bundle, key: Path) -> None:
    assert {path.name for path in bundle.folder.iterdir()} == ALL
    assert not bundle.left_out and bundle.signed_by and not bundle.unsigned
    names = ["digests", "signature", "safetensors", "onnx", "torch.export"]
    assert outcomes(bundle.folder, key=key.with_name("site.pub")) == dict.fromkeys(names, True)
    assert outcomes(bundle.folder)["signature"] is None
    config = json.loads((bundle.folder / "config.json").read_bytes())
    assert (config["size"], config["channels"], config["fit"]) == ([12, 12], 3, "cut")
    assert config["grey_levels"]["dicom"] in (bundle.folder / "MODEL_CARD.md").read_text()
    assert config["features"] == 8 and config["files"].keys() == ALL - {
        "config.json", SIGNATURE, SUMS
    }  # fmt: skip


def test_the_encoder_loads_from_the_bundle(bundle: Bundle, run: Path) -> None:
    ours, theirs = harmonium.load_encoder(bundle.folder), harmonium.load_encoder(run)
    images = golden_images((12, 12), 3)[3]
    assert ours.digest == theirs.digest and torch.equal(ours.embed(images), theirs.embed(images))


def test_the_code_of_the_card_works(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle.folder)
    text = (bundle.folder / "MODEL_CARD.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(codes) == 3
    for code in codes:
        found: dict[str, Any] = {}
        exec(code, found)  # noqa: S102
        assert found["features"].shape == (5, 8)


def test_the_card_has_figures_references_and_what_left(bundle: Bundle, run: Path) -> None:
    text = (bundle.folder / "MODEL_CARD.md").read_text()
    result = json.loads((run / "result.json").read_bytes())
    row = next(line for line in text.splitlines() if line.startswith("| kNN |"))
    for figures in (result["figures"], result["untrained"], *result["references"].values()):
        assert f" {100 * figures['knn']:.1f} " in row
    for words in ("raw pixels", "commonest class", "untrained", "For tests.", bundle.signed_by):
        assert words in text
    about = RunFolder(run).about()
    assert about["split"] in text and about["data"] in text and about["recipe"] in text
    assert re.search(r"\| 1 \| .*\| statistic|statistic", text) and "| all |" in text
    assert "simulation" in text and "server.pub -signature" not in text


def test_left_bytes_are_those_of_the_ledger(run: Path) -> None:
    left = read_account(run).left
    rows = RunFolder(run).read_log("ledger.jsonl")
    for client in (0, 1):
        sent = [row["up"] for row in rows if row["client"] == client]
        assert sum(left[client].values()) == sum(size for up in sent for size in up.values())
        assert left[client]["weights"] == sum(up.get("model", 0) for up in sent)
    masked = {"step": "mask_keys", "client": 3, "up": {"keys": 9}}
    method = Recipe.of("fedavg").any_method()
    assert left_by_client(method, [masked]) == {3: {"secure aggregation": 9}}


def test_names_of_clients_and_paths_stay_at_home(
    tmp_path: Path, plain: None, undrawn: None, unprobed: None
) -> None:
    rng = np.random.default_rng(0)
    for patient in ("mueller", "meier"):
        folder = tmp_path / "secret-clinic" / patient / "lesion"
        folder.mkdir(parents=True)
        for number in range(16):
            Image.fromarray(rng.integers(0, 256, (9, 9), dtype=np.uint8)).save(
                folder / f"{patient}-{number}.png"
            )
    result = harmonium.run(
        "fedavg",
        data={"name": "folder", "path": str(tmp_path / "secret-clinic"), "styles": True, "size": 8},
        split={"name": "column", "column": "style"},
        rounds=1,
        clients=2,
        encoder={"name": "cnn-small", "width": 4, "out": 8},
        evaluate={"labels_per_class": []},
        engine={"workers": 0},
        out=tmp_path / "run",
    )
    bundle = export(result, tmp_path / "bundle")
    for path in bundle.folder.iterdir():
        data = path.read_bytes()
        for word in (b"mueller", b"meier", b"secret-clinic", b"lesion", bytes(tmp_path)):
            assert word not in data, (path.name, word)


@pytest.mark.parametrize("name", sorted(ALL - {SUMS, SIGNATURE}))
def test_a_changed_file_is_named_and_nothing_is_opened(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    seen: list[str] = []
    with pytest.raises(StoreError, match=name):
        verify(copy, watch=lambda check: seen.append(check.name))
    assert seen == ["digests"]
    (copy / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        verify(copy)


def test_changed_sums_fail_by_the_signature(copy: Path, key: Path, tmp_path: Path) -> None:
    card = copy / "MODEL_CARD.md"
    old = files.digest_of(card.read_bytes())
    card.write_text("Trained on everything.")
    sums = (copy / SUMS).read_text()
    (copy / SUMS).write_text(sums.replace(old, files.digest_of(card.read_bytes())))
    with pytest.raises(StoreError, match="config.json"):
        verify(copy)
    config = copy / "config.json"
    before = config.read_bytes()
    config.write_bytes(before.replace(old.encode(), files.digest_of(card.read_bytes()).encode()))
    sums = (copy / SUMS).read_text()
    (copy / SUMS).write_text(
        sums.replace(files.digest_of(before), files.digest_of(config.read_bytes()))
    )
    public = key.with_name("site.pub")
    with pytest.raises(StoreError, match="signature"):
        verify(copy, key=public)
    (copy / SIGNATURE).unlink()
    with pytest.raises(StoreError, match="signature"):
        verify(copy)


def test_another_key_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other")
    with pytest.raises(StoreError, match="signature"):
        verify(bundle.folder, key=other)
    with pytest.raises(StoreError, match="private key"):
        verify(bundle.folder, key=other.with_name("site.key"))


def resealed(folder: Path) -> None:
    """New digests for files that somebody changed who does not have the key."""
    config = json.loads((folder / "config.json").read_bytes())
    config |= {
        "signed_by": None,
        "files": {name: files.digest_of((folder / name).read_bytes()) for name in config["files"]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = [*config["files"], "config.json"]
    (folder / SUMS).write_text(
        "".join(f"{files.digest_of((folder / name).read_bytes())}  {name}\n" for name in names)
    )
    (folder / SIGNATURE).unlink(missing_ok=True)


def test_each_form_must_give_the_golden_features(copy: Path) -> None:
    with np.load(copy / "golden.npz") as stored:
        arrays = dict(stored)
    arrays["features_04"] = arrays["features_04"] + np.float32(0.01)
    arrays["prepared_features"] = arrays["prepared_features"] + np.float32(0.01)
    np.savez(copy / "golden.npz", **arrays)
    resealed(copy)
    seen: dict[str, bool | None] = {}
    with pytest.raises(StoreError, match=r"safetensors.*onnx.*torch\.export"):
        verify(copy, watch=lambda check: seen.update({check.name: check.passed}))
    assert seen == {
        "digests": True,
        "signature": None,
        "safetensors": False,
        "onnx": False,
        "torch.export": False,
    }


def test_a_damaged_graph_is_wrong_and_no_traceback(copy: Path) -> None:
    (copy / "encoder.onnx").write_bytes(b"\x08\x0a nothing")
    (copy / "encoder.pt2").write_bytes(b"PK")
    np.savez(copy / "golden.npz", images_00=np.array([{}], dtype=object))
    resealed(copy)
    with pytest.raises(StoreError, match="golden.npz"):
        verify(copy)


def test_other_files_are_named_and_links_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "classifier.npz").write_bytes(b"")
    texts = [check.text for check in verify(copy)]
    assert "classifier.npz" in texts[0]
    (copy / "golden.npz").rename(tmp_path / "golden.npz")
    (copy / "golden.npz").symlink_to(tmp_path / "golden.npz")
    with pytest.raises(StoreError, match="golden.npz"):
        verify(copy)
    (copy / SUMS).write_text(f"{'0' * 64}  ../secret\n")
    with pytest.raises(StoreError, match=SUMS):
        verify(copy)
    with pytest.raises(StoreError, match="not a bundle"):
        verify(tmp_path)


def test_whitened_features_are_exported(run: Path, tmp_path: Path, plain: None) -> None:
    bundle = export(run, tmp_path / "bundle", whiten=5)
    assert outcomes(bundle.folder)["safetensors"]
    with np.load(bundle.folder / "golden.npz") as stored:
        assert stored["features_00"].shape == (3, 5)
    assert "whiten=5" in (bundle.folder / "MODEL_CARD.md").read_text()
    with pytest.raises(ConfigError, match="whiten is 99"):
        export(run, tmp_path / "other", whiten=99)


def test_without_onnx_the_rest_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "lacking", lambda: ("onnxscript",))
    bundle = export(run, tmp_path / "bundle")
    assert bundle.left_out.keys() == {"encoder.onnx"} and "encoder.pt2" in bundle.files
    assert outcomes(bundle.folder)["encoder.onnx"] is None
    assert "onnxscript" in (bundle.folder / "MODEL_CARD.md").read_text()
    assert "key" in bundle.unsigned and SIGNATURE not in bundle.files


def test_a_network_of_ones_own_is_given_again(
    tmp_path: Path, plain: None, undrawn: None, unprobed: None
) -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small = {"data.limit": 60, "clients": 2, "rounds": 1, "engine.workers": 0}
    result = harmonium.run(
        "digits",
        encoder=network,
        out=tmp_path / "run",
        **small,
        **{"evaluate.labels_per_class": []},
    )
    with pytest.raises(StoreError, match="network=module"):
        export(result, tmp_path / "bundle")
    bundle = export(result, tmp_path / "bundle", network=network)
    assert outcomes(bundle.folder)["safetensors"] is None
    assert outcomes(bundle.folder, network=network)["safetensors"] is True


def test_what_cannot_be_exported_is_said_in_one_line(run: Path, tmp_path: Path, key: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "result.json").unlink()
    several = tmp_path / "several"
    shutil.copytree(run, several / "arms" / "one")
    for folder, words in (
        (unfinished, "has not finished.*resume"),
        (several, "several runs.*export"),
        (tmp_path / "nowhere", "holds no run"),
        (run / "encoder.safetensors", "holds no run"),
    ):
        with pytest.raises(HarmoniumError, match=words) as error:
            export(folder, tmp_path / "bundle")
        assert "\n" not in str(error.value)
    for place in (several, run / "bundle", run):
        with pytest.raises(ConfigError, match="--out"):
            export(run, place)
    with pytest.raises(StoreError, match=r"site\.pub is a public key.*site\.key"):
        export(run, tmp_path / "bundle", key=key.with_name("site.pub"))
    assert not (tmp_path / "bundle").exists()


def of_federation(run: Path, folder: Path, federation: Path, **more: Any) -> Path:
    """The run as the server of a federation would have it, whose images are elsewhere."""
    shutil.copytree(run, folder)
    (folder / "result.json").write_text(json.dumps({"figures": {}, "untrained": {}} | more))
    written = RunFolder(folder)
    roll = [{"client": client, "examples": 30, "name": "north"} for client in (0, 1)]
    about = written.about() | {"federation": {"folder": str(federation), "roll": roll}}
    about["files"]["result.json"] = files.digest_of((folder / "result.json").read_bytes())
    written.write_about(about)
    return folder


def test_a_federations_run_is_signed_with_its_key_and_says_what_is_missing(
    run: Path, tmp_path: Path, plain: None
) -> None:
    federation = init(tmp_path / "federation", ["north", "south"], ["localhost"])
    server = of_federation(run, tmp_path / "server-run", federation.folder)
    bundle = export(server, tmp_path / "bundle")
    checks = outcomes(bundle.folder, key=federation.kit("north") / "server.pub")
    assert checks["signature"] is True
    text = (bundle.folder / "MODEL_CARD.md").read_text()
    assert "not evaluated" in text and "60 images at 2 clients" in text and "north" not in text
    assert "simulation" not in text
    shutil.rmtree(federation.folder)
    unsigned = export(server, tmp_path / "unsigned")
    assert "signing.key" in unsigned.unsigned and not unsigned.signed_by


@pytest.mark.parametrize("together", [False, True])
def test_figures_of_the_sites_are_on_the_card_by_number(
    run: Path, tmp_path: Path, plain: None, together: bool
) -> None:
    one = {"images": 20, "accuracy": 0.812, "commonest": 0.4, "balanced": 0.734, "seen": 5}
    one |= {"auroc": 0.91, "auroc_error": 0.01, "confusion": [[1]]}
    figures = {"protocol": "ridge", "answered": 3, "of": 4, "all": one, "classes": ["wart"]}
    if not together:
        worst = {"client": 2, "site": "north", **one, "accuracy": 0.512, "auroc": None}
        figures |= {"by_site": [worst], "mean": {**one, "images": None}}
    server = of_federation(run, tmp_path / "server-run", tmp_path / "federation", sites=figures)
    text = (export(server, tmp_path / "bundle").folder / "MODEL_CARD.md").read_text()
    assert "not evaluated" not in text and "north" not in text and "wart" not in text
    assert "a site may have set another rule" in text
    assert ("secure aggregation there are no" in text) is together
    over_all = next(line for line in text.splitlines() if line.startswith("| all images "))
    assert all(figure in over_all for figure in ("81.2", "73.4", "91.0"))
    assert ("| client 2 " in text and "51.2" in text) is not together
    empty = {"protocol": "ridge", "answered": 0, "of": 4, "why": "no site sent counts"}
    nobody = of_federation(run, tmp_path / "nobody", tmp_path / "federation", sites=empty)
    text = (export(nobody, tmp_path / "other").folder / "MODEL_CARD.md").read_text()
    assert "not evaluated" in text and "no site sent counts" in text


def scan(path: Path, **elements: Any) -> Path:
    """A grey DICOM file of 12 bits."""
    stored = np.random.default_rng(3).integers(0, 3000, (20, 24)).astype(np.uint16)
    one = Dataset()
    one.file_meta = FileMetaDataset()
    one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one.file_meta.MediaStorageSOPClassUID = CTImageStorage
    one.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    one.Rows, one.Columns, one.SamplesPerPixel = 20, 24, 1
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 12, 11, 0
    one.PhotometricInterpretation, one.PixelData = "MONOCHROME2", stored.tobytes()
    one.RescaleSlope, one.RescaleIntercept = 1, -1024
    for name, value in elements.items():
        setattr(one, name, value)
    one.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize(
    ("elements", "levels"),
    [
        ({"WindowCenter": 40, "WindowWidth": 400}, {}),
        ({"WindowCenter": [300, 40], "WindowWidth": [900, 400]}, {}),
        ({"PhotometricInterpretation": "MONOCHROME1"}, {}),
        ({"WindowCenter": 40, "WindowWidth": 400}, {"window": [100, 1500]}),
        ({"WindowCenter": 40, "WindowWidth": 400}, {"percentiles": [5, 95]}),
    ],
)
def test_the_documented_code_makes_the_bytes_of_training_from_dicom(
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elements: dict[str, Any],
    levels: dict[str, Any],
) -> None:
    given: list[Any] = []

    class Session:
        def run(self, names: list[str], inputs: dict[str, Any]) -> list[Any]:
            given.append(inputs["images"])
            return given

    scan(tmp_path / "scan.dcm", **elements)
    (tmp_path / "encoder").mkdir()
    config = json.loads((bundle.folder / "config.json").read_bytes()) | levels
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config))
    page = Path(__file__).parents[2] / "docs" / "handover.md"
    codes = re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(next(code for code in codes if "pydicom" in code), {"session": Session()})  # noqa: S102
    read = np.asarray(dicom.frame("scan.dcm", 0, Levels(**levels)))
    assert given[0].shape == (1, 20, 24, 1) and len(np.unique(read)) > 50
    assert np.array_equal(given[0][0, ..., 0], read)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, {"dicom": "own window", "grey16": "depth"}),
        ({"depth": 12}, {"dicom": "not by depth", "grey16": "4095"}),
        ({"window": [40, 400]}, {"dicom": "width 400", "grey16": "width 400"}),
        ({"percentiles": [1, 99]}, {"dicom": "percentile 99", "grey16": "percentile 99"}),
    ],
)
def test_the_rule_for_grey_levels_is_told(
    loaded: Any, run: Path, more: dict[str, Any], words: dict[str, str]
) -> None:
    encoder, account = loaded(nn.Flatten(), (8, 8), 1, **more), read_account(run)
    told = grey_levels(account, encoder)
    text = card(account, encoder, {}, "", "")
    for kind, word in words.items():
        assert word in told[kind] and told[kind] in text


def test_features_that_differ_are_seen() -> None:
    one = np.float32([[1.0, 2.0]])
    assert difference([one], [one]) == 0
    assert difference([one * np.nan], [one]) == float("inf") == difference([one[:, :1]], [one])
