"""Clusters of equal size: exact at a client, balanced at the server, counted in images."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from harmonium.learning.objectives.sinkhorn import scaled, scaling, sinkhorn
from harmonium.methods.orchestra.anonymity import anonymous_centroids, fewest_images
from harmonium.methods.orchestra.clustering import (
    argmax_labels,
    balanced_labels,
    global_clustering,
    local_clustering,
    unit_means,
)
from harmonium.methods.orchestra.memory import ProjectionMemory


def drawn(count: int, dim: int = 8, seed: int = 0) -> Tensor:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(rows)


def uneven(count: int = 128, dim: int = 16) -> Tensor:
    """Well separated groups of very different sizes, on which largest shares are unbalanced."""
    rng = torch.Generator().manual_seed(1)
    middles = torch.randn(4, dim, generator=rng)
    group = torch.multinomial(torch.tensor([0.85, 0.1, 0.04, 0.01]), count, True, generator=rng)
    rows = 3 * middles[group] + torch.randn(count, dim, generator=rng)
    return functional.normalize(rows)


def sizes_of(labels: Tensor, count: int) -> list[int]:
    return labels.bincount(minlength=count).tolist()


# ---- Sinkhorn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [drawn(40) @ drawn(6, seed=1).T, uneven(40) @ uneven(40)[:6].T])
def test_rows_sum_to_one_and_columns_to_their_share_in_the_end(scores: Tensor) -> None:
    logits = 25 * scores
    for iterations in (1, 10, 100):
        rows = scaled(logits, iterations).sum(1)
        torch.testing.assert_close(rows, torch.ones(40), rtol=0, atol=1e-6)
    kernel = logits.double().softmax(1)
    rows, columns = scaling(kernel, 3000, tolerance=0.0)
    balanced = rows[:, None] * kernel * columns
    assert (balanced.sum(0) * 6 / 40 - 1).abs().max() < 1e-3
    apart = (scaled(logits, 100).sum(0) * 6 / 40 - 1).abs().max()
    assert apart < 0.1


def test_two_vectors_scale_as_whole_matrices_do() -> None:
    logits = 25 * drawn(30) @ drawn(5, seed=1).T
    slow = sinkhorn(logits.log_softmax(1), 7)
    kernel = logits.double().softmax(1)
    rows, columns = scaling(kernel, 7, tolerance=0.0)
    torch.testing.assert_close((rows[:, None] * kernel * columns).float(), slow)


def test_it_goes_on_from_where_it_was() -> None:
    kernel = (25 * uneven(60) @ uneven(60)[:5].T).double().softmax(1)
    rows, columns = scaling(kernel, 500, tolerance=1e-9)
    again, same = scaling(kernel, 1, rows)
    torch.testing.assert_close(again, rows)
    torch.testing.assert_close(same, columns)


# ---- exact sizes ---------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5), st.sampled_from("rsof"))
@settings(max_examples=80)
def test_sizes_differ_by_at_most_one(count: int, clusters: int, seed: int, kind: str) -> None:
    rows = drawn(count, 4, seed)
    if kind == "s":  # the same point again and again
        rows = rows[:1].repeat(count, 1)
    if kind == "o":  # one far from all others
        rows = torch.cat([-rows[:1], rows[:1].repeat(count - 1, 1)])
    scores = rows @ drawn(clusters, 4, seed + 1).T
    if kind == "f":  # no scores at all
        scores = torch.zeros(count, clusters)
    labels = balanced_labels(scores)
    sizes = sizes_of(labels, clusters)
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == count


def test_no_other_assignment_of_these_sizes_is_better() -> None:
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    found = scores.gather(1, balanced_labels(scores)[:, None]).sum()
    others = set(itertools.permutations([0, 0, 1, 1, 2, 2]))
    best = max(scores.gather(1, torch.tensor(one)[:, None]).sum() for one in others)
    assert found.item() == pytest.approx(best.item(), rel=1e-6)


def test_largest_shares_are_of_any_size() -> None:
    rows = uneven()
    centroids = rows[torch.randperm(128, generator=torch.Generator().manual_seed(0))[:8]]
    sizes = sizes_of(argmax_labels(rows @ centroids.T), 8)
    assert max(sizes) - min(sizes) > 8
    assert sizes_of(balanced_labels(rows @ centroids.T), 8) == [16] * 8


@pytest.mark.parametrize("balance", ["exact", "argmax"])
def test_centroids_are_unit_means_of_the_rows_with_their_label(balance: str) -> None:
    rows = uneven()
    found, labels = local_clustering(rows, 8, balance, torch.Generator().manual_seed(2))  # type: ignore[arg-type]
    torch.testing.assert_close(found.norm(dim=1), torch.ones(8))
    for label in labels.unique().tolist():
        wanted = functional.normalize(rows[labels == label].mean(0), dim=0)
        torch.testing.assert_close(found[label], wanted)
    again, _ = local_clustering(rows, 8, balance, torch.Generator().manual_seed(2))  # type: ignore[arg-type]
    assert torch.equal(again, found)


def test_rows_that_are_all_the_same_make_no_trouble() -> None:
    same = drawn(1).repeat(20, 1)
    for balance in ("exact", "argmax"):
        found, _ = local_clustering(same, 4, balance, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        torch.testing.assert_close(found, same[:4])
    for balance in ("soft", "exact"):
        made = global_clustering(same, drawn(4, seed=5), balance, 20)  # type: ignore[arg-type]
        assert torch.isfinite(made).all()
        torch.testing.assert_close(made.norm(dim=1), torch.ones(4))


def test_a_label_without_rows_stays_where_it_was() -> None:
    rows, before = drawn(3), drawn(2, seed=1)
    after = unit_means(rows, torch.zeros(3, dtype=torch.int64), before)
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[0], functional.normalize(rows.sum(0), dim=0))


# ---- memory and anonymity ------------------------------------------------------------------------


def filled(size: int, batches: list[list[int]], *, distinct: bool) -> ProjectionMemory:
    """Rows are numbered in the order in which they come."""
    memory, count = ProjectionMemory(size, distinct=distinct), 0
    for batch in batches:
        rows = torch.arange(count, count + len(batch))[:, None].float()
        memory.push(torch.tensor(batch), rows)
        count += len(batch)
    return memory


def test_memory_holds_the_newest() -> None:
    batches = [[0, 1, 2], [3, 4, 5], [2, 4, 0], [1, 5, 3]]
    images, rows = filled(4, batches, distinct=False).newest()
    assert images.tolist() == [0, 1, 5, 3] and rows.flatten().tolist() == [8, 9, 10, 11]
    images, rows = filled(99, batches[:3], distinct=True).newest()
    assert images.tolist() == [1, 3, 5, 2, 4, 0]
    assert rows.flatten().tolist() == [1, 3, 5, 6, 7, 8]
    assert len(filled(4, batches, distinct=True)) == 4
    assert len(filled(99, batches[:1], distinct=True)) == 3


@given(st.integers(2, 30), st.integers(2, 20), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=60)
def test_distinct_memory_is_full_if_there_are_images(
    images: int, size: int, batch: int, epochs: int
) -> None:
    rng = torch.Generator().manual_seed(0)
    order = [torch.randperm(images, generator=rng).split(batch) for _ in range(epochs)]
    batches = [part.tolist() for epoch in order for part in epoch]
    memory = filled(size, batches, distinct=True)
    held, rows = memory.newest()
    assert len(set(held.tolist())) == len(held) == min(size, images)
    shown = [image for part in batches for image in part]
    for image, row in zip(held.tolist(), rows.flatten().tolist(), strict=True):
        assert row == len(shown) - 1 - shown[::-1].index(image)  # its newest
    assert sum(len(part) for _, part in memory._batches) < size + batch  # bounded


def test_a_cluster_counts_its_different_images() -> None:
    labels, images = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([5, 5, 6, 7, 8, 9])
    assert fewest_images(labels, images, 2) == 2
    assert fewest_images(labels, images, 3) == 0


@pytest.mark.parametrize(
    ("images", "least", "sent", "k"),
    [(128, 2, 8, 16), (20, 2, 8, 2), (9, 2, 4, 2), (9, 4, 2, 4), (3, 2, 1, 3), (1, 2, 0, 0)],
)
def test_small_clients_send_fewer_centroids(images: int, least: int, sent: int, k: int) -> None:
    memory = ProjectionMemory(128, distinct=True)
    memory.push(torch.arange(images), drawn(images))
    found, fewest = anonymous_centroids(memory, 8, least, "exact", torch.Generator().manual_seed(0))
    assert (len(found), fewest) == (sent, k) and found.shape[1] == 8
    assert fewest >= least or not sent


def test_views_of_one_image_do_not_hide_it() -> None:
    """Four views of each of 8 images: balanced clusters, but of two images at best."""
    rows = drawn(8).repeat_interleave(4, 0) + 0.001 * drawn(32, seed=4)
    images = torch.arange(8).repeat_interleave(4)
    memory = ProjectionMemory(32, distinct=False)
    memory.push(images, functional.normalize(rows))
    rng = torch.Generator().manual_seed(0)
    found, fewest = anonymous_centroids(memory, 8, 1, "exact", rng)
    assert (len(found), fewest) == (8, 1)
    found, fewest = anonymous_centroids(memory, 4, 3, "exact", rng)
    assert (len(found), fewest) == (2, 4)
    assert len(anonymous_centroids(memory, 8, 9, "exact", rng)[0]) == 0


def test_argmax_tells_the_k_that_it_gave() -> None:
    memory = ProjectionMemory(128, distinct=True)
    memory.push(torch.arange(128), uneven())
    rng = torch.Generator().manual_seed(0)
    found, fewest = anonymous_centroids(memory, 16, 1, "argmax", rng)
    assert len(found) in (0, 16) and fewest < 8
    kept, none = anonymous_centroids(memory, 16, 8, "argmax", rng)
    assert (len(kept), none) == (0, 0)
    exact, k = anonymous_centroids(memory, 16, 8, "exact", rng)
    assert (len(exact), k) == (16, 8)


def test_without_clusters_rows_leave_as_they_are() -> None:
    memory = ProjectionMemory(5, distinct=True)
    memory.push(torch.arange(7), drawn(7))
    found, fewest = anonymous_centroids(memory, 0, 1, "exact", torch.Generator())
    assert torch.equal(found, drawn(7)[2:]) and fewest == 1


# ---- at the server -------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["soft", "exact"])
def test_global_centroids_are_unit_and_do_not_depend_on_the_order(balance: str) -> None:
    rows, start = uneven(60), torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    made = global_clustering(rows, start, balance, 60)  # type: ignore[arg-type]
    torch.testing.assert_close(made.norm(dim=1), torch.ones(6))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(global_clustering(rows[order], start, balance, 60), made)  # type: ignore[arg-type]
    assert not torch.allclose(made, functional.normalize(start))
    same = global_clustering(rows[:0], start, balance, 60)  # type: ignore[arg-type]
    torch.testing.assert_close(same, functional.normalize(start))


def test_the_descent_makes_assignments_resemble_balanced_ones() -> None:
    rows, start = uneven(60), functional.normalize(uneven(60)[:6])

    def resemblance(centroids: Tensor) -> float:
        wanted = scaled(25 * rows @ centroids.T, 100)
        shares = (rows @ centroids.T / 0.1).softmax(1)
        return float(functional.cosine_similarity(wanted, shares).mean())

    before, after = resemblance(start), resemblance(global_clustering(rows, start, "soft", 100))
    assert after > before + 0.01


def test_one_step_of_the_descent_by_hand() -> None:
    rows, start = drawn(9), drawn(3, seed=1)
    moving = start.clone().requires_grad_()
    wanted = scaled(25 * rows @ start.T, 100)
    shares = (rows @ moving.T / 0.1).softmax(1)
    (-functional.cosine_similarity(wanted, shares).mean()).backward()
    assert moving.grad is not None
    stepped = start - 0.01 * (moving.grad + 1e-4 * start)
    torch.testing.assert_close(
        global_clustering(rows, start, "soft", 1), functional.normalize(stepped)
    )


def test_exact_global_clusters_are_of_equal_size_and_settle() -> None:
    rows = uneven(64)
    made = global_clustering(rows, drawn(8, 16), "exact", 50)
    labels = balanced_labels(rows @ made.T)
    assert sizes_of(labels, 8) == [8] * 8
    torch.testing.assert_close(unit_means(rows, labels, made), made)
    few = global_clustering(rows[:3], drawn(8, 16), "exact", 50)  # fewer rows than clusters
    assert torch.isfinite(few).all() and len(few) == 8
