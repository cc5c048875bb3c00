"""Whitening of the federation's features, fitted on moments that clients send (`evaluate.whiten`).

Before each evaluation, every client returns the mean of its features and of the products of
all pairs of them, d + d (d + 1) / 2 numbers for d features, and how many images they are of. Their
averages over all images give the whitening of `evaluation/whitening.py`; no labels are used. Both
are averages, so secure aggregation can hide what single clients send. Nothing is trained: a run
ends with the same model with and without it.

It is not fitted where clients send anything with noise, for exact moments of the same images would
undo what the noise protects, nor where each client ends with an encoder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from harmonium.core.devices import to_host
from harmonium.core.errors import DataError, counted
from harmonium.core.types import Weights
from harmonium.evaluation.whitening import Moments, Whitening, moments_of, whitening
from harmonium.federation import global_objective
from harmonium.federation.label_free_score import evaluated_model
from harmonium.federation.wire import Ask, Plan, Value, scalar, statistic
from harmonium.learning.client import Client, Decline
from harmonium.learning.contract import called
from harmonium.learning.symmetric import triangle, unpack, upper_triangle

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server

KEY = "whitening"  # in the server's memory
LEAST = 5  # images; with fewer, a client's moments would nearly be its features
UP = {
    "first": statistic(  # mean of the features
        "mean",
        by="images",
        shape=lambda method, examples: (method.feature_size,),
        dtype=torch.float64,
    ),
    "second": statistic(  # mean of their products, of each pair once
        "mean",
        by="images",
        shape=lambda method, examples: (triangle(method.feature_size),),
        dtype=torch.float64,
    ),
    "images": scalar("sum"),  # images measured: the weights of the mean, whatever weighs models
}
EXTENTS = {  # for the card
    "first": "as many numbers as the encoder has features",
    "second": "as many numbers as there are pairs of features",
}


def obstacle(method: Method) -> str:
    """Why no whitening can be fitted for a method; empty where it can."""
    if reason := global_objective.noise(method):
        return f"{reason}, and exact moments of the same images would undo what noise protects"
    if method.has_own_encoders:
        return f"with {called(method)} each client ends with an encoder of its own"
    return ""


def words(method: Method) -> tuple[str, ...]:
    """What clients send for it, for the card."""
    if not method.whitening:
        return ()
    return (
        "At every evaluation each client also sends the first and second moments of its features, "
        "for whitening (evaluate.whiten).",
    )


def fitted(method: Method, server: Server) -> Plan:
    """The server with moments of the evaluated encoder's features, over the clients that answer."""
    model = evaluated_model(method, server, {}, "evaluate.whiten")
    got = yield Ask("measure_moments", server.everyone, {"model": model}, least=0)
    if not got.ids or got.images < 2:
        return server
    moments = {"first": got.first.double(), "second": got.second.double(), "images": got.images}
    return replace(server, memory={**server.memory, KEY: moments})


def client_moments(method: Method, client: Client, model: Weights) -> dict[str, Value]:
    """Means of features and of their products over a client's images as they are."""
    count = len(client.examples)
    if count < LEAST:
        raise Decline(f"it has {counted(count, 'example')}, too few to send moments of")
    encoder = method.blueprint.copy_from(model, device=client.device).eval()["encoder"]
    sums = moments_of(to_host(client.features(encoder)))
    return {
        "first": sums.first / count,
        "second": upper_triangle(sums.second / count),
        "images": count,
    }


def whitening_of(memory: Mapping[str, Any], directions: int | None) -> Whitening | None:
    """The whitening from the moments in a server's memory; None if no client sent any."""
    if not (stored := memory.get(KEY)):
        return None
    count, first, second = float(stored["images"]), stored["first"], stored["second"]
    try:
        moments = Moments(count, count * first, count * unpack(second, len(first)))
        return whitening(moments, directions)
    except DataError:  # constant features or NaN, which the evaluation reports by itself
        return None
