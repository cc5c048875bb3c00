"""The map of one client: its own classes, the numbers beside it, and images without labels."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.measures.run_reader import Run
from harmonium.measures.tsne import TSNE, own_classes, separation


def test_own_classes_are_those_beyond_a_fair_share() -> None:
    everyone = np.repeat(np.arange(10), 100)
    assert own_classes(np.array([3] * 50 + [7] * 50), everyone) == [3, 7]
    assert own_classes(everyone[::7], everyone) == []
    assert own_classes(np.arange(5).repeat(9), everyone) == [0, 1, 2, 3, 4]
    assert own_classes(np.full(9, -1), everyone) == []
    assert own_classes(np.array([3, 3, -1, -1]), everyone) == [3]


def test_separation_of_groups_that_are_apart_and_of_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    own = np.arange(200) < 60
    noise = functional.normalize(torch.randn(200, 8, generator=rng))
    lost = separation(noise, own)
    assert lost["chance"] == pytest.approx(59 / 199)
    assert lost["purity"] == pytest.approx(59 / 199, abs=0.08)
    assert lost["silhouette"] == pytest.approx(0, abs=0.03)
    assert lost["extent"] == pytest.approx(1, abs=0.05)
    centre = torch.zeros(200, 8)
    centre[:60, 0] = centre[60:, 1] = 9
    found = separation(functional.normalize(noise + centre), own)
    assert found["purity"] == 1 and found["silhouette"] > 0.5  # type: ignore[operator]
    assert found["extent"] < 0.2  # type: ignore[operator]
    small = separation(functional.normalize(noise + centre), np.arange(200) < 5)
    assert small["purity"] > 0  # type: ignore[operator]  # fewer than the usual neighbours
    for none in (np.zeros(200, bool), np.ones(200, bool)):
        assert set(separation(noise, none).values()) == {None}


@pytest.mark.parametrize(("mine", "neighbours"), [(30, 10), (5, 4)])
def test_purity_counts_the_nearest_others(mine: int, neighbours: int) -> None:
    rows = functional.normalize(torch.randn(60, 3, generator=torch.Generator().manual_seed(2)))
    own = np.arange(60) < mine
    shares = []
    for row in range(mine):
        others = [other for other in range(60) if other != row]
        nearest = sorted(others, key=lambda other: -float(rows[row] @ rows[other]))[:neighbours]
        shares.append(np.mean(own[nearest]))
    assert separation(rows, own)["purity"] == pytest.approx(np.mean(shares))


def test_features_of_one_direction_have_a_map_that_the_seed_decides() -> None:
    line = torch.linspace(-1, 1, 20)[:, None] * torch.ones(1, 4)
    first, again, other = (TSNE(seed=seed)._map(line) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_extent_is_a_ratio_of_mean_distances() -> None:
    rows = functional.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(1)))
    own = np.arange(30) < 12
    apart = 1 - rows @ rows.T
    inner = apart[:12, :12].sum() / (12 * 11)
    wanted = (inner / (apart.sum() / (30 * 29))).item()
    assert separation(rows, own)["extent"] == pytest.approx(wanted, rel=1e-4)


def test_a_map_of_a_client_with_two_classes(fedca: Path, opened: Callable[..., Run]) -> None:
    run = opened(fedca)
    found = TSNE(client=1).compute(run)
    held = np.unique(run.dataset.train.labels[run.split.indices[1]])
    assert found.arrays["own"].tolist() == held.tolist() and len(held) == 2
    assert found.plain["own_classes"] == [run.dataset.classes[value] for value in held]
    assert found.arrays["map"].shape == (40, 2) and np.isfinite(found.arrays["map"]).all()
    features = run.features(run.encoders([1])[1], run.images(1000, 0), "")
    own = np.isin(run.dataset.test.labels, held)
    assert found.plain["purity"] == separation(functional.normalize(features), own)["purity"]
    again = TSNE(client=1).compute(run)
    assert np.array_equal(again.arrays["map"], found.arrays["map"])


def test_without_labels_there_is_a_map_and_no_number(
    made: Callable[..., Path], opened: Callable[..., Run], tmp_path: Path
) -> None:
    measure = TSNE(pictures=20)
    found = measure.compute(opened(made("fedavg")))
    assert found.plain["purity"] is None and found.plain["own_classes"] == []
    assert "no test image has a label" in found.notes[0]
    assert measure.draw(tmp_path / "map.png", {"run": found})
    assert (tmp_path / "map.png").stat().st_size > 1000
    (shown,) = measure.tables({"run": found})
    assert shown.rows == [{"run": "run", "client": 0, "classes": "none"}]


def test_clients_that_are_not_there_are_refused(
    fedca: Path, made: Callable[..., Path], opened: Callable[..., Run]
) -> None:
    with pytest.raises(ConfigError, match="clients 0 to 3"):
        TSNE(client=4).compute(opened(fedca))
    run = opened(made("alone", participation={"number": 2}, rounds=1))
    away = next(client for client in range(4) if str(client) not in run.commit.clients)
    with pytest.raises(ConfigError, match="never took part"):
        TSNE(client=away).compute(run)
