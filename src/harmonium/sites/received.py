"""Checks on what a server sends: the first model must be the plan's, later ones plausible.

A server that may choose the weights of a model can choose them so that one step of training writes
single images into the answer. The first model of a run is therefore not the server's choice: it
follows from the plan's seed, or from weights that the site's policy names, and the site builds it
itself. Later models were trained by other sites, so a site can only check that their numbers are
finite and of a plausible size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmonium.core.errors import DataError, WireError
from harmonium.core.types import Weights
from harmonium.federation.filters.rounding import Rounding
from harmonium.federation.fold import most_weight
from harmonium.federation.initialisation import ENCODER, Start
from harmonium.federation.method import Method
from harmonium.federation.wire import MASKS, MOST_GROWTH, Ask, Exchange, check, fault
from harmonium.learning.contract import called
from harmonium.recipe.initial_weights import Init, digest_of

CLOSE = 1e-5  # of a tensor's largest value: CPUs may differ in the last bits of a random draw


@dataclass(frozen=True)
class ApprovedWeights:
    """Weights that came with a model and have the digest that a policy names."""

    digest: str
    tensors: Weights

    def weights(self) -> Weights:
        """The weights themselves."""
        return self.tensors


def check_plausible(method: Method, declared: Exchange, down: Mapping[str, Any]) -> None:
    """Refuse an ask with undeclared fields, unknown tensors, or values that are far too large."""
    sent = {name: value for name, value in down.items() if name != MASKS}
    check(called(method), declared, "down", sent)
    initial = _shared(method)
    known = {*initial, *(method.blueprint.statistics("encoder") if method.recalibrates else ())}
    most = most_weight(initial)
    for name, value in sent.items():
        if reason := fault(value):
            raise WireError(f"the ask's `{name}` {reason}")
        for key, tensor in (value if isinstance(value, dict) else {"": value}).items():
            if declared.down[name].kind == "weights" and _plain(key) not in known:
                raise WireError(f"the ask's `{name}` has `{key}`, which is not sent to clients")
            is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if is_float and (reason := fault(tensor, most)):
                raise WireError(
                    f"the ask's `{name}` {key} {reason}: no value may be larger than {most:.3g}, "
                    f"{MOST_GROWTH:g} times those of the initial model"
                )


def brings_model(declared: Exchange) -> bool:
    """Whether the asks of an exchange bring weights."""
    return any(one.kind == "weights" for one in declared.down.values())


def first_model_fault(
    method: Method, declared: Exchange, down: Mapping[str, Any], start: Start | str | None
) -> str:
    """Why an ask's weights differ from the initial ones of the run; empty if they do not.

    Args:
        method: the plan's, at a random initialisation.
        declared: the exchange that is asked for.
        down: the values that were received.
        start: given weights that the policy allows, or their digest; none: those of the seed.
    """
    if isinstance(start, str):
        approved = _approved(start, declared, down)
        if approved is None:
            return f"does not have the weights {start[:8]}… (name their file in the policy)"
        start = approved
    if start is not None:
        method = replace(method, initial=start)
    initial = _shared(method)
    for name, one in declared.down.items():
        if one.kind != "weights":
            continue
        expected = initial
        if one.of == "parameters":  # control variates and the like begin at zero
            expected = {key: tensor.new_zeros(tensor.shape) for key, tensor in initial.items()}
        ask = Ask(declared.name, (), {name: expected})
        sent: Any = Rounding(method, declared).outgoing(ask).down[name]
        for key, value in down[name].items():
            if not _same(sent.get(_plain(key)), value):
                return f"differs from it in `{key}`"
    return ""


def _approved(digest: str, declared: Exchange, down: Mapping[str, Any]) -> ApprovedWeights | None:
    """The received weights that have a digest, under the key names that a file may use."""
    for name, one in declared.down.items():
        if one.kind != "weights" or one.of == "parameters":
            continue
        model: Weights = down[name]
        encoder = {key: value for key, value in model.items() if key.startswith(ENCODER)}
        bare = {key.removeprefix(ENCODER): value for key, value in encoder.items()}
        for tensors in (bare, encoder, model):
            if digest_of(tensors) == digest:
                return ApprovedWeights(digest, dict(tensors))
    return None


def allowed_start(digest: str, allowed: Iterable[str]) -> Start | str | None:
    """The file or digest by which a policy allows initial weights; none if it does not."""
    if digest in (names := list(allowed)):
        return digest
    for file in (name for name in names if is_file(name)):
        try:
            weights = Init(file, digest)
            weights.weights()
        except DataError:  # the file has other weights, or does not exist
            continue
        return weights
    return None


def is_file(name: str) -> bool:
    """Whether an entry of the policy names a file rather than a digest.

    >>> is_file("/srv/encoder.safetensors"), is_file("a" * 64)
    (True, False)
    """
    return Path(name).is_absolute()


def _shared(method: Method) -> Weights:
    """The tensors of the first model that are sent; not copied, because they may be large."""
    tensors = method.blueprint.tensors()
    return {key: tensor for key, rule, tensor in tensors if rule in ("mean", "row")}


def first_model_digest(method: Method) -> str:
    """SHA-256 of the tensors of the first model that are sent."""
    return digest_of(_shared(method))


def _plain(key: str) -> str:
    """The name of a tensor, without the model's number where a field has several models."""
    return key.rpartition("/")[2]


def _is_measurable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _size(tensor: Tensor) -> float:
    """The largest absolute value."""
    return max(float(tensor.max()), -float(tensor.min()))


def _same(expected: Tensor | None, sent: Tensor) -> bool:
    if expected is None or expected.shape != sent.shape or expected.dtype != sent.dtype:
        return False
    if torch.equal(expected, sent):
        return True
    return _is_measurable(sent) and _size(expected.float() - sent.float()) <= CLOSE * _size(
        expected
    )
