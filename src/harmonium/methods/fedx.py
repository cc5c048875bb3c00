"""FedX: clients distil from their own images and from the received model, by two losses each.

Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, 2022. A client
minimises the sum of four losses:

    contrast(z1, z2)          local contrastive loss          `local_contrast`
    contrast(p1, z2*)         global contrastive loss         `global_contrast`
    relation(z1, z2; z_r)     local relational loss           `local_relation`
    relation(p1, p2; z_r*)    global relational loss          `global_relation`

    z1, z2    projections of two views by the model in training
    p1, p2    the predictor's outputs for z1 and z2
    r         as many other images of the client, drawn at random in every step, one view of each
    *         by the received model, which is frozen
    contrast  NT-Xent at `objective.temperature` t
    relation  with q_v(t) = softmax over r of cos(view v, r) / t, and the target
              m = (q_1(t2) + q_2(t2)) / 2, the mean over v of KL(m || q_v(t)); t2 is
              `local_temperature` or `global_temperature`

The names on the right are the weights of the four, which the paper sets to 1. With the first alone
this is FedAvg of SimCLR.

    ask     to        down                                     up
    train   cohort    model: encoder, projector, predictor     model: the same, trained; loss

Nothing else is kept on either side.

Where this differs from the released code, or follows it beyond the paper:

- The target m of a relation is not detached in the code; gradients flow through it. That is the
  default here too; `detach_target` stops them.
- The code weighs models by the clients' share of all images and looks the weights up by position,
  which is wrong unless all clients take part. Here weights are over those who answered.
- As in the code, the three batches pass the network as one, so BatchNorm sees them together. With
  `local.joint_views: false` each passes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Batch, Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen, mlp, two
from harmonium.learning.objectives.simclr import SimCLR, nt_xent
from harmonium.learning.parts import Part, Parts
from harmonium.methods import methods

WEIGHTS = ("local_contrast", "global_contrast", "local_relation", "global_relation")


@dataclass(kw_only=True)
class Related(Seen):
    """A batch, and beside it the other images r that its views are related to."""

    others: Tensor  # one view of each image in r, (m, channels, height, width)
    z_others: Tensor  # z_r, their projections, (m, dim_z)


@dataclass(frozen=True, kw_only=True)
class Distilled(Context):
    """The received model, frozen."""

    received: Parts | None  # none: both global losses have weight 0


@methods("fedx")
@dataclass(frozen=True)
class FedX(Method):
    """SimCLR that also distils from the received model and from relations to other images."""

    paper = "Han et al., 2022"
    context = Distilled
    joint_views = True

    local_contrast: float = 1.0  # weight of the local contrastive loss
    global_contrast: float = 1.0  # weight of the global contrastive loss
    local_relation: float = 1.0  # weight of the local relational loss
    global_relation: float = 1.0  # weight of the global relational loss
    local_temperature: float = 0.1  # of the local relation's target; views: objective.temperature
    global_temperature: float = 0.1  # of the global relation's target
    detach_target: bool = False  # no gradient through the targets of relations

    def __post_init__(self) -> None:
        if type(self.objective) is not SimCLR:
            raise ConfigError(
                f"fedx contrasts by NT-Xent: objective is {self.objective.name}; set "
                "objective=simclr"
            )
        for name in WEIGHTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"method.{name} is {getattr(self, name)}; it must be 0 or more")
        if not any(getattr(self, name) for name in WEIGHTS):
            raise ConfigError(f"method.{', '.join(WEIGHTS)} are all 0: nothing is learned")
        for name in ("local_temperature", "global_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"method.{name} is {getattr(self, name)}; it must be positive")

    @property
    def distils(self) -> bool:
        """Whether one of the two global losses is used."""
        return bool(self.global_contrast or self.global_relation)

    def extra_parts(self, modules: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """A predictor of the projector's sizes, if a global loss is used."""
        if not self.distils:
            return {}
        own = cast(SimCLR, self.objective)
        return {"predictor": Part(mlp(own.out, own.hidden or dim, own.out, norm=own.norm))}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model beside a frozen copy of it."""
        parts, received = self.pull(client, got.model), None
        if self.distils:
            received = self.pull(client, got.model).requires_grad_(False)
            # Evaluation mode, as in the released code; but with batch_norm=recalibrate the model
            # is sent without BatchNorm statistics, so the copy has to use the batch's.
            received.train(self.recalibrates)
        context = Distilled(me=client.id, anchor=got.model, received=received)
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """Twice the images if relations are used, which draw as many others."""
        doubled = step == "train" and (self.local_relation or self.global_relation)
        return super().passes_of(step) * (2 if doubled else 1)

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """The two views, and one view of as many images drawn independently of the batch."""
        if not (self.local_relation or self.global_relation):
            return super().see(parts, batch)
        drawn = torch.randperm(len(batch.examples), generator=batch.rng)[: len(batch.index)]
        first = replace(batch.make, pipelines=batch.make.pipelines[:1])
        (others,) = first(batch.examples.pixels(drawn), batch.rng)
        # One pass for all three, unless local.joint_views is false.
        h, z = parts.through([*batch.views, others], "encoder", "projector")
        return Related(batch, h[:2], z[:2], others=others, z_others=z[2])

    def score(self, parts: Parts, seen: Seen, context: Distilled) -> Tensor:
        """The sum of the four losses; those of weight 0 are not computed."""
        first, second = seen.pair()  # z1, z2
        temperature, losses = cast(SimCLR, self.objective).temperature, list[Tensor]()
        if self.local_contrast:
            losses.append(self.local_contrast * super().score(parts, seen, context))
        if self.local_relation:
            others = cast(Related, seen).z_others
            relation = self.relation(first, second, others, self.local_temperature)
            losses.append(self.local_relation * relation)
        if self.distils:  # from here on p1, p2
            first, second = two(parts.through([first, second], "predictor")[0])
        if self.global_contrast:
            received = projected(cast(Parts, context.received), seen.batch.views[1])  # z2*
            losses.append(self.global_contrast * nt_xent(first, received, temperature))
        if self.global_relation:
            others = projected(cast(Parts, context.received), cast(Related, seen).others)
            relation = self.relation(first, second, others, self.global_temperature)
            losses.append(self.global_relation * relation)
        return torch.stack(losses).sum()

    def relation(self, first: Tensor, second: Tensor, others: Tensor, mixture: float) -> Tensor:
        """The relational loss at the method's settings, with `mixture` for t2."""
        temperature = cast(SimCLR, self.objective).temperature
        return relational(first, second, others, temperature, mixture, detach=self.detach_target)


@torch.no_grad()
def projected(parts: Parts, images: Tensor) -> Tensor:
    """Projections of images by a frozen model."""
    return cast(Tensor, parts["projector"](parts["encoder"](images)))


def relational(
    first: Tensor,
    second: Tensor,
    others: Tensor,
    temperature: float,
    mixture: float,
    *,
    detach: bool = False,
) -> Tensor:
    """The relational loss: how differently two views are related to other images.

    The mean over both views of KL(m || q_v), with m and q_v as in the module's docstring.

    Args:
        first: projections or predictions of one view, (n, dim).
        second: of the other view of the same images, (n, dim).
        others: projections of other images, (m, dim).
        temperature: t, of each view's softmax q_v over cosine similarities to the others.
        mixture: t2, the temperature of the two softmaxes whose mean is the target m.
        detach: let no gradient flow through m.

    >>> rows = torch.eye(3)
    >>> abs(relational(rows, rows, rows, 0.1, 0.1).item()) < 1e-6
    True
    """
    unit = functional.normalize(others)
    similar = torch.stack([functional.normalize(rows) @ unit.T for rows in (first, second)])
    log_m = (similar / mixture).log_softmax(2).logsumexp(0) - math.log(2)
    log_m = log_m.detach() if detach else log_m
    divergence = log_m.exp() * (log_m - (similar / temperature).log_softmax(2))
    return divergence.sum(2).mean()  # sum over r; mean over both views and the batch
