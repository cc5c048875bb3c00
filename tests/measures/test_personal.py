"""Generalisation and personalisation: every figure by hand, and what labels are used for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.core.seeds import torch_rng
from harmonium.data.images import Images
from harmonium.evaluation import classifier
from harmonium.evaluation.pixels import Pixels
from harmonium.federation.method import Method
from harmonium.federation.personal import Own
from harmonium.measures import Figures, personal
from harmonium.measures.extra_round import trained
from harmonium.measures.personal import ClientTests, Personal, summary
from harmonium.measures.run_reader import Run

from .conftest import SMALL

Made = Callable[..., Path]
Opened = Callable[..., Run]
DATA = {"name": "shapes", "count": 160, "test_count": 60, "size": 10, "styles": 2, "classes": 3}
STYLES: dict[str, Any] = {"data": DATA, "split": "styles", "clients": 4, "rounds": 1}


@pytest.fixture(scope="module")
def styled(made: Made) -> Path:
    return made("fedavg", **STYLES)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer epochs of the classifiers."""
    table = {name: replace(how, epochs=4) for name, how in classifier.PROTOCOLS.items()}
    monkeypatch.setattr(personal, "PROTOCOLS", table)


def told(**rows: tuple[float, str | None]) -> list[dict[str, Any]]:
    return [{"client": int(k[1:]), "accuracy": a, "group": g} for k, (a, g) in rows.items()]


def test_the_figures_over_clients_by_hand() -> None:
    found = summary(told(c0=(0.2, "one"), c1=(0.4, "one"), c2=(0.9, "two")))
    assert found["clients"] == 3 and found["mean"] == pytest.approx(0.5)
    assert found["spread"] == pytest.approx((0.26 / 3) ** 0.5)  # of all clients, not of a sample
    assert found["worst"] == found["worst_tenth"] == 0.2
    assert found["groups"] == pytest.approx({"one": 0.3, "two": 0.9})
    rows = [{"accuracy": (k * 8 % 21) / 100, "group": None} for k in range(21)]
    assert summary(rows)["worst_tenth"] == pytest.approx(0.01)  # the worst three of 21
    assert summary(rows[:20])["worst_tenth"] == pytest.approx(
        np.sort([r["accuracy"] for r in rows[:20]])[:2].mean()
    )
    alone = summary(told(c7=(0.3, None)))
    assert alone["spread"] is None and alone["groups"] == {}


def test_a_client_whose_classifier_diverged_is_marked() -> None:
    counts = {"labels": 4, "classes": 2, "tested": 9}
    rows = [{**row, **counts, "finite": True} for row in told(c0=(0.2, "one"), c1=(0.4, "two"))]
    rows[1]["finite"] = False
    plain = {
        "by": "style",
        "generalisation": {"mean": 0.5, "groups": {"one": 0.4, "two": 0.6}},
        "personalisation": {**summary(rows), "each": rows},
        "newcomers": None,
    }
    tables = {title: shown for title, shown, _ in Personal().tables({"run": Figures(plain)})}
    assert [row["client"] for row in tables["By client"]] == ["0", "1 (!)"]
    assert [row["figure"] for row in tables["By group"]] == ["general", "personal"]
    for word in ("general:", "personal:", "(!)"):
        assert word in Personal.legend


def board(groups: list[int], asked: list[int], by: str | None = "style") -> ClientTests:
    def images(values: list[int]) -> Images:
        return Images(np.zeros((len(values), 8, 8, 1), np.uint8), np.zeros(len(values), np.int64))

    held, theirs = np.array(groups), np.array(asked)
    names = {0: "zero", 1: "one", 2: "two"}
    return ClientTests(
        images(groups), np.zeros(len(groups), int), images(asked), by, held, theirs, names
    )


def test_test_images_count_by_the_clients_shares() -> None:
    some = board([0, 0, 0, 1, 2, -1, 1], [0, 0, 1, 1, 1, 1, -1])
    assert some.weights(np.array([0, 1])).tolist() == [1, 1, 0, 0, 0, 0, 0]
    mixed = some.weights(np.array([0, 1, 2, 3]))  # three of style 0, one of style 1
    assert mixed.tolist() == [1.5, 1.5, 0.25, 0.25, 0.25, 0.25, 0]
    assert mixed[:2].sum() / mixed.sum() == 0.75
    twice = some.weights(np.array([0, 0, 3]))  # an image that is held twice counts twice
    assert twice[:2].sum() == 2 * twice[2:].sum()
    assert not some.weights(np.array([4, 5])).any()
    assert some.group(np.array([0, 3, 6])) == "one" and some.group(np.array([5])) is None
    assert some.group(np.array([0, 3])) is None  # of no style more than of others
    assert board([0, 1], [0], "classes").group(np.array([0])) is None


def test_both_figures_are_those_of_classifiers_trained_by_hand(
    styled: Path, opened: Opened
) -> None:
    run = opened(styled)
    found = Personal(seed=3).compute(run)
    assert found.plain["by"] == "style" and "by style" in found.notes[0] and len(found.notes) == 1
    train, test, views = run.dataset.train, run.dataset.test, run.method.views
    how = Personal().how
    assert how.standardise and how.lr == 0.1 and found.plain["protocol"]["epochs"] == 4

    def accuracy(encoder: nn.Module, rows: np.ndarray, style: int, *path: Any) -> float:
        asked = test.subset(np.flatnonzero(test.factors["style"] == style))
        from harmonium.evaluation.features import embed

        known = embed(encoder, train.subset(rows), views.plain)
        rng = torch_rng(3, "measure", *path)
        model = classifier.train(known, torch.from_numpy(train.labels[rows]), how, rng)
        named = model.predict(embed(encoder, asked, views.plain)).numpy()
        return float((named == asked.labels).mean())

    names = run.dataset.names["style"]
    general = found.plain["generalisation"]
    federation = run.method.represent(run.server)
    for style in (0, 1):
        rows = np.flatnonzero(train.factors["style"] == style)
        wanted = accuracy(federation, rows, style, "general", style)
        assert general["groups"][names[style]] == wanted
    assert general["mean"] == pytest.approx(np.mean(list(general["groups"].values())))
    each = {row["client"]: row for row in found.plain["personalisation"]["each"]}
    assert sorted(each) == [0, 1, 2, 3]
    for client, local in run.encoders([0, 3]).items():
        rows, row = run.split.indices[client], each[client]
        style = int(train.factors["style"][rows][0])
        assert row["accuracy"] == accuracy(local, rows, style, "classifier", client)
        assert row["group"] == names[style] and row["labels"] == len(rows)
        assert row["tested"] == int((test.factors["style"] == style).sum())
    summed = found.plain["personalisation"]
    assert {k: summed[k] for k in summary([*each.values()])} == summary([*each.values()])


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What classifiers are trained on, and what comes of it."""
    calls: list[tuple[Any, ...]] = []
    train = classifier.train

    def spy(features: Any, labels: Any, *rest: Any, adapter: Any = None) -> Any:
        made = train(features, labels, *rest, adapter=adapter)
        calls.append((features, labels, adapter, made))
        return made

    monkeypatch.setattr(personal, "train", spy)
    monkeypatch.setattr(Personal, "_references", lambda *given: {})  # these train classifiers too
    return calls


def test_labels_of_test_images_change_no_classifier(
    styled: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = opened(styled), spied(monkeypatch)
    first = Personal(clients=2).compute(run)
    test = run.dataset.test
    other = Images(test.pixels, (test.labels + 1) % 3, test.factors)
    changed = replace(run, dataset=replace(run.dataset, test=other))
    second = Personal(clients=2).compute(changed)
    half = len(calls) // 2
    assert half == 2 + 2
    for before, after in zip(calls[:half], calls[half:], strict=True):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        assert torch.equal(before[3].weights, after[3].weights)
    assert first.plain["personalisation"]["mean"] != second.plain["personalisation"]["mean"]
    held = np.sort(run.dataset.train.labels[run.split.indices[calls_client(first, 0)]])
    assert np.array_equal(np.sort(calls[2][1].numpy()), held)  # a client's own labels, no others


def calls_client(found: Any, place: int) -> int:
    return int(found.plain["personalisation"]["each"][place]["client"])


class Doubled(nn.Module):
    """Content features, and three that stand for a style."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        content = self.encoder(pictures)
        return torch.cat([content, content[:, :3] ** 2], 1)


class Infused(nn.Module):
    """As in FedStyle's equation 4."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.generator = nn.Linear(dim + 3, dim)
        self.dim = dim

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = features[:, : self.dim] + self.generator(features)
        return changed


def test_adapters_learn_or_not_as_told(
    styled: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = opened(styled), spied(monkeypatch)
    plain_own, adapter = Method.own, Infused(16)
    given = {key: value.clone() for key, value in adapter.state_dict().items()}
    monkeypatch.setattr(
        Method, "own", lambda *args: Own(Doubled(plain_own(*args).encoder), adapter)
    )
    seen: dict[str, Any] = {}
    for kind in ("own", "frozen", "none", "mlp"):
        calls.clear()
        Personal(clients=1, adapter=kind, hidden=5, epochs=0).compute(run)  # type: ignore[arg-type]
        seen[kind] = calls[-1]
        assert all(call[2] is None for call in calls[:-1])  # generalisation has no adapter
    assert all(torch.equal(given[key], value) for key, value in adapter.state_dict().items())
    whole = seen["own"][0]
    assert whole.shape[1] == 19 and seen["own"][2] is adapter
    learnt = seen["own"][3].adapter.state_dict()
    assert all(not torch.equal(learnt[key], given[key]) for key in given)
    assert seen["frozen"][2] is None
    assert torch.allclose(seen["frozen"][0], adapter(whole).detach(), atol=1e-6)
    assert seen["none"][2] is None and torch.equal(seen["none"][0], whole[:, :16])
    assert torch.equal(seen["mlp"][0], whole[:, :16])
    assert isinstance(seen["mlp"][2], classifier.ResidualAdapter) and seen["mlp"][
        2
    ].inner.shape == (5, 16)
    monkeypatch.undo()


def test_every_method_gets_the_same_adapter_and_nothing_without_one(
    styled: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = opened(styled), spied(monkeypatch)
    for kind in ("own", "frozen", "none", "mlp"):
        Personal(clients=1, adapter=kind, epochs=0).compute(run)  # type: ignore[arg-type]
    last = calls[2::3]
    assert [call[2] is None for call in last] == [True, True, True, False]
    assert all(torch.equal(call[0], last[0][0]) for call in last)
    sizes = sum(p.numel() for p in last[3][2].parameters())
    assert sizes == 2 * 16 * 384 + 384 + 16


def test_a_further_round_has_the_epochs_that_are_asked_for(styled: Path, opened: Opened) -> None:
    run = opened(styled)
    model = run.server.model
    one, again, longer = (dict(trained(run, [1], epochs))[1].model for epochs in (None, 1, 3))
    assert all(torch.equal(one[key], again[key]) for key in one)  # the recipe has one
    assert any(not torch.equal(one[key], longer[key]) for key in one)
    assert one.keys() == model.keys() and any(not torch.equal(one[k], model[k]) for k in one)
    ((client, own),) = run.owns([1], epochs=0)
    assert client == 1 and own.adapter is None
    for key, value in own.encoder.state_dict().items():
        assert torch.equal(value, model[f"encoder.{key}"])
    scaled = run.recipe.changed(local={**SMALL["local"], "epochs": 2, "for_clients": 2})  # means 4
    far = dict(trained(replace(run, recipe=scaled), [1], 3))[1].model
    assert all(torch.equal(far[key], longer[key]) for key in far)


def test_a_further_round_gives_the_new_state(made: Made, opened: Opened) -> None:
    run = opened(made("scaffold", participation={"number": 2}, server="adam"))
    client = run.cohort[0]
    before = run.state(client)
    ((_, one),) = trained(run, [client])
    assert set(one.state) == {"control"}
    moved = [
        k
        for k, v in one.state["control"].items()
        if not torch.equal(v, before.get("control", {}).get(k, torch.zeros_like(v)))
    ]
    assert moved and run.state(client).keys() == before.keys()


def test_encoders_that_stay_at_clients(made: Made, opened: Opened) -> None:
    run = opened(made("alone", **STYLES))
    kept = [run.state(client)["parts"] for client in range(4)]
    for own, parts in zip(run.federations(), kept, strict=True):
        assert all(torch.equal(parts[f"encoder.{k}"], v) for k, v in own.state_dict().items())
    for client, own in run.owns(range(4), epochs=0):
        parts = kept[client]
        assert all(
            torch.equal(parts[f"encoder.{k}"], v) for k, v in own.encoder.state_dict().items()
        )
    ((_, further),) = run.owns([2])  # trains its own once more
    assert any(
        not torch.equal(kept[2][f"encoder.{k}"], v) for k, v in further.encoder.state_dict().items()
    )
    away = replace(run, commit=replace(run.commit, clients={"2": run.commit.clients["2"]}))
    found = Personal(epochs=0).compute(away)
    assert [row["client"] for row in found.plain["personalisation"]["each"]] == [2]
    assert "3 clients (0, 1, 3) left out: no model of their own" in found.notes
    found = Personal(clients=2, epochs=0).compute(run).plain
    assert len(found["personalisation"]["each"]) == 2
    assert {row["group"] for row in found["personalisation"]["each"]} == {"print", "dusk"}


def test_clusters_of_clients_have_their_own_encoders(made: Made, opened: Opened) -> None:
    run = opened(made("featarc-clustered", **STYLES))
    clusters = [held["model"] for held in run.server.memory["clusters"]]
    for client, own in run.owns(range(4), epochs=0):
        model = clusters[run.state(client)["cluster"]]
        assert all(
            torch.equal(model[f"encoder.{k}"], v) for k, v in own.encoder.state_dict().items()
        )
    assert any(not torch.equal(clusters[0][key], clusters[1][key]) for key in clusters[0])
    (federation,) = run.federations()
    for key, value in federation.state_dict().items():
        assert torch.equal(run.server.model[f"encoder.{key}"], value)


def test_statistics_are_measured_where_a_round_was_not_judged(made: Made, opened: Opened) -> None:
    encoder = {**SMALL["encoder"], "norm": "batch"}
    run = opened(made("fedavg", encoder=encoder, batch_norm="recalibrate"))
    memory = {k: v for k, v in run.server.memory.items() if k != "statistics"}
    bare = replace(run, commit=replace(run.commit, server={**run.commit.server, "memory": memory}))
    (wanted,), (found,) = run.federations(), bare.federations()
    for key, value in found.state_dict().items():
        assert torch.allclose(value.float(), wanted.state_dict()[key].float(), atol=1e-5)
    ((_, own),) = bare.owns([0], epochs=0)
    assert torch.allclose(own.encoder.state_dict()[key].float(), value.float())


@pytest.mark.parametrize(
    ("by", "wanted", "groups"),
    [("auto", "style", 2), ("classes", "classes", 0), (None, None, 0)],
)
def test_what_clients_are_tested_on(
    by: str | None, wanted: str | None, groups: int, styled: Path, opened: Opened
) -> None:
    run = opened(styled)
    measure = Personal(by=by, epochs=0, part="validation" if by is None else "test")
    found = measure.compute(run)
    assert found.plain["by"] == wanted
    assert len(found.plain["personalisation"]["groups"]) == groups
    tested = {row["tested"] for row in found.plain["personalisation"]["each"]}
    part = run.dataset.validation if by is None else run.dataset.test
    assert tested == (
        {int((part.factors["style"] == k).sum()) for k in (0, 1)} if groups else {len(part)}
    )
    names = ["print", "dusk"] if groups else ["all"]
    assert list(found.plain["generalisation"]["groups"]) == names
    shown = [title for title, _, _ in measure.tables({"run": found})]
    assert shown[2:] == (["By group", "By client"] if groups else ["By client"])


def test_a_column_that_is_not_there_is_refused(styled: Path, opened: Opened) -> None:
    with pytest.raises(ConfigError, match="personal.by is 'stile'.*style, .*classes, none"):
        Personal(by="stile").compute(opened(styled))


def test_clients_without_labels_and_with_one_class(made: Made, opened: Opened) -> None:
    data = {**DATA, "classes": 4}
    run = opened(
        made(
            "fedavg",
            data=data,
            split={"name": "by_class", "labelled": 0.5, "labels": 0.3},
            rounds=1,
        )
    )
    found = Personal(epochs=0).compute(run)
    each = found.plain["personalisation"]["each"]
    seen = run.split.seen(run.dataset.train).labels
    able = [c for c in range(4) if (seen[run.split.indices[c]] >= 0).any()]
    assert [row["client"] for row in each] == able and len(able) == 2
    assert all(row["classes"] == 1 and row["accuracy"] == 1.0 for row in each)
    counts = [int((seen[run.split.indices[client]] >= 0).sum()) for client in able]
    assert [row["labels"] for row in each] == counts and max(counts) < 0.4 * min(
        run.examples.values()
    )
    assert found.plain["by"] == "classes"  # the data have styles, but every client has all
    away = ", ".join(str(c) for c in range(4) if c not in able)
    assert f"2 clients ({away}) left out: no labelled training image" in found.notes
    assert any("labels of one class" in note for note in found.notes)


def test_newcomers_are_never_asked_and_judged_apart(
    made: Made, opened: Opened, tmp_path: Path
) -> None:
    split = {"name": "styles", "newcomers": 2}
    path = made("scaffold", **{**STYLES, "split": split, "participation": {"fraction": 1.0}})
    run = opened(path)
    new, old = list(run.split.newcomers), sorted(run.examples)
    assert len(new) == 2 and sorted([*new, *old]) == [0, 1, 2, 3]
    ledger = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    assert {entry["client"] for entry in ledger} == set(old) == set(run.server.everyone)
    assert sorted(map(int, run.commit.clients)) == old and run.cohort == old
    assert run.clients(9, 0, "angles") == old
    measure = Personal()
    found = measure.compute(run)
    members, others = found.plain["personalisation"], found.plain["newcomers"]
    assert [row["client"] for row in members["each"]] == old
    assert [row["client"] for row in others["each"]] == new
    assert {key: others[key] for key in summary(others["each"])} == summary(others["each"])
    assert {row["group"] for row in others["each"]} == {"print", "dusk"}
    rows = measure.tables({"run": found})[0].rows
    assert [row["figure"] for row in rows] == ["general", "personal", "newcomers"]
    assert rows[2]["accuracy"] == 100 * others["mean"] and rows[2]["clients"] == 2
    assert measure.draw(tmp_path / "strips.png", {"run": found})
    ((_, one),) = trained(run, new[:1])  # from the final model, with nothing kept before
    assert run.state(new[0]) == {} and set(one.state) == {"control"}
    alone = dict(trained(run, old))
    both = dict(trained(run, [*old, new[0]]))
    for client in old:  # who joins changes nobody's training
        pairs = zip(alone[client].model.values(), both[client].model.values(), strict=True)
        assert all(torch.equal(mine, again) for mine, again in pairs)
    still = dict(run.owns(new, epochs=0))  # the model is the federation's, whatever is kept of it
    assert sorted(still) == new


def test_newcomers_of_one_client_that_has_everything(made: Made, opened: Opened) -> None:
    run = opened(made("centralised", **{**STYLES, "split": {"name": "styles", "newcomers": 2}}))
    assert list(run.examples) == [0] and run.split.newcomers == (1, 2)
    found = Personal(epochs=0).compute(run).plain
    assert [row["client"] for row in found["newcomers"]["each"]] == [1, 2]
    assert found["personalisation"]["each"][0]["tested"] == 60  # of either style
    assert found["personalisation"]["each"][0]["group"] is None


def test_data_without_labels_are_refused(made: Made, opened: Opened) -> None:
    with pytest.raises(DataError, match="personal needs labels"):
        Personal().compute(opened(made("fedavg")))


def test_settings_that_cannot_be_right_are_refused() -> None:
    for wrong, what in (
        ({"clients": 0}, "clients"), ({"epochs": -1}, "epochs"), ({"pictures": 0}, "pictures"),
        ({"protocol": "lp_stile"}, "did you mean 'lp_style'"), ({"hidden": 0}, "hidden"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            Personal(**wrong)  # type: ignore[arg-type]


def test_as_a_user_meets_it(styled: Path, made: Made, tmp_path: Path) -> None:
    said: list[str] = []
    words = ["personal", "personal.clients=2", "personal.epochs=1", "personal.pictures=30"]
    found = harmonium.evaluate_run(
        styled, made("alone", **STYLES), *words, out=tmp_path, note=said.append
    )
    kept = json.loads((tmp_path / "eval.json").read_text())
    assert kept["measures"]["personal"] == json.loads(json.dumps(found.figures["personal"]))
    assert found.main_plots["personal"].stat().st_size > 5000
    assert any("2 of 2 clients evaluated" in line for line in said)
    title, rows, _ = found.tables[0]
    assert "percent" in title and [row["figure"] for row in rows] == ["general", "personal"] * 2
    one = next(iter(found.figures["personal"].values()))
    assert rows[0]["accuracy"] == pytest.approx(100 * one["generalisation"]["mean"])
    assert rows[1]["accuracy"] == pytest.approx(100 * one["personalisation"]["mean"])
    again = harmonium.evaluate_run(styled, *words, out=tmp_path / "again")
    assert next(iter(again.figures["personal"].values())) == one


def test_pixels_and_the_commonest_class_stand_beside(styled: Path, opened: Opened) -> None:
    run = opened(styled)
    measure = Personal(clients=2, epochs=0)
    found = measure.compute(run)
    beside = found.plain["references"]
    assert list(beside) == ["untrained", "raw pixels", "whitened pixels", "commonest class"]
    some = measure._client_tests(run)
    clients = [row["client"] for row in found.plain["personalisation"]["each"]]
    rows = [measure._client(run, some, client, Own(Pixels())) for client in clients]
    wanted = float(np.mean([row["accuracy"] for row in rows]))
    assert beside["raw pixels"]["personal"] == pytest.approx(wanted)
    test = run.dataset.test
    always = []
    for client in clients:
        mine = run.split.indices[client]
        style = run.dataset.train.factors["style"][mine][0]
        named = np.bincount(run.dataset.train.labels[mine]).argmax()
        always.append((test.labels[test.factors["style"] == style] == named).mean())
    assert beside["commonest class"]["personal"] == pytest.approx(np.mean(always))
    tables = {one.title: one.rows for one in measure.tables({"run": found})}
    shown = next(its for title, its in tables.items() if "References" in title)
    assert [row["reference"] for row in shown[::2]] == list(beside)
