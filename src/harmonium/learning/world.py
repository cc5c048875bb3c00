"""The facts about a run that methods, objectives and encoders depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The facts known before the model is built: clients, rounds, and the shape of the images."""

    clients: int = 2
    rounds: int = 1
    channels: int = 3
    side: int = 32  # pixels
    classes: int = 0  # 0: unlabelled
    seed: int = 0
    epsilon: float | None = None  # the most that a client's noisy releases may spend together
    delta: float = 1e-5  # at which epsilon is counted
