"""What figures stand beside, and the sentence that compares them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.cli.terminal import probe_rows
from harmonium.data.augment.views import preset
from harmonium.data.images import Dataset, Images
from harmonium.data.sets.digits import Digits
from harmonium.evaluation import evaluator
from harmonium.evaluation.evaluator import Evaluation, Evaluator, figures_of
from harmonium.evaluation.metrics import Answers
from harmonium.evaluation.references import (
    references,
    references_folder,
    validation_levels,
    whitened_pixels,
)
from harmonium.evaluation.verdict import Difference, difference, reasons, sentence, verdict
from harmonium.runs.start import run

SETTINGS = Evaluation(k=10, labels_per_class=(3,), draws=2)


def evaluator_for(data: Dataset, seed: int = 0, **settings: object) -> Evaluator:
    chosen = replace(SETTINGS, **settings)  # type: ignore[arg-type]
    return Evaluator(chosen, data, preset("digits"), seed, nn.Flatten())


def two_classes(share: float = 0.8) -> Dataset:
    """Noise with two labels, one of them much commoner than the other."""
    rng = np.random.default_rng(0)

    def part(count: int) -> Images:
        pixels = rng.integers(0, 255, (count, 8, 8, 1), dtype=np.uint8)
        return Images(pixels, (rng.random(count) > share).astype(np.int64))

    return Dataset("noise", part(200), part(40), part(100), ("a", "b"), "none")


def test_references_are_judged_by_the_same_probes(home: Path) -> None:
    made = evaluator_for(Digits().load())
    found = {name: figures_of(one) for name, one in references(made).items()}
    assert list(found) == ["commonest class", "raw pixels", "whitened pixels"]
    assert found["commonest class"]["balanced"]["knn"] == pytest.approx(0.1)
    flat = made.test(nn.Flatten()).figures  # of 8 x 8 pixels, nothing is averaged away
    for probe in ("knn", "linear", "linear_3"):
        assert found["raw pixels"][probe] == flat[probe]
        assert found["raw pixels"]["balanced"][probe] == flat["balanced"][probe]
    assert found["whitened pixels"]["knn"] > 0.9


def test_they_are_computed_once_for_images_and_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Digits().load()
    first = {name: figures_of(one) for name, one in references(evaluator_for(data)).items()}
    calls: list[int] = []
    probe = evaluator.few_label_probe
    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "knn_answers", None)
        patch.setattr(evaluator, "linear_probe", None)
        patch.setattr(
            evaluator, "few_label_probe", lambda *a, **k: calls.append(1) or probe(*a, **k)
        )
        again = {name: figures_of(one) for name, one in references(evaluator_for(data)).items()}
        assert again == first and not calls
        references(
            evaluator_for(data, seed=1)
        )  # other labels are known: that probe alone is run again
        assert len(calls) == 2
        with pytest.raises(TypeError):
            references(evaluator_for(data, k=5))
    for number, path in enumerate(sorted(references_folder().iterdir())):
        held = path.read_bytes()
        path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]) if number % 2 else b"damaged")
    assert {name: figures_of(one) for name, one in references(evaluator_for(data)).items()} == first


def test_other_labels_are_other_references(home: Path) -> None:
    data = Digits().load()
    known = references(evaluator_for(data))
    turned = replace(data, test=data.test.relabelled((data.test.labels + 1) % 10))
    assert references(evaluator_for(turned))["raw pixels"]["knn"].accuracy < 0.1
    assert known["raw pixels"]["knn"].accuracy > 0.9


def test_two_classes_have_an_auroc_and_the_commonest_one_half(home: Path) -> None:
    data = two_classes()
    made = evaluator_for(data)
    found = {name: figures_of(one) for name, one in references(made).items()}
    always = found["commonest class"]
    assert always["knn"] == pytest.approx(float((data.test.labels == 0).mean()))
    assert always["knn"] > 0.7 and always["balanced"]["knn"] == 0.5 == always["auroc"]["knn"]
    assert set(found["raw pixels"]["auroc"]) == {"knn", "linear", "linear_3"}
    tested = made.test(nn.Flatten())
    assert set(tested.figures["auroc"]) == set(tested.answers)
    assert "auroc" not in evaluator_for(Digits().load()).test(nn.Flatten()).figures


def test_levels_are_the_validation_knn_of_the_references(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = evaluator_for(Digits().load(), bank=300, queries=100)
    found = validation_levels(made)
    assert list(found) == ["commonest class", "raw pixels", "whitened pixels"]
    assert found["raw pixels"] == made.validation_accuracy(nn.Flatten())["knn"]
    asked = made.data.validation.labels[:100]
    common = int(np.bincount(made.data.train.labels).argmax())
    assert found["commonest class"] == pytest.approx(float((asked == common).mean()))
    white = whitened_pixels(made.data.train, made.views.plain)
    assert found["whitened pixels"] == made.validation_accuracy(white)["knn"]
    monkeypatch.setattr(evaluator, "knn_answers", None)  # the second time they come from disk
    assert validation_levels(made) == found
    assert (
        validation_levels(evaluator_for(replace(made.data, train=made.data.train.without_labels())))
        == {}
    )


def test_constant_images_are_not_whitened(home: Path) -> None:
    data = two_classes()
    blank = replace(data, train=Images(np.zeros_like(data.train.pixels), data.train.labels))
    assert list(references(evaluator_for(blank))) == ["commonest class", "raw pixels"]
    bare = replace(data, test=data.test.without_labels())
    assert references(evaluator_for(bare)) == {}


def right(share: float, count: int = 200, draws: int = 1, seed: int = 0) -> Answers:
    rng = torch.Generator().manual_seed(seed)
    hits = (torch.rand(draws, count, generator=rng) < share).to(torch.uint8)
    return Answers(hits, share, None)


def test_a_difference_counts_beyond_the_noise_of_the_test_part() -> None:
    some = torch.zeros(1, 100)
    one = some.clone()
    one[0, :4] = 1  # four images more: McNemar's exact p is 0.125
    assert difference(one, some).outcome == "tie"
    one[0, :9] = 1
    assert difference(one, some).outcome == "better"
    assert difference(some, one).outcome == "worse"
    assert difference(some, some).outcome == "tie"
    # The same mean over draws that disagree is worth less.
    steady = torch.zeros(4, 100)
    steady[:, :12] = 1
    wild = torch.zeros(4, 100)
    wild[0, :48] = 1
    assert difference(steady, 0 * steady).outcome == "better"
    assert difference(wild, 0 * wild).outcome == "tie"


def test_the_rate_of_false_alarms_is_small() -> None:
    found = [
        difference(right(0.6, seed=seed).right, right(0.6, seed=1000 + seed).right).outcome
        for seed in range(400)
    ]
    assert 400 - found.count("tie") < 30  # 5 % are 20


def test_the_sentence_names_the_strongest_reference_that_is_not_beaten() -> None:
    weak, strong = (
        {"knn": right(0.1), "linear_10": right(0.1)},
        {
            "knn": right(0.9, seed=1),
            "linear_10": right(0.5, seed=1),
        },
    )
    beside = {"commonest class": weak, "raw pixels": strong}
    good = verdict([{"knn": right(0.995), "linear_10": right(0.9)}], beside, ["why"])
    assert good is not None and good.text.startswith("Better than") and not good.reasons
    assert all(name in good.text for name in ("commonest class", "raw pixels", "every probe"))
    mixed = verdict([{"knn": right(0.5), "linear_10": right(0.9)}], beside, ["why"])
    assert mixed is not None and mixed.reasons == ("why",)
    assert mixed.text.startswith("Worse than raw pixels by kNN")
    assert "better than" in mixed.text and "10 labels a class" in mixed.text
    tie = verdict([{"knn": right(0.9, seed=2), "linear_10": right(0.5, seed=2)}], beside)
    assert tie is not None and tie.text.startswith("No better than raw pixels")
    assert tie.probes["knn"]["raw pixels"]["outcome"] == "tie"
    assert tie.probes["knn"]["commonest class"]["outcome"] == "better"
    broken = verdict([{}], beside)
    assert broken is not None and "not finite" in broken.text
    assert verdict([], beside) is None and verdict([{}], {}) is None


def test_few_seeds_do_not_make_a_large_difference_level() -> None:
    one = Difference(0.469, 0.752, margin=0.6, seeds=2, noise=0.03)
    assert sentence({"knn": {"raw pixels": one}}) == (
        "Below raw pixels by kNN (46.9 against 75.2 %), which 2 seeds are too few to confirm."
    )
    more = Difference(0.8, 0.6, margin=0.6, seeds=2, noise=0.03)
    level = Difference(0.74, 0.752, margin=0.6, seeds=2, noise=0.03)
    text = sentence({"knn": {"raw pixels": more}, "linear": {"raw pixels": level}})
    assert text == (
        "No better than raw pixels by a linear probe (74.0 against 75.2 %); above raw pixels by "
        "kNN (80.0 against 60.0 %), which 2 seeds are too few to confirm."
    )


def test_reasons_follow_from_figures_without_labels() -> None:
    well = {"warnings": [], "view_distance": 0.2, "finite": True}
    converged = [3.0, 1.0, *[0.5] * 10]
    (views,) = reasons(well, converged, 5000)
    assert "views" in views
    (steps,) = reasons(well, converged, 20)
    assert "steps" in steps and "20" in steps
    (falling,) = reasons(well, [float(12 - i) for i in range(12)], 5000)
    assert "loss" in falling
    (far,) = reasons({**well, "view_distance": 0.9}, converged, 5000)
    assert "0.90" in far
    assert reasons({**well, "warnings": ["collapsed"]}, converged, 5000) == ("collapsed",)
    assert reasons({}, [None, None], None) != ()
    for health in (well, {**well, "view_distance": 0.9}):
        assert reasons(health, converged, 5000, compares_views=False) == ()


@pytest.mark.parametrize("name", ["supervised", "simclr"])
def test_reasons_about_views_are_for_objectives_that_compare_them(
    name: str, home: Path, tmp_path: Path, undrawn: None
) -> None:
    words = ["data=digits", "data.limit=60", "clients=2", "rounds=1", "encoder.width=4"]
    words += ["evaluate.labels_per_class=[]", "evaluate.k=5", "engine.workers=0", "local.batch=2"]
    words += ["local.epochs=15", "local.lr=0.0001", f"objective={name}", "views=digits"]
    found = run("fedavg", *words, out=tmp_path / "run")
    assert any("views" in why.lower() for why in found.reasons) == (name == "simclr")


def test_the_table_of_a_run_has_a_row_for_every_figure() -> None:
    one = {"knn": 0.9, "balanced": {"knn": 0.5}, "auroc": {"knn": 0.7}, "health": {}}
    lost = {"knn": None, "balanced": {"knn": None}, "auroc": {"knn": None}}
    rows = probe_rows({"trained": one, "untrained": lost, "alone": {"knn": 0.2}})
    assert [row["trained"] for row in rows] == pytest.approx([90, 50, 70])
    assert [row["untrained"] for row in rows] == [None] * 3
    assert [row["alone"] for row in rows] == [pytest.approx(20), None, None]
