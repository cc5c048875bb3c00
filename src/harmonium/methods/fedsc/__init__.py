"""FedSC: clients contrast their images against the correlation matrices of all other clients.

Jing et al., FedSC: Provable Federated Self-supervised Learning with Spectral Contrastive Objective
over Non-i.i.d. Data, ICML 2024. Algorithm 1 is `FedSC.round`, Algorithm 2 (DP-CalR) is
`FedSC.correlate` with `noise.py`; the loss of section 5.2 is `correlation_contrast` in
`learning/objectives/spectral.py`.

Symbols
    j, q_j      a client, and its share of all images
    z           projection of a view, clipped to |z|^2 <= mu; H its size (`objective.out`)
    R_j         correlation matrix of client j: mean of z z^T over views of all of its images
    R+_j        mean of z z'^T over pairs of views of the same image; only its trace is needed
    R_{-j}      mean correlation matrix of all other clients, weighted by their images
    alpha_j     weight of the contrast within the client

Local objective, eq. 80, which is eq. 5 with alpha_j in place of q_j; R_{-j} gets no gradient:

    L_j = -Tr R+_j + alpha_j / 2 |R_j|_F^2 + (1 - alpha_j) Tr(R_j R_{-j})

The code minimises 2 L_j, as the released code does; the published learning rates belong to that.
With alpha_j = q_j (`coefficient: share`) the clients' gradients, weighted by q_j, add up to that of
the global objective (eq. 6). The published runs use a line from 1 towards 0.2 (`decay`, appendix
C), which gives that identity up. If no other client's matrix is known, alpha_j is 1: before the
first exchange this is FedAvg with the spectral loss.

Messages
    ask         to                           down                   up
    correlate   the cohort; in the first     model                  corr: R_j, packed
                exchange all clients
    train       the cohort                   model, others: R_{-j}  model, loss
                                             packed, alpha

The server remembers `corr`, the newest R_j of every client that sent one; `since`, the round of
each; and `asked`, how often each client was asked for one. Clients keep nothing: the server sends
R_{-j} rather than the mean of all matrices (Algorithm 1, lines 9, 16 and 20), which takes as many
bytes and spares the client remembering the noisy R_j that it would have to subtract. No message is
per example: R_j is a statistic over all images of a client, with noise if `epsilon` or `sigma` is
set. The noise does not protect the model, which is sent without noise.

Where this code departs from the paper
    - Models are averaged by numbers of images. Line 23 prints the uniform mean, but eq. 6 needs
      q_j; for clients of equal size they are the same.
    - Only the symmetric half of the noise has an effect, as Tr(R N) = Tr(R (N + N^T) / 2) for
      symmetric R. So the symmetric half is sent, packed: H (H + 1) / 2 numbers instead of H^2.
    - With `decay` alpha_j is exactly 1 in round 1, so no loss uses the matrices of that round, and
      all are replaced before the next if all clients take part. A noisy release in round 1 would
      spend budget on nothing. With noise and `decay` the first exchange is therefore in round 2 or
      later, and the budget is divided among the releases that are used.
    - Sensitivity, calibration and partial participation: see `noise.py`.

Where it departs from the released code
    - R_{-j} is weighted by numbers of images; the code takes the uniform mean over the others.
    - All clients take part in the first exchange (lines 4 to 9), and matrices of absent clients
      stay (line 17). Exchanges follow a schedule (`first`, `every`; Table 6 of the paper). The code
      exchanges in every round.
    - Noise follows from a budget and each client's number of images; the code has sigma hard-coded.

What the paper leaves open: "V = 5" views for the matrices. The code makes 5 passes over the images
with two views each, so 10 views of an image; `passes: 5` is the same. More views change nothing
in the sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from harmonium.core.devices import to_double
from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.spending import affordable
from harmonium.federation.wire import (
    Ask,
    Field,
    Folded,
    Plan,
    Value,
    exchange,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen, check
from harmonium.learning.objectives.spectral import Spectral, correlation_contrast, shortened
from harmonium.learning.parts import Parts
from harmonium.learning.symmetric import pack, positive, triangle, unpack
from harmonium.methods import methods
from harmonium.methods.fedsc.noise import Neighbours, is_plausible, sensitivity
from harmonium.privacy.calibration import sigma_for
from harmonium.privacy.mechanisms import Release


@dataclass(frozen=True, kw_only=True)
class InterClientContrast(Context):
    """What the loss of a client needs of the other clients."""

    others: Tensor | None  # R_{-j}, (H, H); none where alpha is 1
    alpha: float  # alpha_j
    weight: float  # of Tr(R_j R_{-j}): 1 - alpha_j


def _correlation_field(method: FedSC) -> Field:
    """A packed correlation matrix, guarded if it has noise."""
    size = triangle(method.spectral.out)
    return statistic("each", guarded=method.private, shape=lambda method, examples: (size,))


@methods("fedsc")
@dataclass(frozen=True)
class FedSC(Method):
    """FedAvg whose clients know the mean correlation matrix of all others."""

    paper = "Jing et al., 2024"
    context = InterClientContrast
    remembers = {"corr": "statistic", "since": "scalar", "asked": "scalar"}

    coefficient: Literal["decay", "share"] = "decay"  # alpha: a line to `final`, or n / all
    final: float = 0.2  # where decay ends; 1: no exchange, FedAvg with the spectral loss
    first: int = 1  # round of the first exchange, with everyone; with noise and decay 2 or later
    every: int = 1  # rounds from one exchange to the next
    passes: int = 5  # over a client's images for its matrix; each makes all views
    epsilon: float | None = None  # budget of a client's matrices in the run; none: no noise
    delta: float = 1e-5  # of the budget; should be far below 1 / images of a client
    releases: int | None = None  # matrices of a client in the run; none: one an exchange
    sigma: float | None = None  # standard deviation of noise, in place of epsilon
    neighbours: Neighbours = "replace"  # what a budget cannot tell apart
    psd: bool = False  # drop negative eigenvalues, which noise alone brings

    def __post_init__(self) -> None:
        if not (isinstance(self.objective, Spectral) and self.objective.form == "fedsc"):
            raise ConfigError(
                "fedsc contrasts by correlation matrices: set objective=spectral "
                f"objective.form=fedsc (objective is {self.objective.name})"
            )
        check(self, "at least 1", lambda n: n >= 1, "first", "every", "passes", "releases")
        check(self, "at least 0", lambda sigma: 0 <= sigma < math.inf, "sigma")
        check(self, "between 0 and 1", lambda final: 0 <= final <= 1, "final")
        check(self, "above 0", lambda epsilon: 0 < epsilon < math.inf, "epsilon")
        check(self, "above 0 and below 1", lambda delta: 0 < delta < 1, "delta")
        if self.epsilon is not None and self.sigma is not None:
            raise ConfigError("method.epsilon decides on the noise, and so does sigma: set one")

    @property
    def spectral(self) -> Spectral:
        """The objective, whose type `__post_init__` has checked."""
        return cast(Spectral, self.objective)

    # ---- when matrices are exchanged -----------------------------------------------------------
    @property
    def private(self) -> bool:
        """Whether matrices get noise."""
        return self.epsilon is not None or bool(self.sigma)

    @property
    def first_exchange(self) -> int:
        """The round of the first exchange; noisy matrices that no loss would use are not sent."""
        return max(self.first, 2) if self.private and self.coefficient == "decay" else self.first

    @property
    def planned_releases(self) -> int:
        """How many matrices a client may send in the run (T_j): as set, or one an exchange."""
        exchanges = range(self.first_exchange, self.world.rounds + 1, self.every)
        return self.releases or max(1, len(exchanges))

    def exchanges_in(self, round: int) -> bool:
        """Whether matrices are renewed in a round; never where alpha is 1 in all rounds."""
        used = self.coefficient == "share" or self.final < 1
        since_first = round - self.first_exchange
        return used and since_first >= 0 and since_first % self.every == 0

    @property
    def exchanges_matrices(self) -> bool:
        """Whether matrices are sent in any round."""
        return any(self.exchanges_in(round) for round in range(1, self.world.rounds + 1))

    # ---- server (Algorithm 1) ------------------------------------------------------------------
    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Renew the cohort's matrices, then have it train against those of all others."""
        memory = dict(server.memory)
        if self.exchanges_in(server.round):  # lines 4 to 18; appendix C: not in every round
            renewed = yield from self.renew_matrices(server, cohort)
            memory |= renewed
        matrices = memory.get("corr", {})
        each = {client: self.contrast_for(server, client, matrices) for client in cohort}
        got = yield Ask("train", cohort, {"model": server.model}, each)  # lines 19 to 22
        return replace(self.merge(server, got.model), memory=memory)  # line 23, by images

    def renew_matrices(
        self, server: Server, cohort: Sequence[ClientId]
    ) -> Generator[Ask, Folded, dict[str, Any]]:
        """Ask for matrices, and return what the server remembers of them afterwards."""
        matrices: dict[str, Tensor] = dict(server.memory.get("corr", {}))
        # How often each client was asked, not how often it answered: a lost reply may have been
        # seen by someone, so it counts as a release.
        asked = dict(server.memory.get("asked", {}))
        most_releases = self.planned_releases if self.private or self.releases else math.inf
        # Lines 4 to 8: as long as no matrix is known, everyone sends one. Lines 11 to 15: later
        # only the cohort does. A client that has spent its budget sends no more; its last matrix
        # stays in use.
        eligible = cohort if matrices else server.everyone
        eligible = [client for client in eligible if asked.get(str(client), 0) < most_releases]
        eligible = affordable(self, server, "correlate", eligible)
        got = yield Ask("correlate", eligible, {"model": server.model}, least=0)
        matrices |= {str(client): packed for client, packed in got.corr.items()}  # lines 14, 17
        since = {**server.memory.get("since", {}), **{str(c): server.round for c in got.ids}}
        asked |= {str(client): asked.get(str(client), 0) + 1 for client in eligible}
        return {"corr": matrices, "since": since, "asked": asked}

    def contrast_for(
        self, server: Server, client: ClientId, matrices: Mapping[str, Tensor]
    ) -> dict[str, Value]:
        """R_{-j} over the other clients with known matrices, and alpha_j of this client.

        Line 20 has R_{-j} = (R - q_j R_j) / (1 - q_j); the mean over the others is the same. While
        some matrices are unknown, shares are among the known ones and this client.
        """
        others = {other: packed for other, packed in matrices.items() if other != str(client)}
        total = sum(server.examples[int(other)] for other in others)
        if not total:  # q_j = 1: the third term of eq. 80 vanishes
            return {"others": torch.zeros(triangle(self.spectral.out)), "alpha": 1.0}
        mean = sum(server.examples[int(o)] / total * m.double() for o, m in others.items())
        own = server.examples[client]
        # Appendix C: from 1 in round 1 to `final`, which round T + 1 would have; 0.204 at the end
        # of 200 rounds, as in the released code.
        line = 1 - (1 - self.final) * (server.round - 1) / self.world.rounds
        alpha = own / (own + total) if self.coefficient == "share" else line
        return {"others": cast(Tensor, mean).float(), "alpha": alpha}

    def noted(self, server: Server) -> dict[str, float]:
        """How many rounds old matrices are, in the mean."""
        since = server.memory.get("since", {}).values()
        return {"age": server.round - sum(since) / len(since)} if since else {}

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Refuse a matrix that cannot be a correlation matrix with the declared noise."""
        if step == "correlate":
            mu = self.spectral.mu
            sigma = sum(release.scale for release in self.costs(step, examples))
            matrix = unpack(up["corr"].double(), self.spectral.out)
            if not is_plausible(matrix, mu, sigma, psd=self.psd):
                return f"`corr` has eigenvalues or a trace beyond 0 and mu={mu:g}, and its noise"
        return super().reply_fault(step, down, up, examples)

    # ---- client --------------------------------------------------------------------------------
    @exchange(down={"model": weights()}, up={"corr": _correlation_field}, when=exchanges_matrices)
    def correlate(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Algorithm 2, DP-CalR: the mean of z z^T over views of all images, and noise.

        The model is in evaluation mode, so that no image moves another's z, as the sensitivity
        assumes. Sums of thousands of rank-one matrices need double precision.
        """
        parts, images = self.pull(client, got.model).eval(), len(client.examples)
        total = to_double(torch.zeros(self.spectral.out, self.spectral.out, device=client.device))
        with torch.no_grad():
            for batch in client.batches(self.passes, self.local.batch, least=1):  # lines 3 and 4
                views = self.see(parts, batch).z
                projections = to_double(torch.cat(views))
                if self.private:  # a row that is not finite would show in the sum despite noise
                    projections = projections.nan_to_num(0.0, 0.0, 0.0)
                clipped = shortened(projections, self.spectral.mu)  # line 5: to sqrt(mu)
                total += clipped.T @ clipped / len(views)
        correlation = total / (self.passes * images)  # line 6: 1 / (|D_j| V)
        if not self.private:
            return {"corr": pack(correlation)}
        (noise,) = self.costs("correlate", images)
        # Post-processing of a noisy value is free: `pack` takes the symmetric half, `positive`
        # projects to the positive semi-definite matrices.
        then = (lambda noisy: pack(positive(noisy))) if self.psd else pack
        return {"corr": client.release("corr", correlation, **noise.how, then=then)}  # line 8

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """One matrix; with a budget, sigma follows from the client's number of images."""
        if step != "correlate" or not self.private:
            return ()
        moved = sensitivity(self.spectral.mu, examples, self.neighbours)
        budget: Any = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "releases": self.planned_releases,
        }
        sigma = self.sigma or sigma_for(**budget, sensitivity=moved)
        return (Release("corr", "gaussian", moved, sigma, neighbours=self.neighbours),)

    @exchange(down={"model": weights(), "others": statistic(), "alpha": scalar()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Algorithm 1, line 21: train against R_{-j}."""
        parts = self.pull(client, got.model)
        others = None if got.alpha == 1 else unpack(got.others, self.spectral.out)
        context = InterClientContrast(
            me=client.id, anchor=got.model, others=others, alpha=got.alpha, weight=1 - got.alpha
        )
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: InterClientContrast) -> Tensor:
        """Eq. 80 twice, of one batch (section 5.2): -2 Tr R+ + alpha |R|^2 + 2 (1 - alpha) Tr(...).

        Projections are clipped to sqrt(mu) here as well, as in the released code.
        """
        return correlation_contrast(
            seen.z,
            self.spectral.mu,
            alpha=context.alpha,
            others=context.others,
            weight=context.weight,
        )

    def passes_of(self, step: str) -> float:
        """A matrix takes passes of its own."""
        return self.passes if step == "correlate" else super().passes_of(step)
