"""Tables with a row a client: they move as an average of whole tables does."""

from typing import Any

import pytest
import torch

from harmonium.federation.rows import step
from harmonium.federation.server_optimisers import Average, Sgd

EXAMPLES = {0: 10, 1: 30, 2: 5}
TABLE = torch.arange(6.0).view(3, 2)


def moved(optimiser: Any, lazy: tuple[str, ...] = (), **rows: Any) -> torch.Tensor:
    uploads = {int(name[1:]): torch.tensor(value) for name, value in rows.items()}
    found, _ = step(
        optimiser, {"t.w": TABLE}, {"t.w": uploads}, {"t.w"}, {}, 1.0, examples=EXAMPLES, lazy=lazy
    )
    assert set(found) == {"t.w"}
    return found["t.w"]


@pytest.mark.parametrize("lazy", [(), ("t",)])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_rows_move_as_an_average_of_whole_tables(weighting: str, lazy: tuple[str, ...]) -> None:
    whole = [TABLE.clone(), TABLE.clone()]
    whole[0][0], whole[1][1] = torch.tensor([8.0, 9.0]), torch.tensor([-1.0, -2.0])
    shares = [0.5, 0.5] if weighting == "uniform" else [0.25, 0.75]
    wanted = shares[0] * whole[0] + shares[1] * whole[1]
    for optimiser in (Average(weighting=weighting), Sgd(weighting=weighting, momentum=0.0)):  # type: ignore[arg-type]
        found = moved(optimiser, lazy, c0=[8.0, 9.0], c1=[-1.0, -2.0])
        torch.testing.assert_close(found, wanted)


def test_lazy_rows_have_moments_of_their_own() -> None:
    memory: dict[str, Any] = {}
    model, table = {"t.w": TABLE}, TABLE
    for client in (0, 1, 0):
        uploads = {"t.w": {client: table[client] + 1}}
        stepped, memory = step(
            Sgd(), model, uploads, {"t.w"}, memory, 1.0, examples=EXAMPLES, lazy=("t",)
        )
        model = {**model, **stepped}
        table = model["t.w"]
    assert set(memory["velocity"]) == {"t.w/0", "t.w/1"}
    assert memory["velocity"]["t.w/0"].tolist() == pytest.approx([-1.9, -1.9])
    torch.testing.assert_close(table[1], TABLE[1] + 1)
    torch.testing.assert_close(table[0], TABLE[0] + 1 + 1.9)
    assert torch.equal(table[2], TABLE[2])
