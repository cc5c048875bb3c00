"""Whitening that is fitted on moments which clients send."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import harmonium
from harmonium.core.errors import ConfigError
from harmonium.evaluation.features import embed
from harmonium.evaluation.whitening import moments_of, whitening
from harmonium.federation.card import card
from harmonium.measures.knn import NearestNeighbours
from harmonium.measures.retrieval import Retrieving
from harmonium.measures.run_reader import Run, open_run
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import changed_recipe
from harmonium.studies.comparison.cells import plan

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "count": 90, "test_count": 40, "size": 10, "classes": 3},
    "encoder": {"name": "cnn-small", "width": 4, "out": 12},
    "local": {"epochs": 1, "batch": 8},
    "evaluate": {"k": 5, "labels_per_class": [], "whiten": 6},
    "engine": {"workers": 0},
    "clients": 3,
    "rounds": 2,
}


def opened(path: Path) -> Run:
    return open_run(path, "run", changed_recipe(path, ()))


@pytest.fixture(scope="module")
def whitened(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    folder = tmp_path_factory.mktemp("whitened") / "run"
    harmonium.run("fedavg", out=folder, **SMALL)
    return folder


def test_the_moments_are_those_of_all_training_images(whitened: Path) -> None:
    run = opened(whitened)
    held = run.server.memory["whitening"]
    features = embed(run.method.represent(run.server), run.dataset.train, run.method.views.plain)
    total = moments_of(features)
    assert held["images"] == len(features) == 3 * (len(features) // 3)
    torch.testing.assert_close(held["first"], total.first / total.count)
    rows, columns = torch.triu_indices(12, 12)
    torch.testing.assert_close(held["second"], (total.second / total.count)[rows, columns])


def test_plain_and_whitened_figures_stand_side_by_side(whitened: Path) -> None:
    result = harmonium.resume(whitened)
    run = opened(whitened)
    encoder, prepare = run.method.represent(run.server), run.method.views.plain
    made = whitening(moments_of(embed(encoder, run.dataset.train, prepare)), 6)
    assert set(result.whitened["figures"]) == {"knn", "linear", "balanced"}
    found = NearestNeighbours(whiten=6).compute(run).plain["sets"]["own"]
    assert found["accuracy"] == result.figures["knn"]
    assert found["whitened"]["accuracy"] == pytest.approx(result.whitened["figures"]["knn"])
    one = result.whitened["changes"]["knn"]
    assert one["whitened"] - one["plain"] == pytest.approx(found["whitened"]["change"])
    assert "knn_whitened" in result.rounds[-1] and "knn_whitened" not in result.rounds[0]
    assert made.directions == 6
    row = (
        NearestNeighbours(whiten=6)
        .tables({"a": NearestNeighbours(whiten=6).compute(run)})[0]
        .rows[0]
    )
    assert row["whitened"] == 100 * found["whitened"]["accuracy"]
    near = Retrieving(whiten=True).compute(run).plain["sets"]["own"]
    assert near["whitened"]["map"] != near["map"]
    shown = Retrieving(whiten=True).tables({"a": Retrieving(whiten=True).compute(run)})[0].rows[0]
    assert shown["P@1 whitened"] == 100 * near["whitened"]["precision"]["1"]


def test_the_model_is_the_same_without_it(whitened: Path, tmp_path: Path) -> None:
    plain = {**SMALL, "evaluate": {"k": 5, "labels_per_class": []}}
    result = harmonium.run("fedavg", out=tmp_path / "plain", **plain)
    assert not result.whitened and result.figures == harmonium.resume(whitened).figures
    held = safetensors.torch.load_file(result.folder / "encoder.safetensors")
    other = safetensors.torch.load_file(whitened / "encoder.safetensors")
    assert set(other) - set(held) == {f"harmonium.whitening.{one}" for one in ("mean", "matrix")}
    assert all(torch.equal(held[key], other[key]) for key in held)
    with pytest.raises(ConfigError, match="whiten"):
        harmonium.load_encoder(result.folder, whiten=True)
    # A run that did not fit one can still be judged with it where its images are.
    assert (
        NearestNeighbours(whiten=True)
        .compute(opened(result.folder))
        .plain["sets"]["own"]["whitened"]
    )


def test_it_goes_with_the_encoder(whitened: Path) -> None:
    plain, white = (harmonium.load_encoder(whitened, whiten=w) for w in (False, True))
    few = harmonium.load_encoder(whitened, whiten=2)
    images = opened(whitened).dataset.train.pixels
    features = plain.embed(np.array(images))
    made = white.embed(np.array(images))
    assert made.shape == (len(images), 6) and white.features == 6 and plain.features == 12
    centred = made - made.mean(dim=0)
    covariance = centred.T @ centred / len(made)
    assert torch.allclose(covariance, torch.eye(6), atol=0.5)  # but for the shrinkage
    assert covariance.fill_diagonal_(0).abs().max() < 1e-3
    torch.testing.assert_close(few.embed(np.array(images)), made[:, :2])
    torch.testing.assert_close(white.whitening(features), made)
    for wrong in (0, 7):
        with pytest.raises(ConfigError, match="whiten"):
            harmonium.load_encoder(whitened, whiten=wrong)


def test_secure_aggregation_hides_single_clients(whitened: Path, tmp_path: Path) -> None:
    masked = {**SMALL, "privacy": {"secure_aggregation": True}, "rounds": 1}
    run = opened(harmonium.run("fedavg", out=tmp_path / "masked", **masked).folder)
    features = embed(run.method.represent(run.server), run.dataset.train, run.method.views.plain)
    total, held = moments_of(features), run.server.memory["whitening"]
    torch.testing.assert_close(held["first"], total.first / total.count, atol=1e-9, rtol=0)
    rows, columns = torch.triu_indices(12, 12)
    pairs = (total.second / total.count)[rows, columns]
    torch.testing.assert_close(held["second"], pairs, atol=1e-9, rtol=0)


def test_the_card_tells_of_it(whitened: Path) -> None:
    run = opened(whitened)
    text = card(run.method).text()
    assert "measure_moments" in text and "evaluate.whiten" in text
    plain = Recipe.of("fedavg", "data=digits").known_method()
    assert "measure_moments" not in card(plain).text()


@pytest.mark.parametrize(
    "words",
    [
        ["alone"],
        ["fedavg", "privacy.update_clip=1", "privacy.update_noise=2", "objective.norm=none"],
        ["fedsc", "method.epsilon=3"],
    ],
)
def test_it_is_refused_where_it_would_reveal_or_mean_nothing(words: list[str]) -> None:
    Recipe.of(*words)
    with pytest.raises(ConfigError, match="evaluate.whiten"):
        Recipe.of(*words, "evaluate.whiten=true")


def test_impossible_numbers_of_directions_are_refused() -> None:
    for words in (["evaluate.whiten=0"], ["evaluate.whiten=-3"]):
        with pytest.raises(ConfigError, match="evaluate.whiten"):
            Recipe.of("fedavg", *words)
    with pytest.raises(ConfigError, match="whiten"):
        NearestNeighbours(whiten=0)


def test_a_comparison_has_rows_of_whitened_features(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.studies.comparison.plots.draw", lambda *_: [])
        settings = {**SMALL, "rounds": 1, "compare.references": "none"}
        found = harmonium.compare("fedavg", out=tmp_path / "c", **settings)
    assert [row["encoder"] for row in found.rows][-2:] == ["fedavg", "fedavg, whitened"]
    beside = plan(["fedavg", "data=digits", "evaluate.whiten=true"]).references
    assert beside["centralised"].evaluate.whiten is True
    assert beside["alone"].evaluate.whiten is False  # each client has an encoder of its own


def test_moments_are_no_part_of_what_a_method_costs(tmp_path: Path) -> None:
    few = {**SMALL, "participation": {"number": 1}, "rounds": 1}
    plain = {**few, "evaluate": {**few["evaluate"], "whiten": False}}
    row, other = (
        harmonium.run("fedavg", out=tmp_path / name, **settings).rounds[-1]
        for name, settings in {"with": few, "without": plain}.items()
    )
    shared = ("answered", "missing", "bytes_down", "bytes_up", "reported")
    assert [row.get(key) for key in shared] == [other.get(key) for key in shared]
    assert row["answered"] == 1 and row["bytes_measuring"] > 0
