"""Mixed precision: what computes in 16 bits, what does not, and steps that overflow."""

from typing import Any

import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.learning.optimisers import FusedAdam, FusedSGD
from harmonium.learning.precision import Scaler
from harmonium.learning.training import Local
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, check_method, first_trial

LOW = ("bf16", "fp16")


def trial(precision: str, **more: Any) -> Trial:
    local = {**TINY["local"], "precision": precision, "lr": 0.02, "schedule": "constant"}
    return first_trial("fedavg", local={**local, **more})


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("precision", LOW)
def test_a_run_is_near_that_of_full_precision_and_repeats_to_the_bit(
    precision: str, optimiser: str
) -> None:
    full, low = trial("fp32", optimiser=optimiser), trial(precision, optimiser=optimiser)
    assert low.digest != full.digest
    assert low.again().digest == low.digest
    if optimiser == "adam":  # its first steps turn the smallest gradients into whole steps
        return
    moved = far = 0.0
    start = full.method.blueprint.shared()
    for key, tensor in full.server.model.items():
        if tensor.is_floating_point():
            moved += float((tensor - start[key]).square().sum())
            far += float((tensor - low.server.model[key]).square().sum())
    assert far < 0.1 * moved


def test_networks_compute_in_half_and_everything_else_does_not() -> None:
    seen: dict[str, torch.dtype] = {}
    method = trial("bf16").method
    parts = method.blueprint.copy_from()
    parts["encoder"][0].register_forward_hook(
        lambda layer, inputs, output: seen.update(inside=output.dtype)
    )
    with parts.computing(torch.bfloat16):
        ((h, *_), (z, *_)) = parts.through([torch.rand(4, 3, 12, 12)] * 2, "encoder", "projector")
    assert seen["inside"] == torch.bfloat16
    assert h.dtype == z.dtype == torch.float32
    parts.through([torch.rand(4, 3, 12, 12)] * 2, "encoder")
    assert seen["inside"] == torch.float32
    z.sum().backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in parts["encoder"].parameters())


@pytest.mark.parametrize("precision", LOW)
def test_methods_pass_the_contract(precision: str) -> None:
    check_method("fedu", local={**TINY["local"], "precision": precision})


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdam])
def test_a_step_that_overflows_is_left_out(kind: Any) -> None:
    """Also the first: torch's fused SGD would then add memory that nobody has written."""
    weight = nn.Parameter(torch.ones(64))
    optimiser = kind([weight], lr=0.1, **({"momentum": 0.9} if kind is FusedSGD else {}))
    scaler, values = Scaler("fp16", torch.device("cpu")), []
    for factor in (1e38, 1.0, 1e38, 1.0):
        optimiser.zero_grad()
        scaler.backward((weight * factor).sum(), optimiser)
        scaler.step(optimiser)
        values.append(float(weight.detach()[0]))
        assert torch.equal(weight.detach(), weight.detach()[:1].expand(64))
    assert values[0] == 1.0 and values[1] == values[2] == pytest.approx(0.9)
    assert 0.5 < values[3] < 0.85


def test_it_is_refused_for_dp_sgd() -> None:
    with pytest.raises(ConfigError, match="local.precision=bf16"):
        Local(precision="bf16", dp_clip=1.0)


def test_full_precision_has_the_digest_of_recipes_without_the_setting() -> None:
    plain = Recipe.of("fedavg")
    assert Recipe.of("fedavg", "local.precision=fp32").digest == plain.digest
    assert Recipe.of("fedavg", "local.precision=bf16").digest != plain.digest
