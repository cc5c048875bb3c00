"""Diagnosis: whether clients differ in content or in style, from sums over their images.

A method of one ask that trains nothing. The question is raised by Louizos et al., A Mutual
Information Perspective on Federated Contrastive Learning, 2024, section 2: user verification helps
where labels tell clients apart and hurts where only their style does. The answer is ours;
`harmonium.studies.diagnosis` derives it from the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from harmonium.core.errors import counted
from harmonium.core.types import ClientId
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, Plan, Value, exchange, scalar, statistic
from harmonium.learning.client import Client, Decline
from harmonium.learning.symmetric import triangle, unpack
from harmonium.methods import methods
from harmonium.methods.diagnosis.features import CHUNK, CONTENT, FIELDS, described
from harmonium.methods.diagnosis.scatter import Sums, group_sums


def _width(method: Method) -> int:
    """How many numbers describe an image."""
    return CONTENT + FIELDS * FIELDS * (method.world.channels + 2)


def _matrix(method: Method, examples: int) -> tuple[int]:
    return (triangle(_width(method)),)


LEAST = 5  # images; with fewer, a client's sums would nearly be its images


@methods("diagnosis")
@dataclass(frozen=True)
class Diagnosis(Method):
    """One ask for sums; the server adds them up and the model stays at initialisation."""

    paper = "asks what Louizos et al., 2024, leave open"
    remembers = {"sums": "statistic"}
    train = None  # type: ignore[assignment]  # nothing of a model is ever sent

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Ask the cohort to describe its images."""
        got = yield Ask("describe", cohort)
        sums = {
            "groups": len(got.ids),
            "pictures": round(float(got.pictures)),
            "total": got.total,
            "within": got.within,
            "between": got.between,
        }
        return replace(server, memory={**server.memory, "sums": sums})

    @exchange(
        up={
            "pictures": scalar("sum"),
            # of the vectors that describe the images
            "total": statistic("sum", shape=lambda m, n: (_width(m),), dtype=torch.float64),
            # their scatter around the client's mean
            "within": statistic("sum", shape=_matrix, dtype=torch.float64),
            # the mean times itself, times the number of images
            "between": statistic("sum", shape=_matrix, dtype=torch.float64),
        }
    )
    def describe(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Add up the descriptors of the client's images."""
        count = len(client.examples)
        if count < LEAST:
            raise Decline(
                f"it has {counted(count, 'example')}, too few to hide one of them in a sum"
            )
        parts = torch.split(torch.arange(count), CHUNK)
        pieces = client.pieces("describing images", parts)
        rows = torch.cat([described(client.examples.pixels(index)) for index in pieces])
        total, within, between = group_sums(rows)
        return {"pictures": count, "total": total, "within": within, "between": between}


def sums_of(server: Server) -> Sums:
    """The sums over the clients of the last round."""
    sums = server.memory["sums"]
    within, between = (unpack(sums[name], len(sums["total"])) for name in ("within", "between"))
    return Sums(sums["groups"], sums["pictures"], sums["total"], within, between)
