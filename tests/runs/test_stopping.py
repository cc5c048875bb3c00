"""Runs that end early by their label-free score."""

import json
from pathlib import Path

import pytest

import harmonium
from harmonium.core.errors import CallbackError, ConfigError
from harmonium.evaluation.stopping import Stop, label_free_score
from harmonium.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = {
    "data.limit": 120,
    "clients": 2,
    "rounds": 8,
    "encoder.width": 4,
    "evaluate.every": 1,
    "evaluate.labels_per_class": [],
    "engine.workers": 0,
}
HASTY = {"stop.patience": 2, "stop.least": 0.2}


def rows(*scores: float | None) -> list[dict]:
    """Logged rounds of these scores; None where a round was not evaluated."""
    return [
        {"round": n, **({} if s is None else {"health": {"view_distance": 1 - s}})}
        for n, s in enumerate(scores)
    ]


def test_the_rule_counts_evaluations_without_improvement() -> None:
    stop = Stop(patience=2, least=0.1)
    assert not stop.why(rows(0.1, 0.3, 0.35))
    assert "after round 1" in stop.why(rows(0.1, 0.3, 0.35, 0.39))
    assert not stop.why(rows(0.1, 0.3, 0.35, 0.4))  # enough in two steps
    assert not stop.why(rows(0.1, 0.3, None, None, 0.35))  # not evaluated: no step
    assert not Stop(patience=None).why(rows(0.1, 0.1, 0.1, 0.1))


def test_scores_of_clients_come_first_and_diverged_features_are_no_improvement() -> None:
    both = {"round": 3, "reported": {"align": 0.5, "unif": -1.0}, "health": {"view_distance": 0.1}}
    assert label_free_score(both) == pytest.approx(0.3)
    assert label_free_score({"round": 1, "reported": {"loss": 1.0}}) is None
    diverged = [{"round": n, "health": {"view_distance": None}} for n in range(4)]
    assert Stop(patience=3).why([*rows(0.5), *diverged[1:]])


def test_a_run_ends_early_and_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = harmonium.run("digits", out=out, **SMALL, **HASTY)
    last = result.rounds[-1]["round"]
    assert 2 <= last < 8
    assert "label-free score" in result.stopped
    assert (out / "encoder.safetensors").is_file()
    assert harmonium.resume(out).rounds == result.rounds
    with pytest.raises(ConfigError, match="ended early"):
        harmonium.resume(out, rounds=20)
    whole = harmonium.run("digits", out=tmp_path / "whole", **SMALL)
    assert len(whole.rounds) == 9 and not whole.stopped
    assert [row["loss"] for row in whole.rounds[: last + 1]] == [r["loss"] for r in result.rounds]


def test_a_stopped_and_resumed_run_ends_at_the_same_round(tmp_path: Path) -> None:
    class Interrupt(harmonium.Callback):
        def round(self, row, seconds):
            if row["round"] == 1:
                raise RuntimeError

    harmonium.run("digits", out=tmp_path / "whole", **SMALL, **HASTY)
    with pytest.raises(CallbackError):
        harmonium.run("digits", out=tmp_path / "two", callbacks=Interrupt(), **SMALL, **HASTY)
    harmonium.resume(tmp_path / "two")
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "two")]
    assert logs[0] == logs[1]
    assert json.loads(logs[0].splitlines()[-1])["stopped"]


def test_recipes_without_the_setting_keep_their_digests() -> None:
    """The digest of the demonstration's recipe, as it was before there was such a setting."""
    assert Recipe.of("demo").digest.startswith("9a99707cd842")
    assert Recipe.of("demo", "stop.least=0.5").digest != Recipe.of("demo").digest
    assert Recipe.of("demo", "stop.patience=3").digest != Recipe.of("demo").digest


def test_a_server_without_images_needs_scores_of_clients() -> None:
    with pytest.raises(ConfigError, match="evaluate.tuning"):
        Recipe.of("fedavg", "data=sites", "data.size=16", "stop.patience=3")
    Recipe.of("fedavg", "data=sites", "data.size=16", "stop.patience=3", "evaluate.tuning=simclr")


@pytest.mark.parametrize("wrong", ["stop.patience=0", "stop.least=-1"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        Recipe.of("fedavg", wrong)
