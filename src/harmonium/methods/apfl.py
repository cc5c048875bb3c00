"""APFL: what a client uses is a mixture of the shared model and one of its own.

Deng et al., Adaptive Personalized Federated Learning, 2020, Algorithm 1. The shared model w goes
the way of FedAvg, bit for bit. From every batch the client's own model v, which never leaves,
learns too, such that its mixture with w is good; w gets no gradient from that, and both steps start
from what was before either. `alpha` is the share of the client's own model, as in the paper;
FedStyle (Yang et al., 2022) writes alpha for the share of w. `mixing` says what is mixed:

  weights    v steps along the gradient of L(alpha v + (1 - alpha) w), as published: that is alpha
             times the gradient at the mixed model;
  straight   v minimises L of (1 - alpha) z_w + alpha z_v, mixed projections of each view;
  crossed    the same with z_v of the other view, as FedStyle's listing has it, for two views. It
             steps w by the loss of v's projections, which do not depend on w: here by that of z_w.

`adaptive` moves alpha by one gradient step a round, from its first batch (eq. 10), within 0 and 1;
its derivative is <v - w, gradient at the mixture>. The released code adds 0.02 alpha to it, which
the paper does not have. Each client keeps an alpha of its own.

The client's own features are (1 - alpha) f_w + alpha f_v, or those of mixed weights; f_w is the
encoder as last sent. v begins as the common first draw. It has BatchNorm statistics of its own: for
mixed weights they are the mixture's, which the mixture measures when it trains. Slow copies are
mixed like weights. What a run judges is the shared encoder, which is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harmonium.core.errors import ConfigError
from harmonium.core.types import Kind, Weights
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.personal import Own, as_sent, resumed, whole
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Batch, Client
from harmonium.learning.context import Context
from harmonium.learning.parts import Parts
from harmonium.learning.training import fit
from harmonium.methods import methods

Mixing = Literal["crossed", "straight", "weights"]


@methods("apfl")
@dataclass(frozen=True)
class APFL(Method):
    """FedAvg, and beside it a model of each client's own that is good in a mixture with it."""

    paper = "Deng et al., 2020"
    keeps = {"mine": "weights", "alpha": "scalar"}

    mixing: Mixing = "crossed"  # projections of opposite views, of the same view, or weights
    alpha: float = 0.5  # share of the client's own model in the mixture; the first, if adaptive
    adaptive: bool = False  # each client moves its alpha once a round, by its gradient

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"method.alpha is {self.alpha}; it must lie between 0 and 1")
        count = self.objective.projections(len(self.views.pipelines))
        crossed = self.mixing == "crossed"
        if (crossed and count != 2) or (self.mixing == "straight" and not count):
            raise ConfigError(
                f"method.mixing={self.mixing} mixes {'two ' * crossed}projections of an image, "
                f"objective={self.objective.name} has {count} to mix: set method.mixing=weights"
            )

    @property
    def workload(self) -> float:
        """Every batch passes through two models."""
        return 2.0

    def keeping(self) -> Mapping[str, Kind]:
        """The client's own model, and its alpha if that moves."""
        return {key: kind for key, kind in self.keeps.items() if self.adaptive or key != "alpha"}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, and the client's own beside it; only the former is sent."""
        parts = self.pull(client, got.model)
        with torch.random.fork_rng(devices=[]):
            mine = resumed(self, client.state.get("mine")).train()
        rate = self.local.rate(client.round, client.rounds)
        context = Context(me=client.id, anchor=got.model)
        alpha = float(client.state.get("alpha", self.alpha))
        second = Second(self, parts, mine, context, alpha, rate)
        done = fit(
            parts,
            client,
            second.look,
            self.local,
            after=partial(self.after_step, parts, context),
            beside=second.step,
            among=self.objective.among(client.examples),
        )
        client.state["mine"] = whole(mine)
        if self.adaptive:
            client.state["alpha"] = second.alpha
        return {"model": self.push(client, parts), "loss": done.loss}

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """By both models or by their mixture; whoever has none of its own, by the one it sent."""
        if "mine" not in state:
            return super().own(model, state)
        mine = self.blueprint.copy_from(state["mine"]).eval()["encoder"]
        alpha = float(state.get("alpha", self.alpha))
        shared = as_sent(self, model, state)
        if self.mixing != "weights":
            return Own(Mixed(shared, mine, alpha))
        mix(mine, shared, alpha)
        return Own(mine)


@dataclass
class Second:
    """A client's own model while it learns beside the shared one, batch by batch."""

    method: APFL
    shared: Parts
    mine: Parts
    context: Context
    alpha: float
    rate: float
    _moved: bool = False  # alpha, in this round
    _again: Batch = field(init=False)  # the batch with the draws of the shared model's look
    _z: list[Tensor] = field(init=False)  # what that makes of it

    def __post_init__(self) -> None:
        self._trained = [p for p in self.mine.parameters() if p.requires_grad]
        self._optimiser = self.method.local.optimise(self._trained, self.rate)

    def look(self, batch: Batch) -> Tensor:
        """The shared model's loss, as FedAvg has it."""
        draws = torch.Generator()
        draws.set_state(batch.rng.get_state())
        self._again = replace(batch, rng=draws)
        seen = self.method.see(self.shared, batch)
        self._z = [z.detach() for z in seen.z]
        return self.method.total(self.shared, seen, self.context)

    def step(self, batch: Batch) -> None:
        """One step of the client's own model on that batch; draws of the shared one stay as is."""
        self._optimiser.zero_grad()
        with torch.random.fork_rng(devices=[]):
            slope = self._by_weights() if self.method.mixing == "weights" else self._by_z()
        if self.method.local.clip is not None:
            nn.utils.clip_grad_norm_(self._trained, self.method.local.clip)
        self._optimiser.step()
        self.method.after_step(self.mine, self.context)
        if self.method.adaptive and not self._moved:
            self.alpha, self._moved = min(max(self.alpha - self.rate * slope, 0.0), 1.0), True

    def _by_z(self) -> float:
        """Gradients of the loss of mixed projections; returns its derivative by alpha."""
        seen = self.method.see(self.mine, self._again)
        own = reversed(seen.z) if self.method.mixing == "crossed" else seen.z
        alpha = torch.tensor(self.alpha, dtype=self._z[0].dtype, requires_grad=True)
        mixed = [(1 - alpha) * w + alpha * v for w, v in zip(self._z, own, strict=True)]
        loss = self.method.total(self.mine, replace(seen, z=mixed), self.context)
        loss.backward()  # type: ignore[no-untyped-call]
        return 0.0 if alpha.grad is None else alpha.grad.item()

    def _by_weights(self) -> float:
        """Gradients of the loss at mixed weights, by v; returns its derivative by alpha."""
        before = [p.detach().clone() for p in self.mine.parameters()]
        mix(self.mine, self.shared, self.alpha)
        mixed = [None if p.requires_grad else p.clone() for p in self.mine.parameters()]
        seen = self.method.see(self.mine, self._again)
        self.method.total(self.mine, seen, self.context).backward()  # type: ignore[no-untyped-call]
        slope = 0.0
        every = zip(self.mine.parameters(), self.shared.parameters(), before, mixed, strict=True)
        with torch.no_grad():
            for p, w, v, start in every:
                if p.grad is not None:
                    slope += float((p.grad * (v - w)).sum())
                    p.grad *= self.alpha
                moved = v if start is None else torch.where(p == start, v, p + (v - start))
                p.copy_(moved)  # of a slow copy that moved when it was looked at, v's moves along
        return slope


class Mixed(nn.Module):
    """Features of two encoders, the second's share being `alpha`."""

    def __init__(self, shared: nn.Module, mine: nn.Module, alpha: float) -> None:
        super().__init__()
        self.shared, self.mine, self.alpha = shared, mine, alpha

    def forward(self, pictures: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        both: Tensor = (1 - self.alpha) * self.shared(pictures) + self.alpha * self.mine(pictures)
        return both


@torch.no_grad()
def mix(mine: nn.Module, shared: nn.Module, alpha: float) -> None:
    """Give `mine` the mixed weights; its buffers, such as BatchNorm's statistics, stay."""
    torch._foreach_lerp_(list(mine.parameters()), list(shared.parameters()), 1 - alpha)
