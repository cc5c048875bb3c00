"""A score of an encoder without labels, from all clients: Lubana et al., Orchestra, 2022, eq. 5.

Every client returns two numbers: the mean cosine of two views of its images (Align), and how far
its images lie apart (Unif). Equation 5 is a mean over clients, E over k in [K], so each counts
alike, however many images it has; with `images`, clients are weighted by their numbers of images.
Either is a mean over clients, so secure aggregation can hide the single values. The views are set
by `Appraisal`, not by training, so that runs with different training views can be compared;
normalisation and image size are those of training. Nothing is trained or kept: a run ends with the
same model with and without the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from harmonium.core.devices import to_host
from harmonium.core.errors import ConfigError, counted
from harmonium.core.types import ClientId, Weights
from harmonium.data.augment.views import Views
from harmonium.evaluation.geometry import tuning_parts
from harmonium.federation.contract import checked_encoder
from harmonium.federation.wire import SCORE, Ask, Field, Value, scalar
from harmonium.learning.client import Client, Decline
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server


Over = Literal["clients", "images"]


@dataclass(frozen=True)
class Appraisal:
    """How clients score an encoder."""

    views: Views
    centred: bool = False  # subtract the client's mean feature; not in the paper
    over: Over = "clients"  # what the mean is over


CHUNK = 256  # images whose views are made at once


def up(method: Method) -> dict[str, Field]:
    """What `appraise` returns: clients count alike, or by their numbers of images."""
    how = method.appraisal
    by = None if how is None or how.over == "clients" else "pictures"
    return {
        "align": scalar("mean", by=by),
        "unif": scalar("mean", by=by),
        "pictures": scalar("sum"),  # images seen: the weights of a mean over images
    }


def ask(method: Method, server: Server) -> Ask:
    """The ask to all clients, because a score of few is noisy; no client has to answer."""
    everyone = server.everyone
    down, each = model_messages(method, server, "evaluate.tuning", everyone)
    return Ask(SCORE, everyone, down, each, least=0)


def model_messages(
    method: Method, server: Server, setting: str, clients: Sequence[ClientId]
) -> tuple[Mapping[str, Value], Mapping[ClientId, Mapping[str, Value]]]:
    """What brings the encoder to evaluate to clients: the same for all, or one for each.

    Errors name `setting`.
    """
    known = {client: method.known(server, client) for client in clients}
    if not any(known.values()):
        return {"model": evaluated_model(method, server, {}, setting)}, {}
    models = {client: evaluated_model(method, server, known[client], setting) for client in clients}
    return {}, {client: {"model": model} for client, model in models.items()}


def evaluated_model(
    method: Method, server: Server, known: Mapping[str, object], setting: str
) -> Weights:
    """The model to send to clients, with the encoder to evaluate; errors name `setting`."""
    measured = server.memory.get("statistics", {})
    encoder = checked_encoder(method.represent(server, known), method)
    evaluated = {f"encoder.{k}": v for k, v in encoder.state_dict().items()}
    if set(evaluated) != {
        key for key in method.blueprint.state_dict() if key.startswith("encoder.")
    }:
        raise ConfigError(
            f"{setting} cannot be used with {called(method)}: the network that is evaluated is not "
            "its encoder"
        )
    sent = {**server.model, **measured}
    return {**sent, **{key: value for key, value in evaluated.items() if key in sent}}


def appraised(method: Method, client: Client, model: Weights) -> dict[str, Value]:
    """Align and Unif over one client's images, of the federation's encoder or the client's own."""
    count = len(client.examples)
    if count < 2:
        raise Decline(f"it has {counted(count, 'example')}, too few to compare")
    encoder = encoder_at(method, client, model)
    assert method.appraisal is not None
    first, second = _features(method.appraisal.views, method.views, client, encoder)
    if method.appraisal.centred:
        mean = torch.cat([first, second]).mean(dim=0)
        first, second = first - mean, second - mean
    align, unif = tuning_parts(first, second)
    return {"align": align, "unif": unif, "pictures": count}


def encoder_at(method: Method, client: Client, model: Weights) -> nn.Module:
    """The encoder to evaluate at a client: the received one, or the client's own."""
    if not method.has_own_encoders:
        return method.blueprint.copy_from(model, device=client.device).eval()["encoder"]
    from harmonium.federation.method import Server  # which imports this module

    model, client.state = to_host([model, client.state])  # the reply brings back no state then
    server = Server({}, model, memory={"statistics": {}})
    return method.represent(server, client.state).to(client.device)


def _features(
    wanted: Views, known: Views, client: Client, encoder: nn.Module
) -> tuple[Tensor, Tensor]:
    """Features of two views of all images, `(n, dim)` each, in double precision."""
    views = _two(wanted, known)
    rows: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        every_index = torch.arange(len(client.examples))
        for index in client.pieces("tuning score", torch.split(every_index, CHUNK)):
            both = views(client.examples.pixels(index), client.rng)
            for features, view in zip(rows, both, strict=True):
                features.append(encoder(view))
    first, second = to_host([torch.cat(features) for features in rows])
    return first.double(), second.double()


def _two(wanted: Views, known: Views) -> Views:
    """Two pipelines of the score, with the image size and normalisation of training."""
    first, *others = wanted.pipelines
    like = known.pipelines[0]
    two = (first, others[0] if others else first)
    return Views(tuple(replace(v, size=like.size, mean=like.mean, std=like.std) for v in two))
