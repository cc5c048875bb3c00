"""Evaluation at the clients: counts alone leave, and they are those of the clients' images."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import harmonium
from harmonium.cli.terminal import show_sites
from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.engines.local import LocalEngine
from harmonium.evaluation.counts import Ridge, class_means, held_out
from harmonium.evaluation.features import embed
from harmonium.evaluation.linear import probe_scores
from harmonium.federation.card import card
from harmonium.federation.driver import Reply
from harmonium.federation.method import Method
from harmonium.federation.site_evaluation import KEY
from harmonium.federation.wire import LABELLED
from harmonium.learning.client import Client
from harmonium.measures.run_reader import Run, open_run
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import open_runtime
from harmonium.runs.start import changed_recipe
from harmonium.studies.comparison.cells import plan
from harmonium.testing import Trial, check_method, first_trial

pytestmark = pytest.mark.usefixtures("undrawn")

CLASSES = 3
EVALUATE: dict[str, Any] = {"k": 5, "labels_per_class": [], "sites": "ridge", "sites_least": 2}
SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "count": 150, "test_count": 30, "size": 10, "classes": CLASSES},
    "encoder": {"name": "cnn-small", "width": 4, "out": 12},
    "local": {"epochs": 1, "batch": 8},
    "evaluate": EVALUATE,
    "engine": {"workers": 0},
    "clients": 3,
    "rounds": 1,
}


def settings(**evaluate: Any) -> dict[str, Any]:
    return {**SMALL, "evaluate": {**EVALUATE, **evaluate}}


def opened(path: Path) -> Run:
    return open_run(path, "run", changed_recipe(path, ()))


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    harmonium.run("fedavg", out=folder, **SMALL)
    return folder


def parts(run: Run, client: int, share: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """The images that a client learns from and those that it is tested on."""
    own = run.split.indices[client]
    rng = seeds.numpy_rng(run.recipe.seed, "held_out", client)
    rows = held_out(run.dataset.train.labels[own], None, share, rng)
    return own[np.setdiff1d(np.arange(len(own)), rows)], own[rows]


def features(run: Run) -> tuple[torch.Tensor, np.ndarray]:
    train = run.dataset.train
    return embed(run.method.represent(run.server), train, run.method.views.plain), train.labels


def confusion(predicted: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    table = np.zeros((CLASSES, CLASSES), int)
    np.add.at(table, (labels, predicted), 1)
    return table.tolist()


def test_a_common_classifier_has_the_counts_of_pooled_images(common: Path) -> None:
    run, figures = opened(common), harmonium.resume(common).sites
    rows, labels = features(run)
    cuts = [parts(run, client) for client in range(3)]
    learned = np.concatenate([first for first, _ in cuts])
    assert figures["learned"] == len(learned)
    pooled = Ridge.fit(class_means(rows[learned], labels[learned], CLASSES))
    predicted = pooled.scores(rows).argmax(axis=1)
    tested = np.concatenate([held for _, held in cuts])
    assert figures["all"]["confusion"] == confusion(predicted[tested], labels[tested])
    assert figures["all"]["images"] == figures["all"]["seen"] == len(tested)
    assert figures["all"]["accuracy"] == np.mean(predicted[tested] == labels[tested])
    for row in figures["by_site"]:
        held = cuts[row["client"]][1]
        assert row["confusion"] == confusion(predicted[held], labels[held])
    balanced = [row["balanced"] for row in figures["by_site"]]
    assert balanced == sorted(balanced) and figures["mean"]["balanced"] == np.mean(balanced)
    assert figures["classes"] == list(run.dataset.classes)


def test_probes_are_each_clients_own(tmp_path: Path) -> None:
    result = harmonium.run("fedavg", out=tmp_path / "run", **settings(sites="probe"))
    run = opened(result.folder)
    rows, labels = features(run)
    assert "learned" not in result.sites and len(result.sites["by_site"]) == 3
    for row in result.sites["by_site"]:
        learned, held = parts(run, row["client"])
        known = torch.from_numpy(labels[learned])
        scores, classes = probe_scores(rows[learned], known, rows[held])
        predicted = classes[scores.argmax(axis=1)]
        assert row["confusion"] == confusion(predicted, labels[held])


def test_figures_are_in_the_log_and_at_the_end(common: Path) -> None:
    result = harmonium.resume(common)
    logged = [row["sites"]["all"] for row in result.rounds if "sites" in row]
    assert logged == [result.sites["all"]]
    stored = json.loads((common / "result.json").read_text())["sites"]
    assert stored == dict(result.sites)
    ledger = [json.loads(line) for line in (common / "ledger.jsonl").read_text().splitlines()]
    sent = {line["step"]: set(line["up"]) for line in ledger if line["step"] in LABELLED}
    assert sent == {
        "can_evaluate": set(),
        "measure_sums": {"first", "second", "cross", "shares", "images"},
        "measure_counts": {"confusion", "scores", "images", "seen"},
    }
    assert result.rounds[-1]["bytes_measuring"] > 0


def test_no_site_is_told_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(LocalEngine, "finish", lambda engine, *given: told.append(given[-1]))
    harmonium.run("fedavg", out=tmp_path / "run", **SMALL)
    assert "all" in told[0]["sites"] and "all" in told[0]["metrics"][-1]["sites"]
    assert "by_site" not in json.dumps(told)


def test_the_terminal_shows_the_worst_site_first(
    common: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = harmonium.resume(common).sites
    show_sites(figures)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines if line.strip().startswith("client ")]
    assert shown == [str(row["client"]) for row in figures["by_site"]]
    total = next(line for line in lines if "all images" in line)
    assert f"{100 * figures['all']['balanced']:.1f}" in total and "±" in total
    assert any("3 of 3 sites" in line for line in lines)
    assert "at the worst (client" in harmonium.resume(common).summary()


def test_the_model_is_the_same_without_it(common: Path, tmp_path: Path) -> None:
    plain = harmonium.run("fedavg", out=tmp_path / "plain", **settings(sites=None))
    assert not plain.sites
    one, other = (load_file(path / "encoder.safetensors") for path in (common, plain.folder))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_digests_of_earlier_recipes_are_unchanged() -> None:
    recipe = Recipe.of("fedavg", "data=digits")
    assert recipe.digest.startswith(BEFORE)
    same = recipe.changed(evaluate={"sites_bins": 32, "sites_classes": []})
    assert same.digest == recipe.digest
    assert recipe.changed(evaluate={"sites": "probe"}).digest != recipe.digest


BEFORE = "2d10970e83db091b"  # of version 0.2.0


def test_a_client_with_too_few_labels_declines_and_nothing_stops(tmp_path: Path) -> None:
    result = harmonium.run("fedavg", out=tmp_path / "run", **settings(sites_least=40))
    assert result.sites["answered"] == 0 and "all" not in result.sites
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    why = [line["why"] for line in map(json.loads, ledger) if line["step"] == "can_evaluate"]
    assert len(why) == 3 and all("40" in one for one in why)
    assert result.rounds[-1]["answered"] == 3


def test_a_class_with_too_few_images_is_left_out(tmp_path: Path) -> None:
    skewed = {**settings(sites_least=6), "split": {"name": "dirichlet", "alpha": 0.5}}
    result = harmonium.run("fedavg", out=tmp_path / "run", **skewed)
    rows = [row for site in result.sites["by_site"] for row in site["confusion"]]
    counts = [sum(row) for row in rows]
    assert 0 in counts and min(count for count in counts if count) >= 6


# ---- secure aggregation ------------------------------------------------------------------------


def test_secure_aggregation_opens_the_sum_alone(common: Path, tmp_path: Path) -> None:
    masked = {**SMALL, "privacy": {"secure_aggregation": True}}
    result = harmonium.run("fedavg", out=tmp_path / "masked", **masked)
    assert "by_site" not in result.sites and "mean" not in result.sites
    one, run = result.sites["all"], opened(result.folder)
    rows, labels = features(run)
    cuts = [parts(run, client) for client in range(3)]
    learned, tested = (np.concatenate([cut[k] for cut in cuts]) for k in range(2))
    pooled = Ridge.fit(class_means(rows[learned], labels[learned], CLASSES))
    predicted = pooled.scores(rows).argmax(axis=1)
    assert one["confusion"] == confusion(predicted[tested], labels[tested])
    stored = run.server.memory[KEY]
    assert set(stored) == {"protocol", "of", "answered", "learned", "total"}


def test_two_sites_open_no_sum(tmp_path: Path) -> None:
    """One of three clients has too few images; it trains with the others all the same."""
    few = {**settings(sites_least=2), "split": {"name": "quantity", "alpha": 0.4}}
    few = {**few, "privacy": {"secure_aggregation": True}, "seed": 5}
    plain = harmonium.run("fedavg", out=tmp_path / "plain", **{**few, "privacy": {}})
    assert plain.sites["answered"] == 2
    result = harmonium.run("fedavg", out=tmp_path / "masked", **few)
    assert "all" not in result.sites and "at least 3" in result.sites["why"]
    assert result.rounds[-1]["answered"] == 3


# ---- hostile answers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trial() -> Trial:
    return first_trial("fedavg", evaluate={"sites": "ridge", "sites_least": 1, "sites_bins": 4})


def negative(up: dict[str, Any]) -> dict[str, Any]:
    table = up["confusion"].clone()
    table[0, 0] -= 50
    table[0, 1] += 50
    return {**up, "confusion": table}


def shifted(up: dict[str, Any]) -> dict[str, Any]:
    scores = up["scores"].clone()
    scores[0] += 1
    return {**up, "scores": scores}


@pytest.mark.parametrize(
    ("step", "lie", "field"),
    [
        ("measure_counts", negative, "confusion"),
        ("measure_counts", lambda up: {**up, "images": up["images"] + 1}, "images"),
        ("measure_counts", lambda up: {**up, "images": 0.5}, "images"),
        ("measure_counts", lambda up: {**up, "seen": up["images"] + 1}, "seen"),
        ("measure_counts", lambda up: {**up, "confusion": up["confusion"][:1]}, "confusion"),
        ("measure_counts", lambda up: {**up, "confusion": up["confusion"].float()}, "confusion"),
        ("measure_counts", lambda up: {**up, "scores": up["scores"][..., :1]}, "scores"),
        ("measure_counts", shifted, "scores"),
        (
            "measure_counts",
            lambda up: {name: 100 * value for name, value in up.items()},
            "images",
        ),
        ("measure_sums", lambda up: {**up, "images": up["images"] + 1}, "shares"),
        ("measure_sums", lambda up: {**up, "shares": -up["shares"]}, "shares"),
        ("measure_sums", lambda up: {**up, "second": -up["second"]}, "second"),
        ("measure_sums", lambda up: {**up, "cross": up["cross"][:, :1]}, "cross"),
    ],
)
def test_a_false_answer_is_refused_by_name(
    trial: Trial, step: str, lie: Callable[[dict[str, Any]], Any], field: str
) -> None:
    recorded = next(one for one in trial.recorded if one.ask.step == step)
    liar = next(reply for reply in recorded.replies if reply.up)
    silent, _ = recorded.replayed(trial.method, Reply(liar.client, None, "lost"))
    result, entries = recorded.replayed(trial.method, replace(liar, up=lie(dict(liar.up or {}))))
    assert entries[liar.client]["outcome"] == "refused" and field in entries[liar.client]["why"]
    assert result == silent


def test_the_contract_holds_with_it() -> None:
    check_method("fedavg", evaluate={"sites": "probe", "sites_least": 1}, clients=3)


def test_a_sum_that_contradicts_itself_is_dropped(trial: Trial) -> None:
    recorded = next(one for one in trial.recorded if one.ask.step == "measure_counts")
    how = replace(trial.method.site_evaluation, by_site=False)
    method = replace(trial.method, site_evaluation=how)
    steps = method.before_evaluation(recorded.server, recorded.server.everyone)
    steps.send(None)
    steps.send(Reached(ids=[0, 1, 2]))
    sums = next(one for one in trial.recorded if one.ask.step == "measure_sums").replies
    ups = [reply.up for reply in sums if reply.up]
    whole = {name: ups[0][name] for name in ("first", "second", "cross", "shares", "images")}
    steps.send(Reached(ids=[0, 1, 2], **whole))
    counts = dict(recorded.replies[0].up or {})
    with pytest.raises(StopIteration) as end:
        steps.send(Reached(ids=[0, 1, 2], **negative(counts)))
    stored = end.value.value.memory[KEY]
    assert "total" not in stored and "confusion" in stored["why"]


class Reached:
    """What a plan gets."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


# ---- labels ------------------------------------------------------------------------------------


def test_no_other_task_sees_a_label(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_runtime(common)
    assert not runtime.images.labelled and runtime.labels is not None
    plain = harmonium.run("fedavg", out=tmp_path / "plain", **settings(sites=None))
    assert open_runtime(plain.folder).labels is None
    seen: list[Any] = []
    train = Method.train

    def spying(self: Method, client: Client, got: Any) -> Any:
        seen.append(client.labelled)
        return train(self, client, got)

    spying.exchange = train.exchange  # type: ignore[attr-defined]
    monkeypatch.setattr(Method, "train", spying)
    harmonium.run("fedavg", out=tmp_path / "spied", **SMALL)
    assert seen == [None] * 3


def test_only_labels_that_clients_may_see_are_used(tmp_path: Path) -> None:
    few = {**settings(sites_least=1), "split": {"name": "iid", "labels": 0.2}}
    result = harmonium.run("fedavg", out=tmp_path / "run", **few)
    train = len(opened(result.folder).dataset.train)
    assert result.sites["learned"] + result.sites["all"]["images"] < 0.3 * train


# ---- where it is possible ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["supervised"],
        ["fedavg", "privacy.update_clip=1", "privacy.update_noise=2", "objective.norm=none"],
        ["fedsc", "method.epsilon=3"],
        ["fedavg", "batch_norm=local", "encoder.norm=batch"],
    ],
)
def test_it_is_refused_where_it_would_reveal_or_mean_nothing(words: list[str]) -> None:
    Recipe.of(*words)
    with pytest.raises(ConfigError, match=r"evaluate\.sites"):
        Recipe.of(*words, "evaluate.sites=ridge")


def test_probes_evaluate_encoders_of_the_clients_own(tmp_path: Path) -> None:
    own = {**settings(sites="probe"), "objective": {"name": "simclr", "norm": "none"}}
    result = harmonium.run("alone", out=tmp_path / "run", **own)
    run = opened(result.folder)
    row = result.sites["by_site"][0]
    encoder = run.method.represent(run.server, run.state(row["client"]))
    learned, held = parts(run, row["client"])
    rows, labels = embed(encoder, run.dataset.train, run.method.views.plain), run.dataset.train
    known = torch.from_numpy(labels.labels[learned])
    scores, classes = probe_scores(rows[learned], known, rows[held])
    predicted = classes[scores.argmax(axis=1)]
    assert row["confusion"] == confusion(predicted, labels.labels[held])


@pytest.mark.parametrize(
    "setting",
    ["sites=knn", "sites_held_out=1", "sites_least=0", "sites_bins=-1", "sites_classes=[a,a]"],
)
def test_impossible_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.sites"):
        Recipe.of("fedavg", f"evaluate.{setting}")


def test_classes_are_named_for_real_sites_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.sites_classes"):
        harmonium.run("fedavg", out=tmp_path / "run", **settings(sites_classes=["a", "b"]))


def test_the_card_tells_of_it(common: Path) -> None:
    text = card(opened(common).method).text()
    assert all(step in text for step in LABELLED) and "evaluate.sites" in text
    plain = Recipe.of("fedavg", "data=digits").known_method()
    assert not any(step in card(plain).text() for step in LABELLED)


def test_references_of_a_comparison_go_without_it() -> None:
    found = plan(["fedavg", "data=digits", "evaluate.sites=ridge"])
    assert found.references and found.methods["fedavg"].evaluate.sites == "ridge"
    assert {one.evaluate.sites for one in found.references.values()} == {None}
