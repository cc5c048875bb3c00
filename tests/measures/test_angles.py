"""Angles between local models: the formula, and what is made of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from harmonium.core.errors import ConfigError, DataError
from harmonium.measures.angles import Angles, angles
from harmonium.measures.run_reader import Run

from .conftest import SMALL


def test_known_vectors_have_known_angles() -> None:
    turn = math.radians(30)
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    second = torch.tensor(
        [[math.cos(turn), math.sin(turn)], [0.0, 7.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]]
    )
    wanted = torch.tensor([30.0, 90.0, 45.0, 180.0, 0.0], dtype=torch.float64)
    assert torch.allclose(angles(first, second), wanted, atol=1e-5)
    assert torch.allclose(angles(second * 100, first / 9), wanted, atol=1e-5)


def test_the_same_features_have_exactly_no_angle_and_tiny_angles_are_right() -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    assert (angles(rows, rows) == 0).all()
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    near = torch.tensor([[1.0, 1e-9]], dtype=torch.float64)
    assert angles(one, near).item() == pytest.approx(math.degrees(1e-9), rel=1e-6)
    assert angles(one, torch.zeros(1, 2)).isnan().all()


def test_the_summary_is_that_of_all_pairs_and_images(
    fedca: Path, opened: Callable[..., Run]
) -> None:
    run = opened(fedca)
    found = Angles(clients=3, pictures=20).compute(run)
    chosen = run.clients(3, 0, "angles")
    pictures = run.images(20, 0)
    rows = {c: run.features(e, pictures, "") for c, e in run.encoders(chosen).items()}
    each = [angles(rows[a], rows[b]).numpy() for a, b in combinations(chosen, 2)]
    whole = np.concatenate(each)
    plain = found.plain
    assert plain["clients"] == chosen and plain["pictures"] == 20 and plain["trained"]
    assert plain["mean"] == pytest.approx(whole.mean()) and whole.mean() > 0.1
    middle = [plain[key] for key in ("lower", "median", "upper")]
    assert middle == pytest.approx(np.percentile(whole, (25, 50, 75)).tolist())
    assert [pair["clients"] for pair in plain["pairs"]] == [
        list(p) for p in combinations(chosen, 2)
    ]
    assert [pair["mean"] for pair in plain["pairs"]] == pytest.approx([a.mean() for a in each])
    between = [
        angles(rows[chosen[0]][i : i + 1].expand(20, -1), rows[chosen[0]]) for i in range(20)
    ]
    assert plain["others"] == pytest.approx(torch.stack(between).sum().item() / 380, rel=0.35)
    assert plain["ratio"] == pytest.approx(plain["mean"] / plain["others"])


def test_identical_local_models_have_no_angle(
    made: Callable[..., Path], opened: Callable[..., Run]
) -> None:
    run = opened(made("fedavg"))
    still = run.recipe.changed(local={**SMALL["local"], "lr": 0.0})
    plain = Angles(pictures=20).compute(replace(run, recipe=still)).plain
    assert plain["mean"] == plain["upper"] == plain["ratio"] == 0 < plain["others"]
    assert all(pair["mean"] == 0 for pair in plain["pairs"])


def test_of_many_pairs_a_seeded_sample_is_taken(
    made: Callable[..., Path], opened: Callable[..., Run]
) -> None:
    run = opened(made("fedavg"))
    some = [
        Angles(pairs=3, pictures=9, seed=seed).compute(run).plain["pairs"] for seed in (0, 0, 1)
    ]
    assert some[0] == some[1] and len(some[0]) == 3
    assert [pair["clients"] for pair in some[0]] != [pair["clients"] for pair in some[2]]


def test_features_without_an_angle_are_left_out_or_refused(
    made: Callable[..., Path], opened: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(made("fedavg"))
    rows = torch.eye(20)
    rows[3] = 0
    monkeypatch.setattr(Run, "features", lambda *_: rows)
    found = Angles(clients=2, pictures=20).compute(run)
    assert found.notes and "1 angles" in found.notes[0] and len(found.arrays["angles"]) == 19
    monkeypatch.setattr(Run, "features", lambda *_: rows * 0)
    with pytest.raises(DataError, match="all 0"):
        Angles(clients=2, pictures=20).compute(run)


def test_settings_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"angles\.clients is 1"):
        Angles(clients=1)
