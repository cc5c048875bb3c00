"""FedRep: first a client's own heads learn on the shared encoder, then the encoder under them.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021,
Algorithm 1. The encoder is shared and heads stay at the client, as in FedPer, but they are trained
in turn: first the heads with the received encoder frozen, then the encoder with the heads frozen.
With no head there is no first phase, and this is FedAvg, bit for bit.

    ask     to        down              up
    train   cohort    model: encoder    model: encoder, trained; loss

The server remembers nothing else; a client keeps its heads (`parts` in its state).

Where the sources differ or are unclear:

- Epochs. The released code trains heads for ten epochs and the encoder for one. FedStyle's
  adaptation (Yang et al., 2022, appendix) takes E_l for both, which is the default here. Its
  listing has epoch loops inside LocalTraining, which its Algorithm 1 calls in another loop of E_l
  epochs; taken as printed, that would be E_l^2 epochs. Only the inner loops count here.
- BatchNorm. A frozen encoder normalises by the statistics that it was sent with. The released code
  leaves it in training mode. With `batch_norm=recalibrate` no statistics are sent, so the client
  first measures them on its own images.
- EMA copies and queues have no gradient. They follow the training in both phases.
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
    """FedAvg of the encoder; clients first train their own heads, then the encoder below them."""

    paper = "Collins et al., 2021"
    share = HEADS_STAY

    head_epochs: int | None = None  # epochs that train the heads; none: local.epochs

    def __post_init__(self) -> None:
        check(self, "at least 1, or none", lambda epochs: epochs >= 1, "head_epochs")
        refuse_tables(self)

    @property
    def workload(self) -> float:
        """Epochs of the heads and of the encoder, in units of local.epochs."""
        return 1 + (self.head_epochs or self.local.epochs) / self.local.epochs

    def passes_of(self, step: str) -> float:
        """Beside training, one pass measures BatchNorm's statistics if they are recalibrated."""
        return super().passes_of(step) + (1 if step == "train" and self.recalibrates else 0)

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the heads, then the encoder; the loss reported is the second phase's."""
        parts = self.pull(client, got.model)
        not_encoder = [name for name in parts if name != "encoder"]
        heads = [
            name for name in not_encoder if any(p.requires_grad for p in parts[name].parameters())
        ]
        # EMA copies and queues are frozen in neither phase and never get a gradient.
        untrained = [name for name in not_encoder if name not in heads]
        context = Context(me=client.id, anchor=got.model)
        if heads:  # phase 1: all but the encoder, which `fit` freezes in evaluation mode
            if self.recalibrates:
                batches = client.batches(1, self.local.batch)
                measure(parts["encoder"], (batch.plain for batch in batches))
            head_local = replace(self.local, epochs=self.head_epochs or self.local.epochs)
            self.fit(parts, client, train=not_encoder, local=head_local, context=context)
        # Phase 2: the encoder, with frozen heads. Each call of `fit` starts a fresh optimiser.
        done = self.fit(parts, client, train=["encoder", *untrained], context=context)
        return {"model": self.push(client, parts), "loss": done.loss}
