"""Probes of runs: each figure by hand, on the run's own images and on others."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import harmonium
from harmonium.core import files, seeds
from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import send_events_to
from harmonium.data.decoding.conversion import shaped
from harmonium.data.images import UNKNOWN, Images
from harmonium.data.sets.digits import Digits
from harmonium.evaluation import classifier
from harmonium.evaluation.evaluator import Evaluator, average, figures_of
from harmonium.evaluation.features import embed
from harmonium.evaluation.finetune import TUNINGS, Tuned, finetune
from harmonium.evaluation.geometry import health
from harmonium.evaluation.linear import FEW_STRENGTH, linear_probe
from harmonium.evaluation.pixels import Pixels
from harmonium.evaluation.references import references
from harmonium.evaluation.retrieval import retrieve
from harmonium.measures import linear, training
from harmonium.measures.eval_data import EvalData, EvalSets, sets_of
from harmonium.measures.extra_round import trained
from harmonium.measures.geometry import Geometry, drift
from harmonium.measures.knn import NearestNeighbours
from harmonium.measures.linear import Linear, cropped
from harmonium.measures.result_cache import RandomPass, ResultCache
from harmonium.measures.retrieval import Retrieving
from harmonium.measures.run_reader import Run
from harmonium.measures.semi import Semi
from harmonium.measures.transfer import Transfer
from harmonium.recipe.overrides import changes_of
from harmonium.runs.loop import initial_encoder
from harmonium.runs.start import evaluation_data

from .conftest import SMALL

Made = Callable[..., Path]
Opened = Callable[..., Run]
DATA = {**SMALL["data"], "unlabelled": False, "count": 90, "classes": 3}


@pytest.fixture(scope="module")
def plain(made: Made) -> Path:
    return made("fedavg", data=DATA)


@pytest.fixture(scope="module")
def alone(made: Made) -> Path:
    return made("alone", data=DATA, rounds=1, evaluate={**SMALL["evaluate"], "clients": 2})


def labels(images: Images) -> torch.Tensor:
    return torch.from_numpy(np.array(images.labels))


@pytest.fixture(scope="module")
def few(made: Made) -> Path:
    return made("fedavg", data=DATA, split={"name": "iid", "labels": 0.2}, rounds=1)


def test_probes_learn_from_turned_images_or_from_upright_ones(
    made: Made, plain: Path, opened: Opened, tmp_path: Path
) -> None:
    split = {"name": "rotation", "alpha": 0.1, "labels": 0.5}
    path = made("fedavg", data=DATA, split=split, rounds=1)
    run = opened(path)
    as_read, held = run.dataset.train.pixels, run.eval_data().dataset.train.pixels
    assert not np.array_equal(held, as_read)
    upright = run.eval_data("upright").dataset
    assert np.array_equal(upright.train.pixels, as_read)
    assert len(upright.labelled or ()) == len(run.eval_data().dataset.labelled or ()) > 0
    found = harmonium.evaluate_run(path, "knn", "on=own,upright", out=tmp_path / "out")
    assert list(found.figures["knn"]["run"]["sets"]) == ["own", "upright"]
    with pytest.raises(ConfigError, match=r"rotated.*on=own"):
        harmonium.evaluate_run(plain, "knn", "on=upright")


def test_lp_000_learns_from_the_labels_that_clients_saw(
    few: Path, plain: Path, opened: Opened
) -> None:
    run, whole = opened(few), opened(plain)
    known = int((run.split.seen(run.dataset.train).labels != UNKNOWN).sum())
    assert 0 < known < len(run.dataset.train) / 2
    measure = Linear(protocol="lp_000", epochs=2)
    found = measure.compute(run)
    assert found.plain["sets"]["own"]["learnt_from"] == known
    assert f"learnt from the {known} images" in found.notes[-1]
    for other, one in ((measure, whole), (Linear(protocol="lp_fedx", epochs=2), run)):
        plainly = other.compute(one).plain["sets"]["own"]
        assert plainly["learnt_from"] == len(one.dataset.train)
    seen = run.split.seen(run.dataset.train)
    bank = seen.subset(np.flatnonzero(seen.labels != UNKNOWN))
    encoder, views = run.method.represent(run.server), run.method.views
    rng = seeds.torch_rng(0, "measure", "linear")
    how = replace(classifier.PROTOCOLS["lp_000"], epochs=2)
    model = classifier.train(embed(encoder, bank, views.plain), labels(bank), how, rng)
    test = run.dataset.test
    right = (model.predict(embed(encoder, test, views.plain)) == labels(test)).double().mean()
    assert found.plain["sets"]["own"]["accuracy"] == float(right)


def test_a_set_that_the_run_learnt_from_is_told(plain: Path, opened: Opened) -> None:
    for names, told in ((("own",), 0), (("shapes",), 1), (("digits",), 0)):
        sets = EvalSets(names, {"shapes": {"count": 60, "test_count": 20}, "digits": {"limit": 40}})
        notes = NearestNeighbours(k=3).compute(opened(plain, sets=sets)).notes
        assert sum("shapes itself" in note for note in notes) == told


# ---- frozen features -------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["plain", "alone"])
def test_the_figures_are_those_that_runs_report(
    which: str, request: pytest.FixtureRequest, opened: Opened
) -> None:
    run = opened(request.getfixturevalue(which))
    data, recipe = evaluation_data(run.dataset, run.split), run.recipe
    untrained = initial_encoder(run.method, data)
    evaluator = Evaluator(recipe.evaluate, data, run.method.views, recipe.seed, untrained)
    represent, server = run.method.represent, run.server
    if which == "alone":
        encoders = [represent(server, run.state(client)) for client in (0, 1)]
    else:
        encoders = [represent(server)]
    wanted = average([evaluator.test(one).figures for one in encoders])
    before = evaluator.test(untrained).figures
    for name, measure in (("knn", NearestNeighbours()), ("linear", Linear())):
        found = measure.compute(run).plain["sets"]["own"]
        assert found["accuracy"] == wanted[name] and found["untrained"] == before[name]
        assert len(found["encoders"]) == len(encoders)
    row = NearestNeighbours().tables({"a": NearestNeighbours().compute(run)})[0].rows[0]
    assert row["accuracy"] == 100 * wanted["knn"] and "on" not in row
    assert row["balanced"] == 100 * wanted["balanced"]["knn"]


def test_references_are_those_that_runs_report(plain: Path, opened: Opened, home: Path) -> None:
    run = opened(plain, finished=ResultCache(home / "draws"))
    data, recipe = evaluation_data(run.dataset, run.split), run.recipe
    judge = Evaluator(recipe.evaluate, data, run.method.views, recipe.seed, run.untrained)
    wanted = {name: figures_of(one) for name, one in references(judge).items()}
    for name, measure in (("knn", NearestNeighbours()), ("linear", Linear())):
        found = measure.compute(run).plain["sets"]["own"]
        beside = found["references"]
        assert set(beside) == {"untrained", *wanted}
        for reference, figures in wanted.items():
            assert beside[reference]["accuracy"] == figures[name]
            assert beside[reference]["balanced"] == figures["balanced"][name]
        again = measure.compute(run).plain["sets"]["own"]  # from disk
        assert again == found and not run.finished.found and not run.finished.computed
        rows = {
            row["reference"]: row for row in measure.tables({"a": measure.compute(run)})[1].rows
        }
        assert set(rows) == {"untrained", *wanted}
        for reference, figures in wanted.items():
            assert rows[reference]["accuracy"][0] == 100 * figures[name]
            assert rows[reference]["balanced"][0] == 100 * figures["balanced"][name]
            assert "AUROC" not in rows[reference]  # of ten classes


def test_trained_networks_stand_beside_linear_probes_of_pixels(plain: Path, opened: Opened) -> None:
    run = opened(plain)
    measure = Semi(fractions=(0.2,), draws=2, **FEW)
    found = measure.compute(run)
    row = found.plain["sets"]["own"]["fractions"][0]
    known, test = measure.known(run.eval_data(), 0.2, 1), run.dataset.test
    prepare = run.method.views.plain
    for name, encoder in run.pixels(run.eval_data()).items():
        mine, asked = (embed(encoder, images, prepare) for images in (known, test))
        none = mine[:0], labels(known)[:0]
        probe = linear_probe(
            mine, labels(known), *none, asked, labels(test), strengths=(FEW_STRENGTH,)
        )
        assert row["references"][name]["draws"][1] == probe.accuracy
    own = found.plain["sets"]["own"]
    assert row["references"]["commonest class"]["accuracy"] == own["chance"]
    shown = [one["reference"] for one in measure.tables({"a": found})[1].rows]
    assert shown == ["untrained", "raw pixels", "whitened pixels", "commonest class"]


def test_settings_of_neighbours_count(plain: Path, opened: Opened) -> None:
    run = opened(plain)
    first = NearestNeighbours(k=1).compute(run).plain["sets"]["own"]["encoders"][0]
    assert first["k"] == 1
    crowd = NearestNeighbours(k=500).compute(run)
    assert any("knn.k is 500" in note for note in crowd.notes)
    held = NearestNeighbours(part="validation").compute(run).plain["sets"]["own"]
    assert held["pictures"] == len(run.dataset.validation)


@pytest.mark.parametrize("name", [*classifier.PROTOCOLS, "lp_orch"])
def test_a_papers_protocol_is_its_classifier_after_the_last_epoch(
    name: Any, plain: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(plain)
    measure = Linear(protocol=name, epochs=3, passes=2, seed=4)
    learnt: list[Any] = []

    def spied(features: Any, *given: Any) -> classifier.Classifier:
        learnt.append(features if isinstance(features, torch.Tensor) else list(features))
        return classifier.train(features, *given)

    monkeypatch.setattr(linear, "train", spied)
    found = measure.compute(run)
    data, views, encoder = run.dataset, run.method.views, run.method.represent(run.server)
    features: Any = embed(encoder, data.train, views.plain)
    how = replace(classifier.PROTOCOLS.get(name, classifier.ORCHESTRA), epochs=3)
    if name == "lp_orch":
        pixels, view = torch.from_numpy(np.array(data.train.pixels)), cropped(run)
        assert (view.crop_min, view.crop_max, view.flip, view.jitter, view.gray) == (
            0.5,
            1,
            0.5,
            0,
            0,
        )
        features = [
            embed(
                encoder, data.train, lambda _, n=n: view(pixels, seeds.torch_rng(4, "pass", n, 0))
            )
            for n in (0, 1)
        ]
        assert not torch.equal(*features)
        assert all(torch.equal(*pair) for pair in zip(learnt[0], features, strict=True))
    rng = seeds.torch_rng(4, "measure", "linear")
    model = classifier.train(features, labels(data.train), how, rng)
    right = model.predict(embed(encoder, data.test, views.plain)) == labels(data.test)
    one = found.plain["sets"]["own"]["encoders"][0]
    assert one["accuracy"] == float(right.double().mean())
    assert one["protocol"]["lr"] == how.lr and one["protocol"]["epochs"] == 3
    said = " ".join(found.notes)
    assert ("2 passes" in said) == (name == "lp_orch") and ("lp_000:" in said) == (name == "lp_000")


def test_views_of_a_pass_differ_by_pass_batch_and_seed(plain: Path, opened: Opened) -> None:
    run = opened(plain)
    pixels = torch.from_numpy(np.array(run.dataset.train.pixels[:4]))
    drawn = RandomPass(cropped(run), seed=0, number=0)
    first = drawn(pixels, 0)
    assert torch.equal(drawn(pixels, 0), first) and not torch.equal(drawn(pixels, 500), first)
    for other in (replace(drawn, seed=1), replace(drawn, number=1)):
        assert not torch.equal(other(pixels, 0), first)


# ---- fine-tuning -----------------------------------------------------------------------------
FEW = {"epochs": 2, "batch": 16}


def accuracy(made: Tuned, images: Images, prepare: Any) -> float:
    given = made.answers(images, prepare)
    assert given is not None
    return given.accuracy


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_fine_tuning_with_few_labels_by_hand(head: Any, plain: Path, opened: Opened) -> None:
    run = opened(plain)
    measure = Semi(head=head, fractions=(0.01, 0.2), draws=2, seed=1, **FEW)
    found = measure.compute(run)
    how = measure.how(run)
    assert how.optimiser == TUNINGS[head].optimiser and how.lr == TUNINGS[head].lr
    assert how.view == (cropped(run) if head == "linear" else None)
    one, data, prepare = found.plain["sets"]["own"], run.eval_data(), run.method.views.plain
    assert [row["fraction"] for row in one["fractions"]] == [0.01, 0.2]
    assert one["fractions"][0]["labels"] == 3  # one of each class, though 1 % is none
    row = one["fractions"][1]
    for draw in (0, 1):
        known = measure.known(data, 0.2, draw)
        counts = np.bincount(run.dataset.train.labels)
        assert np.array_equal(np.bincount(known.labels), np.maximum(1, np.round(0.2 * counts)))
        seed = seeds.seed_of(1, "measure", "tuned", draw)
        for encoder, values in (
            (run.method.represent(run.server), row["draws"]),
            (run.untrained, row["untrained"]["draws"]),
        ):
            made = finetune(encoder, known, how, prepare, seed)
            assert accuracy(made, run.dataset.test, prepare) == values[draw]
    assert not np.array_equal(
        measure.known(data, 0.2, 0).pixels, measure.known(data, 0.2, 1).pixels
    )
    assert row["accuracy"] == pytest.approx(np.mean(row["draws"]))
    assert row["stderr"] == pytest.approx(abs(row["draws"][0] - row["draws"][1]) / 2)
    assert measure.compute(run).plain == found.plain


def test_own_encoders_of_clients_are_averaged_draw_by_draw(alone: Path, opened: Opened) -> None:
    run = opened(alone)
    measure = Semi(fractions=(0.5,), draws=2, **FEW)
    found = measure.compute(run).plain["sets"]["own"]["fractions"][0]
    assert found["encoders"] == ["client 0", "client 1"]
    prepare, known = run.method.views.plain, measure.known(run.eval_data(), 0.5, 1)
    seed = seeds.seed_of(0, "measure", "tuned", 1)
    each = [
        finetune(
            run.method.represent(run.server, run.state(c)), known, measure.how(run), prepare, seed
        )
        for c in (0, 1)
    ]
    values = [accuracy(one, run.dataset.test, prepare) for one in each]
    assert found["draws"][1] == pytest.approx(np.mean(values))
    single = replace(measure, clients=1).compute(run).plain["sets"]["own"]["fractions"][0]
    assert single["encoders"] == ["client 0"] and single["untrained"] == found["untrained"]
    assert single["draws"][1] == values[0]


def test_transfer_trains_everything_on_the_other_set(plain: Path, opened: Opened) -> None:
    sets = EvalSets(("own",), {"digits": {"limit": 60, "test": 0.03}})
    run = replace(opened(plain), sets=sets)
    measure = Transfer(data="digits", **FEW)
    found = measure.compute(run)
    one = found.plain["sets"]["digits"]
    data = Digits(limit=60, test=0.03, size=10, channels=3).load()
    bare = Digits(limit=60, test=0.03).load()
    assert np.array_equal(data.train.pixels, shaped(bare.train.pixels, 10, 3))
    assert one["labels"] == 60 and one["how"]["epochs"] == 2
    prepare, seed = run.method.views.plain, seeds.seed_of(0, "measure", "tuned", 0)
    for encoder, value in (
        (run.method.represent(run.server), one["accuracy"]),
        (run.untrained, one["untrained"]["accuracy"]),
    ):
        made = finetune(encoder, data.train, measure.how(run), prepare, seed)
        assert accuracy(made, data.test, prepare) == value
    assert measure.tables({"a": found})[0].rows[0]["from scratch"] is not None
    with pytest.raises(ConfigError, match="transfer.data=mnist"):
        Transfer().needs(["own"])
    assert Transfer().needs(["own", "digits"]) == ["digits"]


# ---- retrieval and geometry ------------------------------------------------------------------
def test_retrieval_and_its_sheet(plain: Path, opened: Opened, tmp_path: Path) -> None:
    run = opened(plain)
    measure = Retrieving(queries=20, sheet=3, at=(1, 4))
    found = measure.compute(run)
    one, test = found.plain["sets"]["own"], run.dataset.test
    features = embed(run.method.represent(run.server), test, run.method.views.plain)
    asking = torch.from_numpy(seeds.numpy_rng(0, "measure", "queries").permutation(40)[:20])
    wanted = retrieve(features, labels(test), asking, (1, 4))
    assert one["map"] == wanted.average and one["precision"]["4"] == wanted.precision[4]
    assert one["map_chance"] == wanted.average_chance and one["gallery"] == 40
    flat = embed(Pixels(), test, run.method.views.plain)
    assert one["references"]["raw pixels"]["map"] == retrieve(flat, labels(test), asking).average
    assert {"mAP raw pixels", "mAP whitened pixels"} <= set(measure.tables({"a": found})[0].rows[0])
    pictures, alike = found.arrays["own/pictures"], found.arrays["own/alike"]
    assert pictures.shape == (3, 9, 10, 10, 3) and alike[:, 0].all()
    assert np.array_equal(pictures[1, 0], test.pixels[int(asking[1])])
    first = torch.nn.functional.normalize(features.double())
    near = (first @ first[asking[1]]).index_fill(0, asking[1], -2).argmax()
    assert np.array_equal(pictures[1, 1], test.pixels[int(near)])
    assert alike[1, 1] == (test.labels[int(near)] == test.labels[int(asking[1])])
    assert measure.draw(tmp_path / "sheet.png", {"a": found})
    assert Image.open(tmp_path / "sheet.png").width > 500
    assert not replace(measure, sheet=0).draw(tmp_path / "no.png", {"a": replace(found, arrays={})})


def test_geometry_and_drift_by_hand(plain: Path, opened: Opened) -> None:
    run = opened(plain)
    found = Geometry(pictures=20, clients=3).compute(run)
    rows = np.sort(seeds.numpy_rng(0, "measure", "pictures").permutation(40)[:20])
    pixels = torch.from_numpy(run.dataset.test.pixels[rows])
    encoder = run.method.represent(run.server)
    with torch.no_grad():
        views = run.method.views(pixels, seeds.torch_rng(0, "measure", "views"))
        wanted = health(encoder(views[0]), encoder(views[1]))
    one = found.plain["sets"]["own"]
    assert one["alignment"] == wanted.alignment and one["spread"] == wanted.spread
    local = found.plain["local"]
    chosen = run.clients(3, 0, "geometry", least=2)
    assert local["clients"] == chosen
    model, sent = run.server.model, dict(trained(run, chosen))
    keys = [k for k, _ in run.method.blueprint.named_parameters() if k.startswith("encoder.")]
    away = {
        c: torch.cat([(t.model[k] - model[k]).double().flatten() for k in keys])
        for c, t in sent.items()
    }
    size = torch.cat([model[k].double().flatten() for k in keys]).norm()
    told = local["drift"]["encoder"]
    assert told["distance"] == pytest.approx(
        float(np.mean([a.norm() / size for a in away.values()]))
    )
    assert told["farthest"] == pytest.approx(max(float(a.norm() / size) for a in away.values()))
    a, b, c = (one / one.norm() for one in away.values())
    degrees = [float(torch.rad2deg(torch.arccos(x @ y))) for x, y in ((a, b), (a, c), (b, c))]
    assert told["angle"] == pytest.approx(np.mean(degrees), abs=1e-4)
    assert set(local["drift"]) == {"encoder", "projector", "all"} and local["angles"]["mean"] > 0
    assert "local" not in Geometry(clients=0).compute(run).plain
    still = drift(model, {0: model, 1: model}, {"encoder": keys})["encoder"]
    assert still["distance"] == 0 and still["angle"] is None


def test_clients_that_send_nothing_have_angles_and_no_drift(alone: Path, opened: Opened) -> None:
    found = Geometry(pictures=20, clients=3).compute(opened(alone))
    assert found.plain["local"]["drift"] is None and found.plain["local"]["angles"]["mean"] > 0
    assert any("no drift" in note for note in found.notes)


# ---- other sets ------------------------------------------------------------------------------
def test_other_sets_come_in_the_encoders_shape_with_their_own_parts(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    evaluate = NearestNeighbours.evaluate

    def recorded(self: Any, run: Run, data: EvalData) -> Any:
        images = data.dataset
        sizes = (images.train.shape, len(images.train), len(images.test))
        seen.append((data.name, *sizes, images.name))
        return evaluate(self, run, data)

    monkeypatch.setattr(NearestNeighbours, "evaluate", recorded)
    words = ["knn", "on=[own, digits]", "on.digits.limit=200", "on.digits.test=0.1"]
    found = harmonium.evaluate_run(plain, *words, out=tmp_path / "out")
    assert seen[0][0] == "own" and seen[1] == ("digits", (10, 10, 3), 200, 180, "digits")
    assert [row["on"] for row in found.tables[0].rows] == ["own", "digits"]
    kept = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert set(kept["measures"]["knn"]["run"]["sets"]) == {"own", "digits"}
    assert kept["features"]["computed"] + kept["features"]["found"] > 0
    again = harmonium.evaluate_run(plain, *words, out=tmp_path / "out")
    assert again.features["computed"] == 0 and again.features["found"] > 400
    assert again.figures == found.figures


def test_words_for_sets() -> None:
    sets, rest = sets_of(changes_of(["on=digits,own", "knn.k=3", "on.digits.limit=5"]))
    assert sets.names == ("digits", "own") and rest == changes_of(["knn.k=3"])
    assert sets.spec("digits") == Digits(limit=5)
    assert sets_of([])[0].names == ("own",)
    assert sets_of(changes_of(["on=[digits]"]))[0].names == ("digits",)


def test_a_folder_in_place_of_a_set_is_answered_with_the_right_words(tmp_path: Path) -> None:
    for words in (str(tmp_path), f"folder:{tmp_path}"):
        with pytest.raises(ConfigError, match=f"on=folder on.folder.path={tmp_path}"):
            sets_of(changes_of([f"on={words}"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["knn", "on=digitz"], "did you mean 'digits'"),
        (["knn", "on=[]"], "name data sets"),
        (["knn", "on=3"], "name data sets"),
        (["knn", "on=[own,own]"], "twice"),
        (["knn", "on.own.limit=3"], "has no settings"),
        (["knn", "on=digits", "on.digits.limt=3"], "did you mean 'on.digits.limit'"),
        (["knn", "on=digits", "on.digits.size=8"], "the shape that the encoder was made for"),
        (["knn", "on=digits", "on.digits=3"], "write on.SET.key=value"),
        (["knn", "on.digits.limit=3"], "on: .*digits"),
        (["angles", "on=digits"], "on: .*digits"),
        (["knn", "on=digits", "on.digits.limit=99999"], "on.digits.limit=99999"),
        (["knn", "on=mnist"], "mnist"),
        (["knn", "knn.k=0"], "knn.k is 0"),
        (["knn", "knn.temperature=0"], "must be above 0"),
        (["linear", "linear.protocol=lp_orchestra"], "should be one of"),
        (["linear", "linear.passes=0"], "linear.passes is 0"),
        (["semi", "semi.fractions=[0]"], "above 0 and at most 1"),
        (["semi", "semi.fractions=[0.1,0.1]"], "one twice"),
        (["semi", "semi.head=big"], "should be one of"),
        (["semi", "semi.views=crops"], "did you mean 'crop'"),
        (["semi", "semi.lr=0"], "semi.lr is 0"),
        (["transfer"], "transfer.data=mnist"),
        (["transfer", "transfer.data=nothing"], "which is unknown"),
        (["retrieval", "retrieval.at=[0]"], "at least 1"),
        (["linear", "linear.epochs=3"], "for a paper's protocol"),
        (["geometry", "geometry.pictures=1"], "must be at least 2"),
    ],
)
def test_slips_are_one_line_before_anything_is_measured(
    words: list[str], message: str, plain: Path, home: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message.replace("[", r"\[")) as error:
        harmonium.evaluate_run(plain, *words)
    assert "\n" not in str(error.value) and not (home / "evaluations").exists()


def test_data_without_labels_are_refused_by_name(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg"))
    for measure in (NearestNeighbours(), Semi(), Retrieving()):
        with pytest.raises(DataError, match="shapes"):
            measure.compute(run)
    assert Geometry(pictures=20, clients=0).compute(run).plain["sets"]["own"]["spread"] > 0


def test_long_work_is_told_from_first_to_last(plain: Path, home: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None, str]] = []
    words = ["semi", "semi.fractions=[0.3]", "semi.draws=1", "semi.epochs=2", "knn", "linear"]
    words += ["linear.protocol=lp_fedca", "linear.epochs=3", "geometry", "geometry.clients=2"]
    words += ["personal", "tsne", "tsne.perplexity=3"]
    with send_events_to(lambda *heard: told.append(heard)):
        found = harmonium.evaluate_run(plain, *words, out=tmp_path / "out")
    labels = 2 * found.figures["semi"][plain.name]["sets"]["own"]["fractions"][0]["labels"]
    clients = found.figures["personal"][plain.name]["personalisation"]["clients"]
    both = {
        ("opening", 1, "runs"),
        ("evaluation", 6, "measures"),
        ("fine-tuning", labels, "images"),
        ("a classifier", 3, "epochs"),
        ("a further round", 2, "clients"),
        ("personal figures", clients, "clients"),
        ("personal figures of untrained", clients, "clients"),
    }
    assert both <= {(what, total, unit) for what, done, total, unit in told if done == total}
    assert both <= {(what, total, unit) for what, done, total, unit in told if done == 0}
    assert ("features", 40, 40, "images") in told
    begun = {what for what, done, total, _ in told if total is None}
    assert "tables and plots" in begun and any(what.startswith("t-SNE of ") for what in begun)


# ---- what a killed call keeps ----------------------------------------------------------------
DYING = """
import os, sys, harmonium
told = []
def dying(text):
    told.append(text)
    if len(told) == 3:
        os._exit(9)
harmonium.evaluate_run(*sys.argv[2:], out=sys.argv[1], note=dying)
"""


def test_a_killed_call_repeats_no_finished_draw(plain: Path, home: Path, tmp_path: Path) -> None:
    words = ["semi", "semi.fractions=[0.3]", "semi.draws=2", "semi.epochs=1"]
    command = [sys.executable, "-c", DYING, str(tmp_path / "out"), str(plain), *words]
    assert subprocess.run(command).returncode == 9
    assert len(list((home / "draws").iterdir())) == 3
    lines: list[str] = []
    again = harmonium.evaluate_run(plain, *words, note=lines.append)  # wherever it is written
    assert again.draws == {"found": 3, "computed": 1}
    assert sum("found on disk" in line for line in lines) == 3
    shutil.rmtree(home / "draws")
    whole = harmonium.evaluate_run(plain, *words, out=tmp_path / "whole")
    assert whole.figures == again.figures and whole.draws == {"found": 0, "computed": 4}
    other = harmonium.evaluate_run(plain, *words, "semi.seed=1", out=tmp_path / "out")
    assert other.draws["found"] == 0  # nothing of another seed is taken for it
    words = ["transfer", "on=digits", "on.digits.limit=40", "transfer.epochs=1", "transfer.draws=2"]
    twice = harmonium.evaluate_run(plain, *words, out=tmp_path / "out")
    assert twice.draws == {"found": 0, "computed": 4}  # the same images, in another order


def test_networks_that_train_otherwise_share_no_result(plain: Path, opened: Opened) -> None:
    """Before training, one with dropout has the weights of one without."""
    told: list[Any] = []

    def never(about: Any, work: Any) -> dict[str, Any]:
        told.append(about["network"])
        return {"accuracy": 0.5, "balanced": 0.5, "auroc": None}

    run = opened(plain, finished=never)
    Semi(fractions=(0.1,), draws=1).compute(run)
    assert told == [{"name": "cnn-small", **asdict(run.recipe.encoder)}] * 2


def test_a_damaged_result_is_made_anew(tmp_path: Path) -> None:
    for text in ("", "{", '{"result": 3}', "[]"):
        one = ResultCache(tmp_path)
        assert one({"a": 1}, lambda: {"accuracy": 0.5}) == {"accuracy": 0.5}
        (path,) = tmp_path.glob("*.json")
        path.write_text(text)
        assert ResultCache(tmp_path)({"a": 1}, lambda: {"accuracy": 0.25})["accuracy"] == 0.25
        path.unlink()


def test_results_of_two_calls_at_once_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, real = [], files.write_atomic

    def spied(path: Path, data: bytes) -> str:
        names.append(path.name)
        return real(path, data)

    monkeypatch.setattr(files, "write_atomic", spied)

    def work() -> dict[str, Any]:
        if not names:  # the other call finishes while this one works
            ResultCache(tmp_path)({"a": 1}, lambda: {"accuracy": 0.5})
        return {"accuracy": 0.5}

    assert ResultCache(tmp_path)({"a": 1}, work) == {"accuracy": 0.5}
    assert len(set(names)) == 2 and len(list(tmp_path.iterdir())) == 1


# ---- test images ---------------------------------------------------------------------------
def test_test_images_touch_no_probe(
    plain: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other test images and labels leave all that probes learn and choose as it is."""
    run = opened(plain)
    test = run.dataset.test
    rng = np.random.default_rng(0)
    wrong = Images(rng.permutation(255 - test.pixels), (test.labels + 1) % 3)
    changed = replace(run, dataset=replace(run.dataset, test=wrong))
    networks: list[dict[str, torch.Tensor]] = []
    rules: list[torch.Tensor] = []
    fine, learn = finetune, classifier.train

    def tune(*given: Any) -> Tuned:
        made = fine(*given)
        networks.append(made.network.state_dict())
        return made

    def rule(*given: Any, **more: Any) -> classifier.Classifier:
        made = learn(*given, **more)
        rules.append(made.weights)
        return made

    monkeypatch.setattr(training, "finetune", tune)
    monkeypatch.setattr(linear, "train", rule)
    chosen = []
    for one in (run, changed):
        fast = Linear().compute(one).plain["sets"]["own"]["encoders"]
        chosen.append([(row["strength"], row["validation"]) for row in fast])
        Linear(protocol="lp_orch", epochs=2).compute(one)
        Linear(protocol="lp_fedx", epochs=2).compute(one)
        Semi(fractions=(0.3,), draws=1, **FEW).compute(one)
        Semi(fractions=(0.3,), draws=1, head="linear", **FEW).compute(one)
    assert chosen[0] == chosen[1] and chosen[0][0][1] is not None
    for found in (rules, [value for state in networks for value in state.values()]):
        half = len(found) // 2
        assert half and all(
            torch.equal(*pair) for pair in zip(found[:half], found[half:], strict=True)
        )
    first, second = (
        NearestNeighbours().compute(one).plain["sets"]["own"] for one in (run, changed)
    )
    assert first["accuracy"] != second["accuracy"]  # they were looked at in the end
    assert (test.labels != UNKNOWN).all()
