"""DICOM files with several frames, each of which is an image."""

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from harmonium.core.errors import DataError
from harmonium.runs.export import load_encoder
from harmonium.sklearn import Encoder
from harmonium.use import probe as probes
from harmonium.use.embedding import embed
from harmonium.use.labels import Label, match
from harmonium.use.search import search
from harmonium.use.sources import open_images

from .conftest import save_image

PATIENT = "MRN-77-4411"


def save_scan(path: Path, frames: int, seed: int = 0) -> None:
    """A file of 12-bit grey frames, with the number of its patient."""
    values = np.random.default_rng(seed).integers(0, 4096, (frames, 14, 14), dtype=np.uint16)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    scan = Dataset()
    scan.file_meta = meta
    scan.SOPClassUID, scan.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    scan.PatientID = scan.PatientName = PATIENT
    scan.NumberOfFrames = frames
    scan.Rows, scan.Columns, scan.SamplesPerPixel = 14, 14, 1
    scan.PhotometricInterpretation, scan.PixelRepresentation = "MONOCHROME2", 0
    scan.BitsAllocated, scan.BitsStored, scan.HighBit = 16, 12, 11
    scan.PixelData = values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    scan.save_as(path, enforce_file_format=True)


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """A file of three frames, one of a single frame, and an image."""
    folder = tmp_path / "scans"
    save_scan(folder / "north" / "a.dcm", 3)
    save_scan(folder / "north" / "b.dcm", 1, 1)
    save_image(folder / "south" / "c.png", 2)
    return folder


NAMES = [*(f"north/a.dcm, frame {n}" for n in (1, 2, 3)), "north/b.dcm", "south/c.png"]


def test_every_frame_is_an_image_with_a_name(trained: Path, scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.csv"
    features = embed(trained, scans, out=out)
    assert features.names == NAMES
    np.testing.assert_allclose(
        features.matrix(), load_encoder(trained).embed(scans).numpy(), atol=1e-5
    )
    assert PATIENT.encode() not in out.read_bytes() + (tmp_path / "f.csv.json").read_bytes()
    found = search(features, NAMES[1], k=4, images=scans)
    assert set(found.names[0]) == set(NAMES) - {NAMES[1]}
    found.write_page(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<img") == 5 and "not shown" not in text and PATIENT not in text
    assert search(features, scans / "north" / "a.dcm", encoder=trained, k=1).names == [
        [name] for name in NAMES[:3]
    ]


def test_a_label_of_a_file_is_that_of_its_frames_which_stay_together(
    trained: Path, scans: Path
) -> None:
    source = open_images(scans)
    for name in ("north/a.dcm", "a.dcm", "a", str(scans / "north" / "a.dcm")):
        labelled = match([Label(name, "x"), Label("c.png", "y")], source, scans, print)
        assert labelled.rows == [0, 1, 2, 4] and labelled.labels == ["x", "x", "x", "y"]
        assert labelled.groups and len(set(labelled.groups[:3])) == 1 and not labelled.groups[3]
    one = match([Label(NAMES[1], "x")], source, scans, print)
    assert one.rows == [1]
    for number in range(4):
        save_scan(scans / ("north" if number % 2 else "south") / f"{number}.dcm", 3, number)
    probe = probes.fit_probe(trained, scans)
    assert probe.about["labels"] == [10, 7] and probe.figures["groups"] == 7


def test_a_transformer_needs_an_image_a_file(trained: Path, scans: Path) -> None:
    assert Encoder(trained).fit_transform([scans / "north" / "b.dcm"]).shape == (1, 8)
    with pytest.raises(DataError, match=r"a\.dcm.*frames"):
        Encoder(trained).fit_transform([scans / "north" / "a.dcm"])
