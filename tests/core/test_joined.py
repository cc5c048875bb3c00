"""Views that share a tensor are joined without a copy, and only as long as they are its views."""

import torch

from harmonium.core.joined import Joined, joined


def test_views_are_joined_without_a_copy() -> None:
    rows = torch.arange(6.0).view(6, 1)
    views = Joined(rows, [2, 4])
    assert joined(views) is rows
    assert torch.equal(joined(list(views)), rows)


def test_changed_lists_are_joined_anew() -> None:
    rows = torch.arange(6.0).view(6, 1)
    longer, other = Joined(rows, [2, 4]), Joined(rows, [2, 4])
    longer.append(torch.ones(1, 1))
    other[0] = other[0] + 1
    assert joined(longer).flatten().tolist() == [0, 1, 2, 3, 4, 5, 1]
    assert joined(other).flatten().tolist() == [1, 2, 2, 3, 4, 5]
