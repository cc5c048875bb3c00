"""Metrics that terms need before a model is evaluated: measured by clients, stored with a round.

Only the clients of the cohort measure. Earlier measurements of other clients still count, and the
report says how old the oldest one is and how many clients have measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from harmonium.core.devices import to_double
from harmonium.core.errors import counted
from harmonium.core.types import ClientId, Weights
from harmonium.federation.wire import Ask, Plan, statistic
from harmonium.learning.client import Client, Decline
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective
from harmonium.learning.terms import Term

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server

MEASURED = statistic(
    "each", shape=lambda method, examples: (len(method.measured),), dtype=torch.float64
)
NEVER = -1  # stands for the round of a client that has not measured yet


def names(terms: Iterable[Term], objective: Objective) -> list[str]:
    """The names of the metrics, each as `term.name`, in the order of their values."""
    return [f"{term.name}.{one}" for term in terms for one in term.measures(objective)]


def with_term_metrics(server: Server, cohort: Sequence[ClientId]) -> Plan:
    """Ask the cohort to measure; return the server with the updated metrics."""
    model = {**server.model, **server.memory.get("statistics", {})}
    got = yield Ask("gauge", cohort, {"model": model}, least=0)
    if not got.ids:
        return server
    earlier, clients = server.memory.get("measured", {}), len(server.examples)
    newest = updated(earlier, got.measured, clients, server.round)
    return replace(server, memory={**server.memory, "measured": newest})


def measured(method: Method, client: Client, model: Weights) -> Tensor:
    """The metrics of a model, as means over a client's images."""
    parts = method.pull(client, model)
    parts.train(method.recalibrates)  # a recalibrated encoder comes without projectors' statistics
    images, means = list[int](), list[Tensor]()
    context = Context(me=client.id)
    with torch.no_grad():
        for batch in client.batches(1, method.local.batch):
            seen = method.see(parts, batch)
            wanted = (term.measure(parts, seen, context, method.objective) for term in method.terms)
            images.append(len(batch.index))
            means.append(torch.stack([value for some in wanted for value in some]))
    if not images:
        raise Decline(f"it has {counted(len(client.examples), 'example')}, too few to measure")
    rows = to_double(torch.stack(means))
    total = sum(count * row for count, row in zip(images, rows, strict=True))
    return cast(Tensor, total) / sum(images)


def updated(
    earlier: Mapping[str, Tensor], measured: Mapping[ClientId, Tensor], clients: int, round: int
) -> dict[str, Tensor]:
    """The newest values of every client, after some clients measured in a round.

    >>> updated({}, {1: torch.tensor([0.5])}, clients=2, round=3)["rounds"].tolist()
    [-1, 3]
    """
    width = len(next(iter(measured.values()))) if measured else 0
    rounds = earlier["rounds"].clone() if earlier else torch.full((clients,), NEVER)
    zeros = torch.zeros(clients, width, dtype=torch.float64)
    values = earlier["values"].clone() if earlier else zeros
    for client, row in measured.items():
        rounds[client], values[client] = round, row
    return {"rounds": rounds, "values": values}


def report(
    terms: Sequence[Term],
    objective: Objective,
    measured: Mapping[str, Tensor],
    weights: Sequence[float],
    round: int,
) -> dict[str, Any]:
    """What every term reports of its metrics, with the number of clients and the age of the oldest.

    `weights` are those of all clients, measured or not; terms get the entropy of these weights.
    """
    known = measured["rounds"] != NEVER
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    entropy = -math.fsum(share * math.log(share) for share in shares if share)
    some = torch.tensor(shares, dtype=torch.float64)[known]
    means = (some / some.sum()) @ measured["values"][known]
    by_name = dict(zip(names(terms, objective), means.tolist(), strict=True))
    age = {
        "clients": int(known.sum()),
        "of": len(known),
        "oldest": round - int(measured["rounds"][known].min()),  # rounds
    }
    reports: dict[str, Any] = {}
    for term in terms:
        own = {one: by_name[f"{term.name}.{one}"] for one in term.measures(objective)}
        if own:
            reports |= {key: {**value, **age} for key, value in term.report(own, entropy).items()}
    return reports
