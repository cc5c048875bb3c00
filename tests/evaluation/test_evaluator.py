import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.data.images import Dataset, Images
from harmonium.data.sets.digits import Digits
from harmonium.evaluation.evaluator import Evaluation, Evaluator, average

SETTINGS = Evaluation(k=10, labels_per_class=(3,), draws=2)


def pixels() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32))


def evaluator_for(data: Dataset | None = None, **settings: object) -> Evaluator:
    torch.manual_seed(0)
    chosen = replace(SETTINGS, **settings)  # type: ignore[arg-type]
    return Evaluator(chosen, data or Digits().load(), preset("digits"), 0, pixels())


def test_a_verdict_holds_every_probe_of_the_test_part() -> None:
    figures = evaluator_for().test(nn.Flatten()).figures
    assert figures["knn"] > 0.9 and figures["linear"] > 0.9
    assert 0.5 < figures["linear_3"] < figures["linear"]
    json.dumps(figures, allow_nan=False)


def test_a_held_out_labelled_part_has_a_probe_of_its_own() -> None:
    data = Digits(labelled=0.1).load()
    figures = evaluator_for(data).test(nn.Flatten()).figures
    assert figures["linear_3"] < figures["linear_labelled"] < figures["linear"]
    # It learns from the labelled part alone: with wrong labels there it knows nothing.
    assert data.labelled is not None
    wrong = data.labelled.relabelled((data.labelled.labels + 1) % 10)
    assert (
        evaluator_for(replace(data, labelled=wrong)).test(nn.Flatten()).figures["linear_labelled"]
        < 0.1
    )


def test_its_probe_uses_no_other_labels() -> None:
    data = Digits(labelled=0.1).load()
    blind = replace(data, validation=data.validation.without_labels())
    labelled = [
        evaluator_for(each).test(nn.Flatten()).figures["linear_labelled"] for each in (data, blind)
    ]
    assert labelled[0] == labelled[1]


def test_probes_learn_from_the_labelled_part_where_clients_have_no_labels() -> None:
    data = Digits(labelled=0.2).load()
    bare = replace(data, train=data.train.without_labels())
    figures = evaluator_for(bare).test(nn.Flatten()).figures
    assert figures["linear"] > 0.85 and figures["knn"] > 0.85
    assert "linear_labelled" not in figures  # it would be the same
    assert evaluator_for(bare).validate(nn.Flatten())["knn"] > 0.85


def test_training_never_looks_at_the_test_part() -> None:
    data = Digits().load()
    blank = Images(np.zeros_like(data.test.pixels), np.zeros(len(data.test), np.int64))
    seen, blind = evaluator_for(data), evaluator_for(replace(data, test=blank))
    assert seen.validate(nn.Flatten()) == blind.validate(nn.Flatten())
    assert seen.test(nn.Flatten()).figures != blind.test(nn.Flatten()).figures


def test_data_without_labels_get_label_free_figures_alone() -> None:
    data = Digits().load()
    bare = replace(
        data,
        train=data.train.without_labels(),
        validation=data.validation.without_labels(),
        test=data.test.without_labels(),
        classes=(),
    )
    for figures in (
        evaluator_for(bare).validate(pixels()),
        evaluator_for(bare).test(pixels()).figures,
    ):
        assert set(figures) == {"health"}


def test_a_collapsed_encoder_is_called_so_in_words() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(x), 8) + 1e-6 * x.flatten(1)[:, :8]

    (warning,) = evaluator_for().validate(Constant())["health"]["warnings"]
    assert "collapsed" in warning
    assert evaluator_for().validate(pixels())["health"]["warnings"] == []


def test_an_encoder_that_learns_from_labels_is_not_called_collapsed() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(x), 8) + 1e-6 * x.flatten(1)[:, :8]

    taught = replace(evaluator_for(), warns=False)
    assert taught.validate(Constant())["health"]["warnings"] == []
    assert taught.validate(Constant())["health"]["spread"] < 0.01  # the figures stay


def test_figures_that_are_not_finite_do_not_break_json() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), 4), float("nan"))

    health = evaluator_for()._health(Broken())
    json.dumps(health, allow_nan=False)
    assert "not finite" in health["warnings"][0]


def test_evaluations_fall_on_the_first_the_last_and_about_ten_rounds() -> None:
    plain = Evaluation()
    due = [r for r in range(101) if plain.due(r, 100)]
    assert due[0] == 0 and due[-1] == 100 and len(due) == 11
    assert [r for r in range(8) if Evaluation(every=3).due(r, 7)] == [0, 3, 6, 7]


def test_means_over_clients_keep_what_is_not_a_number() -> None:
    many = [
        {"knn": 0.2, "health": {"spread": 1.0, "finite": True, "warnings": ["a"]}},
        {"knn": 0.4, "health": {"spread": None, "finite": False, "warnings": ["a", "b"]}},
    ]
    mean = average(many)
    assert mean["knn"] == pytest.approx(0.3)
    assert mean["health"] == {"spread": None, "finite": False, "warnings": ["a", "b"]}


def test_impossible_settings_are_refused() -> None:
    for settings in ({"k": 0}, {"every": 0}, {"draws": 0}):
        with pytest.raises(ConfigError, match="evaluate"):
            Evaluation(**settings)


def test_without_validation_images_the_test_part_is_still_judged() -> None:
    data = Digits(validation=0.0).load()
    assert len(data.validation) == 0
    figures = evaluator_for(data).test(nn.Flatten()).figures
    assert figures["linear"] > 0.9 and "knn" not in evaluator_for(data).validate(nn.Flatten())


def test_an_encoder_that_diverged_gets_a_warning_and_no_figures() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) / 0.0

    found = evaluator_for()
    assert found.validate(Broken())["knn"] is None
    figures = found.test(Broken()).figures
    assert {figures[key] for key in ("knn", "linear", "linear_3")} == {None}
    assert "not finite" in figures["health"]["warnings"][0]
    json.dumps(figures, allow_nan=False)


def test_few_labels_among_many_images_are_found_while_a_run_goes() -> None:
    data = Digits().load()
    labels = {name: getattr(data, name).labels.copy() for name in ("train", "validation")}
    labels["train"][:-60] = -1
    labels["validation"][:-30] = -1
    few = {name: getattr(data, name).relabelled(some) for name, some in labels.items()}
    found = evaluator_for(replace(data, **few), bank=50, queries=20)
    last, asked = (getattr(data, name) for name in few)
    known, queries = (
        last.subset(range(len(last) - 60, len(last) - 10)),
        range(len(asked) - 30, len(asked) - 10),
    )
    alone = replace(data, train=known, validation=asked.subset(queries))
    assert (
        found.validate(nn.Flatten())["knn"]
        == evaluator_for(alone).validate(nn.Flatten())["knn"]
        > 0.3
    )
    assert evaluator_for(replace(data, **few), k=51, bank=50).notes != evaluator_for(data).notes
