"""From a path to an encoder: what is chosen, why, and that it can be repeated."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import harmonium
from harmonium.cli.main import app
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.decoding import pool
from harmonium.data.inspection.kinds import Removal
from harmonium.evaluation.verdict import label_free
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.schema import Recipe
from harmonium.runs.estimate import Estimate
from harmonium.studies import choices
from harmonium.studies import start as module
from harmonium.studies.choices import CHEAPER, TABLE, Facts, chosen
from harmonium.studies.diagnosis import diagnose

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

RNG = np.random.default_rng(0)
QUICK = ("evaluate.labels_per_class=[]", "engine.workers=0", "encoder.width=4")
FACTS = Facts(3, True, 600, "natural", 32, "cpu", 2, 8.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in this process, and time nothing: a round takes 20 s."""
    monkeypatch.setattr(pool, "_cores", lambda: 0)
    pace(monkeypatch, lambda recipe: 20.0)


def pace(monkeypatch: pytest.MonkeyPatch, seconds) -> list[Recipe]:
    """Let estimates find this many seconds a round; returns the recipes that were estimated."""
    asked: list[Recipe] = []

    def estimated(recipe: Recipe) -> Estimate:
        asked.append(recipe)
        return Estimate(10.0, seconds(recipe) * recipe.rounds, 30.0, recipe.rounds, 1, 1, ())

    monkeypatch.setattr(module, "estimated", estimated)
    return asked


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two sites with two classes of small images each, one of them broken."""
    root = tmp_path / "photos"
    for site in ("north", "south"):
        for number in range(40):
            pixels = RNG.integers(0, 256, (16, 16, 3)).astype(np.uint8)
            place = root / site / f"kind{number % 2}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place)
    (root / "north" / "kind0" / "bad.png").write_bytes(b"")
    return root


# ---- the rules -----------------------------------------------------------------------------------


def test_every_subject_ends_with_a_rule_that_always_holds() -> None:
    for rules in TABLE.values():
        assert rules[-1].when == "otherwise"
        assert rules[-1].holds(FACTS)
    for rule in (*CHEAPER, *(rule for rules in TABLE.values() for rule in rules)):
        Recipe.of("fedavg", **rule.settings)


@pytest.mark.parametrize(
    ("changes", "verified"),
    [
        ({"verdict": "content", "typical": 100}, True),
        ({"verdict": "content", "typical": 600}, False),
        ({"verdict": "style", "typical": 100}, False),
        ({"verdict": None, "typical": 100}, False),
    ],
)
def test_verification_is_for_content_and_few_steps(changes: dict, verified: bool) -> None:
    rule = chosen("method", replace(FACTS, **changes))
    assert (rule.settings is choices.VERIFICATION) == verified


def test_batches_follow_the_typical_client() -> None:
    sizes = {4: 8, 30: 8, 40: 16, 100: 32, 128: 64, 5000: 64}
    assert {n: replace(FACTS, typical=n).batch for n in sizes} == sizes
    assert replace(FACTS, typical=600).steps == 10


def test_the_device_decides_on_encoder_and_size() -> None:
    large = replace(FACTS, side=128)
    assert chosen("size", large).settings == {"data.size": 64}
    there = replace(large, device="cuda:0")
    assert chosen("size", there).settings == {}
    assert chosen("encoder", there).settings == {"encoder": "resnet18"}
    assert chosen("workers", replace(FACTS, memory=1.0)).settings == {"engine.workers": 0}


# ---- choosing ------------------------------------------------------------------------------------


def test_a_dry_run_prints_a_recipe_that_run_takes(
    photos: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["start", str(photos), "--dry-run", *QUICK], standalone_mode=False)
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("# ")]) >= 6
    (tmp_path / "mine.yaml").write_text(text)
    recipe = Recipe.of(str(tmp_path / "mine.yaml"))
    assert (recipe.clients, recipe.split.name, recipe.stop.patience) == (2, "column", 3)
    assert recipe.rounds == (20 * 60 - 40) // 20
    assert not (home / "runs").exists()
    app(["start", str(photos), "--dry-run", "--json", *QUICK], standalone_mode=False)
    plain = json.loads(capsys.readouterr().out)
    assert plain["digest"] == recipe.digest
    assert list(plain["reasons"]) == ["images", "method", "encoder", "views", "rounds"]
    assert plain["diagnosis"]["clients"] == 2


def test_rounds_fit_into_the_time(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dry(**how) -> Recipe:
        return harmonium.start(photos, "engine.workers=0", dry_run=True, **how).recipe

    assert dry(minutes=10).rounds == 28
    assert dry(minutes=1000).rounds == choices.MOST
    asked = pace(monkeypatch, lambda recipe: 4.0 * recipe.encoder.width)
    assert dry(minutes=30).encoder.width == 16  # of width 32 too few rounds would fit
    assert [recipe.encoder.width for recipe in asked] == [32, 16]
    assert dry(minutes=1).rounds == module.FEWEST
    assert dry(minutes=1, rounds=3).rounds == 3
    monkeypatch.setattr(module, "estimated", lambda recipe: "a trial failed")
    started = harmonium.start(photos, "engine.workers=0", dry_run=True)
    assert started.recipe.rounds == module.UNMEASURED
    assert started.choice.estimate is None


def test_verification_needs_rounds(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diagnosed(recipe):
        return replace(diagnose(recipe), verdict="content")

    monkeypatch.setattr(module, "diagnose", diagnosed)
    slow = harmonium.start(photos, *QUICK, dry_run=True, minutes=20).recipe
    assert not slow.terms and slow.objective.name == "simclr"
    fast = harmonium.start(photos, *QUICK, dry_run=True, minutes=60).recipe
    assert fast.terms[0].name == "uv" and fast.server.name == "adam"


def test_settings_that_are_given_are_not_chosen(photos: Path, home: Path) -> None:
    def dry(*words: str) -> Recipe:
        return harmonium.start(photos, *words, "engine.workers=0", dry_run=True).recipe

    given = dry("encoder=resnet8", "clients=4", "split=iid", "views=digits", "data.size=12")
    assert (given.encoder.name, given.clients, given.split.name) == ("resnet8", 4, "iid")
    assert (given.views.name, given.data.size) == ("digits", 12)
    assert dry("method=fedprox", "stop.patience=none").stop.patience is None


def test_what_views_leave_out_reads_as_a_list(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = tuple(Removal(name, "", 0.9) for name in ("mirror", "large turns", "blur"))
    for count, said in ((1, "without mirror"), (3, "without mirror, large turns and blur")):
        found = replace(module.inspect(photos), removals=left_out[:count])
        with monkeypatch.context() as patched:
            patched.setattr(module, "inspect", lambda *_, found=found: found)
            choice = module.choose(photos, changes_of((*QUICK, "clients=1", "split=iid"), {}))
        assert dict(choice.reasons)["views"].endswith(said)


# ---- running -------------------------------------------------------------------------------------


def test_a_started_run_is_repeated_to_the_bit_and_continued(
    photos: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "first"
    notes: list[str] = []

    class Notes(harmonium.Callback):
        def note(self, text):
            notes.append(text)

    started = harmonium.start(photos, *QUICK, "rounds=2", out=out, callbacks=Notes())
    assert started.file == tmp_path / "runs" / "first.yaml"
    assert [n.partition(":")[0] for n in notes[:5]] == [subject for subject, _ in started.reasons]
    assert all(str(out) in command for command in started.next)
    again = harmonium.run(str(started.file), out=tmp_path / "again")
    assert again.recipe.digest == started.recipe.digest
    for name in ("encoder.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    monkeypatch.setattr(module, "inspect", None)  # nothing is chosen again
    continued = harmonium.start(photos, out=out, callbacks=Notes())
    assert any(f"harmonium resume {out} rounds=" in note for note in notes)
    assert continued.reasons == started.reasons
    assert continued.result.rounds == started.result.rounds
    with pytest.raises(ConfigError, match="rounds"):
        harmonium.start(photos, "rounds=4", out=out)
    with pytest.raises(ConfigError, match="another --out"):
        harmonium.start(tmp_path, out=out)


def test_without_labels_the_verdict_is_of_the_features(tmp_path: Path, home: Path) -> None:
    for number in range(40):
        pixels = RNG.integers(0, 256, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    started = harmonium.start(tmp_path, *QUICK, "rounds=1", "clients=2")
    assert started.result.verdict == ""
    used, before = (
        figures["health"]["directions"]
        for figures in (started.result.figures, started.result.untrained)
    )
    assert f"{used:.1f} directions (untrained {before:.1f})" in started.verdict
    assert started.plain()["verdict"] == started.verdict


def test_the_verdict_without_labels_names_a_collapse() -> None:
    health = {"finite": True, "directions": 1.0, "effective_rank": 1.0, "spread": 0.1}
    assert "Not collapsed" in label_free(health, health)
    said = label_free({**health, "warnings": ["It has collapsed onto few directions."]}, health)
    assert said.startswith("Collapsed") and "onto few directions" in said
    assert "not finite" in label_free({}, health)
    assert "not finite" in label_free({"finite": False, "directions": None}, health)


def test_what_would_be_overwritten_or_cannot_work_is_refused(
    photos: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"rounds": 3}))
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        harmonium.start(photos, *QUICK, "rounds=1", out=tmp_path / "x")
    assert yaml.safe_load((tmp_path / "x.yaml").read_text()) == {"rounds": 3}
    with pytest.raises(ConfigError, match="minutes"):
        harmonium.start(photos, minutes=0)
    Image.new("L", (16, 16), 9).save(photos / "stray.png")
    with pytest.raises(DataError, match=r"stray\.png"):
        harmonium.start(photos, dry_run=True)
