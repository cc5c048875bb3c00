"""The loss over the images of all clients: against one batch of them all, and without a trace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm

import harmonium
from harmonium.cli.terminal import show_result
from harmonium.core import seeds
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, PolicyRefusal
from harmonium.evaluation.evaluator import Evaluator
from harmonium.federation import global_objective
from harmonium.federation.card import card
from harmonium.federation.global_objective import from_bounds, note, obstacle
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.recipe.schema import Recipe
from harmonium.report.plots import plot_run
from harmonium.report.run_progress import figures_of
from harmonium.runs.loop import RunLoop
from harmonium.sites.plan import method_of, planned
from harmonium.sites.policy import Policy
from harmonium.testing import TINY, Trial, first_trial

MEASURING = ("measure_objective", "measure_gradient")
FEDSC = {"name": "spectral", "form": "fedsc", "mu": 3.0, "out": 12, "norm": "none"}
FORMS = {
    "fedsc": FEDSC,
    "haochen": {"name": "spectral", "out": 12, "mu": 2.0},
    "orchestra": {"name": "spectral", "form": "orchestra", "out": 12, "centroids": 9},
}


def trial(name: str = "fedavg", **settings: Any) -> Trial:
    return first_trial(name, **{"objective": FEDSC, **settings})


def steps(found: Trial) -> list[str]:
    return list(dict.fromkeys(json.loads(line)["step"] for line in found.lines))


def of_all(found: Trial) -> tuple[float, float, dict[str, float]]:
    """The loss of one batch of everything and its gradient's norm by autograd; local losses.

    FedSC's form is told in the scale of its paper, half of the loss that is trained.
    """
    method, server = found.method, found.server
    known = {**server.model, **server.memory.get("statistics", {})}
    parts = method.blueprint.copy_from(known).eval()
    for path, module in parts.named_modules():
        if isinstance(module, _BatchNorm) and f"{path}.running_mean" not in known:
            module.train()
    scale = 0.5 if found.recipe.tree()["objective"]["form"] == "fedsc" else 1.0
    seen, local = [], {}
    for client, index in enumerate(found.split.indices):
        examples = Examples(found.dataset.train, index)
        rng = seeds.torch_rng(found.recipe.seed, "objective", client)
        batch = Batch(torch.arange(len(index)), examples, method.views, rng)
        seen.append(method.objective.see(parts, batch))
        local[str(client)] = scale * method.objective.score(parts, seen[-1], Context(me=0)).item()
    z = [torch.cat(views) for views in zip(*(one.z for one in seen), strict=True)]
    loss = scale * method.objective.score(parts, Seen(seen[0].batch, seen[0].h, z), Context(me=0))
    trained = [p for p in parts.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, allow_unused=True)
    norm = torch.stack([part.square().sum() for part in slopes if part is not None]).sum().sqrt()
    return loss.item(), norm.item(), local


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_loss_and_the_gradient_of_all_images_in_one_batch(form: str) -> None:
    found = trial(objective=FORMS[form], split={"name": "quantity", "min_size": 3})
    told = found.server.memory["global_objective"]
    loss, norm, local = of_all(found)
    assert len({len(index) for index in found.split.indices}) > 1  # clients weigh differently
    assert told["value"] == pytest.approx(loss, rel=1e-5)
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert told["by_client"] == pytest.approx(local, rel=1e-4)
    counts = [len(index) for index in found.split.indices]
    mean = sum(n * loss for n, loss in zip(counts, local.values(), strict=True)) / sum(counts)
    assert told["local"] == pytest.approx(mean, rel=1e-4)
    assert (told["clients"], told["of"], told["objective"]) == (4, 4, "spectral")
    assert abs(told["value"] - told["local"]) > 5e-5  # equation 3: they are not the same


def test_images_in_several_batches_amount_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_objective, "CHUNK", 5)
    found = trial("fedsc")
    assert max(len(index) for index in found.split.indices) > 5
    told = found.server.memory["global_objective"]
    method = found.method
    parts = method.blueprint.copy_from(found.server.model).eval()
    views: list[list[torch.Tensor]] = [[], []]
    for client, index in enumerate(found.split.indices):
        rng = seeds.torch_rng(found.recipe.seed, "objective", client)
        some = torch.tensor_split(torch.arange(len(index)), -(-len(index) // 5))
        for rows in some:
            pixels = Examples(found.dataset.train, index).pixels(rows)
            for held, view in zip(views, method.views(pixels, rng), strict=True):
                held.append(parts["projector"](parts["encoder"](view)))
    z = [torch.cat(held) for held in views]
    loss = method.objective.score(parts, Seen(None, [], z), Context(me=0))  # type: ignore[arg-type]
    assert told["value"] == pytest.approx(loss.item() / 2, rel=1e-5)


def test_statistics_that_are_known_nowhere_are_those_of_the_batch() -> None:
    """With recalibrate the encoder has its measured statistics and the projector has none."""
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    objective = {**FEDSC, "norm": "batch"}
    found = trial(objective=objective, encoder=encoder, batch_norm="recalibrate")
    told = found.server.memory["global_objective"]
    loss, norm, _ = of_all(found)
    assert told["value"] == pytest.approx(loss, rel=1e-5)
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-3)


def test_everyone_is_measured_and_all_images_count_alike() -> None:
    some = {"participation": {"number": 2}, "server": {"name": "average", "weighting": "uniform"}}
    found = trial(split={"name": "quantity", "min_size": 3}, **some)
    told = found.server.memory["global_objective"]
    loss, norm, _ = of_all(found)
    assert told["value"] == pytest.approx(loss, rel=1e-5) and told["clients"] == 4
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-4)


def test_it_is_of_those_who_answer_and_a_gradient_over_others_is_not_told() -> None:
    class Absent:
        """One client answers nothing, and another not the second time."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def deliver(self, ask: Any, turn: Any) -> Any:
            lost = {"measure_objective": [0], "measure_gradient": [1]}.get(ask.step, [])
            replies = self.engine.deliver(ask, turn)
            return (reply for reply in replies if reply.client not in lost)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

    told = trial().again(wrap=Absent).server.memory["global_objective"]
    assert (told["clients"], told["of"]) == (3, 4) and "0" not in told["by_client"]
    assert "gradient_norm" not in told


def test_infonce_with_verification_has_the_same_word_from_its_bounds() -> None:
    found = first_trial("fedavg", objective="infonce", terms={"uv": {"scale": 5.0}})
    report = found.method.report(found.server)
    told = report["global_objective"]
    assert told == from_bounds("infonce", report["bounds"])
    assert told["value"] == -report["bounds"]["total"]
    assert "global_objective" not in found.server.memory
    both = trial(terms={"uv": {"scale": 5.0}})  # spectral with verification: the loss itself
    assert both.method.report(both.server)["global_objective"]["objective"] == "spectral"


# ---- in a run ------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    **TINY,
    "objective": FEDSC,
    "method": {"name": "fedsc", "passes": 1},
    "evaluate": {"k": 5, "labels_per_class": [], "every": 2},
    "engine": {"workers": 0},
    "rounds": 3,
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, which takes most time, is left out."""
    health = {"spread": 1.0, "effective_rank": 1.0, "uniformity": 1.0, "alignment": 1.0}
    figures = {"health": {**health, "warnings": []}, "knn": 0.5}
    monkeypatch.setattr(Evaluator, "validate", lambda evaluator, *of, **how: figures)


@pytest.mark.usefixtures("quick")
def test_a_run_tells_it_at_every_evaluation_and_ends_with_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = {**RUN, "evaluate": {**RUN["evaluate"], "objective": False}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLoop, "_plot", lambda loop: None)
        measured = harmonium.run("fedsc", out=tmp_path / "on", **RUN)
        plain = harmonium.run("fedsc", out=tmp_path / "off", **off)
    rows = {row["round"]: row.get("global_objective") for row in measured.rounds}
    assert [number for number, told in rows.items() if told] == [0, 2, 3]  # due, first and last
    assert {"value", "local", "by_client", "gradient_norm"} <= set(rows[0])
    assert measured.global_objective == rows[3] and not plain.global_objective
    assert {"value", "local", "by_client", "gradient_norm"} <= set(rows[3])
    one, other = (load_file(tmp_path / name / "encoder.safetensors") for name in ("on", "off"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    kept = ("bytes_up", "bytes_down", "answered", "loss")  # measuring is no part of the method
    for mine, theirs in zip(measured.rounds, plain.rounds, strict=True):
        assert all(mine[key] == theirs[key] for key in kept)
    assert "bytes_measuring" not in plain.rounds[-1]
    spent = measured.rounds[0]["bytes_measuring"]  # before round 1 as at any evaluation
    assert spent == measured.rounds[-1]["bytes_measuring"] > 0
    before = (tmp_path / "on" / "ledger.jsonl").read_text().splitlines()[:8]
    assert [json.loads(line)["step"] for line in before] == [m for m in MEASURING for _ in range(4)]
    plot_run(tmp_path / "run.svg", measured.rounds)
    drawn = (tmp_path / "run.svg").read_text()
    assert "global objective" in drawn and "gradient norm" in drawn
    assert f"objective {rows[3]['value']:.3f}" in str(figures_of(measured.rounds[-1]))
    at_first = f" (at initialisation {rows[0]['value']:.3f})"
    assert f"over all clients {rows[3]['value']:.3f}{at_first}" in measured.summary()
    assert measured.metrics[-1]["global_objective.gradient_norm"] == rows[3]["gradient_norm"]
    capsys.readouterr()
    show_result(measured, as_json=False)
    assert f"{rows[3]['value']:.3f}" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_stopped_and_resumed_tells_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)

    class Stop(Callback):
        def round(self, row: Any, seconds: float) -> None:
            if row["round"] == 2:
                raise KeyboardInterrupt

    harmonium.run("fedsc", out=tmp_path / "whole", **RUN)
    with pytest.raises(KeyboardInterrupt):
        harmonium.run("fedsc", out=tmp_path / "cut", callbacks=Stop(), **RUN)
    harmonium.resume(tmp_path / "cut")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_killed_before_round_1_tells_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)

    class Stop(Callback):
        def __init__(self, answers: int) -> None:
            self.answers, self.notes = answers, list[str]()

        def task(self, reply: Any) -> None:
            self.answers -= 1
            if self.answers == 0:
                raise KeyboardInterrupt

        def note(self, text: str) -> None:
            self.notes.append(text)

    calm = Stop(-1)
    whole = harmonium.run("fedsc", out=tmp_path / "whole", callbacks=calm, **RUN)
    for answers in (1, 6):  # within each of the two asks of four clients
        with pytest.raises(KeyboardInterrupt):
            harmonium.run("fedsc", out=tmp_path / "cut", callbacks=Stop(answers), **RUN)
        assert not list((tmp_path / "cut").glob("commits/*"))
    harmonium.run("fedsc", out=tmp_path / "cut", **RUN)
    for name in ("metrics.jsonl", "ledger.jsonl", "encoder.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    value = whole.rounds[0]["global_objective"]["value"]
    assert f"global objective at initialisation {value:.3f}" in calm.notes


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_norm": "recalibrate", "participation": {"number": 2, "dropout": 0.3}},
        {"method": {"name": "scaffold"}, "local": {**TINY["local"], "momentum": 0.0}},
        {"privacy": {"secure_aggregation": True}},
    ],
    ids=["recalibrated", "stateful", "masked"],
)
def test_before_round_1_it_leaves_no_trace_in_later_rounds(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    base = {**RUN, "method": {}, "rounds": 1, "encoder": encoder, **settings}
    name = base.pop("method").get("name", "fedavg")
    if "privacy" in settings:  # counts of batches cannot be added up
        base["encoder"] = TINY["encoder"]
    off = {**base, "evaluate": {**RUN["evaluate"], "objective": False}}
    measured = harmonium.run(name, out=tmp_path / "on", **base)
    plain = harmonium.run(name, out=tmp_path / "off", **off)
    one, other = (load_file(tmp_path / name / "encoder.safetensors") for name in ("on", "off"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    kept = ("bytes_up", "bytes_down", "answered", "missing", "loss", "reported")
    for mine, theirs in zip(measured.rounds, plain.rounds, strict=True):
        assert [mine.get(key) for key in kept] == [theirs.get(key) for key in kept]
    first, same = measured.rounds[0], plain.rounds[0]
    told = first["global_objective"]
    assert told["clients"] == 4 and told["value"] != measured.global_objective["value"]
    assert first["bytes_measuring"] > 0 and not same.get("global_objective")
    if settings.get("batch_norm") == "recalibrate":  # of its own statistics, as it is later
        lines = (tmp_path / "on" / "ledger.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["step"] == "calibrate" and json.loads(lines[0])["round"] == 0


@pytest.mark.usefixtures("quick")
def test_clients_that_drop_out_on_purpose_are_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    lossy = {**RUN, "participation": {"dropout": 0.5}}
    found = harmonium.run("fedsc", out=tmp_path / "run", **lossy)
    assert found.global_objective["clients"] == 4


# ---- privacy -------------------------------------------------------------------------------------

NOISY: dict[str, dict[str, Any]] = {
    "a budget of the method": {"method": {"name": "fedsc", "epsilon": 5.0}},
    "noise of the method": {"method": {"name": "fedsc", "sigma": 0.1}},
    "a budget of the run": {"method": {"name": "fedsc", "sigma": 9.0}, "privacy": {"epsilon": 9.0}},
    "noise on changes": {"privacy": {"update_clip": 1.0, "update_noise": 1.0}},
    "clipped changes": {"privacy": {"update_clip": 1.0}},
}


@pytest.mark.parametrize("settings", NOISY.values(), ids=NOISY)
def test_nothing_exact_leaves_a_client_that_sends_noise(settings: dict[str, Any]) -> None:
    name = settings.get("method", {}).get("name", "fedavg")
    found = trial(name, **settings)
    assert not {*MEASURING} & {*steps(found), *found.method.exchanges()}
    assert "global_objective" not in found.server.memory
    assert "noise" in note(found.method)
    with pytest.raises(ConfigError, match="evaluate.objective"):
        found.recipe.changed(evaluate={"objective": True})


def test_under_secure_aggregation_only_sums_are_seen() -> None:
    plain, hidden = trial(), trial(privacy={"secure_aggregation": True})
    told, sums = (one.server.memory["global_objective"] for one in (plain, hidden))
    assert "by_client" in told and "by_client" not in sums
    assert card(plain.method).secure_aggregation and card(hidden.method).secure_aggregation
    up = hidden.method.exchanges()["measure_objective"].up
    assert {one.fold for one in up.values()} <= {"mean", "sum"}
    for key in ("value", "local", "gradient_norm"):
        assert sums[key] == pytest.approx(told[key], rel=1e-3)


def test_a_federation_of_sites_measures_only_what_it_is_told_to() -> None:
    sites = ("data=sites", "data.size=12", "data.channels=3", "objective=spectral")
    plan, _ = planned(Recipe.of("fedavg", *sites), 3)
    assert plan.evaluate.objective is False
    assert not {*MEASURING} & set(method_of(plan).exchanges())
    told, _ = planned(Recipe.of("fedavg", *sites, "evaluate.objective=true"), 3)
    method = method_of(told)
    assert {*MEASURING} <= set(method.exchanges())
    with pytest.raises(PolicyRefusal, match="measure_objective"):
        Policy(exchanges=("train",), steps=1).check_plan(told, method)
    text = card(method).text()
    assert all(step in text for step in MEASURING) and "evaluate.objective=false" in text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"objective": "simclr"}),
        ("alone", {"objective": FEDSC}),
        ("fedrep", {"objective": FEDSC}),
        ("fedavg", {"objective": {**FEDSC, "norm": "batch"}, "batch_norm": "local"}),
    ],
)
def test_what_has_no_global_objective_is_not_measured(name: str, settings: dict[str, Any]) -> None:
    recipe = Recipe.from_tree({**TINY, "method": name, **settings})
    method = recipe.method_for((12, 12, 3), classes=3)
    assert obstacle(method) and not {*MEASURING} & set(method.exchanges())
    with pytest.raises(ConfigError, match="evaluate.objective"):
        recipe.changed(evaluate={"objective": True})


def test_a_gradient_that_would_be_rounded_or_cut_is_left_out() -> None:
    for settings in ({"transport": {"up": "int8"}}, {"aggregation": "median"}):
        found = trial(**settings)
        assert "measure_gradient" not in steps(found)
        told = found.server.memory["global_objective"]
        assert told["value"] == pytest.approx(of_all(found)[0], rel=1e-5)
        assert "gradient_norm" not in told
