"""FedCA: clients contrast against each other's projections and stay close to one public model.

Zhang et al., Federated Unsupervised Representation Learning, 2020, Algorithm 1. A client minimises
InfoNCE among its batch and a dictionary of K projections of all clients (eq. 4 to 8), plus strength
times its distance from a model that the server trained on public images (eq. 11 to 14), whose
outputs are sent to every client once. After training it adds the projections of all of its images
to a moving average (eq. 9) and sends rows of that, at unit length (eq. 10, where 1 - alpha^t
cancels), for the next round's dictionary. All clients of a round get the same dictionary.

Algorithm 1 joins all rows of all clients, which is not K of them; `sampling` says who chooses:
each client its share by number of images (`client`), the server among all rows (`server`), or as
`client` with the rows of absent clients kept (`replace`). Too few rows are repeated at random. The
sums of eq. 11 and 12 grow with the batch; `reduction: mean` divides by it. Rows are by the trained
model, as in eq. 9; without moving averages the paper has them by the received one (`source`). Rows
belong to single images: `group` sends means of that many similar rows; `noise` is counted for a
image's own rows alone, as the model goes unprotected beside them. It needs rows by the received
model: one that was trained on all images of a client carries each of them into every row.

Alignment is in evaluation mode on both sides. Targets are made once, by a model whose BatchNorm has
seen all public images; a client's features of the same images must be normalised in the same way,
or a model would be far from itself. So they use its running statistics, and public images move
those as little as targets do.

The dictionary holds a client's own rows too, among them such as belong to the very images that it
contrasts, which then count as negatives of themselves. The paper keeps them; with `exclude_own` the
server leaves them out of what it sends to that client. No client learns whose rows it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.core.types import ClientId, Kind
from harmonium.federation.batch_norm import measure
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.wire import (
    EXAMPLES,
    Ask,
    Field,
    Plan,
    Value,
    exchange,
    per_example,
    public,
    scalar,
    weights,
)
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.objectives.infonce import InfoNCE, WithNegatives
from harmonium.learning.parts import Parts
from harmonium.learning.training import evaluating, fit
from harmonium.methods import methods
from harmonium.methods.fedca import dictionary as pool
from harmonium.privacy.mechanisms import Release

RATIO = scalar("mean", by=EXAMPLES)  # of the alignment to the contrast in the loss of a round
TARGETS: Mapping[str, Kind] = {"align_h": "public", "align_z": "public"}
_LEAST = {"size": 0, "momentum": 0, "strength": 0, "noise": 0}
_LEAST |= {"align_batch": 1, "align_epochs": 1, "group": 1}


@dataclass(frozen=True, kw_only=True)
class Dictionary(WithNegatives):
    """Other clients' rows as negatives, and what the model is aligned with."""

    targets: Iterator[tuple[Tensor, Tensor, Tensor]]  # public images, their features, projections
    weigh: Callable[[float, float], None]  # is told the alignment and the contrast of every step


def _rows(method: FedCA) -> Field:
    """A client's rows: those with noise are guarded, means are statistics, none are public."""
    per_image: Kind = "per_example" if method.size else "public"
    return Field(
        "statistic" if method.group > 1 else per_image,
        "each",
        guarded=bool(method.noise and method.size),
        shape=lambda method, examples: (range(examples + 1), method.objective.out),
    )


@methods("fedca")
@dataclass(frozen=True)
class FedCA(Method):
    """FedAvg with a shared dictionary of negatives and alignment to a public model."""

    paper = "Zhang et al., 2020"
    context = Dictionary
    keeps = {**TARGETS, "ensemble": "per_example"}
    remembers = {
        **TARGETS,
        "told": "scalar",
        "rows": "per_example",
        "dictionary": "per_example",
        "owners": "scalar",
    }

    size: int = 1024  # rows of the dictionary (K); 0: none
    sampling: pool.Sampling = "client"  # who chooses rows
    source: Literal["trained", "received"] = "trained"  # model that makes a client's rows
    momentum: float = 0.5  # of the moving average (alpha); 0: the latest projections
    strength: float = 0.01  # of the alignment (beta); 0: none, and no public images needed
    reduction: Literal["sum", "mean"] = "sum"  # of the alignment over the images of a step
    align_batch: int = 128  # public images a step
    align_epochs: int = 100  # of the server's training on public images
    noise: float = 0.0  # deviation of what is added to each number of a row; with source=received
    group: int = 1  # similar rows in a mean that is sent in their place; 1: rows themselves
    exclude_own: bool = False  # a client's own rows are no negatives of its images

    def __post_init__(self) -> None:
        if not isinstance(self.objective, InfoNCE):
            raise ConfigError(
                f"fedca contrasts by InfoNCE: objective is {self.objective.name}; set "
                "objective=infonce objective.anchors=first"
            )
        for name, least in _LEAST.items():
            value, below = getattr(self, name), " and below 1" if name == "momentum" else ""
            if not least <= value < (1 if below else math.inf):
                raise ConfigError(f"method.{name} is {value}; it must be at least {least}{below}")
        if self.noise and self.group > 1:
            raise ConfigError("method.noise cannot be counted for means of groups: choose one")
        if self.noise and self.size and self.source == "trained":
            raise ConfigError(
                "method.noise is counted for an image's own row, but a model that was trained on "
                "all images of a client enters every row: set method.source=received"
            )
        if self.noise and self.size and self.strength and self.batch_norm == "recalibrate":
            raise ConfigError(
                "method.noise is counted for an image's own row, but with batch_norm=recalibrate "
                "and alignment statistics of all images of a client enter every row: set "
                "batch_norm=average or method.strength=0"
            )

    @property
    def needs_public(self) -> bool:
        """Whether clients are aligned."""
        return self.strength > 0

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Train the alignment model on public images; nobody is asked."""
        if not self.strength:
            return server
        here = self.at_server(server, "align")
        parts = self.blueprint.copy_from()
        once = replace(self.local, epochs=self.align_epochs, schedule="constant", warmup=0)
        alone = Context(me=here.id)
        fit(parts, here, lambda b: self.objective.score(parts, self.see(parts, b), alone), once)
        h = here.features(parts.eval()["encoder"])
        with torch.no_grad():
            z = parts["projector"](h)
        return replace(server, memory={**server.memory, "align_h": h, "align_z": z, "told": []})
        yield

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Tell new clients the targets, then have all train with the same dictionary."""
        memory, ready = dict(server.memory), list(cohort)
        if self.strength:
            new = [client for client in cohort if client not in memory["told"]]
            if new:
                targets = {"h": memory["align_h"], "z": memory["align_z"]}
                got = yield Ask("align", new, targets, least=0)
                memory["told"] = sorted([*memory["told"], *got.ids])
            ready = [client for client in cohort if client in memory["told"]]
        if not ready:
            raise NotEnoughReplies("no client has the alignment targets yet")
        counts = pool.quotas(self.size, self.sampling, server.examples, ready)
        each: dict[int, dict[str, Value]] = {c: {"count": counts[c]} for c in ready}
        rows = memory.get("dictionary", torch.zeros(0, cast(InfoNCE, self.objective).out))
        down: dict[str, Value] = {"model": server.model, "dictionary": rows}
        if self.exclude_own:
            del down["dictionary"]
            owners = memory.get("owners", torch.zeros(0))
            each = {c: {**one, "dictionary": rows[owners != c]} for c, one in each.items()}
        got = yield Ask("train", ready, down, each)
        sent = {str(client): rows for client, rows in got.rows.items()}
        if self.sampling == "replace":
            sent = memory["rows"] = {**memory.get("rows", {}), **sent}
        memory["dictionary"], owners = pool.collected(sent, self.size)
        if self.exclude_own:
            memory["owners"] = owners
        return replace(self.merge(server, got.model), memory=memory)

    @exchange(down={"h": public(), "z": public()}, when=needs_public)
    def align(self, client: Client, got: SimpleNamespace) -> None:
        """Keep what the alignment model makes of the public images."""
        client.state |= {"align_h": got.h, "align_z": got.z}

    @exchange(
        down={"model": weights(), "dictionary": per_example(), "count": scalar()},
        up={**TRAINED, "rows": _rows, "ratio": RATIO},
    )
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train against the dictionary and towards the targets, then describe all images."""
        parts, weighed = self.pull(client, got.model), list[tuple[float, float]]()

        def weigh(pull: float, contrast: float) -> None:
            weighed.append((pull, contrast))

        if self.strength and self.batch_norm == "recalibrate":  # no statistics come with the model
            network = nn.Sequential(parts["encoder"], parts["projector"])
            measure(network, (batch.plain for batch in client.batches(1, self.local.batch)))
        context = Dictionary(
            me=client.id,
            anchor=got.model,
            negatives=got.dictionary if len(got.dictionary) else None,
            targets=pool.public_batches(client, self.align_batch),
            weigh=weigh,
        )
        rows = self.rows(client, parts, int(got.count)) if self.source == "received" else None
        done = self.fit(parts, client, context=context)
        return {
            "model": self.push(client, parts),
            "loss": done.loss,
            "rows": self.rows(client, parts, int(got.count)) if rows is None else rows,
            "ratio": sum(pull for pull, _ in weighed) / max(sum(c for _, c in weighed), 1e-12),
        }

    def score(self, parts: Parts, seen: Seen, context: Dictionary) -> Tensor:
        """Contrast among batch and dictionary, and alignment."""
        contrast = super().score(parts, seen, context)
        if not self.strength:
            return contrast
        images, h, z = next(context.targets)
        with evaluating(parts["encoder"], parts["projector"]):  # as the targets were made
            own_h = parts["encoder"](images)
            own_z = parts["projector"](own_h)
        far = (own_h - h).square().sum() + (own_z - z).square().sum()
        pull = self.strength * (far if self.reduction == "sum" else far / len(h))
        context.weigh(pull.item(), contrast.item())
        return contrast + pull  # type: ignore[no-any-return]

    def rows(self, client: Client, parts: Parts, count: int) -> Tensor:
        """Update the moving average, and choose unit rows of it to send."""
        parts.eval()
        z = client.features(lambda x: parts["projector"](parts["encoder"](x)))
        if not self.size:
            return z[:0]
        held = client.state.get("ensemble", torch.zeros_like(z))
        average = client.state["ensemble"] = torch.lerp(z, held, self.momentum)
        some = torch.randperm(len(z), generator=client.rng)[: count * self.group]
        return pool.protected(client, functional.normalize(average[some]), self.noise, self.group)

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Rows are no more than were asked for, of unit length, and of different images."""
        why = pool.odd_rows(up["rows"], int(down["count"])) if step == "train" else None
        return why or super().reply_fault(step, down, up, examples)

    def passes_of(self, step: str) -> float:
        """One more describes all images, another measures BatchNorm's statistics."""
        if step == "align":
            return 0.0
        more = (
            1 + (self.strength > 0 and self.batch_norm == "recalibrate") if step == "train" else 0
        )
        return super().passes_of(step) + more

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """Rows with noise, where there is noise."""
        return pool.costs(self.noise) if step == "train" and self.size else ()

    def revealed(self) -> tuple[str, ...]:
        """What a curious server and curious clients get."""
        settings = (self.size, self.sampling, self.momentum, self.noise, self.group)
        return pool.in_words(*settings, exclude_own=self.exclude_own)

    def extents(self) -> dict[str, str]:
        """Sizes of the dictionary, of rows and of targets."""
        return pool.extents(self.size, self.sampling, self.blueprint["projector"])
