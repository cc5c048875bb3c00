import math

import pytest
import torch

from harmonium.core.errors import ConfigError, DataError
from harmonium.evaluation import knn
from harmonium.evaluation.knn import knn_accuracy, knn_predict


def brute_force(bank, labels, queries, k, temperature):
    """The definition again, one query and one neighbour at a time."""
    answers = []
    for query in queries.double():
        cosines = [float(query @ row) / float(query.norm() * row.norm()) for row in bank.double()]
        order = sorted(range(len(cosines)), key=lambda i: -cosines[i])[:k]
        votes: dict[int, float] = {}
        for i in order:
            name = int(labels[i])
            votes[name] = votes.get(name, 0.0) + math.exp(cosines[i] / temperature)
        answers.append(max(sorted(votes), key=lambda name: votes[name]))
    return answers


def problem(seed=0, n=120, m=40, dim=7, classes=5):
    rng = torch.Generator().manual_seed(seed)
    bank = torch.randn(n, dim, generator=rng) * 3 + 1
    queries = torch.randn(m, dim, generator=rng) * 2 + 1
    labels = torch.randint(classes, (n,), generator=rng) * 10 + 3
    return bank, labels, queries


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (7, 0.1), (30, 0.02), (120, 1.0)])
def test_equals_the_definition(k, temperature):
    bank, labels, queries = problem()
    got = knn_predict(bank, labels, queries, k=k, temperature=temperature)
    assert got.tolist() == brute_force(bank, labels, queries, k, temperature)


def test_by_hand():
    # Cosines with the query (1, 0): 1, 0.6, 0.6. Two far votes of exp(0.6/T) against one of
    # exp(1/T): the near one wins while exp(0.4/T) > 2, that is T < 0.577.
    bank = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.6, -0.8]])
    labels, query = torch.tensor([0, 1, 1]), torch.tensor([[5.0, 0.0]])
    assert knn_predict(bank, labels, query, k=3, temperature=0.5).tolist() == [0]
    assert knn_predict(bank, labels, query, k=3, temperature=0.7).tolist() == [1]
    assert knn_predict(bank, labels, query, k=1, temperature=0.7).tolist() == [0]
    assert knn_accuracy(bank, labels, query, torch.tensor([0]), k=1) == 1.0


def test_chunks_do_not_matter():
    bank, labels, queries = problem(1)
    answers = {
        chunk: knn_predict(bank, labels, queries, k=9, chunk=chunk).tolist()
        for chunk in (1, 7, 40, 1000)
    }
    assert len({tuple(answer) for answer in answers.values()}) == 1


def test_more_neighbours_than_bank_means_all_of_it():
    bank, labels, queries = problem(2)
    whole = knn_predict(bank, labels, queries, k=len(bank))
    assert torch.equal(knn_predict(bank, labels, queries, k=10_000), whole)


def test_unlabelled_rows_are_left_out():
    bank, labels, queries = problem(3)
    hidden = labels.clone()
    hidden[::3] = -1
    keep = hidden >= 0
    truth = torch.full((len(queries),), 13)
    truth[::2] = -1
    got = knn_accuracy(bank, hidden, queries, truth, k=5)
    assert got == knn_accuracy(
        bank[keep], labels[keep], queries[truth >= 0], truth[truth >= 0], k=5
    )
    assert -1 not in knn_predict(bank, hidden, queries, k=5)


def test_ties_do_not_depend_on_the_order_of_the_bank():
    # Four equally near rows for two places: three say 1, one says 0; then the votes are 1.5 to 0.5.
    bank = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]])
    query = torch.tensor([[1.0, 0.0]])
    for place in range(4):
        labels = torch.ones(5, dtype=torch.long)
        labels[place] = 0
        assert knn_predict(bank, labels, query, k=2).tolist() == [1]
    # With votes equal as well, the smallest label wins.
    even = torch.tensor([1, 0, 0, 1, 1])
    assert knn_predict(bank, even, query, k=2).tolist() == [0]
    assert knn_predict(bank, 1 - even, query, k=2).tolist() == [0]


def test_tied_places_are_shared_beside_certain_ones():
    # One place is certain (label 2); the other is shared by three rows: 2/3 for 1 and 1/3 for 0.
    bank = torch.tensor([[1.0, 0.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]])
    query = torch.tensor([[1.0, 0.0]])
    assert knn_predict(bank, torch.tensor([2, 1, 0, 1]), query, k=2, temperature=1e4)[0] == 2
    assert knn_predict(bank, torch.tensor([0, 1, 1, 1]), query, k=4, temperature=1e4)[0] == 1


def test_blocks_of_the_bank_do_not_matter(monkeypatch):
    bank, labels, queries = problem(5, n=130)
    bank[40:90] = bank[3]  # ties within blocks and across them
    settings = [(k, temperature) for k in (1, 9, 60, 130) for temperature in (0.05, 1.0)]
    whole = [knn_predict(bank, labels, queries, k=k, temperature=t) for k, t in settings]
    monkeypatch.setattr(knn, "BANK", 30)
    for expected, (k, temperature) in zip(whole, settings, strict=True):
        got = knn_predict(bank, labels, queries, k=k, temperature=temperature)
        assert torch.equal(got, expected)
        order = torch.randperm(130, generator=torch.Generator().manual_seed(k))
        turned = knn_predict(bank[order], labels[order], queries, k=k, temperature=temperature)
        assert torch.equal(turned, expected)


@pytest.mark.parametrize("block", [16, 1000])
@pytest.mark.parametrize("asked", [1, 3, 20])
@pytest.mark.parametrize("n", [5, 33, 203])
def test_equal_rows_share_whatever_the_shapes(n, asked, block, monkeypatch):
    # Matrix products of few rows round differently at the edges; the same row must not.
    monkeypatch.setattr(knn, "BANK", block)
    rng = torch.Generator().manual_seed(n + asked)
    bank = torch.randn(1, 64, generator=rng).expand(n, 64).contiguous()
    queries = torch.randn(asked, 64, generator=rng)
    for place in (0, n // 2, n - 2, n - 1):
        labels = torch.full((n,), 4)
        labels[place] = 2
        assert knn_predict(bank, labels, queries, k=2).tolist() == [4] * asked


def test_a_collapsed_encoder_names_the_largest_class():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (500,), generator=rng)
    rows = torch.randn(1, 16, generator=rng)
    got = knn_predict(rows.expand(500, -1), labels, rows.expand(90, -1), k=7, chunk=40)
    assert got.tolist() == [int(labels.bincount().argmax())] * 90


def test_threads_do_not_matter():
    bank, labels, queries = problem(6, n=300, m=200)
    answers = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        answers.append(knn_predict(bank, labels, queries, k=9, chunk=30))
        assert torch.get_num_threads() == threads
        torch.set_num_threads(1)
    assert torch.equal(*answers)


def test_the_largest_are_found_in_groups():
    values = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    values[0, ::7] = 4.0  # more ties than places
    values[1] = 1.0
    values[2, -8:] = 9.0  # in the columns that fill no group
    for k in (1, 10, 60, 3000):
        largest, places = knn._largest(values, k)
        assert torch.equal(largest, values.topk(k, dim=1).values)
        assert torch.equal(values.gather(1, places), largest)
        assert all(len(set(row)) == k for row in places.tolist())


def test_a_large_bank_equals_the_plain_formula():
    rng = torch.Generator().manual_seed(7)
    bank, queries = torch.randn(4000, 12, generator=rng), torch.randn(300, 12, generator=rng)
    labels = torch.randint(9, (4000,), generator=rng)
    unit, asked = (torch.nn.functional.normalize(part.double()) for part in (bank, queries))
    near, rows = (asked @ unit.T).topk(50, dim=1)
    votes = torch.zeros(300, 9, dtype=torch.float64)
    votes.scatter_add_(1, labels[rows], (near / 0.1).exp())
    assert torch.equal(knn_predict(bank, labels, queries, k=50), votes.argmax(dim=1))


def test_rows_of_zeros_are_as_far_as_a_right_angle():
    bank = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [1.0, 0.1]])
    labels, query = torch.tensor([5, 6, 7]), torch.tensor([[-1.0, 0.2]])
    assert knn_predict(bank, labels, query, k=1).tolist() == [6]
    assert knn_predict(bank[[0, 2]], labels[[0, 2]], query, k=1).tolist() == [5]


def test_a_small_temperature_does_not_overflow():
    bank, labels, queries = problem(4)
    got = knn_predict(bank, labels, queries, k=20, temperature=1e-3)
    assert torch.equal(got, knn_predict(bank, labels, queries, k=1))


def test_refusals():
    bank, labels, queries = problem()
    with pytest.raises(DataError, match="labelled"):
        knn_predict(bank, torch.full_like(labels, -1), queries)
    with pytest.raises(DataError, match="labelled"):
        knn_accuracy(bank, labels, queries, torch.full((len(queries),), -1))
    with pytest.raises(ConfigError, match="k >= 1"):
        knn_predict(bank, labels, queries, k=0)
