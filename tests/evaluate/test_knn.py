import math

import pytest
import torch

from harmonium.errors import ConfigError, DataError
from harmonium.evaluate.knn import knn_accuracy, knn_predict


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
