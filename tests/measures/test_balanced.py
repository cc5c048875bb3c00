"""Balanced accuracy and AUROC of fine-tuned networks and of clients, against scikit-learn's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from harmonium.evaluation import classifier, finetune, linear, metrics
from harmonium.measures import Figures, Shown, personal
from harmonium.measures.eval_data import EvalSets
from harmonium.measures.knn import NearestNeighbours
from harmonium.measures.linear import Linear
from harmonium.measures.personal import Personal, summary
from harmonium.measures.probing import Frozen
from harmonium.measures.result_cache import ResultCache
from harmonium.measures.run_reader import Run
from harmonium.measures.seed_means import over_seeds
from harmonium.measures.semi import Semi
from harmonium.measures.transfer import Transfer
from harmonium.report.tables import table

Made = Callable[..., Path]
Opened = Callable[..., Run]
TWO = {"name": "shapes", "count": 120, "test_count": 60, "size": 10, "classes": 2, "styles": 2}
TEN = {"name": "digits", "limit": 120}
QUICK: Any = {"epochs": 2, "batch": 16, "draws": 2}
MEASURES = [Semi(fractions=(0.2,), **QUICK), Transfer(data="shapes", **QUICK)]
REFERENCES = ["untrained", "raw pixels", "whitened pixels", "commonest class"]


@pytest.fixture(scope="module")
def two(made: Made) -> Path:
    return made("fedavg", data=TWO, split="iid", rounds=1)


@pytest.fixture(scope="module")
def ten(made: Made) -> Path:
    return made("fedavg", data=TEN, split="iid", rounds=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer epochs of the clients' classifiers."""
    few = {name: replace(how, epochs=4) for name, how in classifier.PROTOCOLS.items()}
    monkeypatch.setattr(personal, "PROTOCOLS", few)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What scikit-learn says of all that probes with two classes answered, in their order."""
    found: list[dict[str, float]] = []

    def spy(draws: Any, labels: Any, weights: Any = None) -> metrics.Answers:
        ((scores, classes),) = draws
        if list(classes) == [0, 1]:
            by = {"sample_weight": weights}
            named = scores.argmax(1)
            area = roc_auc_score(labels, scores[:, 1] - scores[:, 0], **by)
            balanced = balanced_accuracy_score(labels, named, **by)
            accuracy = float(np.average(named == labels, weights=weights))
            found.append({"accuracy": accuracy, "balanced": balanced, "auroc": area})
        return metrics.answers(draws, labels, weights)

    for module in (finetune, linear, personal):
        monkeypatch.setattr(module, "answers", spy)
    return found


def uneven(run: Run) -> Run:
    """The run with few test images of its second class, on which accuracy is not balanced."""
    test = run.dataset.test
    rows = np.sort(
        [*np.flatnonzero(test.labels == 0), *np.flatnonzero(test.labels == 1)[:9]]
    ).astype(int)
    return replace(run, dataset=replace(run.dataset, test=test.subset(rows)))


def fits(tables: Sequence[Shown], width: int = 80) -> bool:
    made = (
        table(s.rows, None, s.title, digits=s.digits, unbroken=["on", "labels"]) for s in tables
    )
    return all(one.least <= width for one in made)


def figures(measure: Semi | Transfer, found: Figures) -> Mapping[str, Any]:
    (one,) = found.plain["sets"].values()
    return one["fractions"][0] if isinstance(measure, Semi) else one  # type: ignore[no-any-return]


# ---- fine-tuned networks ---------------------------------------------------------------------
@pytest.mark.parametrize("measure", MEASURES, ids=lambda one: one.name)
def test_networks_and_references_have_the_figures_of_scikit_learn(
    measure: Semi | Transfer, two: Path, opened: Opened, asked: list[dict[str, float]]
) -> None:
    sets = EvalSets(settings={"shapes": {"count": 100, "test_count": 50, "classes": 2}})
    run = replace(uneven(opened(two)), sets=sets)
    found = measure.compute(run)
    one = figures(measure, found)
    held = one["references"]
    rows = [one, one["untrained"], held["raw pixels"], held["whitened pixels"]]
    assert len(asked) == 2 * len(rows)
    for row, draws in zip(rows, zip(asked[::2], asked[1::2], strict=True), strict=True):
        for key, name in (("accuracy", ""), ("balanced", "balanced_"), ("auroc", "auroc_")):
            values = [draw[key] for draw in draws]
            assert row[f"{name}draws"] == pytest.approx(values)
            assert row[key] == pytest.approx(np.mean(values))
            assert row[f"{name}stderr"] == pytest.approx(abs(values[0] - values[1]) / 2)
    if isinstance(measure, Semi):
        assert any(row["balanced"] != pytest.approx(row["accuracy"]) for row in rows)
    always = held["commonest class"]
    assert always["balanced"] == always["auroc"] == 0.5
    runs, beside = measure.tables({"plain": found})
    shown = [runs.rows[0], *beside.rows]
    assert [row["reference"] for row in beside.rows[1:]] == REFERENCES[1:]
    for row, wanted in zip(shown, [*rows, always], strict=True):
        assert row["balanced"][0] == pytest.approx(100 * wanted["balanced"])
        assert row["AUROC"][0] == pytest.approx(100 * wanted["auroc"])
    assert fits([runs, beside])


@pytest.mark.parametrize("measure", [NearestNeighbours(), Linear()], ids=lambda one: one.name)
def test_references_of_frozen_features_have_every_figure(
    measure: Frozen, two: Path, opened: Opened
) -> None:
    found = measure.compute(uneven(opened(two)))
    held = found.plain["sets"]["own"]["references"]
    runs, beside = measure.tables({"plain": found})
    assert [row["reference"] for row in beside.rows] == REFERENCES
    for row in beside.rows:
        wanted = held[row["reference"]]
        for key, heading in (
            ("accuracy", "accuracy"),
            ("balanced", "balanced"),
            ("auroc", "AUROC"),
        ):
            assert row[heading][0] == pytest.approx(100 * wanted[key])
    always = beside.rows[-1]
    assert always["balanced"][0] == always["AUROC"][0] == 50.0 < always["accuracy"][0]
    assert not {"chance", "raw pixels"} & set(runs.rows[0]) and "chance" not in measure.legend
    assert fits([runs, beside], 60)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda one: one.name)
def test_ten_classes_have_no_auroc(measure: Any, ten: Path, opened: Opened) -> None:
    run = opened(ten, sets=EvalSets(settings={"digits": {"limit": 60}}))
    measure = replace(measure, data="digits") if isinstance(measure, Transfer) else measure
    found = measure.compute(run)
    one = figures(measure, found)
    assert one["references"]["commonest class"]["balanced"] == pytest.approx(0.1)
    for row in (one, one["untrained"], *one["references"].values()):
        assert 0 < row["balanced"] < 1 and not [key for key in row if "auroc" in key]
    for shown in measure.tables({"plain": found}):
        assert all("balanced" in row and "AUROC" not in row for row in shown.rows)


def test_a_network_that_diverged_has_no_figure(two: Path, opened: Opened) -> None:
    found = Semi(fractions=(0.2,), head="linear", lr=1e30, **QUICK).compute(opened(two))
    one = found.plain["sets"]["own"]["fractions"][0]
    assert one["accuracy"] is one["balanced"] is None and one["balanced_draws"] == [None, None]
    row = Semi().tables({"a": found})[0].rows[0]
    assert row["accuracy"] is row["balanced"] is None and len(found.notes) == 2


def test_means_over_seeds_have_them_all(two: Path, opened: Opened) -> None:
    run = opened(two)
    labels = {"a/0": 0, "a/1": 1}
    measures: Any = [lambda n: Semi(fractions=(0.2,), seed=n, **QUICK), lambda n: Personal(seed=n)]
    for measure in measures:
        found = {label: measure(seed).compute(run) for label, seed in labels.items()}
        for shown in measure(0).tables(found)[:2]:
            means = over_seeds(shown, {"fedavg": list(labels)})
            assert means is not None and len(means.rows) == len(shown.rows) / 2
            both = [[row for row in shown.rows if row["run"] == label] for label in labels]
            for row, *each in zip(means.rows, *both, strict=True):
                for key in ("accuracy", "balanced", "AUROC"):
                    values = [np.atleast_1d(one[key])[0] for one in each]
                    assert np.atleast_1d(row[key])[0] == pytest.approx(np.mean(values))
            if "reference" in shown.rows[0]:
                assert fits([means])


@pytest.mark.parametrize("measure", [MEASURES[0], Personal(epochs=0)], ids=["semi", "personal"])
def test_results_of_before_are_made_anew(
    measure: Any, two: Path, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    call = ResultCache.__call__

    def spy(self: ResultCache, about: Any, work: Any) -> dict[str, Any]:
        told.append(dict(about))
        return call(self, about, work)

    with monkeypatch.context() as patch:
        patch.setattr(ResultCache, "__call__", spy)
        wanted = measure.compute(opened(two, finished=ResultCache())).plain
    kept = ResultCache(tmp_path)
    for about in told:
        del about["figures"]
        kept(about, lambda: {"accuracy": 0.1, "general": 0.1, "personal": 0.1})
    assert len(list(tmp_path.iterdir())) == len(told) > 1
    found = measure.compute(opened(two, finished=ResultCache(tmp_path)))
    assert found.plain == wanted and len(list(tmp_path.iterdir())) == 2 * len(told)
    assert measure.compute(opened(two, finished=ResultCache(tmp_path))).plain == wanted  # from disk
    assert len(list(tmp_path.iterdir())) == 2 * len(told)


# ---- clients ---------------------------------------------------------------------------------
@pytest.mark.parametrize("by", ["style", "classes"])
def test_clients_have_the_figures_of_scikit_learn(
    by: str, two: Path, opened: Opened, asked: list[dict[str, float]]
) -> None:
    measure = Personal(by=by, epochs=0)
    found = measure.compute(uneven(opened(two)))
    plain, groups = found.plain, 2 if by == "style" else 1
    general, own = asked[:groups], asked[groups : groups + 4]
    each = plain["personalisation"]["each"]
    for row, wanted in zip(each, own, strict=True):
        assert {key: row[key] for key in wanted} == pytest.approx(wanted)
    assert any(row["balanced"] != pytest.approx(row["accuracy"]) for row in each)
    rest = asked[groups + 4 :]
    assert len(rest) == 3 * (4 + groups)
    for number, name in enumerate(REFERENCES[:3]):
        some = rest[number * (4 + groups) :][: 4 + groups]
        whole, clients = some[:groups], some[groups:]
        one = plain["references"][name]
        assert one["general"] == pytest.approx(mean(whole, "accuracy"))
        assert one["personal"] == pytest.approx(mean(clients, "accuracy"))
        for key in ("balanced", "auroc"):
            wanted = {"general": mean(whole, key), "personal": mean(clients, key)}
            assert one[key] == pytest.approx(wanted)
    for key in ("balanced", "auroc"):
        assert plain["generalisation"][key] == pytest.approx(mean(general, key))
        assert plain["personalisation"][key] == pytest.approx(mean(own, key))
        always = plain["references"]["commonest class"][key]
        assert always == {"general": 0.5, "personal": 0.5}
    assert plain["personalisation"]["auroc_clients"] == 4
    tables = measure.tables({"plain": found})
    for row, kind in zip(tables[0].rows, ("generalisation", "personalisation"), strict=True):
        assert row["balanced"] == 100 * plain[kind]["balanced"]
        assert row["AUROC"] == 100 * plain[kind]["auroc"]
    for row in tables[1].rows:
        one = plain["references"][row["reference"]]
        assert row["accuracy"] == 100 * one[row["figure"]]
        assert row["balanced"] == 100 * one["balanced"][row["figure"]]
        assert row["AUROC"] == 100 * one["auroc"][row["figure"]]
    assert [row["AUROC"] for row in tables[-1].rows] == [100 * row["auroc"] for row in each]
    assert fits(tables[1:2]) and fits(tables, 90)


def mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def test_clients_of_ten_classes_have_no_auroc(ten: Path, opened: Opened) -> None:
    measure = Personal(by=None, epochs=0)
    found = measure.compute(opened(ten))
    always = found.plain["references"]["commonest class"]
    assert always["balanced"] == pytest.approx({"general": 0.1, "personal": 0.1})
    assert "AUROC" not in str(measure.tables({"a": found})) and "AUROC" not in str(found.notes)
    for one in (*found.plain["references"].values(), found.plain["generalisation"]):
        assert "auroc" not in one and one["balanced"]
    tables = measure.tables({"plain": found})
    assert all("balanced" in row for shown in tables for row in shown.rows) and fits(tables)


def test_a_client_with_one_of_two_classes_ranks_nothing(made: Made, opened: Opened) -> None:
    split = {"name": "by_class", "classes_per_client": 1}
    run = opened(made("fedavg", data=TWO, split=split, rounds=1))
    everything = Personal(by=None, epochs=0).compute(run).plain["personalisation"]
    assert everything["balanced"] == everything["auroc"] == 0.5
    assert everything["auroc_clients"] == 4
    own = Personal(by="classes", epochs=0).compute(run).plain["personalisation"]
    assert own["balanced"] == own["mean"] == 1.0 and "auroc" not in own


def test_the_mean_auroc_is_of_the_clients_that_have_one(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg", data={**TWO, "classes": 3}, split="iid", rounds=1))
    labels = run.dataset.train.labels
    indices = list(run.split.indices)
    indices[:2] = (np.flatnonzero(labels < 2)[:20], np.flatnonzero(labels > 0)[:20])
    run = replace(run, split=replace(run.split, indices=tuple(indices)))
    found = Personal(by="classes", epochs=0).compute(run)
    one = found.plain["personalisation"]
    areas = [row["auroc"] for row in one["each"]]
    assert areas[2:] == [None, None] and one["auroc_clients"] == 2
    assert one["auroc"] == pytest.approx(np.mean(areas[:2]))
    assert any("AUROC: the mean over 2 of 4 clients" in note for note in found.notes)
    assert summary(one["each"])["auroc"] == one["auroc"]
