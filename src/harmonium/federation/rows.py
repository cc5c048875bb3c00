"""Tensors with one row per client (tables), and how the server optimiser updates them.

A client sends its own row. The table is updated as if every client had sent the whole table with
the other rows unchanged, which is what averaging whole tables gives. With momentum the rows of
absent clients move as well. A lazy table is passed to the optimiser row by row, so absent rows stay
as they are and each row counts its own steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from harmonium.core.types import ClientId, Weights
from harmonium.federation.server_optimisers import Memory, ServerOptimiser


def step(
    optimiser: ServerOptimiser,
    current: Weights,
    folded: Mapping[str, Any],
    steered: set[str],
    memory: Memory,
    rate: float,
    *,
    examples: Mapping[ClientId, int],
    lazy: Collection[str],
) -> tuple[Weights, Memory]:
    """The new tensors and the optimiser's memory after folded uploads.

    Args:
        optimiser: the server optimiser.
        current: the model before the step.
        folded: averages, and for tables a dict from client to row.
        steered: keys of trained tensors; others are taken as they are.
        memory: the optimiser's memory before the step.
        rate: the server learning rate.
        examples: number of examples of each client, which weighs it.
        lazy: parts in which rows of absent clients stay as they are.
    """
    tables = {key: rows for key, rows in folded.items() if not isinstance(rows, Tensor)}
    before, average = dict(current), {k: v for k, v in folded.items() if k not in tables}
    steered = set(steered)
    apart = {key for key in tables if key.partition(".")[0] in lazy}
    for key, rows in tables.items():
        moved = _moved(current[key], rows, optimiser.weighting == "uniform", examples)
        if key not in apart:
            average[key] = _with(current[key], moved)
            continue
        for client, row in moved.items():
            before[_single(key, client)] = current[key][client]
            average[_single(key, client)] = row
            steered |= {_single(key, client)} if key in steered else set()
    stepped, memory = optimiser.step(before, average, steered, memory, rate)
    for key in apart:
        rows = {client: stepped.pop(_single(key, client)) for client in tables[key]}
        stepped[key] = _with(current[key], rows)
    return stepped, memory


def _moved(
    table: Tensor,
    rows: Mapping[ClientId, Tensor],
    uniform: bool,
    examples: Mapping[ClientId, int],
) -> dict[ClientId, Tensor]:
    """Rows after averaging whole tables, in each of which only the owner's row has changed."""
    weights = {client: 1 if uniform else examples[client] for client in rows}
    total = sum(weights.values())
    return {c: torch.lerp(table[c], row, weights[c] / total) for c, row in rows.items()}


def _with(table: Tensor, rows: Mapping[ClientId, Tensor]) -> Tensor:
    """A copy of the table with some rows replaced."""
    copy = table.clone()
    for client, row in rows.items():
        copy[client] = row
    return copy


def _single(key: str, client: ClientId) -> str:
    return f"{key}/{client}"
