"""Features of many images: what the files hold, and commands that are killed and started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.runs.export import load_encoder
from harmonium.use import tables
from harmonium.use.embedding import embed
from harmonium.use.sources import open_images
from harmonium.use.tables import read_features
from harmonium.use.unfinished import Unfinished, folder_of

from .conftest import save_image

Call = Callable[..., tuple[str, str]]
BATCH = 2  # several parts of 23 images on any number of cores


@pytest.fixture(autouse=True)
def _few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture(scope="module")
def wanted(trained: Path, photos: Path) -> np.ndarray:
    """The features that the encoder itself gives, of one image at a time."""
    encoder = load_encoder(trained)
    paths = [path for path in sorted(photos.rglob("*.png")) if path.name != "torn.png"]
    return np.concatenate([encoder.embed([path]).numpy() for path in paths])


@pytest.mark.parametrize("kind", tables.FORMATS)
def test_every_format_holds_the_encoders_features_under_relative_names(
    kind: str, trained: Path, photos: Path, wanted: np.ndarray, tmp_path: Path
) -> None:
    out = tmp_path / f"features{kind}"
    embed(trained, photos, out=out, batch=BATCH)
    features = read_features(out)
    assert features.names == sorted(features.names) and len(features) == 22
    assert features.names[0] == "north/01.png" and str(photos) not in out.read_bytes().decode(
        "latin-1"
    )
    np.testing.assert_allclose(features.matrix(), wanted, atol=1e-5)
    about = features.about
    assert about["encoder"] == load_encoder(trained).digest
    assert (about["count"], about["dimension"], about["whitening"]) == (22, 8, None)
    assert [one["name"] for one in about["left_out"]] == ["north/torn.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [out.name, *([f"{out.name}.json"] if kind == ".csv" else [])]
    )


def test_other_libraries_read_the_files(trained: Path, photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for kind in tables.FORMATS:
        embed(trained, photos, out=tmp_path / f"f{kind}")
    with np.load(tmp_path / "f.npz") as archive:
        matrix, names = archive["features"], archive["names"].tolist()
        assert json.loads(str(archive["harmonium"]))["count"] == 22
    table = parquet.read_table(tmp_path / "f.parquet")
    assert table["name"].to_pylist() == names
    assert np.array_equal(np.stack(table["features"].to_numpy(zero_copy_only=False)), matrix)
    sheet = np.genfromtxt(tmp_path / "f.csv", delimiter=",", skip_header=1, dtype=str)
    assert sheet[:, 0].tolist() == names
    assert np.array_equal(sheet[:, 1:].astype(np.float32), matrix)


def test_whitened_features_are_those_of_the_encoder(trained: Path, photos: Path) -> None:
    features = embed(trained, photos / "south", whiten=3)
    encoder = load_encoder(trained, whiten=3)
    assert features.dimension == features.about["whitening"] == 3
    np.testing.assert_allclose(features.matrix(), encoder.embed(photos / "south"), atol=1e-4)


def test_an_image_that_cannot_be_read_changes_no_other_row(trained: Path, tmp_path: Path) -> None:
    for number in range(5):
        save_image(tmp_path / f"{number}.png", number)
    whole = embed(trained, tmp_path, batch=BATCH).matrix()
    (tmp_path / "1.png").write_bytes(b"")
    some = embed(trained, tmp_path, batch=1)  # of two parts
    assert some.names == ["0.png", "2.png", "3.png", "4.png"]
    assert np.array_equal(embed(trained, tmp_path, batch=BATCH).matrix(), whole[[0, 2, 3, 4]])


class Killed(BaseException):
    """As if the process had ended at this instant."""


@pytest.mark.parametrize("kind", tables.FORMATS)
def test_interrupted_at_any_write_the_output_has_the_same_bytes(
    kind: str,
    trained: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm, out = tmp_path / f"calm{kind}", tmp_path / f"f{kind}"
    embed(trained, photos, out=calm, batch=BATCH)
    append, replace = Unfinished._append, os.replace
    left = [0]

    def countdown() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def torn(self: Unfinished, name: str, data: bytes) -> None:
        left[0] -= 1
        append(self, name, data if left[0] else data[: len(data) // 2])
        if left[0] == 0:
            raise Killed

    def unnamed(source: Path, target: Path) -> None:
        countdown()
        replace(source, target)

    monkeypatch.setattr(Unfinished, "_append", torn)
    monkeypatch.setattr(os, "replace", unnamed)
    encoder, said = load_encoder(trained, layout="NHWC"), list[str]()
    for write in range(1, 99):
        left[0] = write
        try:
            embed(encoder, photos, out=out, batch=BATCH)
            break
        except Killed:
            assert not out.exists()
        embed(encoder, photos, out=out, batch=BATCH, note=said.append)
        assert out.read_bytes() == calm.read_bytes() and not folder_of(out).exists()
        out.unlink()
    done = [int(one.split()[-4]) for one in said if "continuing" in one]
    assert done == sorted(done) and set(done) == {0, 8, 16, 23}


FORKING = """
import os, sys
from harmonium.data.decoding import pool
from harmonium.use.embedding import embed
pool._cores = lambda: 0
os.cpu_count = lambda: 1
for _ in sys.stdin:
    if not (child := os.fork()):
        embed(*sys.argv[1:3], out=sys.argv[3], batch=1)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("over", flush=True)
"""


def test_kills_lose_nothing_and_repeat_nothing(trained: Path, photos: Path, tmp_path: Path) -> None:
    """`benchmarks/embed.py` kills whole commands; here they are copies of a loaded process."""
    calm, out = tmp_path / "calm.npz", tmp_path / "f.npz"
    embed(trained, photos, out=calm, batch=1)
    rows, rng, kills = folder_of(out) / "rows", random.Random(1), 0
    words = [sys.executable, "-c", FORKING, *map(str, (trained, photos, out))]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, bufsize=1) as loaded:
        assert loaded.stdin and loaded.stdout
        while kills < 3:
            print("go", file=loaded.stdin, flush=True)
            child = int(loaded.stdout.readline())
            enough = rng.uniform(0, 23 * 8 * 4)  # of the bytes of all rows
            while not out.exists() and not (rows.exists() and rows.stat().st_size >= enough):
                time.sleep(0.001)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            assert loaded.stdout.readline() == "over\n"
            if out.exists():
                assert out.read_bytes() == calm.read_bytes()
                out.unlink()
            else:
                kills += 1
        loaded.stdin.close()
    embed(trained, photos, out=out, batch=1)
    assert out.read_bytes() == calm.read_bytes() and not folder_of(out).exists()


def interrupted(trained: Path, photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ends after two parts."""
    add = Unfinished.add

    def once(self: Unfinished, *part: object) -> None:
        add(self, *part)  # type: ignore[arg-type]
        if self.stop > 2 * 4 * BATCH - 1:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Unfinished, "add", once)
        embed(trained, photos, out=out, batch=BATCH)


def test_other_images_or_another_encoder_start_anew(
    trained: Path, other: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.npz"
    interrupted(trained, photos, out, monkeypatch)
    notes = list[str]()
    embed(other, photos, out=out, batch=BATCH, note=notes.append)
    assert "16 images of another encoder" in notes[0] and "anew" in notes[0]
    assert np.array_equal(read_features(out).matrix(), embed(other, photos, batch=BATCH).matrix())
    mine = tmp_path / "mine"
    for number in range(20):
        save_image(mine / f"{number:02d}.png", number)
    again = tmp_path / "g.npz"
    interrupted(trained, mine, again, monkeypatch)
    save_image(mine / "03.png", 99)
    notes.clear()
    embed(trained, mine, out=again, batch=BATCH, note=notes.append)
    assert "other images" in notes[0]
    assert np.array_equal(read_features(again).matrix(), embed(trained, mine, batch=BATCH).matrix())


def test_damaged_parts_are_computed_again(
    trained: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, out = tmp_path / "calm.npz", tmp_path / "f.npz"
    embed(trained, photos, out=calm, batch=BATCH)
    for name, place in (("rows", 300), ("journal", -9), ("journal", 5)):
        interrupted(trained, photos, out, monkeypatch)
        path = folder_of(out) / name
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        embed(trained, photos, out=out, batch=BATCH)
        assert out.read_bytes() == calm.read_bytes()
        out.unlink()


def test_a_complete_output_is_left_alone_and_anothers_file_is_refused(
    trained: Path, other: Path, photos: Path, tmp_path: Path
) -> None:
    for kind in tables.FORMATS:
        out, notes = tmp_path / f"f{kind}", list[str]()
        embed(trained, photos, out=out)
        before = out.stat().st_mtime_ns
        embed(trained, photos, out=out, note=notes.append)
        assert out.stat().st_mtime_ns == before and "complete" in notes[0]
        embed(other, photos, out=out, note=notes.append)
        assert "another encoder" in notes[1] and out.stat().st_mtime_ns > before
        foreign = tmp_path / f"mine{kind}"
        foreign.write_text("my own")
        with pytest.raises(StoreError, match=rf"mine{kind}"):
            embed(trained, photos, out=foreign)
        assert foreign.read_text() == "my own"


def test_images_that_cannot_be_read_are_named(trained: Path, photos: Path, tmp_path: Path) -> None:
    notes = list[str]()
    embed(trained, photos, note=notes.append)
    assert "north/torn.png (not an image)" in notes[0] and "1 of 23" in notes[0]
    with pytest.raises(DataError, match=r"north/torn\.png.*--corrupt skip"):
        embed(trained, photos, corrupt="refuse")
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.png \(empty\)"):
        embed(trained, tmp_path, out=tmp_path / "f.npz")
    assert not folder_of(tmp_path / "f.npz").exists()


def test_names_from_files_tables_and_archives(
    trained: Path, photos: Path, tmp_path: Path, home: Path
) -> None:
    files = [photos / "south" / "02.png", photos / "north" / "01.png", photos / "south" / "02.png"]
    assert open_images(*files).names == ("north/01.png", "south/02.png")
    assert open_images(files[0]).names == ("02.png",)
    assert open_images(photos / "north", photos / "south").names[0] == "north/01.png"
    table = tmp_path / "list.csv"
    listed = [photos / "south" / "02.png", photos / "north" / "01.png", photos / "south" / "02.png"]
    table.write_text("path,label\n" + "".join(f"{path},x\n" for path in listed))
    source = open_images(table)
    assert source.names == ("south/02.png", "north/01.png") and "1 line" in source.notes[0]
    inside = photos / "list.csv"
    inside.write_text("file;label\nsouth/02.png;x\nnorth/../north/01.png;y\n")
    assert open_images(inside, column="file").names == ("south/02.png", "north/01.png")
    assert open_images(inside).names == ("south/02.png", "north/01.png")
    inside.write_text("file;label\none;x\nother;y\n")
    with pytest.raises(DataError, match="path.*--path-column"):
        open_images(inside)
    inside.unlink()
    table.write_text("path\nnorth/01.png\nsouth/02.png\n")  # relative to another folder
    with pytest.raises(DataError, match=r"2 of 2 .*list\.csv.*north/01\.png.*folder"):
        open_images(table)
    table.write_text(f"path\nnorth/01.png\nsouth/02.png\n{listed[0]}\n")
    assert "2 of 3" in open_images(table).notes[0]
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 14, 3), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", train_x=pixels[:8], test_x=pixels[8:])
    features = embed(trained, tmp_path / "set.npz")
    assert features.names[0] == "train/0" and features.names[-1] == "test/3"
    np.testing.assert_allclose(
        features.matrix(), load_encoder(trained).embed(pixels).numpy(), atol=1e-6
    )
    some = open_images(tmp_path / "set.npz").subset([9, 2])
    assert some.names == ("test/1", "train/2")
    np.testing.assert_allclose(embed(trained, some).matrix(), features.matrix()[[9, 2]], atol=1e-6)


@pytest.mark.parametrize("name", ["features.txt", "features", "folder.csv"])
def test_an_output_that_cannot_be_written_is_refused_first(
    name: str, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=name):
        embed(trained, tmp_path / "nothing", out=tmp_path / name)


def test_parquet_without_its_library_is_one_line(
    trained: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"harmonium\[parquet\]"):
        embed(trained, photos, out=tmp_path / "f.parquet")


def test_the_command(trained: Path, photos: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "f.npz"
    said, told = call("embed", trained, photos, "--out", out, "--whiten", 2)
    assert "22" in said and str(out) in said and "north/torn.png" in told
    said, told = call("embed", trained, photos, "--out", out, "--whiten", 2, "--json")
    about = json.loads(said)
    assert told == "" and (about["count"], about["dimension"]) == (22, 2)
    for words, named in (
        (("--out", tmp_path / "f.txt"), "f.txt"),
        (("--out", out, "--corrupt", "maybe"), "--corrupt"),
        (("--out", out, "--whiten", "no"), "--whiten"),
        (("--out", out, "--whiten", "99"), "99"),
        (("--out", out, "--batch", "0"), "batch"),
        (("--out", out, "--device", "cuda:7"), "cuda:7"),
        (("--out", out, "--import", "nosuchmodule"), "nosuchmodule"),
    ):
        said, told = call("embed", trained, photos, *words, code=2)
        assert said == "" and named in told and len(told.strip().splitlines()) == 1
    _, told = call("embed", tmp_path, photos, "--out", out, code=2)
    assert "encoder.safetensors" in told
