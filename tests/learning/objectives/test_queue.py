from collections import deque

import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.learning.objectives.queue import Queue, queue_of, queue_part, redraw
from harmonium.learning.parts import Part, Parts


def directions(count: int, seed: int) -> torch.Tensor:
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return rows / rows.norm(dim=1, keepdim=True)


def take_in(queue: Queue, rows: torch.Tensor) -> None:
    queue.offer(rows)
    queue.push()


def parts_with(owner: str, **overrides: str) -> Parts:
    queue = queue_part(5, 3, owner)  # type: ignore[arg-type]
    return Parts({"encoder": Part(nn.Linear(2, 2)), "queue": queue}, overrides)  # type: ignore[arg-type]


def test_it_starts_as_random_directions_none_of_them_real() -> None:
    queue = Queue(50, 3)
    assert torch.allclose(queue.rows.norm(dim=1), torch.ones(50))
    assert len(queue.rows.unique(dim=0)) == 50 and len(queue.real()) == 0


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [5, 3, 4], [7, 1], [1] * 13, [3, 12, 2]])
def test_the_newest_rows_replace_the_oldest_also_around_the_end(sizes: list[int]) -> None:
    """Against a list that forgets: same rows, and each at its number modulo the size."""
    queue, wanted, seen = Queue(5, 3), deque(maxlen=5), 0  # type: ignore[var-annotated]
    for seed, count in enumerate(sizes):
        rows = directions(count, seed)
        take_in(queue, rows)
        wanted.extend(enumerate(rows, seen))
        seen += count
        assert int(queue.count) == seen and len(queue.real()) == min(seen, 5)
        for number, row in wanted:
            assert torch.allclose(queue.rows[number % 5], row)


def test_of_more_rows_than_fit_only_the_newest_stay() -> None:
    queue, rows = Queue(4, 3), directions(11, 0)
    take_in(queue, rows)
    assert torch.allclose(queue.real().sort(0).values, rows[-4:].sort(0).values)


def test_rows_have_unit_length_and_no_gradient() -> None:
    queue = Queue(4, 3)
    take_in(queue, torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True) * 1.0)
    assert queue.real().tolist() == [pytest.approx([0.6, 0.8, 0.0]), [0.0, 0.0, 0.0]]
    assert not queue.rows.requires_grad


def test_nothing_enters_before_push_and_then_only_the_last_offer() -> None:
    queue, first, second = Queue(4, 3), directions(2, 0), directions(1, 1)
    before = queue.rows.clone()
    queue.push()
    queue.offer(first)
    assert torch.equal(queue.rows, before) and int(queue.count) == 0
    queue.offer(second)
    queue.push()
    queue.push()
    assert int(queue.count) == 1 and torch.allclose(queue.real(), second)


def test_what_the_caller_does_to_offered_rows_later_changes_nothing() -> None:
    queue, rows = Queue(4, 3), directions(2, 0)
    queue.offer(rows)
    kept = rows.clone()
    rows.zero_()
    queue.push()
    assert torch.allclose(queue.real(), kept)


@pytest.mark.parametrize("overrides", [{"queue": "mean"}, {"*": "mean"}, {"queue": "row"}])
def test_a_queue_cannot_be_sent(overrides: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="'queue' holds rows"):
        parts_with("local", **overrides)
    with pytest.raises(ConfigError, match="'queue' holds rows"):
        Parts({"queue": queue_part(5, 3, "mean")}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("owner", ["local", "fresh"])
def test_it_stays_at_the_client_or_nowhere(owner: str) -> None:
    parts = parts_with(owner)
    keys = {"queue.rows", "queue.count"}
    assert not keys & set(parts.shared())
    assert set(parts.kept()) == (keys if owner == "local" else set())
    assert parts.reveals["queue"] == "per_example"


def test_a_kept_queue_goes_on_where_it_was() -> None:
    parts = parts_with("local")
    take_in(queue_of(parts), directions(3, 0))
    again = parts_with("local").copy_from(parts.kept())
    take_in(queue_of(again), directions(4, 1))
    assert int(queue_of(again).count) == 7
    assert torch.allclose(queue_of(again).rows[2], directions(3, 0)[2])
    assert torch.allclose(queue_of(again).rows[1], directions(4, 1)[3])


def test_only_a_fresh_queue_is_drawn_anew() -> None:
    for owner, changes in (("fresh", True), ("local", False)):
        parts = parts_with(owner)
        before = queue_of(parts).rows.clone()
        redraw(parts)
        rows = queue_of(parts).rows
        assert torch.equal(rows, before) != changes
        assert torch.allclose(rows.norm(dim=1), torch.ones(5))
