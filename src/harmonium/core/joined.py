"""Rows of several views in one tensor, so that what needs all of them need not copy them together.

With a small encoder the copies of a step, and those of its backward pass, cost as much as a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Joined(list[Tensor]):
    """The views of a batch as a list, made from one tensor that has their rows one after another.

    >>> views = Joined(torch.arange(4), [1, 3])
    >>> views, joined(views) is views.rows
    ([tensor([0]), tensor([1, 2, 3])], True)
    """

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        """Split `rows` into views of these sizes."""
        super().__init__(torch.split(rows, list(sizes)))
        self.rows = rows
        self._made = tuple(self)

    @property
    def intact(self) -> bool:
        """Whether the list still has the views that it was made with."""
        same = (now is then for now, then in zip(self, self._made, strict=False))
        return len(self) == len(self._made) and all(same)


def joined(views: Sequence[Tensor]) -> Tensor:
    """The rows of all views in one tensor, (n of all views, ...)."""
    if isinstance(views, Joined) and views.intact:
        return views.rows
    return torch.cat(list(views))
