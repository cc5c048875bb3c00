"""Inspection of images that the tests make themselves: what is counted, found and suggested."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import harmonium
from harmonium.cli.main import app
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.augment.views import PRESETS
from harmonium.data.decoding import pool
from harmonium.data.inspection import inspect
from harmonium.data.inspection.duplicates import CONTRAST, LEVELS, group_numbers
from harmonium.data.inspection.kinds import RULES, VIEWS, kind_of, removals
from harmonium.data.inspection.measures import measured, told
from harmonium.data.inspection.structure import word_of
from harmonium.data.inspection.text import lines
from harmonium.data.partition import make_split
from harmonium.recipe.schema import Recipe


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode here: processes of their own would take most of the time."""
    monkeypatch.setattr(pool, "_cores", lambda: 0)


RNG = np.random.default_rng(0)


def save(pixels: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def smooth(count: int, side: int, channels: int = 3, coarse: int = 4) -> np.ndarray:
    """Soft random images, `(n, side, side, channels)`."""
    small = RNG.integers(0, 256, (count, coarse, coarse, channels)).astype(np.uint8)
    images = [Image.fromarray(x if channels == 3 else x[..., 0]) for x in small]
    big = [np.asarray(x.resize((side, side), Image.Resampling.BICUBIC)) for x in images]
    return np.stack(big)


def natural(count: int) -> np.ndarray:
    return smooth(count, 24)


def tissue(count: int) -> np.ndarray:
    """Pink with purple nuclei, all over the image."""
    share = smooth(count, 24, 1, 8)[..., None] / 255
    pink, purple = np.array((235, 170, 200)), np.array((120, 70, 150))
    return (pink * (1 - share) + purple * share).astype(np.uint8)


def scans(count: int) -> np.ndarray:
    """A light body on black, in grey."""
    y, x = np.mgrid[-1:1:24j, -1:1:24j]
    body = np.clip(1.3 - 1.6 * np.hypot(x, y), 0, 1)[None]
    grey = (body * (90 + smooth(count, 24, 1) // 2)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, 3)


def documents(count: int) -> np.ndarray:
    """Letters F of thin black strokes on white, at slightly different places."""
    pages = np.full((count, 24, 24, 3), 250, np.uint8)
    for page in pages:
        top, left = RNG.integers(2, 6, 2)
        page[top : top + 16, left : left + 2] = 20
        page[top : top + 2, left : left + 11] = 20
        page[top + 7 : top + 9, left : left + 8] = 20
    return pages


MADE = {"natural": natural, "tissue": tissue, "scan": scans, "document": documents}


# ---- counts --------------------------------------------------------------------------------------


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Three sites with two classes each, of several sizes, with broken files and copies."""
    root = tmp_path / "three sites"
    for name, count, size in (("north", 40, (20, 24)), ("south", 30, (30, 18)), ("west", 2, None)):
        for number in range(count):
            pixels = natural(1)[0]
            image = Image.fromarray(pixels).resize(size or (24, 24))
            place = root / name / f"kind{number % 2}" / f"{number:02}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            image.save(place)
    (root / "north/kind0/bad.png").write_bytes(b"this is text")
    (root / "north/kind1/none.jpg").write_bytes(b"")
    whole = (root / "south/kind0/00.png").read_bytes()
    (root / "south/kind0/cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "south/notes.txt").write_text("read me")
    with Image.open(root / "north/kind0/00.png") as image:
        image.resize((40, 48)).save(root / "south/kind1/copy.jpg", quality=95)
        image.save(root / "north/kind1/copy.png")
    return root


def test_everything_in_a_folder_of_sites_is_counted(sites: Path) -> None:
    found = inspect(sites)
    assert found.images == 74
    assert found.sizes == {"20x24": 41, "30x18": 30, "24x24": 2, "40x48": 1}
    assert set(found.broken) == {
        str(Path("north/kind0/bad.png")),
        str(Path("north/kind1/none.jpg")),
        str(Path("south/kind0/cut.png")),
    }
    assert found.broken[str(Path("north/kind1/none.jpg"))] == "empty"
    assert found.unread == "1 .txt"
    assert found.folders.startswith("sites, then classes")
    assert found.label == "level 2"
    assert found.clients.sizes == {"north": 41, "south": 31, "west": 2}
    assert (found.columns[0].least, found.columns[0].most, found.columns[0].known) == (2, 41, 74)
    again = found.duplicates
    assert (again.groups, again.images, again.across, again.within) == (1, 3, 1, 0)


def test_the_suggested_command_runs(sites: Path, home: Path) -> None:
    """As printed, but smaller; a site may lose all of its images to the held-out parts."""
    found = inspect(sites)
    words = shlex.split(found.command)
    assert words[:3] == ["harmonium", "run", "fedavg"]
    recipe = Recipe.of(*words[2:])
    split = make_split(recipe.split, recipe.data.load(), None, recipe.clients, 0)
    assert found.clients.count == recipe.clients == len(split)
    small = ["rounds=1", "encoder.width=4", "engine.workers=0", "evaluate.labels_per_class=[]"]
    app([*words[1:], *small, "--out", str(home / "run")], standalone_mode=False)
    assert (home / "run" / "encoder.safetensors").is_file()


@pytest.mark.parametrize("seed", range(3))
def test_the_clients_left_with_training_images_are_counted_exactly(
    tmp_path: Path, home: Path, seed: int
) -> None:
    """Sites of one to three images, of which some are held out whole."""
    sizes = {"site1": 30, "site2": 1, "site3": 2, "site4": 1, "site5": 3, "site6": 1}
    for name, count in sizes.items():
        for number in range(count):
            save(natural(1)[0], tmp_path / "in" / name / f"{number}.png")
    found = inspect(tmp_path / "in", f"data.seed={seed}")
    recipe = Recipe.of(*shlex.split(found.command)[2:])
    held = recipe.data.load().train.factors["style"]
    assert found.clients.count == len(np.unique(held))
    assert any("lose all images" in note for note in found.notes) == (found.clients.count < 6)


def test_a_table_with_columns_of_other_names(tmp_path: Path, home: Path) -> None:
    rows = ["image_file;Hospital;diagnosis;patient_id"]
    for number, pixels in enumerate(scans(60)):
        save(pixels[..., 0], tmp_path / "files" / f"{number}.png")
        rows.append(f"files/{number}.png;{'AB'[number % 2]};{number % 3};p{number // 2}")
    table = tmp_path / "list.csv"
    table.write_text("\n".join(rows))
    found = inspect(table)
    assert (found.clients.column, found.clients.count, found.label) == ("Hospital", 2, "diagnosis")
    assert any("patient_id" in note for note in found.notes)
    shown = json.dumps(found.plain()) + str(lines(found))
    assert "p29" not in shown and '"p1"' not in shown  # names of patients are not repeated
    assert found.suggestion.channels == 1
    recipe = Recipe.of(*shlex.split(found.command)[2:])
    dataset = recipe.data.load()
    assert dataset.classes == ("0", "1", "2")
    assert len(make_split(recipe.split, dataset, None, recipe.clients, 0)) == 2


def test_settings_of_data_decide(tmp_path: Path) -> None:
    save(natural(1)[0], tmp_path / "x" / "a.png")
    (tmp_path / "list.csv").write_text("path,ward,kind\na.png,1,2\n")
    found = inspect(
        tmp_path / "list.csv",
        f"data.root={tmp_path / 'x'}",
        "data.client_column=ward",
        "data.label_column=kind",
    )
    assert found.images == 1
    assert found.label == "kind"
    assert "data.client_column=ward" in found.command
    assert "data.client_column=ward" in found.start


def test_an_archive_with_sites(tmp_path: Path, home: Path) -> None:
    images = natural(80)
    images[41] = images[3]
    where = np.array(["east", "west"])[np.arange(80) // 40]
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(80) % 4, site=where)
    found = inspect(tmp_path / "a.npz")
    assert found.form == "npz"
    assert found.images == 80
    assert found.modes == {"colour": 80}
    assert found.clients.sizes == {"east": 40, "west": 40}
    assert (found.duplicates.groups, found.duplicates.across) == (1, 1)
    assert found.duplicates.examples == (("image 3", "image 41"),)
    recipe = Recipe.of(*shlex.split(found.command)[2:])
    assert len(make_split(recipe.split, recipe.data.load(), None, recipe.clients, 0)) == 2


def test_near_duplicates_across_parts_are_counted(tmp_path: Path) -> None:
    for part, count in (("train", 30), ("test", 10)):
        for number in range(count):
            save(natural(1)[0], tmp_path / part / "one" / f"{number}.png")
    with Image.open(tmp_path / "train/one/5.png") as image:
        image.save(tmp_path / "test/one/same.png")
    found = inspect(tmp_path)
    assert found.parts == {"train": 30, "test": 11}
    assert (found.duplicates.groups, found.duplicates.parts) == (1, 1)


def test_bits_of_16_bit_files_are_counted(tmp_path: Path) -> None:
    for number in range(4):
        values = RNG.integers(0, 4096, (16, 16)).astype(np.uint16)
        save(values, tmp_path / f"{number}.png")
    found = inspect(tmp_path)
    assert found.depth == 12
    assert "data.depth=12" in found.command


# ---- what folders and columns mean ---------------------------------------------------------------


def test_folders_are_sites_by_their_names_or_by_the_form_of_their_images(tmp_path: Path) -> None:
    def made(name: str, *folders: tuple[str, int]) -> str:
        for folder, side in folders:
            for number in range(5):
                save(smooth(1, side)[0], tmp_path / name / folder / f"{number}.png")
        return inspect(tmp_path / name).folders.partition(" (")[0]

    assert made("a", ("cat", 16), ("dog", 16)) == "classes"
    assert made("b", ("Hospital_1", 16), ("Hospital_2", 16)) == "sites"
    assert made("c", ("north", 16), ("south", 16)) == "sites"
    assert made("d", ("alpha", 16), ("beta", 20), ("gamma", 24)) == "sites"
    assert made("e", ("cat/p1", 16), ("cat/p2", 16), ("dog/p3", 16)) == "classes, then groups"
    assert made("f", ("site1/cat", 16), ("site2/cat", 16)) == "sites, then classes"


def test_first_words_of_names() -> None:
    assert [word_of(name) for name in ("SiteA", "site_a", "Site-1", "site1", "")] == [
        *["site"] * 4,
        "",
    ]


# ---- near-duplicates -----------------------------------------------------------------------------


def test_no_near_duplicate_is_missed() -> None:
    """Against a comparison of every pair, on noisy copies around the limits."""
    plain = RNG.integers(0, 256, (15, 432)).astype(np.float64)
    faint = 128 + (plain[:5] - 128) / 16  # their own contrast is what limits them
    base = np.concatenate([plain, faint])
    noisy = [base + RNG.normal(0, deviation, base.shape) for deviation in (0, 1, 3, 3.9, 4.1, 8)]
    rows = np.clip(np.concatenate(noisy), 0, 255).round().astype(np.uint8)
    values = rows.astype(np.float64)
    apart = np.array([np.sqrt(((one - values) ** 2).mean(1)) for one in values])
    unit = values - values.mean(1, keepdims=True)
    unit /= np.sqrt((unit**2).mean(1, keepdims=True))
    relative = np.array([np.sqrt(((one - unit) ** 2).mean(1)) for one in unit])
    near = (apart <= LEVELS) & (relative <= CONTRAST)
    linked = np.linalg.matrix_power(near.astype(np.float64), 8) > 0
    numbers = group_numbers(rows)
    assert ((numbers[:, None] == numbers) == linked).all()
    assert 0 < (near.sum() - len(rows)) / 2 < len(rows) ** 2 / 2


def test_copies_that_differ_along_the_widest_direction_are_found() -> None:
    """Images that differ in brightness alone: by 4 levels within tens, by 5 between them."""
    texture = RNG.integers(0, 60, 432)
    levels = np.cumsum(np.where(np.arange(40) % 10 == 0, 5, 4))
    numbers = group_numbers((texture + levels[:, None]).astype(np.uint8))
    assert numbers.tolist() == [row // 10 for row in range(40)]


def test_many_copies_are_grouped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    base = RNG.integers(60, 200, (5, 432))
    rows = (base[RNG.integers(0, 5, 300)] + RNG.integers(0, 3, (300, 432))).astype(np.uint8)
    whole = group_numbers(rows)
    monkeypatch.setattr("harmonium.data.inspection.duplicates.PAIRS", 500)
    assert (group_numbers(rows) == whole).all()
    assert len(np.unique(whole)) == 5


# ---- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_kinds_are_told_by_their_rules(kind: str) -> None:
    images = MADE[kind](200)
    verdict = kind_of(measured(images, images[:20]))
    assert verdict.kind == kind
    assert len(verdict.evidence) == 1 + [name for name, _ in RULES].index(kind)


def test_mixed_few_and_tiny_images_are_unknown() -> None:
    mixed = np.concatenate([natural(50), scans(50)])
    for images in (mixed, natural(10), smooth(50, 8)):
        assert kind_of(measured(images, images)).kind == "unknown"


def test_every_kind_has_views() -> None:
    assert set(VIEWS) == {*MADE, "unknown"}
    assert set(VIEWS.values()) <= set(PRESETS)


def test_a_mirror_is_told_where_images_have_sides() -> None:
    images = documents(200)[..., 0].astype(np.float64)
    assert told(images, lambda x: x[:, :, ::-1]) > 0.9
    noise = smooth(200, 12, 1).astype(np.float64)
    assert abs(told(noise, lambda x: x[:, :, ::-1]) - 0.5) < 0.1
    assert told(images[:50], lambda x: x[:, :, ::-1]) is None


def test_augmentations_that_would_remove_the_signal() -> None:
    def found(images: np.ndarray) -> dict[str, tuple[str, ...]]:
        measures = measured(images, images[:20])
        return {
            one.augmentation: one.settings for one in removals(kind_of(measures).kind, measures)
        }

    assert "hue jitter and grey" in found(tissue(200))
    letters = found(documents(200))
    assert letters["mirror"] == ()  # the preset has none
    assert {"large turns", "blur"} <= set(letters)
    arrows = natural(200)
    arrows[:, 4:20, 2:8] = (250, 20, 20)  # always on the left
    assert found(arrows)["mirror"] == ("views.flip=0",)
    dots = np.full((200, 32, 32, 3), 120, np.uint8) + RNG.integers(0, 9, (200, 32, 32, 3), np.uint8)
    for image in dots:
        top, left = RNG.integers(0, 29, 2)
        image[top : top + 3, left : left + 3] = RNG.integers(0, 256, 3)
    assert found(dots)["small crops"] in (("views.crop_min=0.7",), ("views.crop_min=0.9",))
    assert found(natural(200)) == {}


def test_small_and_large_images_get_a_size(tmp_path: Path) -> None:
    for number, pixels in enumerate(smooth(30, 200)):
        save(pixels[:, :100] if number < 20 else pixels, tmp_path / f"{number}.png")
    found = inspect(tmp_path)
    assert found.suggestion.size == 32
    assert any("middle square" in note for note in found.notes)


# ---- words ---------------------------------------------------------------------------------------


def test_the_command_line_ends_with_commands_and_json_has_everything(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["inspect", str(sites)], standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("run") and shown[-1].startswith("or")
    assert shlex.split(shown[-2])[1:] == ["harmonium", "start", str(sites)]
    app(["inspect", str(sites), "--json"], standalone_mode=False)
    plain = json.loads(capsys.readouterr().out)
    again = harmonium.inspect(sites)
    assert plain["command"] == again.command
    assert plain["broken"] == dict(again.broken)
    assert plain["measures"]["mirrored"] == again.measures.mirrored


def test_a_folder_that_no_run_reads_says_what_to_mend(sites: Path) -> None:
    save(natural(1)[0], sites / "stray.png")
    found = inspect(sites)
    assert "stray.png" in found.problems[0]
    assert lines(found)[-1][0] == "mend"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda root: root / "missing", "missing"),
        (lambda root: save(natural(1)[0], root / "one.png"), "one.png is one image"),
        (lambda root: (root / "empty").mkdir() or root / "empty", "no images"),
        (lambda root: (root / "a.doc").touch() or root / "a.doc", "a.doc"),
        (lambda root: (root / "t.csv").write_text("a,b\n1,2\n") and root / "t.csv", "path_column"),
    ],
)
def test_what_cannot_be_inspected_is_named(tmp_path: Path, make, named: str) -> None:
    with pytest.raises(DataError, match=named):
        inspect(make(tmp_path))


def test_only_broken_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match="1 image"):
        inspect(tmp_path)


def test_other_settings_are_refused(sites: Path) -> None:
    with pytest.raises(ConfigError, match="rounds=3"):
        inspect(sites, "rounds=3")


@pytest.mark.parametrize("spans", [False, True])
def test_groups_are_kept_together_where_no_client_shares_them(tmp_path: Path, spans: bool) -> None:
    rows = ["path,site,patient"]
    for number in range(120):
        save(np.full((8, 8), number, np.uint8), tmp_path / f"{number}.png")
        patient = number // 2 % 15
        site = number % 2 if spans else patient % 2
        rows.append(f"{number}.png,site {site},p{patient}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    found = inspect(tmp_path / "t.csv")
    assert found.suggestion.settings.get("data.group_column") == (None if spans else "patient")
    assert any("patient" in note and ("several" in note) is spans for note in found.notes)
    recipe = Recipe.of("fedavg", *found.suggestion.words())
    make_split(recipe.split, recipe.data.load(), None, recipe.clients, 0)  # or it raises an error
