"""DICOM files: grey levels, colours, frames, files that cannot be read, and what stays unsaid."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import apply_modality_lut, apply_windowing
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.decoding import dicom, pool
from harmonium.data.decoding.worker import Order, perform
from harmonium.data.inspection import inspect
from harmonium.data.sets.folder import Folder
from harmonium.data.sets.table import Table

PATIENT = "Doe^Jane"
NUMBER = "MRN-77-4411"
RAMP = np.arange(-1024, 3072).reshape(64, 64)  # Hounsfield units, all that 12 bits can say


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    """A home of its own, and no decoding processes, which take longer to start than to decode."""
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def scan(path, stored, syntax=ExplicitVRLittleEndian, patient=NUMBER, **elements):
    """Write a DICOM file of stored values: (rows, columns), frames of them, or colours."""
    stored = np.asarray(stored)
    colour = stored.ndim > 2 and stored.shape[-1] == 3
    sides = stored.shape[-3:-1] if colour else stored.shape[-2:]
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = syntax, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    ds = Dataset()
    ds.file_meta = meta
    ds.SOPClassUID, ds.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    ds.PatientName, ds.PatientID = PATIENT, patient
    ds.StudyInstanceUID = "1.2.826.0.1.3680043.99.4711"
    ds.Rows, ds.Columns = sides
    ds.SamplesPerPixel = 3 if colour else 1
    ds.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    ds.BitsAllocated = ds.BitsStored = stored.dtype.itemsize * 8
    ds.PixelRepresentation = int(stored.dtype.kind == "i")
    if colour:
        ds.PlanarConfiguration = 0
    if stored.ndim - colour > 2:
        ds.NumberOfFrames = len(stored)
    ds.PixelData = stored.tobytes()
    ds["PixelData"].VR = "OB" if stored.dtype.itemsize == 1 else "OW"
    for name, value in elements.items():
        setattr(ds, name, value)
    ds.HighBit = ds.BitsStored - 1
    path.parent.mkdir(parents=True, exist_ok=True)
    ds.save_as(path, enforce_file_format=True)
    return ds


def ct(path, **elements):
    """A CT slice with every value of 12 bits, stored as scanners do."""
    rescale = {"BitsStored": 12, "RescaleSlope": 1, "RescaleIntercept": -1024}
    return scan(path, (RAMP + 1024).astype(np.uint16), **{**rescale, **elements})


def read(path, channels=1, **how):
    answer = perform(str(path), Order(channels=channels, **how))
    assert answer.error == "", answer.error
    return answer.pixels[..., 0] if channels == 1 else answer.pixels


def by_hand(values, centre, width):
    """A window as PS3.3 C.11.2.1.2.1 writes it."""
    values = values.astype(float)
    inside = ((values - (centre - 0.5)) / (width - 1) + 0.5) * 255
    inside = np.where(values <= centre - 0.5 - (width - 1) / 2, 0, inside)
    return np.where(values > centre - 0.5 + (width - 1) / 2, 255, inside)


# ---- grey levels ---------------------------------------------------------------------------------


def test_a_window_is_in_hounsfield_units(tmp_path):
    ct(tmp_path / "a.dcm")
    assert np.abs(read(tmp_path / "a.dcm", window=[40, 400]) - by_hand(RAMP, 40, 400)).max() <= 0.5


def test_the_files_own_window_holds_if_none_is_set(tmp_path):
    """Of several the first; and a setting goes before it, so that files can be compared."""
    ct(tmp_path / "a.dcm", WindowCenter=[-600, 40], WindowWidth=[1500, 400])
    own = read(tmp_path / "a.dcm")
    assert np.abs(own - by_hand(RAMP, -600, 1500)).max() <= 0.5
    assert not np.array_equal(own, read(tmp_path / "a.dcm", window=[40, 400]))


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_window_functions_are_those_of_pydicom(tmp_path, function):
    made = ct(tmp_path / "a.dcm", WindowCenter=300, WindowWidth=900, VOILUTFunction=function)
    shown = apply_windowing(apply_modality_lut(made.pixel_array, made), made)
    expected = (shown + 1024) * 255 / 4095  # from the range of the stored bits
    assert np.abs(read(tmp_path / "a.dcm") - expected).max() <= 0.51


def test_without_a_window_all_stored_bits_count_and_not_those_allocated(tmp_path):
    ct(tmp_path / "a.dcm")
    pixels = read(tmp_path / "a.dcm")
    assert np.abs(pixels - (RAMP + 1024) * 255 / 4095).max() <= 0.5
    signed = RAMP.astype(np.int16) - 1024  # -2048 to 2047
    scan(tmp_path / "b.dcm", signed, BitsStored=12)
    assert np.array_equal(read(tmp_path / "b.dcm"), pixels)
    scan(tmp_path / "c.dcm", signed, BitsStored=12, RescaleSlope=-2, RescaleIntercept=7)
    assert np.abs(read(tmp_path / "c.dcm") - (255 - pixels.astype(int))).max() <= 1


def test_monochrome1_is_inverted_after_the_window(tmp_path):
    ct(tmp_path / "a.dcm")
    ct(tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1")
    for how in ({}, {"window": [40, 400]}, {"percentiles": [1, 99]}):
        one, other = read(tmp_path / "a.dcm", **how), read(tmp_path / "b.dcm", **how)
        assert np.array_equal(other, 255 - one)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_a_table_of_levels_may_have_more_entries_than_levels(tmp_path, bits):
    """4096 entries of 8 bits are common; an index of 8 bits would wrap around."""
    item = Dataset()
    item.add_new("LUTDescriptor", "SS", [4096, -1024, bits])
    most = (1 << bits) - 1
    table = (np.arange(4096)[::-1] * most / 4095).round().astype(np.uint16)
    item.add_new("LUTData", "OW", table.tobytes())
    ct(tmp_path / "a.dcm", VOILUTSequence=[item], WindowCenter=40, WindowWidth=400)
    expected = table.reshape(64, 64) * 255.0 / most
    assert np.abs(read(tmp_path / "a.dcm") - expected).max() <= 0.5


def test_percentiles_leave_out_padding(tmp_path):
    """Outside the circle of a CT lies a value that no tissue has."""
    stored = np.full((64, 64), -2000, np.int16)
    stored[16:48, 16:48] = np.arange(1024).reshape(32, 32)
    scan(tmp_path / "a.dcm", stored, PixelPaddingValue=-2000)
    scan(tmp_path / "b.dcm", stored)
    pixels, other = (read(tmp_path / name, percentiles=[0, 100]) for name in ("a.dcm", "b.dcm"))
    assert pixels[16, 16] == 0 and pixels[47, 47] == 255 and (pixels[:16] == 0).all()
    assert other[16, 16] > 100


def test_frames_of_enhanced_files_have_their_own_rescale_and_window(tmp_path):
    def group(slope, centre):
        values, window = Dataset(), Dataset()
        values.RescaleSlope, values.RescaleIntercept = slope, 0
        window.WindowCenter, window.WindowWidth = centre, 201
        whole = Dataset()
        whole.PixelValueTransformationSequence, whole.FrameVOILUTSequence = [values], [window]
        return whole

    frames = np.stack([np.arange(256).reshape(16, 16)] * 2).astype(np.uint16)
    each = [group(1, 100), group(2, 300)]
    scan(tmp_path / "a.dcm", frames, PerFrameFunctionalGroupsSequence=each)
    for number, (slope, centre) in enumerate([(1, 100), (2, 300)]):
        answer = perform((str(tmp_path / "a.dcm"), number), Order(channels=1))
        expected = by_hand(frames[number] * slope, centre, 201)
        assert np.abs(answer.pixels[..., 0] - expected).max() <= 0.5


# ---- colours -------------------------------------------------------------------------------------


def colours(side=16):
    ramp = np.arange(side * side, dtype=np.uint8).reshape(side, side)
    return np.stack([ramp, 255 - ramp, ramp // 2], 2)


def test_rgb_in_any_planar_configuration_and_depth(tmp_path):
    wanted = colours()
    scan(tmp_path / "a.dcm", wanted)
    planes = np.ascontiguousarray(wanted.transpose(2, 0, 1))
    scan(tmp_path / "b.dcm", wanted, PlanarConfiguration=1, PixelData=planes.tobytes())
    scan(tmp_path / "c.dcm", wanted.astype(np.uint16) * 257)
    for name in "abc":
        assert np.array_equal(read(tmp_path / f"{name}.dcm", 3), wanted)


def test_ybr_becomes_rgb(tmp_path):
    wanted = colours()
    stored = np.asarray(Image.fromarray(wanted).convert("YCbCr"))
    scan(tmp_path / "a.dcm", stored, PhotometricInterpretation="YBR_FULL")
    assert np.abs(read(tmp_path / "a.dcm", 3).astype(int) - wanted).max() <= 3


@pytest.mark.parametrize("bits", [8, 16])
def test_a_palette_becomes_its_colours(tmp_path, bits):
    levels = np.random.default_rng(0).integers(0, 256, (3, 256))
    tables = {}
    for name, row in zip(("Red", "Green", "Blue"), levels, strict=True):
        stem = f"{name}PaletteColorLookupTable"
        entries = row.astype(np.uint8) if bits == 8 else (row * 257).astype(np.uint16)
        tables |= {f"{stem}Descriptor": [256, 0, bits], f"{stem}Data": entries.tobytes()}
    stored = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scan(tmp_path / "a.dcm", stored, PhotometricInterpretation="PALETTE COLOR", **tables)
    assert np.array_equal(read(tmp_path / "a.dcm", 3), levels.T.reshape(16, 16, 3))


# ---- data sets -----------------------------------------------------------------------------------


@pytest.fixture
def films(tmp_path):
    """Three files of four frames and two of one; pixels are 40 times the file plus the frame."""
    root = tmp_path / "films"
    for number in range(5):
        count = 4 if number < 3 else 1
        frames = np.stack([np.full((8, 8), 40 * number + k, np.uint8) for k in range(count)])
        scan(root / f"{number}.dcm", frames if count > 1 else frames[0], patient=f"P{number}")
    return root


def scan_of(root, **settings):
    return Folder(path=str(root), channels=1, validation=0, test=0, **settings).load()


def levels(images):
    return sorted(images.pixels[:, 0, 0, 0].tolist())


def test_every_frame_is_an_image_unless_one_is_asked_for(films):
    assert levels(scan_of(films).train) == [0, 1, 2, 3, 40, 41, 42, 43, 80, 81, 82, 83, 120, 160]
    assert levels(scan_of(films, frames="first").train) == [0, 40, 80, 120, 160]
    assert levels(scan_of(films, frames="middle").train) == [2, 42, 82, 120, 160]
    with pytest.raises(ConfigError, match="data.frames=last"):
        scan_of(films, frames="last")


def test_files_are_dicom_by_ending_or_by_their_first_bytes(tmp_path):
    root = tmp_path / "archive"
    for name in ("a.dcm", "b.DCM", "IM0001", "1.2.840.113619.2.5"):
        scan(root / name, np.full((8, 8), 9, np.uint8))
    Image.new("L", (8, 8), 9).save(root / "c.png")
    (root / "DICOMDIR").write_bytes(bytes(128) + b"DICM" + bytes(100))
    (root / "README").write_text("no image")
    data = scan_of(root)
    assert len(data.train) == 5
    assert any("2 without an ending" in note for note in data.notes)


def test_a_table_may_list_dicom_files(films, tmp_path):
    lines = ["path,label", *(f"films/{k}.dcm,{k % 2}" for k in range(5))]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    data = Table(path=str(tmp_path / "all.csv"), channels=1, validation=0, test=0).load()
    assert len(data.train) == 14 and np.bincount(data.train.labels).tolist() == [9, 5]


def test_a_missing_package_is_one_line(films, monkeypatch):
    monkeypatch.setattr(dicom, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'harmonium\[dicom\]'"):
        scan_of(films)
    with pytest.raises(ConfigError, match=r"pip install 'harmonium\[dicom\]'"):
        inspect(films)


def test_files_that_cannot_be_decoded_are_named_with_the_reason(films):
    ds = scan(films / "compressed.dcm", np.zeros((8, 8), np.uint8))
    ds.file_meta.TransferSyntaxUID = JPEGLSLossless
    ds.PixelData = encapsulate([b"\xff\xd8\xff\xf7nothing"])
    ds["PixelData"].is_undefined_length = True
    ds.save_as(films / "compressed.dcm", enforce_file_format=True)
    whole = (films / "0.dcm").read_bytes()
    (films / "short.dcm").write_bytes(whole[:-40])
    (films / "text.dcm").write_text("no DICOM")
    scan(films / "odd.dcm", np.zeros((8, 8), np.uint8), PhotometricInterpretation="HSV")
    with pytest.raises(DataError) as refused:
        scan_of(films)
    said = str(refused.value)
    for part in (
        "compressed.dcm (no decoder here for JPEG-LS",
        "short.dcm, frame 4 (a damaged",
        "text.dcm (not a DICOM file",
        "odd.dcm (a photometric",
    ):
        assert part in said
    assert "\n" not in said
    assert len(scan_of(films, corrupt="skip").train) == 14 + 3


@pytest.mark.parametrize("syntax", [RLELossless, DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit])
def test_compressed_files_are_the_same_images(tmp_path, syntax):
    wanted = np.arange(256, dtype=np.uint8).reshape(16, 16)
    ds = scan(tmp_path / "a.dcm", wanted)
    if syntax == RLELossless:
        ds.compress(RLELossless)
    elif syntax == JPEGBaseline8Bit:
        Image.fromarray(wanted).save(tmp_path / "a.jpg", quality=100)
        ds.file_meta.TransferSyntaxUID = syntax
        ds.PixelData = encapsulate([(tmp_path / "a.jpg").read_bytes()])
        ds["PixelData"].is_undefined_length = True
    else:
        ds.file_meta.TransferSyntaxUID = syntax
    ds.save_as(tmp_path / "a.dcm", enforce_file_format=True)
    worst = np.abs(read(tmp_path / "a.dcm").astype(int) - wanted).max()
    assert worst <= (3 if syntax == JPEGBaseline8Bit else 0)


def test_reports_among_the_images_are_left_out_with_a_note(films):
    ds = scan(films / "report.dcm", np.zeros((8, 8), np.uint8))
    for name in ("PixelData", "Rows", "Columns"):
        delattr(ds, name)
    ds.save_as(films / "report.dcm", enforce_file_format=True)
    data = scan_of(films)
    assert len(data.train) == 14 and any("1 DICOM file without an image" in n for n in data.notes)


# ---- patients ------------------------------------------------------------------------------------


def wards(root, patients=12, each=3):
    """Files named in turns, so that neighbours are not of one patient."""
    for number in range(patients * each):
        patient = number % patients
        scan(root / f"{number:03}.dcm", np.full((8, 8), patient, np.uint8), patient=f"ID-{patient}")
    return root


def test_images_of_one_patient_stay_together(tmp_path):
    root = wards(tmp_path / "wards")
    spec = Folder(path=str(root), channels=1, validation=0.25, test=0.25, group="patient")
    data = spec.load()
    parts = [set(levels(part)) for part in (data.train, data.validation, data.test)]
    assert all(parts) and sum(map(len, parts)) == 12
    assert [len(part) for part in (data.validation, data.test)] == [6, 9]
    assert spec.load().digest == data.digest


def test_images_without_a_patient_are_groups_of_their_own(tmp_path):
    for number in range(8):
        patient = "" if number < 4 else "one"
        scan(tmp_path / "w" / f"{number}.dcm", np.full((8, 8), number, np.uint8), patient=patient)
    data = scan_of(tmp_path / "w", group="patient")
    assert data.train.factors["group"].tolist().count(-1) == 4
    assert any("4 of 8 images" in note for note in data.notes)


def test_the_number_of_a_patient_does_not_depend_on_the_key(tmp_path, home):
    root = wards(tmp_path / "wards", 4)
    keys = {Folder(path=str(root), group="patient").order(1).key for _ in range(3)}
    assert len(keys) == 3
    hashes = {dicom.patient(str(root / "000.dcm"), key) for key in keys}
    assert len(hashes) == 3 and dicom.patient(str(root / "000.dcm"), "00" * 32) not in hashes


def test_nothing_of_a_patient_is_said_or_kept(tmp_path, home, caplog, capfd, recwarn):
    root = tmp_path / "films"
    secrets = (PATIENT, NUMBER, "Jane", "1.2.826.0.1.3680043.99.4711", "ID-0")
    for number in range(12):
        scan(
            root / f"{number}.dcm",
            np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8),
            patient=f"{NUMBER}-{number // 3}",
        )
    # Values that pydicom complains about, quoting them, in what is read and in what is not.
    bad = (root / "0.dcm").read_bytes()
    (root / "bad.dcm").write_bytes(bad.replace(b"MONOCHROME2", NUMBER.encode()))
    ct(root / "odd.dcm", NumberOfFrames="00000000001")
    odd = (root / "odd.dcm").read_bytes()
    assert b"00000000001" in odd
    (root / "odd.dcm").write_bytes(odd.replace(b"00000000001", NUMBER.encode()))
    with caplog.at_level(logging.DEBUG), pytest.raises(DataError) as refused:
        scan_of(root, group="patient", size=8)
    assert "odd.dcm (a damaged DICOM file" in str(refused.value)
    data = {"name": "folder", "path": str(root), "channels": 1, "corrupt": "skip"}
    data |= {"group": "patient", "validation": 0.25, "test": 0.25}
    small = {"encoder.width": 4, "rounds": 1, "clients": 2, "engine.workers": 0}
    run = harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **small)
    said = [
        str(refused.value),
        caplog.text,
        *capfd.readouterr(),
        *(str(w.message) for w in recwarn),
    ]
    kept = [
        path.read_bytes() for top in (home, run.folder) for path in top.rglob("*") if path.is_file()
    ]
    for secret in secrets:
        assert not any(secret in text for text in said), secret
        assert not any(secret.encode() in content for content in kept), secret


# ---- use -----------------------------------------------------------------------------------------


def test_the_encoder_reads_files_as_training_did(films, tmp_path):
    root = tmp_path / "cts"
    for number in range(12):
        ct(root / f"{number}.dcm", RescaleIntercept=-1024 + number, WindowCenter=0, WindowWidth=90)
    scan(root / "film.dcm", np.zeros((2, 64, 40), np.int16))
    data = {"name": "folder", "path": str(root), "channels": 1, "window": [40, 400]}
    data |= {"size": 16, "fit": "pad", "test": 0, "validation": 0}
    small = {"encoder.width": 4, "rounds": 1, "clients": 2, "engine.workers": 0}
    run = harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **small)
    encoder = harmonium.load_encoder(run)
    about = encoder.about
    assert (about["window"], about["fit"], about["frames"]) == ([40.0, 400.0], "pad", "all")
    trained = Folder(**{key: v for key, v in data.items() if key != "name"}).load().train.pixels
    order = np.lexsort(trained.reshape(len(trained), -1).T)
    features = encoder.embed(root)
    expected = encoder.embed(trained)
    assert len(features) == 14
    first, second = (sorted(rows.tolist()) for rows in (features, expected))
    assert np.allclose(first, second, atol=1e-6) and len(order) == 14
    json.dumps(about)


def test_an_inspection_counts_frames(tmp_path):
    scan(tmp_path / "film.dcm", np.zeros((3, 8, 8), np.uint8), NumberOfFrames=3)
    scan(tmp_path / "one.dcm", np.zeros((8, 8), np.uint8))
    assert inspect(tmp_path).images == 4


def test_an_inspection_says_how_patients_are_kept_together(films):
    def said(*words):
        found = inspect(films, *words)
        assert not any(f"P{number}" in json.dumps(found.plain()) for number in range(5))
        return any("data.group=patient" in note for note in found.notes)

    assert said() and not said("data.group=patient")
    for number in range(5):
        (films / f"{number}.dcm").unlink()
        Image.new("L", (8, 8), 40 * number).save(films / f"{number}.png")
    assert not said()
