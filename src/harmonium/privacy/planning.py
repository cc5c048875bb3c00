"""Planning of Gaussian noise before a run: noise for a budget, or the budget of some noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from harmonium.core.errors import ConfigError, suggest
from harmonium.core.settings import coerce
from harmonium.privacy import budget
from harmonium.privacy.calibration import sigma_for
from harmonium.privacy.library import epsilon_pld
from harmonium.privacy.mechanisms import Neighbours

FAR = {"replace": math.sqrt(2), "add-remove": 1.0}  # how far one image moves n R, divided by mu
_KEYS: dict[str, Any] = {
    "epsilon": float | None,
    "sigma": float | None,
    "multiplier": float | None,
    "delta": float,
    "rounds": int,
    "examples": int | None,
    "mu": float | None,
    "dim": int | None,
    "neighbours": Neighbours,
}


@dataclass(frozen=True)
class Plan:
    """Gaussian noise on one release a round, and what it amounts to."""

    epsilon: float  # of all rounds, exactly
    rdp: float  # the same by Renyi divergences, as papers often report it
    each: float  # of one round, exactly
    delta: float
    rounds: int
    neighbours: str
    multiplier: float  # standard deviations of noise for each unit of sensitivity
    examples: int | None
    mu: float | None
    sensitivity: float | None  # of a correlation matrix
    sigma: float | None  # of its noise
    dim: int | None
    noise_norm: float | None  # expected norm of the noise that a matrix gets
    kept_norm: float | None  # of its symmetric half, which is what is left of it
    notes: tuple[str, ...]

    @cached_property
    def pld(self) -> float | None:
        """Epsilon of all rounds by dp-accounting; none where it is not installed."""
        one = {"mechanism": "gaussian", "sensitivity": 1.0, "scale": self.multiplier}
        return epsilon_pld([{**one, "count": self.rounds}], self.delta)

    def plain(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {**asdict(self), "pld": self.pld}


def plan(
    *,
    epsilon: float | None = None,
    sigma: float | None = None,
    multiplier: float | None = None,
    delta: float = 1e-5,
    rounds: int = 1,
    examples: int | None = None,
    mu: float | None = None,
    dim: int | None = None,
    neighbours: Neighbours = "replace",
) -> Plan:
    """Noise for a budget, or the budget of some noise, for one Gaussian release a round.

    Args:
        epsilon: the budget of all rounds; then the noise is found.
        sigma: the noise of a correlation matrix as FedSC sends it; then epsilon is found.
        multiplier: the same for any release: its noise over its sensitivity.
        delta: of the budget.
        rounds: releases of a client.
        examples: of a client; with mu they give the sensitivity of a correlation matrix.
        mu: largest squared norm of a projection.
        dim: of a projection, for the norm of the noise.
        neighbours: `replace`, one image in another's place, or `add-remove`.

    >>> found = plan(epsilon=3, delta=1e-5, rounds=200, examples=5000, mu=4, dim=512)
    >>> round(found.multiplier, 2), round(found.sigma, 4), round(found.rdp, 2)
    (19.67, 0.0222, 3.71)
    """
    given = {"epsilon": epsilon, "sigma": sigma, "multiplier": multiplier}
    sizes = {"rounds": rounds, "examples": examples, "mu": mu, "dim": dim}
    _check(neighbours, given, sizes)
    sensitivity = None if examples is None or mu is None else FAR[neighbours] * mu / examples
    if epsilon is not None:
        multiplier = sigma_for(epsilon, delta, sensitivity=1.0, releases=rounds)
    elif sigma is not None and sensitivity is not None:
        multiplier = sigma / sensitivity
    assert multiplier is not None
    release = {"mechanism": "gaussian", "sensitivity": 1.0, "scale": multiplier}
    releases = [{**release, "count": rounds}]
    sigma = None if sensitivity is None else multiplier * sensitivity
    norm = None if sigma is None or dim is None else sigma * dim
    return Plan(
        epsilon=budget.epsilon(releases, delta),
        rdp=budget.epsilon_rdp(releases, delta),
        each=budget.epsilon([release], delta),
        delta=delta,
        rounds=rounds,
        neighbours=neighbours,
        multiplier=multiplier,
        examples=examples,
        mu=mu,
        sensitivity=sensitivity,
        sigma=sigma,
        dim=dim,
        noise_norm=norm,
        kept_norm=None if norm is None or dim is None else norm * math.sqrt((1 + 1 / dim) / 2),
        notes=tuple(_notes(delta, examples, mu, dim, norm)),
    )


def _check(
    neighbours: str, given: Mapping[str, float | None], sizes: Mapping[str, float | None]
) -> None:
    """Refuse settings that do not describe one plan; `given` are the noise and the budget."""
    if neighbours not in FAR:
        raise ConfigError(f"neighbours is '{neighbours}': {suggest(neighbours, FAR)}")
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = " and ".join(named) if named else "none of them"
        raise ConfigError(f"give one of epsilon, sigma and multiplier; there is {what}")
    for name, value in {**given, **sizes}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be above 0")
    if "sigma" in named and (sizes["examples"] is None or sizes["mu"] is None):
        raise ConfigError("sigma is the noise of a correlation matrix: give examples and mu, too")


def plan_from(words: list[str]) -> Plan:
    """The same from `key=value` words."""
    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"'{word}' is not a setting of a plan: {suggest(key, _KEYS)}")
        values[key] = coerce(key, _KEYS[key], value)
    return plan(**values)


def _notes(
    delta: float, examples: int | None, mu: float | None, dim: int | None, noise_norm: float | None
) -> list[str]:
    notes = []
    matrix = {"examples": examples, "mu": mu, "dim": dim}
    given = [name for name, value in matrix.items() if value is not None]
    if given and (lacking := [name for name in ("examples", "mu") if name not in given]):
        notes.append(
            f"{' and '.join(given)} describe a correlation matrix, whose noise also needs "
            f"{' and '.join(lacking)}"
        )
    if examples is not None and delta >= 1 / examples:
        notes.append(
            f"delta {delta:g} is not below 1 / {examples} examples: publishing one image as it "
            f"is would be within it, so epsilon means little; choose at most {0.1 / examples:.0e}"
        )
    if noise_norm is not None and mu is not None and noise_norm > mu:
        notes.append("the noise of one matrix is larger than any signal in it can be")
    notes.append(
        "this covers the noisy releases alone; weights that are sent beside them have no noise"
    )
    return notes
