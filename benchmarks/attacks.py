"""What two hostile clients of ten can do to an encoder, with and without a federation's defaults.

    python benchmarks/attacks.py [--seeds 0 1 2] [--json] [--runs FILE...]
                                 [--write docs/results/attacks.md]

Runs are on the digits that come along: ten clients with few classes each, twenty rounds, a CNN so
small that training adds twenty points to it and there is something to lose. Clients 3 and 7 lie in
every round; all they do is send other answers, so what arrives at the server is what a hostile site
could send. Figures are test kNN in percent of the frozen encoder. `simulation` is what a recipe has
unless told: the plain mean of the papers. `federation` is what `harmonium server start` has unless
told: changes longer than the round's median are shortened to it, and a majority must answer. Checks
on arrival are the same in both. `--json` prints a line for every run; files of such lines that are
given as `--runs` join the table and are not run again.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmonium import seeds
from harmonium.engines.local import LocalEngine
from harmonium.errors import HarmoniumError
from harmonium.federation.drive import Reply, Turn
from harmonium.federation.wire import Ask
from harmonium.recipe import Recipe
from harmonium.recipe_text import load_tree
from harmonium.report.tables import estimate, markdown
from harmonium.runs import run
from stored import arguments, before, show

Found = dict[str, Any]
Lie = Callable[[Mapping[str, Any], Mapping[str, Any], torch.Generator], dict[str, Any] | None]

LIARS = (3, 7)
ROUNDS = 20
ENCODER = {"name": "cnn-small", "width": 4, "out": 16}  # small: so that training shows
COSTS = 3.0  # points of kNN that no attack may cost with a federation's defaults
ARMS = {
    "simulation": {"aggregation": "mean"},
    "federation": {"aggregation": "norm-bound", "participation": {"quorum": "majority"}},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsc": {
        "objective": {"name": "spectral", "form": "fedsc", "mu": 4.0, "hidden": 128, "out": 64}
    },
    "fedca": {
        "method": {"name": "fedca", "align_epochs": 2},
        "public": {"name": "shapes", "count": 640, "test_count": 10},
    },
    "orchestra": {"method": {"name": "orchestra", "clusters": 16}},
}


# ---- lies ------------------------------------------------------------------------------------
def moved(by: float) -> Lie:
    """The honest change of the model so many times; below 0, backwards."""

    def lie(down: Mapping[str, Any], up: Mapping[str, Any], rng: torch.Generator) -> dict[str, Any]:
        model = {
            key: (sent + by * (up["model"][key] - sent)).to(sent.dtype)
            if sent.is_floating_point() and not key.endswith("running_var")
            else up["model"][key]
            for key, sent in down["model"].items()
            if key in up["model"]
        }
        return {**up, "model": model}

    return lie


def noise(down: Mapping[str, Any], up: Mapping[str, Any], rng: torch.Generator) -> dict[str, Any]:
    """Random weights of the deviation that the model's have, on top of them."""
    model = {
        key: sent + sent.std(correction=0) * torch.randn(sent.shape, generator=rng)
        if sent.is_floating_point() and not key.endswith("running_var")
        else up["model"][key]
        for key, sent in down["model"].items()
    }
    return {**up, "model": model}


def far(down: Mapping[str, Any], up: Mapping[str, Any], rng: torch.Generator) -> dict[str, Any]:
    """Weights of 3e38, which are finite."""
    model = {
        key: torch.full_like(value, 3e38) if value.is_floating_point() else value
        for key, value in up["model"].items()
    }
    return {**up, "model": model}


def absent(down: Mapping[str, Any], up: Mapping[str, Any], rng: torch.Generator) -> None:
    """Nothing at all: the least that two clients can cost."""


def with_field(name: str, change: Callable[[Tensor, torch.Generator], Any]) -> Lie:
    """Another value of one field, where an answer has it."""
    return lambda down, up, rng: {**up, name: change(up[name], rng)} if name in up else dict(up)


def random_rows(value: Tensor, rng: torch.Generator) -> Tensor:
    """Unit rows that say nothing: no check can tell them from honest ones."""
    return torch.nn.functional.normalize(torch.randn(value.shape, generator=rng), dim=-1)


def random_matrix(value: Tensor, rng: torch.Generator) -> Tensor:
    """A matrix within all bounds, of one direction."""
    size = (math.isqrt(8 * len(value) + 1) - 1) // 2
    direction = torch.nn.functional.normalize(torch.randn(size, generator=rng), dim=0)
    rows, columns = torch.triu_indices(size, size)
    return 3.9 * torch.outer(direction, direction)[rows, columns]


ATTACKS: dict[str, dict[str, Lie]] = {
    "fedavg": {
        "sign-flip x10": moved(-10.0),
        "change x100": moved(100.0),
        "noise": noise,
        "weights of 3e38": far,
    },
    "fedsc": {
        "matrix of 3e38": with_field("corr", lambda v, rng: torch.full_like(v, 3e38)),
        "matrix x1e8": with_field("corr", lambda v, rng: 1e8 * v),
        "matrix negated": with_field("corr", lambda v, rng: -v),
        "matrix of one direction": with_field("corr", random_matrix),
        "sign-flip x10": moved(-10.0),
    },
    "fedca": {
        "rows x1e6": with_field("rows", lambda v, rng: 1e6 * v),
        "rows of zeros": with_field("rows", lambda v, rng: torch.zeros_like(v)),
        "equal rows": with_field("rows", lambda v, rng: v[:1].expand(len(v), -1).clone()),
        "100 times the rows": with_field("rows", lambda v, rng: v.repeat(100, 1)),
        "random unit rows": with_field("rows", random_rows),
        "sign-flip x10": moved(-10.0),
    },
    "orchestra": {
        "500 times the centroids": with_field("centroids", lambda v, rng: v.repeat(500, 1)),
        "centroids x1e6": with_field("centroids", lambda v, rng: 1e6 * v),
        "anonymity as a tensor": with_field("anonymity", lambda v, rng: torch.ones(2)),
        "random unit centroids": with_field("centroids", random_rows),
        "sign-flip x10": moved(-10.0),
    },
}
CLEAN, ABSENT = "nobody lies", "nothing: they are absent"
OF_MODELS = ("sign-flip x10", "change x100", "noise", "weights of 3e38")
MORE = {  # beyond what the defaults promise: no check can see them, and they do not end
    (method, attack)
    for method in ("fedsc", "fedca", "orchestra")
    for attack in (
        "sign-flip x10",
        "matrix of one direction",
        "random unit rows",
        "random unit centroids",
    )
}


def recipe(method: str, arm: str, seed: int) -> Recipe:
    """The digits with a method's own objective and server, small."""
    own = load_tree(method) if method != "fedavg" else {}
    kept = {key: own[key] for key in ("method", "objective", "public") if key in own}
    if method == "orchestra":
        kept["views"] = own["views"]
        kept["local"] = {"epochs": 2, "batch": 64, "lr": 0.01, "schedule": "constant"}
    if method == "fedsc":
        kept["local"] = {"epochs": 2, "batch": 64, "lr": 0.03, "clip": 3.0}
    tree = {**load_tree("digits"), "encoder": ENCODER, "rounds": ROUNDS, **kept, **METHODS[method]}
    tree |= {**ARMS[arm], "seed": seed, "engine": {"workers": 0}}
    tree["evaluate"] = {**tree["evaluate"], "every": ROUNDS, "objective": False}
    return Recipe.from_tree(tree)


def lying(lie: Lie, seed: int) -> Callable[..., Iterator[Reply]]:
    """`LocalEngine.deliver` where some clients send something else."""
    honest = LocalEngine.deliver

    def deliver(engine: LocalEngine, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for reply in honest(engine, ask, turn):
            if reply.client in LIARS and reply.up:
                rng = seeds.torch_rng(seed, "attack", turn.round, turn.ask, reply.client)
                down = {**ask.down, **ask.each.get(reply.client, {})}
                up = lie(down, reply.up, rng)
                reply = replace(reply, up=up, why="" if up is not None else "it is absent")
            yield reply

    return deliver


def measure(method: str, attack: str, arm: str, seed: int) -> Found:
    """One run and what it came to."""
    found: Found = {"label": f"{method}/{attack}/{arm}", "seed": seed}
    honest = LocalEngine.deliver
    if attack != CLEAN:
        lie = ATTACKS[method].get(attack, absent)

        def only(down: Mapping[str, Any], up: Mapping[str, Any], rng: torch.Generator) -> Any:
            return lie(down, up, rng) if attack not in OF_MODELS or "model" in up else dict(up)

        LocalEngine.deliver = lying(only, seed)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = run(recipe(method, arm, seed), out=Path(folder) / "run")
            text = (Path(folder) / "run" / "ledger.jsonl").read_text(encoding="utf-8")
    except HarmoniumError as error:
        return {**found, "ended": f"{type(error).__name__}: {error}"}
    finally:
        LocalEngine.deliver = honest  # type: ignore[method-assign]
    lines = [json.loads(line) for line in text.splitlines()]
    refused = [line for line in lines if line["outcome"] == "refused"]
    return {
        **found,
        "knn": 100 * done.figures["knn"],
        "knn_untrained": 100 * done.untrained["knn"],
        "refused": len(refused) / max(1, sum(line["client"] in LIARS for line in lines)),
        "wrong": sum(line["client"] not in LIARS for line in refused),
        "why": refused[0]["why"] if refused else "",
    }


def page(runs: Sequence[Found]) -> str:
    """The table, and whether every attack stays within its bound."""
    by: dict[str, list[Found]] = {}
    for one in runs:
        by.setdefault(one["label"], []).append(one)
    rows, worst, beyond = [], -math.inf, -math.inf
    for method, attacks in ATTACKS.items():
        for attack in (CLEAN, ABSENT, *attacks):
            row: dict[str, Any] = {"method": method, "two of ten clients": attack}
            for arm in ARMS:
                if not (its := by.get(f"{method}/{attack}/{arm}", [])):
                    continue
                ended = any("ended" in one for one in its)
                clean = {one["seed"]: one["knn"] for one in by[f"{method}/{CLEAN}/{arm}"]}
                row[f"{arm}: kNN"] = "ends" if ended else estimate([one["knn"] for one in its])
                if attack == CLEAN:
                    continue
                cost = (math.inf, 0.0)
                if not ended:
                    cost = estimate([clean[one["seed"]] - one["knn"] for one in its])
                    row[f"{arm}: costs"] = cost
                    if attack != ABSENT:
                        row["refused"] = "yes" if any(one["why"] for one in its) else "no"
                if arm == "federation" and (method, attack) in MORE:
                    beyond = max(beyond, cost[0])
                elif arm == "federation" and attack != ABSENT:
                    worst = max(worst, cost[0])
            rows.append(row)
    untrained = estimate([one["knn_untrained"] for one in runs if "knn_untrained" in one])
    wrong = sum(one.get("wrong", 0) for one in runs)
    seeds_of = sorted({one["seed"] for one in runs})
    return "\n".join(
        [
            "# What two hostile clients of ten can do",
            "",
            "Test kNN in percent after 20 rounds on the digits, mean and standard error over seeds "
            f"{', '.join(map(str, seeds_of))}: `python benchmarks/attacks.py`. `costs` are points "
            "of kNN less than without liars, paired by seed. `refused`: whether the checks on "
            "arrival refuse the liars' answers, in both columns alike; what they cannot tell from "
            "honest answers counts. `simulation` has the plain mean, `federation` the defaults of "
            "`harmonium server start`: changes are bounded by the round's median, and a majority "
            f"must answer. An untrained encoder has {untrained[0]:.1f}. Settings are the digits' "
            "own and were not tuned for any method; the arms of a method differ in nothing else.",
            "",
            markdown(rows),
            "",
            "With the defaults of a federation the worst of the attacks on FedAvg's model and of "
            f"the lies that checks refuse costs {worst:.1f} points; {COSTS:g} are the most that "
            f"one may cost. Honest clients were refused {wrong} times.",
            "",
            "What no check can tell from an honest answer is bounded and not undone: a change in "
            "the wrong direction, of the median's length, in every round, and rows, centroids or "
            "a matrix that are well-formed and say nothing. Such lies, told of the methods beside "
            f"FedAvg, cost {beyond:.1f} points at most. Orchestra learns little on these images, "
            "so its rows show that nothing breaks and no more.",
            "",
        ]
    )


def main() -> None:
    """Run what is missing and show the page."""
    parser = arguments(__doc__, workers=False)
    parser.add_argument("--methods", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    asked = parser.parse_args()
    runs = before(asked)
    held = {(one["label"], one["seed"]) for one in runs}
    for seed in asked.seeds:
        for method in asked.methods:
            for attack in (CLEAN, ABSENT, *ATTACKS[method]):
                for arm in ARMS if attack in (CLEAN, *OF_MODELS) else ("federation",):
                    if (f"{method}/{attack}/{arm}", seed) not in held:
                        runs.append(measure(method, attack, arm, seed))
                        if asked.json:
                            print(json.dumps(runs[-1]), flush=True)
    show(asked, page, runs)


if __name__ == "__main__":
    main()
