"""FedSC: clients contrast against each other's correlation matrices, which may carry noise.

Jing et al., FedSC: Provable Federated Self-supervised Learning with Spectral Contrastive Objective
over Non-i.i.d. Data, 2024, Algorithm 1. Before it trains, a client sends the mean of z z^T over
views of its images (z: projections shortened to a norm of sqrt(mu)); the server keeps everyone's
newest and sends to each client the mean of the others', by number of images. The client minimises

    -2 Tr R+ + alpha |R|^2 + 2 (1 - alpha) Tr(R R_others),

equation 80 twice, as the released code, whose learning rates belong to that. With alpha its share
of all images (`coefficient: share`, equation 5) the clients' gradients add up to that of all
images together; the paper trains with a line from 1 to 0.2 (`decay`). A client without others
has alpha 1, so before the first exchange this is FedAvg with the spectral loss.

Where paper and code differ: models are averaged by images, as equation 6 needs; matrices are over
5 passes of all views; all send theirs in the first exchange; those of absent clients stay.

Private: noise of N(0, sigma^2) on every entry, of which the symmetric half is sent, packed. The
proof takes mu / n for how far one image moves a matrix, which is right if it comes or goes while
the divisor stays n. Exchanging one for another moves it by sqrt(2) mu / n, as matrices z z^T have
no negative products; the published noise fits that, and it is the default. Each client's sigma
follows from the budget, the planned releases and its own n; who has made them all sends no more.
Published noise shrinks with partial participation, which spends more than it says: what counts is
how often a client sends. None of it protects the model, which is sent as it is.

With `decay` alpha is exactly 1 in round 1, here as in the released code: nobody's matrix is used
there, and under a full exchange each is replaced before it ever is. A noisy release in round 1
would spend budget on nothing, so with noise the first exchange, the one that everyone takes part
in, is in round 2 at the earliest, and the budget is divided among those that are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.spending import affordable
from harmonium.federation.wire import (
    Ask,
    Field,
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
from harmonium.learning.symmetric import is_between, pack, positive, triangle, unpack
from harmonium.methods import methods
from harmonium.privacy.calibration import sigma_for
from harmonium.privacy.mechanisms import Release

ROUNDING = 1e-3  # of mu: what single precision may add to the eigenvalues of a packed matrix


@dataclass(frozen=True, kw_only=True)
class Matrices(Context):
    """The mean matrix of the other clients, and how much the client's own counts."""

    others: Tensor | None  # (out, out); none: alpha is 1
    alpha: float


@methods("fedsc")
@dataclass(frozen=True)
class FedSC(Method):
    """FedAvg whose clients know the mean correlation matrix of all others."""

    paper = "Jing et al., 2024"
    context = Matrices
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
    neighbours: Literal["replace", "add-remove"] = "replace"  # what a budget cannot tell apart
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
        """The objective, which `__post_init__` has looked at."""
        return cast(Spectral, self.objective)

    @property
    def start(self) -> int:
        """The round of the first exchange: not one whose noisy matrices no loss would use."""
        return max(self.first, 2) if self.private and self.coefficient == "decay" else self.first

    @property
    def planned(self) -> int:
        """Matrices that a client may send: as told, or one an exchange."""
        return self.releases or max(1, len(range(self.start, self.world.rounds + 1, self.every)))

    @property
    def private(self) -> bool:
        """Whether matrices get noise."""
        return self.epsilon is not None or bool(self.sigma)

    def exchanging(self, round: int) -> bool:
        """Whether matrices are renewed in a round; never where none would be used."""
        used = self.coefficient == "share" or self.final < 1
        return used and round >= self.start and (round - self.start) % self.every == 0

    @property
    def exchanges_matrices(self) -> bool:
        """Whether matrices are sent in any round."""
        return any(self.exchanging(round) for round in range(1, self.world.rounds + 1))

    @property
    def correlation(self) -> Field:
        """A packed matrix, guarded if it has noise."""
        size = triangle(self.spectral.out)
        return statistic("each", guarded=self.private, shape=lambda method, examples: (size,))

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Renew the cohort's matrices, then have it train against those of all others."""
        memory = dict(server.memory)
        held: dict[str, Tensor] = dict(memory.get("corr", {}))
        if self.exchanging(server.round):
            asked = dict(memory.get("asked", {}))  # times; a lost answer may have been seen
            most = self.planned if self.private or self.releases else math.inf
            able = cohort if held else server.everyone
            able = [client for client in able if asked.get(str(client), 0) < most]
            able = affordable(self, server, "correlate", able)
            got = yield Ask("correlate", able, {"model": server.model}, least=0)
            held |= {str(c): sent for c, sent in got.corr.items()}
            since = {**memory.get("since", {}), **{str(c): server.round for c in got.ids}}
            asked |= {str(c): asked.get(str(c), 0) + 1 for c in able}
            memory |= {"corr": held, "since": since, "asked": asked}
        each = {client: self.of_others(server, client, held) for client in cohort}
        got = yield Ask("train", cohort, {"model": server.model}, each)
        return replace(self.merge(server, got.model), memory=memory)

    def of_others(
        self, server: Server, client: ClientId, held: Mapping[str, Tensor]
    ) -> dict[str, Value]:
        """The mean matrix of all others whose matrices are known, and this client's alpha."""
        others = {other: matrix for other, matrix in held.items() if other != str(client)}
        total = sum(server.examples[int(other)] for other in others)
        if not total:
            return {"others": torch.zeros(triangle(self.spectral.out)), "alpha": 1.0}
        mean = sum(server.examples[int(o)] / total * m.double() for o, m in others.items())
        own = server.examples[client]
        line = 1 - (1 - self.final) * (server.round - 1) / self.world.rounds
        alpha = own / (own + total) if self.coefficient == "share" else line
        return {"others": cast(Tensor, mean).float(), "alpha": alpha}

    def passes_of(self, step: str) -> float:
        """A matrix has passes of its own."""
        return self.passes if step == "correlate" else super().passes_of(step)

    def noted(self, server: Server) -> dict[str, float]:
        """How many rounds old matrices are, in the mean."""
        since = server.memory.get("since", {}).values()
        return {"age": server.round - sum(since) / len(since)} if since else {}

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """A matrix is the mean of z z^T with |z|^2 at most mu, plus its noise.

        So its trace and eigenvalues lie within 0 and mu. Noise of N(0, sigma^2) on d x d entries
        moves the trace by sigma sqrt(d) in the standard deviation, and an eigenvalue by hardly
        more than 2 sigma sqrt(d); 10 sigma more come to an honest client less than once in 10^20
        matrices.
        """
        if step == "correlate":
            dim, mu = self.spectral.out, self.spectral.mu
            sigma = sum(release.scale for release in self.costs(step, examples))
            far = sigma * (2 * math.sqrt(dim) + 10) + ROUNDING * mu
            wide = 10 * sigma * math.sqrt(dim) + ROUNDING * mu
            matrix = unpack(up["corr"].double(), dim)
            most = mu + (dim * far if self.psd else wide)  # without negative ones to cancel others
            within = is_between(matrix, -far, mu + far) and -wide <= matrix.trace() <= most
            if not within:
                return f"`corr` has eigenvalues or a trace beyond 0 and mu={mu:g}, and its noise"
        return super().reply_fault(step, down, up, examples)

    @exchange(down={"model": weights()}, up={"corr": correlation}, when=exchanges_matrices)
    def correlate(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """The mean of z z^T over views of all images; no image moves another's z."""
        parts, count = self.pull(client, got.model).eval(), len(client.examples)
        total = torch.zeros(self.spectral.out, self.spectral.out, dtype=torch.float64)
        with torch.no_grad():
            for batch in client.batches(self.passes, self.local.batch, least=1):
                views = self.see(parts, batch).z
                rows = torch.cat(views).double()
                if self.private:  # a row that is not finite would tell of its image
                    rows = rows.nan_to_num(0.0, 0.0, 0.0)
                rows = shortened(rows, self.spectral.mu)
                total += rows.T @ rows / len(views)
        matrix = total / (self.passes * count)
        if not self.private:
            return {"corr": pack(matrix)}
        (noise,) = self.costs("correlate", count)
        then = (lambda noisy: pack(positive(noisy))) if self.psd else pack
        return {"corr": client.release("corr", matrix, **noise.how, then=then)}

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """One matrix, whose noise follows from the number of images if a budget is given."""
        if step != "correlate" or not self.private:
            return ()
        far = (math.sqrt(2) if self.neighbours == "replace" else 1.0) * self.spectral.mu / examples
        budget: Any = {"epsilon": self.epsilon, "delta": self.delta, "releases": self.planned}
        sigma = self.sigma or sigma_for(**budget, sensitivity=far)
        return (Release("corr", "gaussian", far, sigma, neighbours=self.neighbours),)

    @exchange(down={"model": weights(), "others": statistic(), "alpha": scalar()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train against the others' matrix."""
        parts = self.pull(client, got.model)
        others = None if got.alpha == 1 else unpack(got.others, self.spectral.out)
        context = Matrices(me=client.id, anchor=got.model, others=others, alpha=got.alpha)
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Matrices) -> Tensor:
        """Equation 80 twice."""
        return correlation_contrast(
            seen.z, self.spectral.mu, alpha=context.alpha, others=context.others
        )
