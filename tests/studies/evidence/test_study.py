"""Studies from their file to the page: stages, what is run again, and what is refused."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harmonium.cli.main import app
from harmonium.core.errors import ConfigError
from harmonium.measures.evaluation import evaluate_run
from harmonium.recipe.presets import studies
from harmonium.recipe.schema import Recipe
from harmonium.studies.evidence.published import evidence_page, publish
from harmonium.studies.evidence.study import CODE, code_version, study
from harmonium.studies.evidence.study_file import read_study
from harmonium.studies.evidence.worker import DIED, Worker

pytestmark = pytest.mark.usefixtures("all_unrendered")

SMALL = """\
# Do labels help?
# Nobody, 2026
claim: Labels help.
regime: >
  data=shapes data.count=96 data.test_count=64 data.validation=0.3 data.size=8 clients=2 rounds=4
  encoder.width=4 encoder.out=8 views.mode=fast local.batch=32 local.epochs=1
  evaluate.k=5 evaluate.labels_per_class=[] evaluate.every=1 engine.workers=0
arms:
  FedAvg: fedavg
  FedProx: fedprox method.mu=0.1
references: [centralised]
grid: {local.lr: [0.01, 0.1]}
seeds: {headroom: [1, 2], tuning: [3], deciding: [4, 5]}
headroom: {by: knn, flat: 100}
rule: [{better: FedProx, than: FedAvg, by: knn}]
"""

MEASURED = """\
measures:
  "*": personal personal.epochs=0
  FedProx: personal personal.epochs=0 angles angles.clients=2
tuning: {by: personal}
rule: []
"""


def written(path: Path, text: str = SMALL) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", studies())
def test_every_study_of_the_library_can_be_read(name: str) -> None:
    file = read_study(name)
    assert file.title and file.claim and file.rows
    assert all(len(file.recipe(c, row, s, 1).digest) > 8
               for c in file.conditions for row in file.rows for s in file.settings)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("claim: Labels help.", "clame: x", "clame"),
        ("fedprox method", "fedprux method", "s, FedProx: .*fedprux"),
        ("tuning: [3]", "tuning: [1]", "seed 1"),
        ("deciding: [4, 5]", "deciding: [4]", "seeds.deciding"),
        ("than: FedAvg", "than: FedAvgg", "FedAvgg"),
        ("by: knn}]", "by: nkn}]", "nkn"),
        ("headroom: {by: knn, flat: 100}\n", "", "headroom"),
        ("references: [centralised]", "references: [central]", "central"),
        ("local.lr: [", "local.lrr: [", "local.lrr"),
        ("fedprox method.mu=0.1", "fedavg", "FedAvg and FedProx"),
        ("rule: [{", "measures: persnal\nrule: [{", "persnal"),
        ("rule: [{", "measures: personal personal.epoch=1\nrule: [{", "personal.epoch"),
        ("rule: [{", "measures: tsne\nrule: [{", "tsne"),
        ("rule: [{", "measures: {FedAvgg: personal}\nrule: [{", "FedAvgg"),
        ("rule: [{", "measures: angles\ntuning: {by: angle}\nrule: [{", "angle"),
        ("by: knn}]", "by: personal}]", "personal"),  # which no measure gives
        ("FedProx: fedprox method.mu=0.1", "FedProx:", "FedProx"),
        ("local.lr: [0.01, 0.1]", "local.lr: 0.01", "grid.local.lr"),
        ("arms:", "vary: {local.epochs: 2}\narms:", "vary.local.epochs"),
        ("flat: 100", "flat: little", "headroom.flat"),
        ("by: knn}]", "by: knn, margin: much}]", "rule.margin"),
        ("by: knn}]", "by: knn, in: winter}]", "winter"),
        ("than: FedAvg", "than: FedProx", "FedProx"),
        ("rule: [{", "rule: [FedProx wins, {", "FedProx wins"),
        ("deciding: [4, 5]", "deciding: [4, 5, 4]", "seeds.deciding"),
    ],
)
def test_slips_are_refused_before_anything_runs(
    tmp_path: Path, old: str, new: str, names: str
) -> None:
    assert old in SMALL
    path = written(tmp_path / "s.yaml", SMALL.replace(old, new))
    done = CliRunner().invoke(app, ["study", path, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError) and re.search(names, str(done.exception))
    assert "\n" not in str(done.exception) and not (tmp_path / "out").exists()


def test_arms_with_one_recipe_may_differ_in_how_they_are_measured(tmp_path: Path) -> None:
    text = SMALL.replace("fedprox method.mu=0.1", "fedavg")
    with pytest.raises(ConfigError, match="FedAvg and FedProx"):
        read_study(written(tmp_path / "same.yaml", text))
    differ = 'measures: {"*": personal, FedProx: personal personal.adapter=mlp}\n'
    assert read_study(written(tmp_path / "measured.yaml", differ + text)).rows[:2] == (
        "FedAvg",
        "FedProx",
    )


def test_without_headroom_nothing_is_tuned_or_decided(tmp_path: Path, undrawn: None) -> None:
    found = study(written(tmp_path / "s.yaml"), out=tmp_path / "out")
    assert not found.has_headroom("") and found.verdict == "not decidable here"
    assert {cell.stage for cell in found.results} == {"headroom"}
    plain = json.loads((tmp_path / "out" / "study.json").read_text())
    assert plain["verdict"] == found.verdict and len(plain["cells"]) == 4
    assert found.verdict in (tmp_path / "out" / "study.md").read_text()


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A study that nothing keeps from its end: without a rule it needs no headroom."""
    folder = tmp_path_factory.mktemp("study")
    text = SMALL.replace("rule: [{better: FedProx, than: FedAvg, by: knn}]", MEASURED)
    study(written(folder / "s.yaml", text), out=folder / "out")
    return folder


def test_every_arm_is_tuned_on_one_grid_and_shown_on_fresh_seeds(decided: Path) -> None:
    plain = json.loads((decided / "out" / "study.json").read_text())
    tuned = {one["row"]: len(one["scores"]) for one in plain["tuning"]}
    assert tuned == {"FedAvg": 2, "FedProx": 2, "centralised": 2}
    for one in plain["tuning"]:
        best = max(one["scores"], key=lambda each: each["score"])
        assert best["setting"] == one["chosen"]
    cells = [one for one in plain["cells"] if one["stage"] == "deciding"]
    assert {(one["row"], one["seed"]) for one in cells} == {
        (row, seed) for row in tuned for seed in (4, 5)
    }
    chosen = {one["row"]: one["chosen"] for one in plain["tuning"]}
    assert all(one["setting"] == chosen[one["row"]] for one in cells)
    assert len({one["recipe"] for one in plain["cells"]}) == len(plain["cells"])


def test_measures_give_figures_of_rows_and_choose_settings_on_validation_images(
    decided: Path,
) -> None:
    plain = json.loads((decided / "out" / "study.json").read_text())
    keys = {
        (one["stage"], one["row"]): set(one["figures"]) - {"knn", "linear"}
        for one in plain["figures"]
    }
    figures = {"general", "personal", "worst"}
    assert keys["deciding", "FedAvg"] == {"rank", *figures}
    assert keys["deciding", "FedProx"] == {"rank", *figures, "angle", "angle_ratio"}
    assert keys["deciding", "untrained"] == {"rank", "general", "personal"}
    assert {f"validation_{key}" for key in figures} < keys["tuning", "FedAvg"]
    assert "personal" not in keys["tuning", "FedAvg"]
    assert not plain["unmeasured"] and all(one["figures"] for one in plain["cells"])
    for one in plain["tuning"]:
        values = {
            tuple(cell["setting"]): cell["figures"]["validation_personal"]
            for cell in plain["cells"]
            if (cell["stage"], cell["row"]) == ("tuning", one["row"])
        }
        assert values == {tuple(each["setting"]): each["score"] for each in one["scores"]}
    page = (decided / "out" / "study.md").read_text()
    assert "effective rank" in page and "worst client" in page and "angle ratio" in page


def test_figures_of_measures_are_those_of_eval(decided: Path, tmp_path: Path) -> None:
    plain = json.loads((decided / "out" / "study.json").read_text())
    for stage, part, key in (
        ("deciding", "test", "personal"),
        ("tuning", "validation", "validation_personal"),
    ):
        cell = next(c for c in plain["cells"] if (c["stage"], c["row"]) == (stage, "FedAvg"))
        folder, settings = decided / "out" / cell["path"], {"personal.epochs": 0}
        settings |= {"personal.part": part}
        evaluated = evaluate_run(folder, "personal", out=tmp_path, formats="png", **settings)
        (figures,) = evaluated.figures["personal"].values()
        assert cell["figures"][key] == 100 * figures["personalisation"]["mean"]


def test_a_measure_that_fails_is_told_and_others_go_on(decided: Path, tmp_path: Path) -> None:
    shutil.copytree(decided / "out", tmp_path / "out")
    text = SMALL.replace("rule: [{better: FedProx, than: FedAvg, by: knn}]", MEASURED)
    text = text.replace('"*": personal personal.epochs=0', '"*": personal personal.epochs=0 angles')
    found = study(written(tmp_path / "s.yaml", text), out=tmp_path / "out")
    assert {cell.row for cell in found.unmeasured} == {"centralised"}  # it has one client
    assert "angle" in found.figures("deciding", "", "FedAvg")
    page = (tmp_path / "out" / "study.md").read_text()
    assert all(f"not measured: {cell.label}" in page for cell in found.unmeasured)


def test_nothing_runs_twice_and_a_changed_file_is_told(
    decided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted((decided / "out").rglob("result.json"))
    times = [path.stat().st_mtime_ns for path in before]
    text = (decided / "s.yaml").read_text().replace("Labels help", "Labels do help")
    monkeypatch.setattr("harmonium.studies.evidence.study.measure", None)  # nothing is measured
    again = study(written(decided / "s.yaml", text), out=decided / "out")
    after = sorted((decided / "out").rglob("result.json"))
    assert after == before and [path.stat().st_mtime_ns for path in after] == times
    assert len(again.changed) == 1 and "12" in again.changed[0]  # runs that had finished
    assert again.changed[0] in (decided / "out" / "study.md").read_text()


def test_a_finished_study_can_be_published(decided: Path, tmp_path: Path) -> None:
    paths = publish(str(decided / "s.yaml"), tmp_path / "docs", out=decided / "out")
    assert {path.suffix for path in paths} == {".md", ".json", ".png"}
    texts = [path.read_text() for path in paths if path.suffix != ".png"]
    assert not any(str(decided) in text for text in texts)
    page = evidence_page(tmp_path / "docs")
    assert "FedProx" in page and "Labels" in page and "shapes, 2 clients, 4 rounds" in page


def test_a_dry_run_counts_finished_runs_of_every_stage(decided: Path, tmp_path: Path) -> None:
    def stages(out: Path) -> dict:
        words = ["study", str(decided / "s.yaml"), "--out", str(out), "--dry-run", "--json"]
        done = CliRunner().invoke(app, words)
        return {one["stage"]: one for one in json.loads(done.output)}

    finished, fresh = stages(decided / "out"), stages(tmp_path / "new")
    assert {k: (v["runs"], v["finished"]) for k, v in finished.items()} == {
        "tuning": (6, 6),
        "deciding": (6, 6),
    }
    assert finished["deciding"]["cpu_seconds"] == 0
    assert all(one["finished"] == 0 and one["cpu_seconds"] is None for one in fresh.values())
    assert not (tmp_path / "new").exists()


def test_runs_in_processes_of_their_own_have_the_same_figures(
    decided: Path, tmp_path: Path
) -> None:
    text = SMALL.replace("rule: [{better: FedProx, than: FedAvg, by: knn}]", "rule: []")
    text = text.replace("[0.01, 0.1]", "[0.1]").replace("deciding: [4, 5]", "deciding: [4]")
    text = text.replace("references: [centralised]", "references: []")
    text = text.replace("headroom: {by: knn, flat: 100}\n", "measures: {FedAvg: angles}\n")
    text = text.replace("tuning: [3], ", "")
    path = written(tmp_path / "s.yaml", text.replace("headroom: [1, 2], ", "tuning: [3], "))
    one, two = (study(path, out=tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    for row in ("FedAvg", "FedProx"):
        assert one.figures("deciding", "", row) == two.figures("deciding", "", row)
    assert "angle" in two.figures("deciding", "", "FedAvg")
    assert all(seconds > 0 for seconds in two.costs.values()) and len(two.costs) == 2
    assert one.commits == two.commits == [code_version()]
    made_by = json.loads((two.folder / CODE).read_text())
    (two.folder / CODE).write_text(json.dumps({**made_by, min(made_by): "older"}))
    assert sorted(study(path, out=two.folder).commits) == sorted(["older", code_version()])


def test_a_study_that_is_stopped_starts_no_further_run_and_blames_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def pretend(worker: Worker, recipe: Recipe, folder: Path) -> tuple[float, str]:
        begun.append(folder)
        if len(begun) == 1:  # the first is at work when Ctrl-C comes, for ten seconds at most
            for _ in range(1000):
                time.sleep(0 if worker._closed else 0.01)
        return 0.0, DIED if worker._closed else ""

    def note(text: str) -> None:
        told.append(text)
        raise KeyboardInterrupt

    told: list[str] = []
    monkeypatch.setattr(Worker, "run", pretend)
    with pytest.raises(KeyboardInterrupt):
        study(written(tmp_path / "s.yaml"), out=tmp_path / "out", jobs=2, note=note)
    assert len(begun) <= 3 and len(told) == 1 and "failed" not in told[0]


def test_failed_runs_are_not_taken_for_a_lack_of_headroom(tmp_path: Path, undrawn: None) -> None:
    impossible = "clients=2 split=by_class split.classes_per_client=2"  # of eight classes
    text = SMALL.replace("clients=2", impossible)
    found = study(written(tmp_path / "s.yaml", text), out=tmp_path / "out")
    assert found.failed and not any(check.met for check in found.checks[""])
    decision = found.decisions[0]
    assert decision.verdict == "not decidable here" and "4 runs failed" in decision.why


def test_the_studies_are_listed() -> None:
    done = CliRunner().invoke(app, ["study", "--json"])
    assert set(json.loads(done.output)) == set(studies())


def test_settings_can_be_chosen_by_the_global_objective_of_which_less_is_better(
    tmp_path: Path, undrawn: None
) -> None:
    text = SMALL.replace("rule: [{better: FedProx, than: FedAvg, by: knn}]", "rule: []")
    text = text.replace("references: [centralised]", "references: []\ntuning: {by: objective}")
    text = text.replace("headroom: {by: knn, flat: 100}\n", "").replace("headroom: [1, 2], ", "")
    text = text.replace("rounds=4", "rounds=1 objective=spectral objective.form=fedsc")
    text = text.replace("  FedProx: fedprox method.mu=0.1\n", "")
    found = study(written(tmp_path / "s.yaml", text), out=tmp_path / "out")
    scores = found.scores["", "FedAvg"]
    assert len(set(scores.values())) == 2
    assert scores[found.chosen["", "FedAvg"]] == min(scores.values())
