"""Retrieval against rankings made one by one, and against chance."""

import numpy as np
import pytest
import torch

from harmonium.core.errors import DataError
from harmonium.evaluation import retrieval
from harmonium.evaluation.retrieval import chance_precision, nearest, retrieve


def test_against_rankings_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "CHUNK", 7)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 30)
    labels[0] = 9  # the only one: it finds nothing, and does not ask
    rows = rng.normal(size=(30, 5)) + np.eye(10)[labels][:, :5]
    asking = np.array([0, 3, 4, 8, 11, 12, 20, 21, 22, 29])
    found = retrieve(
        torch.from_numpy(rows).float(),
        torch.from_numpy(labels),
        torch.from_numpy(asking),
        (1, 5, 99),
    )
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    first, fifth, average, share = [], [], [], []
    for one in asking[1:]:
        others = np.delete(np.arange(30), one)
        order = others[np.argsort(-(unit[others] @ unit[one]))]
        alike = labels[order] == labels[one]
        first.append(alike[0])
        fifth.append(alike[:5].mean())
        hits = np.flatnonzero(alike)
        average.append(np.mean([(n + 1) / (place + 1) for n, place in enumerate(hits)]))
        share.append(alike.mean())
    assert found.queries == 9 and found.gallery == 30
    assert found.precision[1] == pytest.approx(np.mean(first))
    assert found.precision[5] == pytest.approx(np.mean(fifth))
    assert found.precision[99] == pytest.approx(np.mean(share)) == found.precision_chance
    assert found.average == pytest.approx(np.mean(average))


@pytest.mark.parametrize(("relevant", "others"), [(1, 4), (3, 12), (5, 5)])
def test_chance_is_what_drawn_rankings_give(relevant: int, others: int) -> None:
    rng = np.random.default_rng(1)
    alike = np.arange(others) < relevant
    total = 0.0
    for _ in range(4000):
        hits = np.flatnonzero(rng.permutation(alike))
        total += np.mean((np.arange(relevant) + 1) / (hits + 1))
    assert chance_precision(relevant, others) == pytest.approx(total / 4000, abs=0.012)
    assert chance_precision(1, 1) == 1.0


def test_ties_go_by_place_and_an_image_never_finds_itself() -> None:
    unit = torch.ones(5, 1, dtype=torch.float64)
    assert nearest(unit, torch.tensor([2, 0]), 3).tolist() == [[0, 1, 3], [1, 2, 3]]
    with pytest.raises(DataError, match="at least 2 images of one class"):
        retrieve(torch.eye(3), torch.arange(3), torch.arange(3))
