"""The rules by which `harmonium start` chooses a recipe, as a table that a reader can check.

A rule is a condition on the facts and the settings that follow. For each subject the first rule
whose condition holds is taken. Facts come from the images (`harmonium inspect`), the machine and
the diagnosis of the clients; no label has a part in them. How many rounds fit is measured, in
`studies/start.py`. `docs/your-images.md` prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 2  # full batches in a client's pass up to which training is nearly synchronous
ROUNDS = 100  # fewest rounds of near-synchronous training that verification is chosen for
BATCH = 64  # images a step, where clients have enough
LEAST_BATCH = 8
ENOUGH = 20  # rounds below which something cheaper is tried
MOST = 200  # rounds at most
EVALUATIONS = 10  # in a run, about
PATIENCE = 3  # of them without improvement that end a run
CPU_SIDE = 64  # pixels at most without an accelerator


@dataclass(frozen=True)
class Facts:
    """What choices are made from."""

    clients: int
    named: bool  # whether the data name them; else they are equal shares
    typical: int  # training images of the median client
    kind: str  # of image
    side: int  # pixels, as `inspect` suggests
    device: str  # where clients train, e.g. cpu
    cores: int
    memory: float  # GiB of this machine
    verdict: str | None = None  # of the diagnosis; None where clients are shares of one set

    @property
    def batch(self) -> int:
        """Images a step: half of a typical client's at most, as a power of two."""
        half = max(LEAST_BATCH, self.typical // 2)
        return min(BATCH, 1 << (half.bit_length() - 1))

    @property
    def steps(self) -> int:
        """Batches in a pass over a typical client's images."""
        return max(1, -(-self.typical // self.batch))

    @property
    def is_synchronous(self) -> bool:
        """Whether a pass over a typical client's images is so few steps that clients stay close."""
        return self.typical <= STEPS * BATCH


@dataclass(frozen=True)
class Rule:
    """Settings that follow where a condition holds."""

    when: str  # the condition in words
    holds: Callable[[Facts], bool]
    then: str  # what is chosen, in words
    settings: Mapping[str, Any]


VERIFICATION: Mapping[str, Any] = {
    "objective": "infonce",
    "terms.uv.scale": 10,
    "server": "adam",
    "server.lr": 0.003,
    "server.weighting": "uniform",
    "local.epochs": 1,
    "local.batch": BATCH,
    "local.lr": 0.3,
    "local.momentum": 0.0,
    "local.schedule": "constant",
    "local.clip": None,
}
"""The training in which user verification leads: the study verification-label-skew."""

AVERAGING: Mapping[str, Any] = {"objective": "simclr"}

TABLE: Mapping[str, tuple[Rule, ...]] = {
    "method": (
        Rule(
            f"clients differ in content, a client's pass has at most {STEPS * BATCH} images, and "
            f"{ROUNDS} rounds fit",
            lambda f: f.verdict == "content" and f.is_synchronous,
            "Federated SimCLR: FedAvg of InfoNCE with user verification, Adam at the server",
            VERIFICATION,
        ),
        Rule("otherwise", lambda f: True, "FedAvg of SimCLR", AVERAGING),
    ),
    "passes": (
        Rule(
            "a pass over a typical client's images is fewer than 10 batches",
            lambda f: f.steps < 10,
            "two passes a round",
            {"local.epochs": 2},
        ),
        Rule("otherwise", lambda f: True, "one pass a round", {"local.epochs": 1}),
    ),
    "encoder": (
        Rule(
            "there is an accelerator",
            lambda f: f.device != "cpu",
            "ResNet-18",
            {"encoder": "resnet18"},
        ),
        Rule("otherwise", lambda f: True, "the small network", {"encoder": "cnn-small"}),
    ),
    "size": (
        Rule(
            f"no accelerator, and more than {CPU_SIDE} pixels are suggested",
            lambda f: f.device == "cpu" and f.side > CPU_SIDE,
            f"{CPU_SIDE} pixels",
            {"data.size": CPU_SIDE},
        ),
        Rule("otherwise", lambda f: True, "as `inspect` suggests", {}),
    ),
    "workers": (
        Rule(
            "less memory than one GiB for each core",
            lambda f: f.device == "cpu" and f.memory < f.cores,
            "no processes beside this one",
            {"engine.workers": 0},
        ),
        Rule("otherwise", lambda f: True, "one process for each core", {}),
    ),
}
"""For each subject its rules, in the order in which they are tried."""

CHEAPER: tuple[Rule, ...] = (
    Rule(
        "the small network",
        lambda f: f.device == "cpu",
        "half its width",
        {"encoder.width": 16, "encoder.out": 128},
    ),
    Rule("more than 32 pixels", lambda f: f.side > 32, "32 pixels", {"data.size": 32}),
)
"""What is given up, one after the other, while fewer than `ENOUGH` rounds fit."""


def chosen(subject: str, facts: Facts) -> Rule:
    """The first rule of a subject that holds.

    >>> facts = Facts(3, True, 900, "scan", 96, "cpu", 2, 8.0, "style")
    >>> chosen("method", facts).then, chosen("size", facts).then, facts.batch
    ('FedAvg of SimCLR', '64 pixels', 64)
    """
    return next(rule for rule in TABLE[subject] if rule.holds(facts))
