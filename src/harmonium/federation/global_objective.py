"""The global objective: the loss over the images of all clients together, and its gradient.

It is measured on the federation's model at initialisation and before each evaluation; nothing is
trained. An objective such as the spectral contrast of FedSC (Jing et al., 2024, eq. 4)
is a function of means over images (`Objective.means`, `Objective.from_means`), so two asks to all
clients measure it:

- `measure_objective`: every client returns its means (of the spectral contrast, the correlation
  matrix and the scalar Tr R+) and the loss over its own images. The means over all clients give
  the global objective exactly; the losses are the local objectives.
- `measure_gradient`: the derivative of the global objective with respect to the means goes down;
  by the chain rule every client returns its share of the gradient, and the average is the gradient
  with respect to the model, of which the server reports the norm.

Both asks use one draw of views for each image that depends on the seed and the client alone, so
value and gradient belong together, and rounds and methods with the same split are compared on the
same views. All images count alike, however models are weighted. FedSC's objective is reported in
the scale of its equations 1 and 4, half of the loss that clients train with.

It is not measured where clients send anything with noise: exact means beside noisy ones would undo
what the noise protects. With secure aggregation the server sees sums of all of it and no single
client's objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.core import seeds
from harmonium.core.devices import to_double
from harmonium.core.errors import WireError, counted
from harmonium.core.types import Weights
from harmonium.federation.aggregation import Mean
from harmonium.federation.wire import (
    Ask,
    Field,
    FromSettings,
    Plan,
    Value,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Batch, Client, Decline
from harmonium.learning.contract import called
from harmonium.learning.parts import Parts

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server

KEY = "global_objective"  # in the server's memory and in metrics.jsonl
CHUNK = 256  # most images whose views are made at once
EXTENTS = {  # for the card
    "means": "as many numbers as the objective has means",
    "slope": "as many numbers as the objective has means",
}
GRADIENT_UP = {
    "gradient": weights(by="images", of="parameters"),
    "images": scalar("sum"),
}


@dataclass(frozen=True)
class GlobalObjective:
    """Asks for the global objective, to be measured where that is possible."""

    by_client: bool = True  # the server sees local objectives one by one, else their mean


def obstacle(method: Method) -> str:
    """Why the global objective of a method cannot be measured; empty where it can."""
    objective = method.objective
    if not objective.pooled:
        return f"objective={objective.name} is not a function of means over images"
    if reason := noise(method):
        return f"{reason}, and exact means of the same images would undo what noise protects"
    if method.personal:
        return f"{called(method)} ends with a model for each client and none for all of them"
    for key, rule, _ in method.blueprint.tensors():
        fresh = rule == "fresh" and method.batch_norm == "recalibrate"
        if key.partition(".")[0] in objective.pooled and rule != "mean" and not fresh:
            return f"{key} is not the same at all clients, so there is no one model to measure"
    return ""


def note(method: Method) -> str:
    """The note of a run whose global objective is not measured because of its noise."""
    wanted = method.global_objective is not None and bool(method.objective.pooled)
    reason = obstacle(method) if wanted else ""
    return f"the global objective is not measured: {reason}" if reason else ""


def words(method: Method) -> tuple[str, ...]:
    """What clients send for it, for the card."""
    if not method.measures_objective:
        return ()
    gradient = " and the gradient of the loss over its images" if has_gradient(method) else ""
    return (
        f"Before round 1 and at every evaluation each client also sends means over its "
        f"images{gradient}, for the global objective in the log; evaluate.objective=false leaves "
        "that out.",
    )


def has_gradient(method: Method) -> bool:
    """Whether its gradient can be averaged exactly: not where answers are rounded or left out."""
    return type(method.aggregation) is Mean and method.transport.up == "none"


def local_objective(method: Method) -> Field:
    """The clients' local objectives: one by one, or only their mean, according to the settings."""
    how = method.global_objective
    return scalar() if how is None or how.by_client else scalar("mean", by="images")


MEANS_UP: dict[str, Field | FromSettings] = {
    "means": statistic(
        "mean", by="images", shape=lambda method, examples: (method.objective.pooled_size,)
    ),
    "local_objective": local_objective,
    "images": scalar("sum"),  # images measured: the weights of the mean
}


# ---- server ----------------------------------------------------------------------------------


def measured(method: Method, server: Server) -> Plan:
    """The server with the newest measurement in its memory, of all clients that answer."""
    model = {**server.model, **server.memory.get("statistics", {})}
    got = yield Ask("measure_objective", server.everyone, {"model": model}, least=0)
    if not got.ids or not got.images:
        return server
    means = got.means.double().requires_grad_()
    try:
        value = method.objective.from_means(means, round(got.images))
    except WireError:  # a remote client may send anything; a measurement must not end the run
        return server
    report: dict[str, Any] = {"objective": method.objective.name, "value": _finite(value.item())}
    if isinstance(got.local_objective, Mapping):
        shares = {c: server.examples[c] / got.images for c in got.ids}
        local = math.fsum(shares[c] * loss for c, loss in got.local_objective.items())
        report["by_client"] = {str(c): float(v) for c, v in got.local_objective.items()}
    else:
        local = float(got.local_objective)
    report |= {"local": _finite(local), "clients": len(got.ids), "of": len(server.examples)}
    if has_gradient(method):
        (slope,) = torch.autograd.grad(value, means)
        down: dict[str, Value] = {"model": model, "slope": slope.float()}
        images = got.images
        got = yield Ask("measure_gradient", got.ids, down, least=0)
        if got.ids and got.images == images:  # else it is the gradient over other images
            squares = (float(part.double().square().sum()) for part in got.gradient.values())
            report["gradient_norm"] = _finite(math.sqrt(math.fsum(squares)))
    return replace(server, memory={**server.memory, KEY: report})


def _finite(value: float) -> float | None:
    """A number for JSON, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def from_bounds(name: str, bounds: Mapping[str, Any]) -> dict[str, Any]:
    """The same record for InfoNCE with user verification: the bound of all clients, as a loss.

    >>> bounds = {"total": 2.0, "local": 1.5, "clients": 3, "of": 4}
    >>> from_bounds("infonce", bounds)
    {'objective': 'infonce', 'value': -2.0, 'local': -1.5, 'clients': 3, 'of': 4}
    """
    report = {"objective": name, "value": -bounds["total"], "local": -bounds["local"]}
    return {**report, "clients": bounds["clients"], "of": bounds["of"]}


# ---- client ----------------------------------------------------------------------------------


def client_means(method: Method, client: Client, model: Weights) -> dict[str, Value]:
    """A client's means over its images, and the objective over these alone."""
    parts, total = _model(method, client, model), torch.zeros(())
    with torch.no_grad():
        for share, batch in _batches(method, client):
            seen = method.objective.see(parts, batch)
            means = method.objective.means(parts, seen)
            total = total + share * means
    count = len(client.examples)
    local = method.objective.from_means(total, count)
    return {"means": total.float(), "local_objective": local, "images": count}


def client_gradient(
    method: Method, client: Client, model: Weights, slope: Tensor
) -> dict[str, Value]:
    """A client's share of the gradient: of its means, each weighted by its slope."""
    parts = _model(method, client, model)
    named = dict(parts.named_parameters())
    wanted = {key: named[key] for key in method.blueprint.layouts()["parameters"]}
    total = {key: torch.zeros_like(parameter) for key, parameter in wanted.items()}
    for share, batch in _batches(method, client):
        means = method.objective.means(parts, method.objective.see(parts, batch))
        weighted = share * (to_double(slope).to(means.device) * means).sum()
        gradients = torch.autograd.grad(weighted, list(wanted.values()), allow_unused=True)
        for key, part in zip(wanted, gradients, strict=True):
            if part is not None:
                total[key] += part
    return {"gradient": total, "images": len(client.examples)}


def _model(method: Method, client: Client, model: Weights) -> Parts:
    """The received model in evaluation mode; a BatchNorm without statistics sees its batch."""
    parts = method.pull(client, model).eval()
    unknown = [
        module
        for path, module in parts.named_modules()
        if isinstance(module, _BatchNorm) and f"{path}.running_mean" not in model
    ]
    if (count := len(client.examples)) < (2 if unknown else 1):
        raise Decline(f"it has {counted(count, 'example')}, too few to measure")
    for module in unknown:
        module.train()
    return parts


def _batches(method: Method, client: Client) -> Iterator[tuple[float, Batch]]:
    """All images in order, in batches of nearly one size, each with its share; fixed views."""
    rng = seeds.torch_rng(method.world.seed, "objective", client.id)
    count = len(client.examples)
    pieces = torch.tensor_split(torch.arange(count), math.ceil(count / CHUNK))
    for index in client.pieces("global objective", pieces):
        yield len(index) / count, Batch(index, client.examples, client.views, rng)


def noise(method: Method) -> str:
    """What clients send with noise, in a few words; empty if nothing."""
    if method.world.epsilon is not None:
        return "privacy.epsilon is a budget of noisy releases"
    if method.updates is not None or method.local.dp_clip is not None:
        return "changes of the model are protected by clipping or noise"
    guarded = (
        step
        for step, one in method.declared_exchanges().items()
        if method.costs(step, 1000) or any(field.guarded for field in one.up.values())
    )
    step = next(guarded, "")
    return f"`{step}` of {called(method)} is answered with noise" if step else ""
