"""Robust aggregation: by hand, under attack as in the known experiment, and through a tally."""

import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.federation.aggregation import (
    Aggregation,
    Mean,
    Median,
    NormBound,
    Trimmed,
    aggregations,
)
from harmonium.federation.fold import Tally
from harmonium.federation.wire import EXAMPLES, Exchange, Field, scalar, weights
from harmonium.learning.parts import Slot

Upload = dict[str, Tensor]
LAYOUT = {
    "w": Slot("mean", (2,), torch.float32),
    "norm.mean": Slot("mean", (1,), torch.float32),
    "norm.count": Slot("mean", (), torch.int64),
    "rows": Slot("row", (1,), torch.float32),
}
LAYOUTS = {"model": LAYOUT, "parameters": {key: LAYOUT[key] for key in ("w", "rows")}}
EVERY = [Mean(), Median(), Trimmed(0.25), NormBound(), NormBound(5.0), NormBound(agreement=0.0)]
ROBUST = [Median(), Trimmed(0.2), NormBound(), NormBound(agreement=0.0)]


def upload(w: list[float], mean: float = 0.0, count: int = 1, row: float = 0.0) -> Upload:
    return {
        "w": torch.tensor(w),
        "norm.mean": torch.tensor([mean]),
        "norm.count": torch.tensor(count),
        "rows": torch.tensor([row]),
    }


def fold(
    aggregation: Aggregation,
    uploads: list[Upload],
    *,
    field: Field | None = None,
    layouts: dict[str, dict[str, Slot]] = LAYOUTS,  # noqa: B006
    reference: Upload | None = None,
    order: list[int] | None = None,
    examples: list[int] | None = None,
) -> Upload:
    tally = Tally(
        Exchange("train", {}, {"model": field or weights(by=EXAMPLES)}),
        layouts,  # type: ignore[arg-type]
        dict(enumerate(examples or [1] * len(uploads))),
        aggregation=aggregation,
        reference=reference,
    )
    for client in order or range(len(uploads)):
        assert tally.refusal(client, {"model": uploads[client]}) is None
        tally.add(client, {"model": uploads[client]})
    result: Upload = tally.result().model
    return result


def test_the_median_of_each_coordinate() -> None:
    three = [upload([1.0, 9.0], 3.0), upload([2.0, -9.0], 1e5), upload([1e6, 0.0], 4.0)]
    assert fold(Median(), three)["w"].tolist() == [2.0, 0.0]
    assert fold(Median(), three)["norm.mean"].tolist() == [4.0]  # statistics can be poisoned too
    four = [*three, upload([4.0, 2.0])]
    assert fold(Median(), four)["w"].tolist() == [3.0, 1.0]  # the mean of the two in the middle
    assert fold(Median(), three[:1])["w"].tolist() == [1.0, 9.0]
    assert fold(Median(), three[:2])["w"].tolist() == [1.5, 0.0]


def test_the_trimmed_mean_of_each_coordinate() -> None:
    values = [5.0, -100.0, 1.0, 3.0, 2.0, 4.0, 1e5, 6.0]
    uploads = [upload([value, -value]) for value in values]
    kept = sorted(values)[2:-2]  # a quarter of eight at each end
    expected = statistics.fmean(kept)
    assert fold(Trimmed(0.25), uploads)["w"].tolist() == [expected, -expected]
    assert fold(Trimmed(0.3), uploads)["w"].tolist() == [expected, -expected]  # rounded down
    plain = statistics.fmean(values)
    assert fold(Trimmed(0.1), uploads)["w"].tolist() == pytest.approx([plain, -plain])


@pytest.mark.parametrize(("trim", "count", "cut"), [(0.29, 100, 29), (0.1, 30, 3), (0.49, 2, 0)])
def test_what_trimming_cuts_off(trim: float, count: int, cut: int) -> None:
    values = [float(2**k) for k in range(20)] * 5
    values = sorted(values)[:count]
    found = fold(Trimmed(trim), [upload([value, 0.0]) for value in values])["w"][0]
    assert found == pytest.approx(statistics.fmean(values[cut : count - cut]), rel=1e-6)
    alone = fold(Trimmed(0.4999999999), [upload([1.0, 2.0]), upload([3.0, 4.0])])
    assert alone["w"].tolist() == [2.0, 3.0]  # something is always left


def test_numbers_of_examples_do_not_move_median_and_trimmed_mean() -> None:
    uploads = [upload([float(k), 0.0]) for k in (1, 2, 6)]
    for aggregation, expected in ((Median(), 2.0), (Trimmed(0.1), 3.0)):
        assert fold(aggregation, uploads, examples=[1, 1, 1000])["w"][0] == expected
    assert fold(NormBound(bound=99.0), uploads, examples=[1, 1, 998])["w"][0] > 5.9


def test_changes_are_shortened_to_the_bound() -> None:
    """From (1, 1): a change of length 5 is cut to 1, one of 0.5 is not; then the weighted mean."""
    sent = {"w": torch.tensor([1.0, 1.0]), "norm.mean": torch.tensor([100.0])}
    uploads = [upload([4.0, 5.0], 7.0), upload([1.0, 1.5], 9.0)]
    got = fold(NormBound(bound=1.0), uploads, reference=sent, examples=[3, 1])
    first, second = (1 + 3 / 5, 1 + 4 / 5), (1.0, 1.5)
    expected = [(3 * a + b) / 4 for a, b in zip(first, second, strict=True)]
    assert got["w"].tolist() == pytest.approx(expected, rel=1e-6)
    assert got["norm.mean"].tolist() == [7.5]  # statistics are averaged plainly
    assert got["w"].dtype == torch.float32


def test_what_is_a_change_already_has_no_reference() -> None:
    layouts = {"model": LAYOUT, "parameters": {"w": LAYOUT["w"]}}
    uploads = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 0.5])}]
    sent = {"w": torch.tensor([50.0, 50.0])}
    field = weights(of="parameters")
    got = fold(NormBound(bound=1.0), uploads, field=field, layouts=layouts, reference=sent)
    assert got["w"].tolist() == pytest.approx([0.3, (0.8 + 0.5) / 2])


def test_without_a_bound_it_is_the_median_length() -> None:
    uploads = [upload([length, 0.0]) for length in (1.0, 3.0, 2.0, 900.0, 4.0)]
    sent = {"w": torch.zeros(2)}
    got = fold(NormBound(), uploads, reference=sent)["w"]
    assert got.tolist() == pytest.approx([(1 + 3 + 2 + 3 + 3) / 5, 0.0])
    even = fold(NormBound(), uploads[:4], reference=sent)["w"]  # the lower of the two middle ones
    assert even.tolist() == pytest.approx([(1 + 2 + 2 + 2) / 4, 0.0])


def test_the_median_length_may_count_clients_by_their_images() -> None:
    """A large site takes more steps than two small ones, whose median would all but stop it."""
    uploads, sent = [upload([w, 0.0]) for w in (0.1, 0.2, 10.0)], {"w": torch.zeros(2)}
    sizes = [10, 12, 1000]
    alike = fold(NormBound(), uploads, reference=sent, examples=sizes)["w"]
    weighted = fold(NormBound(weighted=True), uploads, reference=sent, examples=sizes)["w"]
    plain = fold(Mean(), uploads, reference=sent, examples=sizes)["w"]
    assert alike[0] < 0.21 and torch.equal(weighted, plain)
    even = [upload([w, 0.0]) for w in (1.0, 2.0, 3.0, 90.0)]
    same = [
        fold(rule, even, reference=sent)["w"] for rule in (NormBound(), NormBound(weighted=True))
    ]
    assert torch.equal(*same)


def test_changes_against_the_median_change_are_left_out() -> None:
    """Two of five go backwards at full length: with `agreement` they neither pull nor weigh."""
    forwards = [upload([1.0, y], 2.0) for y in (-0.5, 0.0, 0.5)]
    backwards = [upload([-900.0, 0.0], 1.0), upload([-1.0, 0.0], 1.0)]
    sent = {"w": torch.zeros(2), "norm.mean": torch.zeros(1)}
    uploads = [*forwards, *backwards]
    pulled = fold(NormBound(), uploads, reference=sent)
    assert pulled["w"][0] < 0.25 and pulled["norm.mean"] < 2.0
    kept = fold(NormBound(agreement=0.0), uploads, reference=sent)
    alone = fold(NormBound(bound=math.sqrt(1.25)), forwards, reference=sent)
    assert kept["w"].tolist() == pytest.approx(alone["w"].tolist())
    assert kept["norm.mean"].tolist() == [2.0]


def test_agreement_is_with_the_median_not_with_the_longest() -> None:
    """At right angles is not against; a strict `agreement` leaves that out as well."""
    uploads = [upload([1.0, 0.0]), upload([1.0, 0.0]), upload([0.0, 1.0])]
    sent = {"w": torch.zeros(2)}
    assert fold(NormBound(agreement=0.0), uploads, reference=sent)["w"][1] > 0.3
    assert fold(NormBound(agreement=0.1), uploads, reference=sent)["w"].tolist() == [1.0, 0.0]


def test_where_no_change_agrees_there_is_no_result() -> None:
    """Three changes whose median is shorter than any of them and points elsewhere."""
    uploads = [upload([1.0, 0.1]), upload([-1.0, 0.1]), upload([0.0, -1.0])]
    with pytest.raises(NotEnoughReplies, match="aggregation.agreement"):
        fold(NormBound(agreement=0.9), uploads, reference={"w": torch.zeros(2)})


def test_lengths_are_over_all_trained_tensors_together() -> None:
    layout = {key: Slot("mean", (1,), torch.float32) for key in ("a", "b", "twin")}
    layouts = {"model": layout, "parameters": {key: layout[key] for key in ("a", "b")}}
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "twin": torch.tensor([1e3])}
    got = fold(NormBound(bound=2.5), [one], layouts=layouts)
    assert [got[key].item() for key in ("a", "b", "twin")] == pytest.approx([1.5, 2.0, 1e3])


@pytest.mark.parametrize("aggregation", EVERY, ids=str)
def test_rows_and_counters_are_as_ever(aggregation: Aggregation) -> None:
    uploads = [upload([0.0, 0.0], count=k, row=1000.0 * k) for k in (4, 9, 2)]
    got = fold(aggregation, uploads, reference={"rows": torch.zeros(3, 1)})
    assert got["norm.count"] == 9
    rows: dict[int, Tensor] = got["rows"]  # type: ignore[assignment]
    assert [rows[client].item() for client in (0, 1, 2)] == [4000.0, 9000.0, 2000.0]


@pytest.mark.parametrize("aggregation", EVERY, ids=str)
def test_equal_uploads_come_back_to_the_bit(aggregation: Aggregation) -> None:
    draw = torch.Generator().manual_seed(0)
    same = {f"w{k}": torch.randn(100 * k, generator=draw) for k in range(1, 9)}
    sent = {key: torch.randn(value.shape, generator=draw) for key, value in same.items()}
    layout = {key: Slot("mean", tuple(same[key].shape), torch.float32) for key in same}
    for count in (1, 4, 7):
        uploads = [dict(sorted(same.items(), reverse=bool(k % 2))) for k in range(count)]
        many = NormBound(bound=1e3) if aggregation == NormBound(bound=5.0) else aggregation
        got = fold(many, uploads, layouts={"model": layout, "parameters": layout}, reference=sent)
        assert all(torch.equal(got[key], same[key]) for key in same)


def big(count: int = 10, width: int = 2000) -> tuple[list[Tensor], dict[str, dict[str, Slot]]]:
    """Honest changes: one direction in common, and an own part of the same length."""
    draw = torch.Generator().manual_seed(1)
    common = torch.randn(width, generator=draw)
    honest = [common + torch.randn(width, generator=draw) for _ in range(count)]
    layout = {"w": Slot("mean", (width,), torch.float32)}
    return honest, {"model": layout, "parameters": layout}


def test_a_bound_nobody_reaches_is_the_mean_to_the_bit() -> None:
    changes, layouts = big()
    uploads, examples = [{"w": change} for change in changes], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    sent = {"w": torch.ones(2000)}
    kept = {"layouts": layouts, "reference": sent, "examples": examples}
    plain = fold(Mean(), uploads, **kept)["w"]  # type: ignore[arg-type]
    assert torch.equal(fold(NormBound(bound=1e9), uploads, **kept)["w"], plain)  # type: ignore[arg-type]
    by_hand = sum(n * change.double() for n, change in zip(examples, changes, strict=True)) / 39
    assert torch.equal(plain, by_hand.float())
    assert not torch.equal(fold(NormBound(), uploads, **kept)["w"], plain)  # type: ignore[arg-type]


ATTACKS = {
    "ten times the opposite": lambda honest, noise: -10 * honest,
    "a thousand times the opposite": lambda honest, noise: -1000 * honest,
    "noise": lambda honest, noise: 100 * noise,
}
PLAIN = {"ten times the opposite": 2.2, "a thousand times the opposite": 200, "noise": 10}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("aggregation", [Mean(), *ROBUST], ids=str)
def test_two_liars_of_ten(aggregation: Aggregation, attack: str) -> None:
    """The mean is off by 2 to 200 times what honest clients learnt; the others stay near it."""
    changes, layouts = big()
    draw = torch.Generator().manual_seed(2)
    sent = {"w": torch.randn(2000, generator=draw)}
    honest = torch.stack(changes).mean(0)
    lies = [ATTACKS[attack](honest, torch.randn(2000, generator=draw)) for _ in range(2)]
    uploads = [{"w": sent["w"] + change} for change in [*lies, *changes[2:]]]
    learnt = torch.stack(changes[2:]).mean(0)
    got = fold(aggregation, uploads, layouts=layouts, reference=sent)["w"] - sent["w"]
    off = ((got - learnt).norm() / learnt.norm()).item()
    if aggregation == Mean():
        assert off > 0.8 * PLAIN[attack]
    else:
        assert off < 0.65
    if aggregation in (Median(), Trimmed(0.2)):
        assert off < PLAIN[attack] / 4


@pytest.mark.parametrize("aggregation", EVERY, ids=str)
def test_the_order_of_adding_changes_nothing(aggregation: Aggregation) -> None:
    changes, layouts = big(6, 300)
    uploads = [{"w": change} for change in changes]
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    found = [
        fold(aggregation, uploads, layouts=layouts, order=order.tolist())["w"] for order in orders
    ]
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("aggregation", EVERY, ids=str)
def test_clients_of_weight_nought_do_not_count(aggregation: Aggregation) -> None:
    declared = Exchange("train", {}, {"model": weights(by="n"), "n": scalar()})

    def result(numbers: list[int]) -> Upload:
        tally = Tally(declared, LAYOUTS, dict.fromkeys(range(4), 9), aggregation=aggregation)  # type: ignore[arg-type]
        for client, n in enumerate(numbers):
            tally.add(client, {"model": upload([float(n), 0.0]), "n": n})
        found: Upload = tally.result().model
        return found

    assert result([0, 0, 0, 3])["w"].tolist() == [3.0, 0.0]
    with pytest.raises(NotEnoughReplies, match="weight 0"):
        result([0, 0])


def test_nobody_answered_is_an_empty_result() -> None:
    assert all(fold(aggregation, []) == {} for aggregation in EVERY)


def test_all_are_registered() -> None:
    assert set(aggregations.table()) == {"mean", "median", "trimmed", "norm-bound"}


@pytest.mark.parametrize(
    ("owner", "settings", "message"),
    [
        (Trimmed, {"trim": 0.5}, "aggregation.trim is 0.5"),
        (Trimmed, {"trim": -0.1}, "aggregation.trim is -0.1"),
        (NormBound, {"bound": 0.0}, "aggregation.bound is 0.0"),
        (NormBound, {"bound": math.nan}, "aggregation.bound is nan"),
        (NormBound, {"agreement": 1.0}, "aggregation.agreement is 1.0"),
        (NormBound, {"agreement": math.nan}, "aggregation.agreement is nan"),
    ],
)
def test_impossible_settings_are_refused(owner, settings, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        owner(**settings)
