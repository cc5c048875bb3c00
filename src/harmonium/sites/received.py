"""Checks on what a server sends: the first model must be the plan's, later ones plausible.

A server that may choose the weights of a model can choose them so that one step of training writes
single images into the answer. The server therefore does not choose the first model of a run: it
follows from the plan's seed, or from weights that the site's policy names, and the site builds it
itself. Of later models, which other sites have trained, a site can only check that their numbers
are finite and of a plausible size.
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

CLOSE = 1e-5  # of a tensor's largest value: kinds of CPU may differ in the last bits of a draw


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
    began = _shared(method)
    known = {*began, *(method.blueprint.statistics("encoder") if method.recalibrates else ())}
    most = most_weight(began)
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
                    f"{MOST_GROWTH:g} times those of the model as it began"
                )


def brings_model(declared: Exchange) -> bool:
    """Whether an ask comes with weights."""
    return any(one.kind == "weights" for one in declared.down.values())


def first_model_fault(
    method: Method, declared: Exchange, down: Mapping[str, Any], start: Start | str | None
) -> str:
    """Why an ask's weights are not those that a run begins with; empty if they are.

    Args:
        method: the plan's, at a random initialisation.
        declared: the exchange that is asked for.
        down: the values that were received.
        start: given weights that the policy allows, or their digest; none: the seed decides.
    """
    if isinstance(start, str):
        approved = _approved(start, declared, down)
        if approved is None:
            return f"does not hold the weights {start[:8]}… (name their file in the policy)"
        start = approved
    if start is not None:
        method = replace(method, initial=start)
    began = _shared(method)
    for name, one in declared.down.items():
        if one.kind != "weights":
            continue
        expected = began
        if one.of == "parameters":  # control variates and the like begin at zero
            expected = {key: tensor.new_zeros(tensor.shape) for key, tensor in began.items()}
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
            initial = Init(file, digest)
            initial.weights()
        except DataError:  # it has other weights, or does not exist
            continue
        return initial
    return None


def is_file(name: str) -> bool:
    """Whether an entry of the policy names a file, and not a digest.

    >>> is_file("/srv/encoder.safetensors"), is_file("a" * 64)
    (True, False)
    """
    return Path(name).is_absolute()


def _shared(method: Method) -> Weights:
    """The tensors of the first model that are sent; not copied, because they may be large."""
    kept = method.blueprint.tensors()
    return {key: tensor for key, rule, tensor in kept if rule in ("mean", "row")}


def first_model_digest(method: Method) -> str:
    """SHA-256 of the tensors of the first model that are sent."""
    return digest_of(_shared(method))


def _plain(key: str) -> str:
    """The name of a tensor, without the number that several models in one field have."""
    return key.rpartition("/")[2]


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _size(tensor: Tensor) -> float:
    """The largest absolute value."""
    return max(float(tensor.max()), -float(tensor.min()))


def _same(expected: Tensor | None, got: Tensor) -> bool:
    if expected is None or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if torch.equal(expected, got):
        return True
    return _counts(got) and _size(expected.float() - got.float()) <= CLOSE * _size(expected)
