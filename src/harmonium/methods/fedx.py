"""FedX: clients learn from their own images and from the received model, by two losses each.

Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, 2022. With z
the projections of two views, p what a predictor makes of them, and z* the projections of the
received model, which is held still, a client minimises

  contrast(z1, z2) + contrast(p1, z2*) + relation(z1, z2; z_r) + relation(p1, p2; z_r*)

where contrast is NT-Xent and r are images that the client draws anew in every step. A relation is
by softmax over similarities to r: the mean KL divergence of the two views' mixture from either.
Each of the four has a weight here; with the first alone it is FedAvg of SimCLR. The released code
lets gradients flow through the mixture, which `detach_target` stops.

Nothing but the model is sent and nothing is kept. The released code divides the weights of an
average by the images of all clients and takes them by position, which is wrong unless all take
part; here they are of those who answered. All three batches pass the network as one, as in that
code, so BatchNorm sees them together; with `local.joint_views: false` each passes by itself.
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
    """A batch with images that its views are related to, and their projections."""

    others: Tensor  # a view of each, (m, channels, height, width)
    z_others: Tensor  # (m, dim_z)


@dataclass(frozen=True, kw_only=True)
class Distilled(Context):
    """The received model, which stays as it came."""

    received: Parts | None  # none: nothing is learned from it


@methods("fedx")
@dataclass(frozen=True)
class FedX(Method):
    """SimCLR that also learns from the received model, and from relations to other images."""

    paper = "Han et al., 2022"
    context = Distilled
    joint_views = True

    local_contrast: float = 1.0  # weight of contrasting the views
    global_contrast: float = 1.0  # weight of contrasting predictions with the received model
    local_relation: float = 1.0  # weight of relations within the client's model
    global_relation: float = 1.0  # weight of relations to the received model
    local_temperature: float = (
        0.1  # of the mixture in local relations; of views: objective.temperature
    )
    global_temperature: float = 0.1  # of the mixture in global relations
    detach_target: bool = False  # no gradient through the mixture of relations

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
        """Whether anything is learned from the received model."""
        return bool(self.global_contrast or self.global_relation)

    def extra_parts(self, made: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """A predictor of the projector's sizes, where the received model is learned from."""
        if not self.distils:
            return {}
        own = cast(SimCLR, self.objective)
        return {"predictor": Part(mlp(own.out, own.hidden or dim, own.out, norm=own.norm))}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model beside a copy of it that stays as it is."""
        parts, received = self.pull(client, got.model), None
        if self.distils:
            received = self.pull(client, got.model).requires_grad_(False)
            received.train(self.recalibrates)  # statistics are then known nowhere
        context = Distilled(me=client.id, anchor=got.model, received=received)
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """As many other images are drawn where relations count."""
        doubled = step == "train" and (self.local_relation or self.global_relation)
        return super().passes_of(step) * (2 if doubled else 1)

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """The views, and as many images of the client drawn without regard to them."""
        if not (self.local_relation or self.global_relation):
            return super().see(parts, batch)
        drawn = torch.randperm(len(batch.examples), generator=batch.rng)[: len(batch.index)]
        first = replace(batch.make, pipelines=batch.make.pipelines[:1])
        (others,) = first(batch.examples.pixels(drawn), batch.rng)
        h, z = parts.through([*batch.views, others], "encoder", "projector")
        return Related(batch, h[:2], z[:2], others=others, z_others=z[2])

    def score(self, parts: Parts, seen: Seen, context: Distilled) -> Tensor:
        """The four losses; those without weight are not computed."""
        first, second = seen.pair()
        warm, losses = cast(SimCLR, self.objective).temperature, list[Tensor]()
        if self.local_contrast:
            losses.append(self.local_contrast * super().score(parts, seen, context))
        if self.local_relation:
            others = cast(Related, seen).z_others
            apart = self.apart(first, second, others, self.local_temperature)
            losses.append(self.local_relation * apart)
        if self.distils:
            first, second = two(parts.through([first, second], "predictor")[0])
        if self.global_contrast:
            known = projected(cast(Parts, context.received), seen.batch.views[1])
            losses.append(self.global_contrast * nt_xent(first, known, warm))
        if self.global_relation:
            others = projected(cast(Parts, context.received), cast(Related, seen).others)
            apart = self.apart(first, second, others, self.global_temperature)
            losses.append(self.global_relation * apart)
        return torch.stack(losses).sum()

    def apart(self, first: Tensor, second: Tensor, others: Tensor, mixture: float) -> Tensor:
        """The relational loss at the method's settings."""
        warm = cast(SimCLR, self.objective).temperature
        return relational(first, second, others, warm, mixture, detach=self.detach_target)


@torch.no_grad()
def projected(parts: Parts, pictures: Tensor) -> Tensor:
    """What a model that is held still makes of images."""
    return cast(Tensor, parts["projector"](parts["encoder"](pictures)))


def relational(
    first: Tensor,
    second: Tensor,
    others: Tensor,
    temperature: float,
    mixture: float,
    *,
    detach: bool = False,
) -> Tensor:
    """How differently two views are related to other images: KL of their mixture from either.

    Args:
        first: projections or predictions of one view, (n, dim).
        second: of the other view of the same images, (n, dim).
        others: projections of other images, (m, dim).
        temperature: of each view's softmax over cosine similarities to the others.
        mixture: temperature of the two softmaxes whose mean is the mixture.
        detach: let no gradient flow through the mixture.

    >>> rows = torch.eye(3)
    >>> abs(relational(rows, rows, rows, 0.1, 0.1).item()) < 1e-6
    True
    """
    unit = functional.normalize(others)
    similar = torch.stack([functional.normalize(rows) @ unit.T for rows in (first, second)])
    mixed = (similar / mixture).log_softmax(2).logsumexp(0) - math.log(2)
    mixed = mixed.detach() if detach else mixed
    apart = mixed.exp() * (mixed - (similar / temperature).log_softmax(2))
    return apart.sum(2).mean()
