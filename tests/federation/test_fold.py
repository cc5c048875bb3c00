import itertools
import weakref

import pytest
import torch

from harmonium.core.errors import NotEnoughReplies, WireError
from harmonium.federation.aggregation import Aggregation, Mean, Median, NormBound, Trimmed
from harmonium.federation.fold import Tally
from harmonium.federation.wire import (
    EXAMPLES,
    Exchange,
    Field,
    check,
    public,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.parts import Slot

LAYOUT = {
    "encoder.w": Slot("mean", (2,), torch.float32),
    "encoder.count": Slot("mean", (), torch.int64),
    "uv.rows": Slot("row", (3,), torch.float32),
}
EXAMPLES_OF = {0: 1, 1: 3, 5: 4}


def upload(value: float, count: int = 1, row: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "encoder.w": torch.tensor([value, -value]),
        "encoder.count": torch.tensor(count),
        "uv.rows": torch.full((3,), row),
    }


def fold(up: dict[str, Field], answers: dict[int, dict[str, object]], **options: bool) -> object:
    tally = Tally(Exchange("step", {}, up), {"model": LAYOUT}, EXAMPLES_OF, **options)
    for client, values in answers.items():
        assert tally.refusal(client, values) is None
        tally.add(client, values)
    return tally.result()


def test_weights_are_averaged_by_examples_over_those_who_answered() -> None:
    up = {"model": weights(by=EXAMPLES)}
    got = fold(up, {0: {"model": upload(1.0, 7)}, 1: {"model": upload(5.0, 2)}})
    assert got.model["encoder.w"].tolist() == [4.0, -4.0]  # (1*1 + 3*5) / 4
    assert got.model["encoder.w"].dtype == torch.float32
    assert got.model["encoder.count"] == 7  # counters take the largest
    assert got.ids == [0, 1]


def test_without_a_weight_the_mean_is_plain() -> None:
    for options, up in (({}, weights()), ({"uniform": True}, weights(by=EXAMPLES))):
        answers = {0: {"model": upload(1.0)}, 1: {"model": upload(5.0)}}
        assert fold({"model": up}, answers, **options).model["encoder.w"].tolist() == [3.0, -3.0]


def test_rows_are_kept_by_their_owner() -> None:
    answers = {0: {"model": upload(1.0, row=2.0)}, 5: {"model": upload(1.0, row=9.0)}}
    rows = fold({"model": weights()}, answers).model["uv.rows"]
    assert {client: row[0].item() for client, row in rows.items()} == {0: 2.0, 5: 9.0}


def test_every_other_fold() -> None:
    up = {
        "total": statistic("sum"),
        "mean": statistic("mean", by="n"),
        "rows": statistic("concat"),
        "own": statistic("each"),
        "loss": scalar("mean"),
        "n": scalar(),
    }
    answers = {
        client: {
            "total": torch.tensor([float(client)]),
            "mean": torch.tensor([float(client)]),
            "rows": torch.full((client + 1, 2), float(client)),
            "own": torch.tensor(client),
            "loss": float(client),
            "n": client,
        }
        for client in (0, 1)
    }
    got = fold(up, answers)
    assert got.total.tolist() == [1.0]
    assert got.mean.tolist() == [1.0]  # client 0 has weight 0
    assert got.rows.shape == (3, 2)
    assert got.loss == 0.5
    assert got.n == {0: 0, 1: 1}


def test_adding_up_in_float64_hides_the_order() -> None:
    """In float32, most sums of many terms depend on their order; in float64 then cast, none."""
    values = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    layout = {"w": Slot("mean", (500,), torch.float32)}
    results = []
    for seed in range(3):
        tally = Tally(
            Exchange("s", {}, {"m": weights()}), {"model": layout}, dict.fromkeys(range(200), 1)
        )
        for k in torch.randperm(200, generator=torch.Generator().manual_seed(seed)).tolist():
            tally.add(k, {"m": {"w": values[k]}})
        results.append(tally.result().m["w"])
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(results))


def bad(**changes: object) -> dict[str, object]:
    return {"model": {**upload(1.0), **changes}, "n": 1}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (bad(**{"encoder.w": torch.tensor([1.0, float("nan")])}), "not finite"),
        (bad(**{"encoder.w": torch.tensor([1.0, float("inf")])}), "not finite"),
        (bad(**{"encoder.w": torch.ones(1)}), "shape (1,), not (2,)"),
        (bad(**{"encoder.w": torch.ones(2, 2)}), "shape (2, 2), not (2,)"),
        (bad(**{"encoder.w": torch.ones(2).double()}), "is torch.float64"),
        (bad(**{"encoder.w": torch.ones(2).to(torch.complex64)}), "encoder.w"),
        (bad(**{"extra.w": torch.ones(2)}), "has extra.w"),
        ({"model": {"encoder.w": torch.ones(2)}, "n": 1}, "lacks encoder.count"),
        ({"model": upload(1.0), "n": -1}, "weight `n` is -1"),
        ({"model": upload(1.0), "n": 1e12}, "weight `n` is 1e+12"),
        ({"model": upload(1.0), "n": float("nan")}, "`n` is not finite"),
    ],
)
def test_bad_uploads_are_refused_with_the_reason(values: dict[str, object], reason: str) -> None:
    up = {"n": scalar(), "model": weights(by="n")}
    tally = Tally(Exchange("step", {}, up), {"model": LAYOUT}, EXAMPLES_OF)
    refusal = tally.refusal(1, values)
    assert refusal is not None and reason in refusal


def test_statistics_of_other_shapes_are_refused_and_not_broadcast() -> None:
    fields = {"r": statistic(), "c": statistic("concat")}
    tally = Tally(Exchange("s", {}, fields), {"model": {}}, EXAMPLES_OF)
    tally.add(0, {"r": torch.ones(3, 3), "c": torch.ones(2, 4)})
    assert "shape (3,)" in str(tally.refusal(1, {"r": torch.ones(3), "c": torch.ones(1, 4)}))
    assert "rows of (5,)" in str(tally.refusal(1, {"r": torch.ones(3, 3), "c": torch.ones(1, 5)}))
    assert "no rows" in str(tally.refusal(1, {"r": torch.ones(3, 3), "c": torch.tensor(1.0)}))


def test_weights_that_sum_to_nothing_are_an_error() -> None:
    up = {"model": weights(by="n"), "n": scalar()}
    with pytest.raises(NotEnoughReplies):
        fold(up, {0: {"model": upload(1.0), "n": 0}})


def test_a_mean_of_whole_numbers_is_not_cut_off() -> None:
    answers = {0: {"s": torch.tensor([1, 0])}, 1: {"s": torch.tensor([2, 1])}}
    assert fold({"s": statistic("mean")}, answers).s.tolist() == [1.5, 0.5]
    total = fold({"s": statistic("sum")}, answers).s
    assert total.tolist() == [3, 1] and total.dtype == torch.int64


def test_types_must_agree_between_clients() -> None:
    for how in ("mean", "sum", "concat"):
        tally = Tally(Exchange("step", {}, {"s": statistic(how)}), {"model": LAYOUT}, EXAMPLES_OF)
        tally.add(0, {"s": torch.tensor([1, 2])})
        assert "is torch.float32" in str(tally.refusal(1, {"s": torch.tensor([1.0, 2.0])}))


@pytest.mark.parametrize("item", ["text", None, [1, 2], 3.0])
def test_what_is_no_tensor_is_refused_and_not_a_crash(item: object) -> None:
    for name, field in (("model", weights()), ("any", public())):
        declared = Exchange("step", {}, {name: field})
        with pytest.raises(WireError, match=f"`{name}`.*tensor"):
            check("m", declared, "up", {name: {"encoder.w": item}})
    tally = Tally(Exchange("step", {}, {"n": scalar()}), {"model": LAYOUT}, EXAMPLES_OF)
    assert tally.refusal(0, {"n": 10**400}) == "`n` is not finite"


@pytest.mark.parametrize(
    ("aggregation", "holds"),
    [
        (Mean(), False),
        (NormBound(bound=0.1), False),
        (NormBound(), True),
        (Median(), True),
        (Trimmed(), True),
    ],
    ids=str,
)
def test_uploads_are_dropped_once_they_are_added(aggregation: Aggregation, holds: bool) -> None:
    """Memory does not grow with the clients, unless the aggregation must compare them."""
    layout = {"w": Slot("mean", (2,), torch.float32)}
    declared = Exchange("step", {}, {"model": weights()})
    tally = Tally(
        declared,
        {"model": layout, "parameters": layout},
        dict.fromkeys(range(5), 1),
        aggregation=aggregation,
    )
    alive = []
    for client in range(5):
        tensor = torch.full((2,), float(client))
        alive.append(weakref.ref(tensor))
        tally.add(client, {"model": {"w": tensor}})
        del tensor
    assert sum(one() is not None for one in alive) == (5 if holds else 0)
    tally.result()
    assert all(one() is None for one in alive)
