"""User verification: a classifier predicts the client from each of the two views of an image.

Louizos et al., A Mutual Information Perspective on Federated Contrastive Learning, 2024. Added to
SimCLR it is Federated SimCLR: eq. 6 bounds the mutual information of two views over the whole
federation by local contrast and a client classifier r(s | z) for each view, plus the entropy of the
clients. The classifier has a projector of its own on the encoder's output (appendix A) and three
constraints (section 2.1): no bias, unit inputs and unit rows, and a client trains its own row only.

Where the paper is silent: with unit rows and no logit scale the client part of the bound stays
negative even at its optimum for ten clients or more, so `scale` is a setting, 1 as printed; Adam
moves rows of absent clients by their moments (`rows: dense`, as printed) unless it is `lazy`.
Algorithm 2 verifies unlabelled images only, eq. 13 all of them: `pictures` follows the equation.

A client measures the bounds on the federation's model before an evaluation, not on its own model
after training: equation 6 holds for one encoder, and a client's last steps fit its own row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.core.types import Weights
from harmonium.data.images import UNKNOWN
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, mlp
from harmonium.learning.objectives.infonce import bound, info_nce
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Part, Parts
from harmonium.learning.terms import Term, terms
from harmonium.learning.unit_rows import non_unit_length
from harmonium.learning.world import World

if TYPE_CHECKING:
    from harmonium.federation.method import Method

TABLE = "uv.weight"  # a row a client
ROUNDED = 0.05  # how far from 1 a row's length may lie after it travelled in few bits


class Rows(nn.Module):
    """A unit row for every client."""

    def __init__(self, clients: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(functional.normalize(torch.randn(clients, size)))


@terms("uv")
@dataclass(frozen=True)
class Verification(Term):
    """Cross-entropy of the client's number for every view, summed over two views."""

    paper = "Louizos et al., 2024"
    reveals = (
        "Every client sends a row of its own and how well it is told from others, under its "
        "number; all rows go to all clients."
    )

    weight: float = 1.0  # of the term (the paper's beta); 0: only the bounds are reported
    scale: float = 1.0  # of the logits, which are cosines
    hidden: int | None = None  # width of its projector's inner layer; none: the encoder's
    out: int = 128  # size of a row
    rows: Literal["dense", "lazy"] = "dense"  # lazy: rows of absent clients stay where they are
    pictures: Literal["all", "unlabelled"] = "all"  # images that it uses

    def __post_init__(self) -> None:
        for name, wanted, fits in (
            ("weight", "0 or more", self.weight >= 0),
            ("scale", "above 0", self.scale > 0),
            ("hidden", "at least 1", self.hidden is None or self.hidden >= 1),
            ("out", "at least 1", self.out >= 1),
        ):
            value = getattr(self, name)
            if not (fits and (value is None or math.isfinite(value))):
                raise ConfigError(f"terms.uv.{name} is {value}; it must be {wanted}")

    def check(self, objective: Objective) -> None:
        """Raise an error for objectives that do not use two views of an image."""
        if objective.views[0] < 2 and not objective.uses_labels:
            raise ConfigError(
                f"terms=uv needs two views of every image, but objective={objective.name} does not "
                "make them: choose another, e.g. objective=simclr"
            )
        if self.pictures == "unlabelled" and not objective.uses_labels:
            raise ConfigError(
                "terms.uv.pictures=unlabelled needs an objective that reads labels, e.g. "
                "objective=semi-infonce"
            )

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector that is averaged, and a table of which a client sends its own row."""
        projector = mlp(dim, self.hidden or dim, self.out)
        table = Part(Rows(world.clients, self.out), "row", lazy=self.rows == "lazy")
        return {"uv_projector": Part(projector), "uv": table}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The cross-entropy of the client for two views; rows of other clients are constants."""
        h = list(seen.h)
        if self.pictures != "all":
            unlabelled = seen.batch.where(seen.batch.host_labels == UNKNOWN)
            h = [view[unlabelled] for view in h]
        if not self.weight or not len(h[0]):
            return torch.zeros(())
        return self.weight * 2 * torch.stack(self._costs(parts, h, context.me)).mean()

    def _costs(self, parts: Parts, h: list[Tensor], me: int) -> list[Tensor]:
        """The mean cross-entropy of each view."""
        table = _table(parts)
        mine = (torch.arange(len(table), device=table.device) == me)[:, None]
        rows = torch.where(mine, table, table.detach())
        projected = parts["uv_projector"](torch.cat(h)).chunk(len(h))
        return [verification(view, rows, me, self.scale) for view in projected]

    def after_step(self, parts: Parts, context: Context) -> None:
        """Normalise the client's row and restore the other rows, which weight decay may change."""
        if not self.weight:  # nothing has moved, and rounding must not
            return
        table, me = _table(parts).data, context.me
        own = functional.normalize(table[me], dim=0)
        if TABLE in (received := context.anchor or {}):
            table.copy_(received[TABLE])
        table[me] = own

    def at_server(self, model: Weights) -> Weights:
        """Normalise the rows, which the server's optimiser may have changed in length."""
        return {**model, TABLE: functional.normalize(model[TABLE])} if TABLE in model else model

    def reply_fault(self, model: Weights) -> str | None:
        """A client's row is of unit length, as `after_step` leaves it."""
        if not self.weight or TABLE not in model:
            return None
        length = non_unit_length(model[TABLE], ROUNDED)
        return None if length is None else f"`model` {TABLE} has length {length:.3g}, not 1"

    def note(self, method: Method, cohort: int) -> str:
        """A warning if there is only one client, or if moments move rows of absent clients."""
        if method.world.clients == 1:
            return "there is one client, so user verification has nothing to distinguish"
        drifts = any(getattr(method.server_optimiser, key, 0) for key in ("beta1", "momentum"))
        if not drifts or self.rows == "lazy" or cohort >= method.world.clients:
            return ""
        return (
            f"{cohort} of {method.world.clients} clients take part in a round, and the server's "
            "moments move the rows of the others as well; terms.uv.rows=lazy leaves them"
        )

    # ---- bounds ------------------------------------------------------------------------------
    def measures(self, objective: Objective) -> tuple[str, ...]:
        """The cost of either view, and the local bound where the objective is InfoNCE's kind."""
        return ("first", "second", *(["local"] if isinstance(objective, SimCLR) else []))

    def measure(
        self, parts: Parts, seen: Seen, context: Context, objective: Objective
    ) -> list[Tensor]:
        """The costs of one batch, and the local bound."""
        costs = self._costs(parts, seen.h, context.me)[:2]
        if isinstance(objective, SimCLR):
            loss = info_nce(*seen.pair(), objective.temperature)
            costs.append(bound(loss, len(seen.batch.index)))
        return costs

    def report(self, means: Mapping[str, float], entropy: float) -> dict[str, Any]:
        """The bounds in nats, none of them clipped; `entropy` is that of the clients."""
        return {"bounds": {**bounds(means, entropy), "entropy": entropy, "scale": self.scale}}


def _table(parts: Parts) -> nn.Parameter:
    return cast(Rows, parts["uv"]).weight


def verification(inputs: Tensor, rows: Tensor, me: int, scale: float = 1.0) -> Tensor:
    """Mean over inputs of -log softmax of the client `me` among all rows, by scaled cosines.

    Args:
        inputs: outputs of the projector, (n, size).
        rows: one for each client, (clients, size).
        me: the client whose inputs these are.
        scale: of the cosines.

    >>> verification(torch.eye(3)[:1], torch.eye(3), me=0, scale=80.0).item()
    0.0
    """
    logits = scale * functional.normalize(inputs) @ functional.normalize(rows).T
    return functional.cross_entropy(logits, torch.full((len(logits),), me, device=logits.device))


def bounds(means: Mapping[str, float], entropy: float) -> dict[str, float]:
    """Lower bounds of mutual information in nats, from verification costs and the local bound.

    `client`: of a view and its client (lemma 2.1, mean of both views); `labels`: of both views and
    the unknown label, where clients differ by labels alone (proposition 2); `local`: of the views
    within a client (proposition 1); `total`: of the views over all clients (eq. 6).

    >>> bounds({"first": 0.5, "second": 0.5, "local": 2.0}, entropy=1.0)
    {'client': 0.5, 'labels': 1.0, 'local': 2.0, 'total': 2.0}
    """
    both = means["first"] + means["second"]
    lower = {"client": entropy - both / 2, "labels": 2 * entropy - both}
    if "local" in means:
        lower |= {"local": means["local"], "total": means["local"] - both + entropy}
    return lower
