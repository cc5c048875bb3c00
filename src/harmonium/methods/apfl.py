"""APFL: each client uses a mixture of the shared model and a personal model that never leaves it.

Deng et al., Adaptive Personalized Federated Learning, 2020, Algorithm 1; adapted to objectives
without labels by FedStyle (Yang et al., 2022, appendix, "APFL").

Symbols (Deng et al.; in brackets the names in FedStyle's listing):

    w       shared model, FedAvg's [w_{k,g}]: received, trained for its own loss, sent back
    v       the client's personal model [w_k], which stays at the client
    alpha   share of v in the mixture, `method.alpha`
    L       the local objective

Beware of alpha: in FedStyle's listing it is the share of w, so its alpha is 1 - alpha here. Both
use 0.5.

For every batch, both models step from where they were before either step:

    w <- w - lr grad_w L(w)                                                (as FedAvg, bit for bit)
    v <- v - lr grad_v L(mixture of v and w),    w being held constant

`method.mixing` sets what is mixed. With z_w and z_v the projections by either model:

    weights    alpha v + (1 - alpha) w, as published. By the chain rule grad_v is alpha times the
               gradient at the mixed weights.
    straight   (1 - alpha) z_w^i + alpha z_v^i, the projections of each view i
    crossed    (1 - alpha) z_w^1 + alpha z_v^2 and (1 - alpha) z_w^2 + alpha z_v^1: opposite views,
               as in FedStyle's listing, lines 9 and 10; for objectives of two views

`method.adaptive` lets each client learn its own alpha by a gradient step (equation 10):

    alpha <- alpha - lr dL/dalpha, clipped to [0, 1];  for weights dL/dalpha = <v - w, grad L>,

with the gradient at the mixture. It takes this step once a round, from the first batch.

For a client's own tasks its features are (1 - alpha) f_w + alpha f_v, f being encoders, or those
of the encoder with mixed weights. f_w is the encoder as the client last sent it. A run itself is
evaluated by the shared encoder, which is FedAvg's.

Messages:

    ask     to        down       up
    train   cohort    model: w   model: w, trained; loss

The server remembers nothing but the model. A client keeps v (`mine` in its state) and, if it is
adaptive, `alpha`.

Where the sources are unclear, and where this differs from them:

- FedStyle's listing, line 12, steps w by L(z_v^1, z_v^2). That does not depend on w, so w would get
  no gradient; it must be L(z_w^1, z_w^2).
- FedStyle's Algorithm 1 averages "w_k" for every method, which is the personal model in the listing
  of APFL. What is sent and averaged has to be w.
- The code published with APFL (FedTorch) mixes the outputs of the two models and not their weights.
  For projections, `straight` is that form. It takes <v - w, alpha grad_v + (1 - alpha) grad_w> +
  0.02 alpha for dL/dalpha; the last summand is not in the paper. Here dL/dalpha is the derivative
  of the loss that v minimises.
- v starts from the same initialisation at every client, which is that of w.
- v has BatchNorm statistics of its own. With mixed weights they are the mixture's, which measures
  them while it trains. EMA copies of networks (BYOL, MoCo) are mixed like weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harmonium.core.devices import to_double
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
    """FedAvg, and at each client a personal model that is trained in a mixture with the shared."""

    paper = "Deng et al., 2020"
    keeps = {"mine": "weights", "alpha": "scalar"}

    mixing: Mixing = "crossed"  # projections of opposite views, of the same view, or weights
    alpha: float = 0.5  # share of the personal model in the mixture; its start, if adaptive
    adaptive: bool = False  # each client updates its alpha once a round, by a gradient step

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
        """Twice FedAvg's: every batch passes through two models."""
        return 2.0

    def keeping(self) -> Mapping[str, Kind]:
        """The personal model; its alpha too, if that is adaptive."""
        return {key: kind for key, kind in self.keeps.items() if self.adaptive or key != "alpha"}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, and the personal one beside it; only the former is sent."""
        shared = self.pull(client, got.model)
        # Building v may draw random numbers; outside this block w draws as FedAvg does.
        with torch.random.fork_rng(devices=[]):
            personal = resumed(self, client).train()
        lr = self.local.rate(client.round, client.rounds)
        context = Context(me=client.id, anchor=got.model)
        alpha = float(client.state.get("alpha", self.alpha))
        training = PersonalTraining(self, shared, personal, context, alpha, lr)
        # `fit` calls `beside` once w has its gradient and before w steps. So v sees the same w
        # as w's gradient does, and both steps start from the values before either.
        done = fit(
            shared,
            client,
            training.shared_loss,
            self.local,
            after=partial(self.after_step, shared, context),
            beside=training.step,
            among=self.objective.among(client.examples),
        )
        client.state["mine"] = whole(personal)
        if self.adaptive:
            client.state["alpha"] = training.alpha
        return {"model": self.push(client, shared), "loss": done.loss}

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """Mixed features, or the encoder of mixed weights; before any training, as FedAvg's."""
        if "mine" not in state:
            return super().own(model, state)
        personal = self.blueprint.copy_from(state["mine"]).eval()["encoder"]
        alpha = float(state.get("alpha", self.alpha))
        shared = as_sent(self, model, state)
        if self.mixing != "weights":
            return Own(MixedFeatures(shared, personal, alpha))
        mix_weights(personal, shared, alpha)
        return Own(personal)


@dataclass
class PersonalTraining:
    """Trains the personal model v beside the shared model w, batch by batch.

    For each batch `fit` first calls `shared_loss`, which remembers what `step` needs of w, and then
    `step`.
    """

    method: APFL
    shared: Parts  # w
    personal: Parts  # v
    context: Context
    alpha: float
    lr: float
    _alpha_updated: bool = False  # whether alpha has taken its step of this round
    _same_batch: Batch = field(init=False)  # the batch, with w's random draws still ahead of it
    _z_shared: list[Tensor] = field(init=False)  # z_w, detached

    def __post_init__(self) -> None:
        self._parameters = [p for p in self.personal.parameters() if p.requires_grad]
        self._optimiser = self.method.local.optimise(self._parameters, self.lr)

    def shared_loss(self, batch: Batch) -> Tensor:
        """L(w), the loss of the shared model as FedAvg has it."""
        # v gets the same augmentations as w: a copy of the generator before w draws from it.
        rng = torch.Generator()
        rng.set_state(batch.rng.get_state())
        self._same_batch = replace(batch, rng=rng)
        seen = self.method.see(self.shared, batch)
        self._z_shared = [z.detach() for z in seen.z]
        return self.method.total(self.shared, seen, self.context)

    def step(self, batch: Batch) -> None:
        """One step of v, and of alpha in the first batch of a round if it is adaptive."""
        self._optimiser.zero_grad()
        # Draws that v's pass takes from torch's own generator must not shift w's.
        with torch.random.fork_rng(devices=[]):
            if self.method.mixing == "weights":
                alpha_gradient = self._backward_mixed_weights()
            else:
                alpha_gradient = self._backward_mixed_projections()
        if self.method.local.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.method.local.clip)
        self._optimiser.step()
        self.method.after_step(self.personal, self.context)
        if self.updates_alpha:  # equation 10
            self.alpha = min(max(self.alpha - self.lr * float(alpha_gradient), 0.0), 1.0)
            self._alpha_updated = True

    @property
    def updates_alpha(self) -> bool:
        """Whether this step is the one of the round in which alpha takes its own."""
        return self.method.adaptive and not self._alpha_updated

    def _backward_mixed_projections(self) -> Tensor | float:
        """Gradients by v of L at mixed projections; returns dL/dalpha.

        FedStyle's listing, lines 7 to 10 and 13, with 1 - alpha for its alpha.
        """
        seen = self.method.see(self.personal, self._same_batch)
        z_personal = reversed(seen.z) if self.method.mixing == "crossed" else seen.z
        alpha = self._z_shared[0].new_full((), self.alpha).requires_grad_()
        mixed = [
            (1 - alpha) * z_w + alpha * z_v
            for z_w, z_v in zip(self._z_shared, z_personal, strict=True)
        ]
        # Terms and heads behind the projections, such as a predictor, are v's.
        loss = self.method.total(self.personal, replace(seen, z=mixed), self.context)
        loss.backward()  # type: ignore[no-untyped-call]
        return 0.0 if alpha.grad is None else alpha.grad

    def _backward_mixed_weights(self) -> Tensor | float:
        """Gradients by v of L at mixed weights; returns dL/dalpha, 0 where alpha stays.

        The mixture is formed in v's own parameters, whose gradients are then those at the mixture,
        and v's values are put back afterwards.
        """
        v_before = [p.detach().clone() for p in self.personal.parameters()]
        mix_weights(self.personal, self.shared, self.alpha)
        # Parameters without a gradient: frozen ones and EMA copies, the latter of which some
        # objectives move in the forward pass. None stands for all others.
        ema_before = [None if p.requires_grad else p.clone() for p in self.personal.parameters()]
        seen = self.method.see(self.personal, self._same_batch)
        loss = self.method.total(self.personal, seen, self.context)
        loss.backward()  # type: ignore[no-untyped-call]
        products = list[Tensor]()
        parameters = zip(
            self.personal.parameters(), self.shared.parameters(), v_before, ema_before, strict=True
        )
        with torch.no_grad():
            for p, w, v, ema in parameters:
                if p.grad is not None:
                    if self.updates_alpha:
                        products.append((p.grad * (v - w)).sum())  # <v - w, grad L(mixture)>
                    p.grad *= self.alpha  # chain rule: d(alpha v + (1 - alpha) w) / dv = alpha
                # An EMA copy that the forward pass moved carries v along by the same difference;
                # where it did not move, v comes back exactly.
                p.copy_(v if ema is None else torch.where(p == ema, v, p + (v - ema)))
        return to_double(torch.stack(products)).cumsum(0)[-1] if products else 0.0


class MixedFeatures(nn.Module):
    """Features (1 - alpha) f_w + alpha f_v of two encoders."""

    def __init__(self, shared: nn.Module, personal: nn.Module, alpha: float) -> None:
        """Take both encoders without copying them."""
        super().__init__()
        self.shared, self.personal, self.alpha = shared, personal, alpha

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        f_w, f_v = self.shared(images), self.personal(images)
        mixed: Tensor = (1 - self.alpha) * f_w + self.alpha * f_v
        return mixed


@torch.no_grad()
def mix_weights(personal: nn.Module, shared: nn.Module, alpha: float) -> None:
    """Set `personal` to alpha v + (1 - alpha) w; its buffers, BatchNorm's statistics, stay."""
    torch._foreach_lerp_(list(personal.parameters()), list(shared.parameters()), 1 - alpha)
