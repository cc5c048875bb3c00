"""Numbers as whole numbers: exact sums, a known range, and clear words about what is no sum."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harmonium.core.errors import ConfigError, WireError
from harmonium.federation.method import Method
from harmonium.federation.secure_aggregation.fixed_point import (
    KINDS,
    Masks,
    Reach,
    Weighing,
    bits,
    from_whole,
    most,
    obstacles,
    to_whole,
    unfit,
)
from harmonium.federation.wire import EXAMPLES, Field, exchange, scalar, statistic, weights
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Part
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY

MEAN, SUM = statistic("mean"), statistic("sum")
ALIKE = Weighing({0: 4, 1: 4, 2: 2}, total=10, began=3, uniform=False)
ON = {"secure_aggregation": True}


def whole(part: Field, value: Any, client: int = 0, weighing: Weighing = ALIKE) -> np.ndarray:
    return to_whole({"x": part}, client, {"x": value}, weighing)


def reason(part: Field, value: Any, weighing: Weighing = ALIKE) -> str | None:
    return unfit({"x": part}, 0, {"x": value}, weighing)


# ---- how many --------------------------------------------------------------------------------


@given(st.integers(3, 1000), st.floats(0.501, 1.0))
def test_a_threshold_is_more_than_half_and_can_be_reached(began: int, share: float) -> None:
    masks = Masks(share)
    assert began / 2 < masks.shares(began) <= masks.answers(began) <= began
    assert masks.answers(began) >= 3 and masks.shares(began) >= share * began - 1e-6


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [MEAN, SUM, scalar("mean"), scalar("sum")])
def test_multiples_of_the_last_place_are_exact(part: Field) -> None:
    steps = torch.tensor([0.0, 1.0, -1.0, 2.0**20 - 1, -(2.0**20)], dtype=torch.float64)
    alone = Weighing({0: 1}, total=1, began=1, uniform=True)
    for value in (steps * 2.0 ** -bits(part)).tolist():
        value = torch.tensor([value], dtype=torch.float64) if part.kind != "scalar" else value
        assert from_whole(whole(part, value, 0, alone), part).item() == torch.as_tensor(value)


@given(st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3))
def test_a_sum_is_within_half_a_last_place_a_client(values: list[float]) -> None:
    for part in (MEAN, SUM):
        vectors = [
            whole(part, torch.tensor(x, dtype=torch.float64), c) for c, x in enumerate(values)
        ]
        total = sum(vectors[1:], start=vectors[0].copy())
        right = math.fsum(values) / (1 if part is SUM else 3)
        # Three roundings, and that of a product in float64.
        assert abs(from_whole(total, part).item() - right) <= 1.5 * 2.0 ** -bits(part) + 1e-11
        assert np.array_equal(total, vectors[2] + vectors[0] + vectors[1])  # in any order


@pytest.mark.parametrize("part", [MEAN, SUM])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_values_fit_and_larger_ones_are_refused(part: Field, sign: float) -> None:
    limit = most(part, 3)
    value = torch.tensor([sign * limit], dtype=torch.float64)
    assert reason(part, value) is None
    total = sum((whole(part, value, client) for client in range(3)), start=np.zeros(1, np.uint64))
    expected = sign * limit * (3 if part is SUM else 1)
    assert from_whole(total, part).item() == pytest.approx(expected, rel=1e-12)
    assert "the most secure aggregation can carry" in str(reason(part, 1.001 * value))
    assert f"beyond {limit:g}" in str(reason(part, 1.001 * value))


def test_the_room_of_a_sum_is_shared_by_those_who_began() -> None:
    assert most(SUM, 100) == 2**30 / 100 and most(MEAN, 100) == 2**22


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([1.0, math.nan]), "`x` is not finite"),
        (torch.tensor([-math.inf]), "`x` is not finite"),
        (10**400, "`x` is not finite"),
        (torch.ones(2, dtype=torch.complex64), "`x` is torch.complex64, which cannot be summed"),
        (torch.ones(2, dtype=torch.bool), "`x` is torch.bool, which cannot be summed"),
        ({"w": torch.zeros(1), "v": torch.tensor([math.nan])}, "`x` v is not finite"),
    ],
)
def test_what_cannot_be_summed_is_named(value: Any, words: str) -> None:
    assert reason(MEAN, value) == words


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
def test_every_kind_of_number_is_measured_and_turned(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 3], [100, 7]]).to(dtype)
    assert reason(SUM, value) is None
    assert from_whole(whole(SUM, value), SUM).tolist() == [0, 3, 100, 7]
    assert reason(SUM, torch.zeros(0).to(dtype)) is None and len(whole(SUM, value[:0])) == 0


def test_whole_numbers_below_zero_are_measured_too() -> None:
    assert "is 2e+09, beyond" in str(reason(SUM, torch.tensor([-2_000_000_000])))


# ---- weights ---------------------------------------------------------------------------------


def test_shares_sum_to_the_whole() -> None:
    by_n = statistic("mean", by="n")
    for part, expected in (
        (MEAN, [1 / 3] * 3),
        (statistic("mean", by=EXAMPLES), [0.4, 0.4, 0.2]),
        (by_n, [0.3, 0.1, 0.0]),
        (SUM, [1.0] * 3),
    ):
        found = [ALIKE.share(part, c, {"n": n}) for c, n in enumerate((3, 1, 0))]
        assert found == pytest.approx(expected)
    assert ALIKE.whole(by_n, [0, 1, 2], {"n": 4.0}) == pytest.approx(0.4)
    assert ALIKE.whole(MEAN, [0, 2], {}) == pytest.approx(2 / 3)
    assert ALIKE.whole(SUM, [0, 2], {}) == 1
    alike = Weighing(ALIKE.examples, 10, 3, uniform=True)
    assert alike.share(statistic("mean", by=EXAMPLES), 2, {}) == pytest.approx(1 / 3)
    assert alike.share(by_n, 0, {"n": 3}) == pytest.approx(0.3)  # uploaded weights stay


@pytest.mark.parametrize("weight", [-1, 4.5, math.nan, 10**400])
def test_a_weight_beyond_a_clients_examples_is_refused(weight: float) -> None:
    declared = {"x": statistic("mean", by="n"), "n": scalar("sum")}
    said = str(unfit(declared, 0, {"x": torch.ones(1), "n": weight}, ALIKE))
    assert "`n` is" in said and ("not within 0" in said or "not finite" in said)
    assert unfit(declared, 0, {"x": torch.ones(1), "n": 4}, ALIKE) is None


# ---- how far ---------------------------------------------------------------------------------


MODEL = {
    "w": torch.full((4,), 2.0),  # of length 4
    "norm.running_var": torch.tensor([3.0]),
    "norm.num_batches_tracked": torch.tensor(7),
}


@pytest.mark.parametrize(
    ("reach", "change", "words"),
    [
        (Reach(MODEL, ["w"]), {"w": 20.0}, None),
        (Reach(MODEL, ["w"]), {"w": 20.1}, "`model` is 40.2 from the one that was sent, beyond 40"),
        (Reach(MODEL, ["w"]), {"norm.running_var": 29_000.0}, None),
        (
            Reach(MODEL, ["w"]),
            {"norm.running_var": 3e4},
            r"norm.running_var is 3e\+04, beyond 3e\+04",
        ),
        (Reach(MODEL, ["w"]), {"norm.num_batches_tracked": 10**6}, None),
        (Reach({"w": MODEL["w"]}, ["w"], clip=0.5), {"w": 0.25}, None),
        (Reach({"w": MODEL["w"]}, ["w"], clip=0.5), {"w": 0.2501}, "is 0.5002 from .* beyond 0.5"),
        (Reach({"w": MODEL["w"]}, ["w"], clip=0.5, noise=1.0), {"w": 6.2}, None),
        (Reach({"w": MODEL["w"]}, ["w"], clip=0.5, noise=1.0), {"w": 6.3}, "beyond 12.5"),
        (Reach({}, ["w"]), {"w": 1e6}, None),
    ],
)
def test_a_model_is_within_reach_or_is_refused(
    reach: Reach, change: dict[str, float], words: str | None
) -> None:
    """Of the change of what is trained the length counts, of statistics the largest number."""
    up = {"model": {key: tensor + change.get(key, 0) for key, tensor in MODEL.items()}}
    assert (found := reach.excess(up)) == words or re.search(str(words), str(found))


# ---- what is no sum --------------------------------------------------------------------------


def with_up(**up: Field) -> type[Method]:
    @exchange(up=up)
    def look(self, client, got):  # type: ignore[no-untyped-def]
        return {}

    made = type("Looking", (Method,), {"__annotations__": {}, "look": look})
    return dataclass(frozen=True)(made)


@dataclass(frozen=True)
class Counting(Method):
    """Has a counter of its own, which the federation keeps the largest of."""

    def extra_parts(self, modules: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        counter = nn.Module()
        counter.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return {"counter": Part(counter)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": with_up(rows=statistic("concat"))}, "`rows` of .*concat.*declare a mean or"),
        ({"method": with_up(corr=statistic("each"))}, "`corr` of .*client by client.*each"),
        ({"method": with_up(n=scalar())}, r"`n` of .*\.look: .*client by client"),
        (
            {"method": with_up(m=weights(by="n"), n=scalar("mean"))},
            r'`n` of .*weighs other fields and is no sum; declare it scalar\("sum"\)',
        ),
        ({"aggregation": "median"}, "`model` of fedavg.train: aggregation=median looks at single"),
        ({"method": Counting}, "steps is a counter, of which the largest is kept; keep its part"),
        ({"clients": 2}, "at least 3 clients a round.*asks 2"),
        ({"participation": {"number": 2}}, "at least 3 clients a round.*asks 2"),
    ],
)
def test_a_recipe_that_cannot_be_hidden_is_refused(changes: dict[str, Any], words: str) -> None:
    floats = {"method": "fedavg", "objective": {"name": "simclr", "norm": "none"}}
    recipe = {**TINY, **floats, **changes}
    Recipe.from_tree({**recipe, "privacy": {"secure_aggregation": False}})
    with pytest.raises(ConfigError, match=f"privacy.secure_aggregation.*{words}"):
        Recipe.from_tree({**recipe, "privacy": ON})


def test_the_counter_of_batch_norm_hinders_nothing() -> None:
    """No step reads it, so a rounded mean serves as well as the largest."""
    for more in ({}, {"encoder": {"name": "resnet8", "norm": "batch"}}):
        Recipe.from_tree({**TINY, "method": "fedavg", "objective": "simclr", **more, "privacy": ON})


def test_rows_of_clients_are_no_sum() -> None:
    def extra_parts(self, modules, dim):  # type: ignore[no-untyped-def]
        return {"table": Part(nn.Embedding(self.world.clients, 4), "row")}

    made = type("Tabled", (Method,), {"__annotations__": {}, "extra_parts": extra_parts})
    method = dataclass(frozen=True)(made)(objective=SimCLR(norm="none"))
    assert "table.weight has a row for each client" in obstacles(method)["train"]["model"]


@pytest.mark.parametrize("share", [0.5, 0.0, 1.01, math.nan])
def test_a_threshold_at_half_or_below_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="secure_threshold.*above 0.5 and at most 1"):
        Recipe.from_tree({**TINY, "method": "fedavg", "privacy": {"secure_threshold": share}})


@pytest.mark.parametrize("name", ["mask_keys", "mask_shares", "unmask"])
def test_words_of_secure_aggregation_are_taken(name: str) -> None:
    def handler(self, client, got):  # type: ignore[no-untyped-def]
        return {}

    handler.__name__ = name
    with pytest.raises(WireError, match=f"`{name}`"):
        exchange()(handler)
    handler.__name__ = "look"
    with pytest.raises(WireError, match="`masks`"):
        exchange(down={"masks": statistic()})(handler)
