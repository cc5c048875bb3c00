"""FedRep: first a client's own heads learn on the shared encoder, then the encoder under them.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021,
Algorithm 1. Encoders are shared and heads stay as in FedPer; but a client first trains its heads
with the received encoder held still, then the encoder with its heads held still. With no head the
first phase falls away and it is FedAvg, bit for bit.

The released code has ten epochs for heads and one for the encoder, FedStyle's adaptation (Yang et
al., 2022) as many for either, which is the default. Its listing has epochs inside both phases and
around them; taken as printed, E epochs would be E times E. A held encoder normalises by the
statistics that came with it, where the released code leaves it in training mode. With
`batch_norm=recalibrate` none come, so the client measures them on its own images first. Slow
copies and queues are moved by no gradient and go along in both phases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from harmonium.federation.batch_norm import measure
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import check
from harmonium.methods import methods
from harmonium.methods.fedper import HEADS_STAY, refuse_tables


@methods("fedrep")
@dataclass(frozen=True)
class FedRep(Method):
    """FedAvg of encoders that learn under heads of the clients' own, after those have learned."""

    paper = "Collins et al., 2021"
    share = HEADS_STAY

    head_epochs: int | None = None  # passes that train heads; none: as many as local.epochs

    def __post_init__(self) -> None:
        check(self, "at least 1, or none", lambda epochs: epochs >= 1, "head_epochs")
        refuse_tables(self)

    @property
    def workload(self) -> float:
        """Those of the heads, and those of the encoder."""
        return 1 + (self.head_epochs or self.local.epochs) / self.local.epochs

    def passes_of(self, step: str) -> float:
        """One more measures BatchNorm's statistics."""
        return super().passes_of(step) + (1 if step == "train" and self.recalibrates else 0)

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the heads, then the encoder; the loss is the latter's."""
        parts = self.pull(client, got.model)
        rest = [name for name in parts if name != "encoder"]
        heads = [name for name in rest if any(p.requires_grad for p in parts[name].parameters())]
        along = [name for name in rest if name not in heads]
        context = Context(me=client.id, anchor=got.model)
        if heads:
            if self.recalibrates:
                batches = client.batches(1, self.local.batch)
                measure(parts["encoder"], (batch.plain for batch in batches))
            first = replace(self.local, epochs=self.head_epochs or self.local.epochs)
            self.fit(parts, client, train=rest, local=first, context=context)
        done = self.fit(parts, client, train=["encoder", *along], context=context)
        return {"model": self.push(client, parts), "loss": done.loss}
