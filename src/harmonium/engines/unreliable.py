"""Unreliable clients: an engine wrapper that drops answers as `participation` specifies.

Everything follows from the seed, the round, the ask and the client, never from the machine: the
same clients fail with any number of workers and after any crash. A client needs its number of
examples over the mean number, `slowdown` times that if it is one of the slow, times a mild
log-normal jitter. Answers after the deadline are refused, and when a round asked more clients than
it needs, only the first answers are kept.

Tasks whose answers would be lost are not run at all. The result is the same, because the state of
a client is accepted only together with its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from harmonium.core import codec, seeds
from harmonium.core.types import ClientId
from harmonium.federation.driver import Engine, Reply, Turn
from harmonium.federation.sampling import Participation
from harmonium.federation.wire import Ask, is_measuring

JITTER = 0.2  # standard deviation of the logarithm of a client's time between asks


@dataclass
class Unreliable:
    """Passes to `engine` what would be answered in time, and reports the rest as lost."""

    engine: Engine
    participation: Participation
    seed: int
    examples: Mapping[ClientId, int]  # registered number of examples of every client

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """First the clients that do not answer, with the reason; then the replies of `engine`."""
        lost = self.lost(ask, turn)
        yield from (Reply(client, None, f"{why} (simulated)") for client, why in lost.items())
        if answering := [client for client in ask.to if client not in lost]:
            yield from self.engine.deliver(replace(ask, to=answering), turn)

    def lost(self, ask: Ask, turn: Turn) -> dict[ClientId, str]:
        """The asked clients that do not answer in time, with the reason; none while measuring."""
        if is_measuring(ask.step, turn.round):
            return {}
        rules = self.participation
        reasons, times = {}, {}
        for client in ask.to:
            if self._rng("dropout", turn, client).random() < rules.dropout:
                reasons[client] = "dropped out"
                continue
            time = self.time(client, turn)
            if rules.deadline is not None and time > rules.deadline:
                reasons[client] = f"too late: {time:.3g} of at most {rules.deadline:g}"
            else:
                times[client] = time
        if self._is_cohort(ask, turn):
            wanted = rules.size(len(self.examples))
            for client in sorted(times, key=lambda c: (times[c], c))[wanted:]:
                reasons[client] = f"not needed: {wanted} had answered before it"
        return reasons

    def time(self, client: ClientId, turn: Turn) -> float:
        """The time that a client takes, relative to an average client."""
        slow = self.participation.slowdown if client in self.slow else 1.0
        jitter = self._rng("time", turn, client).lognormal(0.0, JITTER)
        return float(self.examples[client] / self._mean * slow * jitter)

    @cached_property
    def _mean(self) -> float:
        return max(sum(self.examples.values()) / len(self.examples), 1.0)

    @cached_property
    def slow(self) -> frozenset[ClientId]:
        """The clients that are slow throughout the run."""
        everyone = sorted(self.examples)
        count = round(self.participation.stragglers * len(everyone))
        rng = seeds.numpy_rng(self.seed, "stragglers")
        return frozenset(everyone[int(i)] for i in rng.choice(len(everyone), count, replace=False))

    def _is_cohort(self, ask: Ask, turn: Turn) -> bool:
        """Whether an ask goes to the round's whole cohort; any other ask needs all its answers."""
        everyone = sorted(self.examples)
        cohort = self.participation.cohort(everyone, turn.round, self.seed)
        return turn.round > 0 and set(ask.to) == set(cohort)

    def _rng(self, purpose: str, turn: Turn, client: ClientId) -> Any:
        return seeds.numpy_rng(self.seed, purpose, turn.round, turn.ask, client)

    def accept(self, reply: Reply) -> None:
        """Accept the state of a counted reply."""
        self.engine.accept(reply)

    def snapshot(self) -> codec.Tree:
        """The engine's snapshot; nothing is added, because all randomness is keyed."""
        return self.engine.snapshot()

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the states of a checkpoint."""
        self.engine.restore(snapshot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
