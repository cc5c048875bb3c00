"""Pieces of an evaluation on a pretend accelerator that small runs do not reach."""

import pytest
import torch
from tests.devices.pretend import DEVICE

from harmonium.core import devices
from harmonium.evaluation import knn


@pytest.mark.parametrize("block", [2**16, 40])
def test_equal_neighbours_share_places_as_on_the_cpu(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several bank rows are exactly as near as the k-th."""
    monkeypatch.setattr(knn, "BANK", block)
    rng = torch.Generator().manual_seed(0)
    bank = torch.randn(30, 4, generator=rng).repeat(3, 1)
    labels = torch.randint(0, 5, (90,), generator=rng)
    queries = bank[:20] + 0.1 * torch.randn(20, 4, generator=rng)
    here, _ = knn.knn_votes(bank, labels, queries, k=10)
    with devices.use_device(DEVICE):
        there, _ = knn.knn_votes(bank, labels, queries, k=10)
    assert torch.equal(there, here)
    assert there.device == devices.CPU
