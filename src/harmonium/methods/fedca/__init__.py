"""FedCA: clients contrast against each other's projections and stay close to one public model.

Zhang et al., Federated Unsupervised Representation Learning, 2020 (Federated Contrastive Averaging
with dictionary and alignment). Algorithm 1's server is `FedCA.setup` and `FedCA.round`, its
ClientUpdate is `FedCA.train`. The dictionary is in `dictionary.py`, the alignment in
`alignment.py`, the contrastive loss of eq. 4 to 8 in `learning/objectives/infonce.py`.

Symbols
    f, g          encoder and projector; h = f(x), z = g(h)
    u, D_u        a client and its images
    dict          dictionary of K unit rows of all clients (K: `size`), the same for all in a round
    Z_i           moving average of the projections of image i, the local ensemble dictionary
    alpha         its momentum (`momentum`)
    h_align, z_align   alignment targets: features and projections of the public images D_align by
                  the alignment model
    beta          weight of the alignment (`strength`)

Loss of a step, eq. 14: with N images of which each has two views i and j,

    logits = [z_i z_j^T | z_i dict^T],  N x (N + K), of unit rows                  (eq. 4 to 6)
    loss   = CE(logits / t, [0, ..., N - 1]) + beta (|h - h_align|^2 + |z - z_align|^2)
                                                                     (eq. 7, 8 and 11 to 14)

Only view i looks for its partner, and it does so in view j alone: this is not NT-Xent. Rows of the
dictionary get no gradient and are never the right answer. In round 1 there is no dictionary yet.

Messages
    ask     to                        down                          up
    align   clients of the cohort     h: h_align, z: z_align        nothing
            without targets; once
    train   clients of the cohort     model, dictionary, count:     model, loss, rows, ratio: of
            with targets              rows to send                  alignment to contrast

The server remembers the targets (`align_h`, `align_z`), `told`: the clients that have them, and the
`dictionary`; under `sampling: replace` also the newest `rows` of every client, under `exclude_own`
the `owners` of the dictionary's rows. A client keeps the targets and `ensemble`, all Z_i; a client
that is absent for some rounds continues with its stored Z_i.

Rows are per example: each belongs to one image, and by the dictionary it goes to all clients. The
paper has no protection. Here `group` sends means of that many similar rows in their place, and
`noise` adds accounted noise to each row. Noise is accounted for the row of an image alone, as the
model is sent without protection; it therefore needs rows by the received model, because a model
that was trained on all images of a client carries each of them into every row.

Where the paper is unclear
    - K = 1024, but line 9 concatenates all rows of all clients: see `dictionary.py`.
    - Which model makes the rows. Eq. 9 and Algorithm 1 (ClientUpdate, line 5) have the trained
      local model, the default; the text before eq. 4, for a dictionary without moving averages,
      has the global model (`source: received`).
    - The sums of eq. 11 and 12 grow with the batch of public images; `reduction: mean` divides by
      it. The paper does not say how that batch is chosen; see `alignment.py`.
    - The temperature t is not given. Recipes use 0.1.
    - The dictionary holds a client's own rows too, some of them of the very images that it
      contrasts, which then count as negatives of themselves. The paper keeps them. With
      `exclude_own` the server leaves them out of what it sends to that client; no client learns
      whose rows it gets.

The authors have released no code. The implementation of FedCA in the code of FedSC differs: it has
no alignment, and its dictionary loss takes row i of the dictionary for the partner of image i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_device, to_host, to_widest
from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.core.types import ClientId, Kind
from harmonium.federation.batch_norm import measure
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.wire import (
    EXAMPLES,
    Ask,
    Field,
    Folded,
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
from harmonium.learning.training import fit
from harmonium.methods import methods
from harmonium.methods.fedca import dictionary
from harmonium.methods.fedca.alignment import (
    TARGETS,
    AlignmentBatch,
    Reduction,
    alignment_batches,
    alignment_loss,
)
from harmonium.privacy.mechanisms import Release

RATIO = scalar("mean", by=EXAMPLES)  # of the alignment to the contrast in the loss of a round
_LEAST = {"size": 0, "momentum": 0, "strength": 0, "noise": 0}
_LEAST |= {"align_batch": 1, "align_epochs": 1, "group": 1}


@dataclass(frozen=True, kw_only=True)
class DictionaryAndTargets(WithNegatives):
    """The dictionary as further negatives, and what the model is aligned with."""

    alignment_batches: Iterator[AlignmentBatch]
    record_terms: Callable[[Tensor, Tensor], None]  # takes alignment and contrast of every step


def _rows_field(method: FedCA) -> Field:
    """A client's rows: guarded if they have noise, a statistic if means, public if none."""
    per_image: Kind = "per_example" if method.size else "public"
    return Field(
        "statistic" if method.group > 1 else per_image,
        "each",
        guarded=bool(method.noise and method.size),
        shape=lambda method, examples: (range(examples + 1), method.objective.out),
    )


def ratio_of(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor | float:
    """The sum of the alignment over that of the contrast, given both for every step.

    >>> ratio_of([(torch.tensor(1.0), torch.tensor(2.0)), (torch.tensor(2.0), torch.tensor(4.0))])
    tensor(0.5000, dtype=torch.float64)
    """
    if not terms:  # no alignment
        return 0.0
    alignments, contrasts = (
        to_widest(torch.stack(each)).cumsum(0)[-1] for each in zip(*terms, strict=True)
    )
    return alignments / contrasts.clamp(min=1e-12)


@methods("fedca")
@dataclass(frozen=True)
class FedCA(Method):
    """FedAvg with a shared dictionary of negatives and alignment to a public model."""

    paper = "Zhang et al., 2020"
    context = DictionaryAndTargets
    keeps = {**TARGETS, "ensemble": "per_example"}
    remembers = {
        **TARGETS,
        "told": "scalar",
        "rows": "per_example",
        "dictionary": "per_example",
        "owners": "scalar",
    }

    size: int = 1024  # rows of the dictionary (K); 0: none
    sampling: dictionary.Sampling = "client"  # who chooses rows
    source: Literal["trained", "received"] = "trained"  # model that makes a client's rows
    momentum: float = 0.5  # of the moving average (alpha); 0: the latest projections
    strength: float = 0.01  # of the alignment (beta); 0: none, and no public images needed
    reduction: Reduction = "sum"  # of the alignment over the images of a step
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

    # ---- server (Algorithm 1) ------------------------------------------------------------------
    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Line 2: train the alignment model on public images; nobody is asked.

        It is trained as a client trains, without dictionary and alignment, from the initial weights
        of the federation's own model.
        """
        if not self.strength:
            return server
        here = self.at_server(server, "align")
        parts = self.blueprint.copy_from(device=here.device)
        settings = replace(self.local, epochs=self.align_epochs, schedule="constant", warmup=0)
        plain = Context(me=here.id)
        fit(parts, here, lambda b: self.objective.score(parts, self.see(parts, b), plain), settings)
        h = here.features(parts.eval()["encoder"])
        with torch.no_grad():
            z = parts["projector"](h)
        h, z = to_host([h, z])
        return replace(server, memory={**server.memory, "align_h": h, "align_z": z, "told": []})
        yield  # a plan that asks nothing

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Send targets to new clients, then have all train with the same dictionary."""
        memory, ready = dict(server.memory), list(cohort)
        if self.strength:
            memory["told"] = yield from self.send_targets(memory, cohort)
            ready = [client for client in cohort if client in memory["told"]]
        if not ready:
            raise NotEnoughReplies("no client has the alignment targets yet")
        down, each = self.training_messages(server, ready)
        got = yield Ask("train", ready, down, each)  # lines 6 and 7
        rows = {str(client): sent for client, sent in got.rows.items()}
        if self.sampling == "replace":
            rows = memory["rows"] = {**memory.get("rows", {}), **rows}
        memory["dictionary"], owners = dictionary.build_dictionary(rows, self.size)  # line 9
        if self.exclude_own:
            memory["owners"] = owners
        return replace(self.merge(server, got.model), memory=memory)  # line 8

    def send_targets(
        self, memory: Mapping[str, Any], cohort: Sequence[ClientId]
    ) -> Generator[Ask, Folded, list[ClientId]]:
        """Send the targets to those who lack them, and return all clients that have them now."""
        reached: list[ClientId] = memory["told"]
        new = [client for client in cohort if client not in reached]
        if not new:
            return reached
        got = yield Ask("align", new, {"h": memory["align_h"], "z": memory["align_z"]}, least=0)
        return sorted([*reached, *got.ids])

    def training_messages(
        self, server: Server, ready: Sequence[ClientId]
    ) -> tuple[dict[str, Value], dict[ClientId, dict[str, Value]]]:
        """What all clients get for training, and what each of them gets beside it."""
        counts = dictionary.quotas(self.size, self.sampling, server.examples, ready)
        no_rows = torch.zeros(0, cast(InfoNCE, self.objective).out)
        rows = server.memory.get("dictionary", no_rows)
        if not self.exclude_own:
            return (
                {"model": server.model, "dictionary": rows},
                {client: {"count": counts[client]} for client in ready},
            )
        owners = server.memory.get("owners", torch.zeros(0))
        return {"model": server.model}, {
            client: {"count": counts[client], "dictionary": rows[owners != client]}
            for client in ready
        }

    # ---- client (ClientUpdate) -----------------------------------------------------------------
    @exchange(down={"h": public(), "z": public()}, when=needs_public)
    def align(self, client: Client, got: SimpleNamespace) -> None:
        """Keep the alignment targets."""
        client.state |= {"align_h": got.h, "align_z": got.z}

    @exchange(
        down={"model": weights(), "dictionary": per_example(), "count": scalar()},
        up={**TRAINED, "rows": _rows_field, "ratio": RATIO},
    )
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train against the dictionary and towards the targets, then project all images."""
        parts, terms = self.pull(client, got.model), list[tuple[Tensor, Tensor]]()

        def record_terms(alignment: Tensor, contrast: Tensor) -> None:
            terms.append((alignment.detach(), contrast.detach()))

        # With `recalibrate` no BatchNorm statistics come with the model, and alignment, in
        # evaluation mode, needs some from the first step on.
        if self.strength and self.batch_norm == "recalibrate":
            network = nn.Sequential(parts["encoder"], parts["projector"])
            measure(network, (batch.plain for batch in client.batches(1, self.local.batch)))
        context = DictionaryAndTargets(
            me=client.id,
            anchor=got.model,
            negatives=got.dictionary if len(got.dictionary) else None,
            alignment_batches=alignment_batches(client, self.align_batch),
            record_terms=record_terms,
        )
        count, rows = int(got.count), None
        if self.source == "received":
            rows = self.local_dictionary(client, parts, count)
        done = self.fit(parts, client, context=context)  # lines 1 to 4
        model = self.push(client, parts)
        if rows is None:
            rows = self.local_dictionary(client, parts, count)  # line 5
        return {"model": model, "loss": done.loss, "rows": rows, "ratio": ratio_of(terms)}

    def score(self, parts: Parts, seen: Seen, context: DictionaryAndTargets) -> Tensor:
        """Eq. 14: contrast among batch and dictionary (eq. 8), and alignment (eq. 13)."""
        contrast = super().score(parts, seen, context)
        if not self.strength:
            return contrast
        batch = next(context.alignment_batches)
        alignment = self.strength * alignment_loss(parts, batch, self.reduction)
        context.record_terms(alignment, contrast)
        return contrast + alignment

    def local_dictionary(self, client: Client, parts: Parts, count: int) -> Tensor:
        """Update the moving averages of all images, and choose unit rows of them to send.

        Images are not augmented, and the model is in evaluation mode. In the round in which a
        client first takes part Z_i starts at 0; the factor 1 / (1 - alpha^t) of eq. 10, which
        corrects for that, cancels with the norm.
        """
        parts.eval()
        z = client.features(lambda x: parts["projector"](parts["encoder"](x)))
        if not self.size:
            return z[:0]
        before = client.state.get("ensemble", torch.zeros_like(z))
        ensemble = torch.lerp(z, before, self.momentum)  # eq. 9
        client.state["ensemble"] = ensemble
        chosen = torch.randperm(len(z), generator=client.rng)[: count * self.group]
        rows = functional.normalize(ensemble[to_device(chosen, client.device)])  # eq. 10
        return dictionary.protected(client, rows, self.noise, self.group)

    # ---- what the framework asks of a method ---------------------------------------------------
    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Refuse more rows than were asked for, rows not of unit length, and repeated rows."""
        fault = dictionary.rows_fault(up["rows"], int(down["count"])) if step == "train" else None
        return fault or super().reply_fault(step, down, up, examples)

    def passes_of(self, step: str) -> float:
        """Training takes one more pass for rows, and another to measure BatchNorm's statistics."""
        if step == "align":
            return 0.0
        passes = super().passes_of(step)
        if step != "train":
            return passes
        measures_statistics = self.strength > 0 and self.batch_norm == "recalibrate"
        return passes + 1 + measures_statistics

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """Rows with noise, where there is noise."""
        return dictionary.costs(self.noise) if step == "train" and self.size else ()

    def revealed(self) -> tuple[str, ...]:
        """What the server and other clients learn from rows, in plain words."""
        settings = (self.size, self.sampling, self.momentum, self.noise, self.group)
        return dictionary.disclosure(*settings, exclude_own=self.exclude_own)

    def extents(self) -> dict[str, str]:
        """Sizes of the dictionary, of rows and of targets."""
        return dictionary.message_sizes(self.size, self.sampling, self.blueprint["projector"])
