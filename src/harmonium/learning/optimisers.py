"""SGD, Adam and the clipping of gradients as in torch, bit for bit, but quicker to call.

With a small encoder a step is many short operations, so what surrounds each of them counts. These
work on all parameters in one call per operation. They also leave out the first step's import of
torch's compiler, which takes more than a second in every process that trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _plain(kind: type[Kind]) -> type[Kind]:
    """The same optimiser with its own methods instead of the wrapped ones."""
    names = ("add_param_group", "zero_grad", "step")
    own: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    own["step"] = torch.no_grad()(own["step"])
    own["step"].hooked = True  # or torch wraps it, for its profiler
    return type(kind.__name__, (kind,), {"__module__": __name__, **own})


class FusedSGD(_plain(torch.optim.SGD)):  # type: ignore[misc]
    """Torch's fused SGD, which leaves out a step whose gradients overflowed, on the device itself.

    Running sums start at 0 here: torch's start with what the first step finds in memory if that
    step is left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float, **how: Any) -> None:
        super().__init__(parameters, momentum=momentum, fused=True, **how)
        if momentum:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class FusedAdam(_plain(torch.optim.Adam)):  # type: ignore[misc]
    """Torch's fused Adam, which leaves out such steps too."""

    def __init__(self, parameters: Iterable[nn.Parameter], **how: Any) -> None:
        super().__init__(parameters, fused=True, **how)


class SGD(_plain(torch.optim.SGD)):  # type: ignore[misc]
    """Torch's SGD with a learning rate, momentum and weight decay.

    Torch has a fused step too, which takes a gradient for laid out in memory like its parameter
    without a check; this one does not depend on it.
    """

    @torch.no_grad()
    def step(self) -> None:
        """One step; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            changes = [p.grad for p in parameters]
            if group["weight_decay"]:
                decayed = torch._foreach_add(changes, parameters, alpha=group["weight_decay"])
                changes = list(decayed)
            if group["momentum"]:
                changes = self._with_momentum(parameters, changes, group["momentum"])
            if parameters:
                torch._foreach_add_(parameters, changes, alpha=-group["lr"])

    step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it, for its profiler

    def _with_momentum(
        self, parameters: list[nn.Parameter], gradients: list[Tensor], momentum: float
    ) -> list[Tensor]:
        """The running sums of gradients, which start with a parameter's first gradient."""
        sums = [self.state[p].get("momentum_buffer") for p in parameters]
        kept = [place for place, total in enumerate(sums) if total is not None]
        if kept:
            before = [sums[place] for place in kept]
            torch._foreach_mul_(before, scalar(momentum, before[0]))
            torch._foreach_add_(before, [gradients[place] for place in kept])
        for place, (parameter, total) in enumerate(zip(parameters, sums, strict=True)):
            if total is None:
                sums[place] = self.state[parameter]["momentum_buffer"] = gradients[place].clone()
        return sums


class Adam(_plain(torch.optim.Adam)):  # type: ignore[misc]
    """Torch's Adam with a learning rate and weight decay."""

    @torch.no_grad()
    def step(self) -> None:
        """One step; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            by_steps: dict[int, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    steps = self._counted(parameter)
                    by_steps.setdefault(steps, []).append(parameter)
            for steps, parameters in by_steps.items():
                self._change(parameters, steps, group)

    step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it, for its profiler

    def _counted(self, parameter: nn.Parameter) -> int:
        """How many steps a parameter has taken, with this one."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        state["step"] = steps = state.get("step", 0) + 1
        return int(steps)

    def _change(self, parameters: list[nn.Parameter], steps: int, group: dict[str, Any]) -> None:
        """Change parameters that have taken the same number of steps."""
        first_decay, second_decay = group["betas"]
        values: list[Tensor] = [*parameters]
        gradients = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if group["weight_decay"]:
            gradients = [*torch._foreach_add(gradients, values, alpha=group["weight_decay"])]
        means = [self.state[parameter]["exp_avg"] for parameter in parameters]
        squares = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - first_decay)
        torch._foreach_mul_(squares, scalar(second_decay, squares[0]))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second_decay)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, scalar((1 - second_decay**steps) ** 0.5, roots[0]))
        torch._foreach_add_(roots, scalar(group["eps"], roots[0]))
        rate = group["lr"] / (1 - first_decay**steps)
        torch._foreach_addcdiv_(values, means, roots, -rate)


def scalar(value: float, like: Tensor) -> Any:
    """A number for calls on many tensors, of which those on a CPU take a tensor more quickly."""
    if like.device.type != "cpu":
        return value
    return torch.full((), value, dtype=like.dtype)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Shorten all gradients together to a norm of at most `most`.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], 1.0)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)))
        factor = norm.add_(1e-6).reciprocal_().mul_(most).clamp_(max=1.0)
        torch._foreach_mul_(gradients, factor)
