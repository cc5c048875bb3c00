"""Symmetric matrices as the numbers on and above their diagonal: half of what they would take."""

from __future__ import annotations

import torch
from torch import Tensor

from harmonium.core.errors import WireError


def triangle(size: int) -> int:
    """How many numbers a symmetric matrix of this size is.

    >>> triangle(512)
    131328
    """
    return size * (size + 1) // 2


def upper_triangle(matrix: Tensor) -> Tensor:
    """The entries of a square matrix on and above its diagonal, row after row.

    >>> upper_triangle(torch.tensor([[1, 2], [2, 3]])).tolist()
    [1, 2, 3]
    """
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def pack(matrix: Tensor) -> Tensor:
    """The symmetric half of a square matrix (size, size), as float32 (triangle(size),).

    >>> pack(torch.tensor([[1.0, 0.0], [4.0, 3.0]])).tolist()
    [1.0, 2.0, 3.0]
    """
    return upper_triangle((matrix + matrix.T) / 2).float()


def unpack(packed: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) behind its packed form.

    >>> unpack(torch.tensor([1.0, 2.0, 3.0]), 2).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    if packed.shape != (triangle(size),):
        raise WireError(
            f"a symmetric matrix of size {size} is {triangle(size)} numbers, not of shape "
            f"{tuple(packed.shape)}"
        )
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    matrix = packed.new_empty(size, size)
    matrix[rows, columns] = packed
    matrix[columns, rows] = packed
    return matrix


def positive(matrix: Tensor) -> Tensor:
    """The nearest matrix to the symmetric half of this one without negative eigenvalues.

    >>> positive(torch.diag(torch.tensor([2.0, -1.0]))).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    clean: Tensor = (vectors * values.clamp_min(0)) @ vectors.T
    return clean


def is_between(matrix: Tensor, least: float, most: float) -> bool:
    """Whether all eigenvalues of a symmetric matrix lie between two numbers.

    They do if two shifted matrices have a Cholesky factor, which is quicker to try than eigenvalues
    are to find.

    >>> is_between(torch.diag(torch.tensor([2.0, 1.0])), 0.5, 2.5)
    True
    >>> is_between(torch.diag(torch.tensor([2.0, -1.0])), 0.0, 2.5)
    False
    """
    unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    shifted = torch.stack([matrix - least * unit, most * unit - matrix])
    return not bool(torch.linalg.cholesky_ex(shifted).info.any())
