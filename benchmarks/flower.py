"""What a round costs on Flower's messages, beside the same round on the local engine.

    python benchmarks/flower.py [--json] [--rounds 5] [--clients 3]

Clients send the received model straight back, so all that is measured is carrying it: to every
client and back, checks, seals, database and fold. Both engines have processes of their own (the
local one a worker a core, Flower a warm node a client) and run their rounds in turn, so that the
ratio means something on a noisy machine. Seconds are wall time, the median over rounds after the
first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).parent))

from harmonium.core import codec
from harmonium.engines.local import LocalEngine
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import exchange, scalar, weights
from harmonium.learning.client import Client
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import markdown
from harmonium.runs.open_run import open_runtime
from harmonium.runs.start import _begin
from harmonium.sites.rehearsal import rehearsal

SIZES = {"1 MB": ["encoder.width=17"], "45 MB": ["encoder=resnet18"]}
MASKED = ["privacy.secure_aggregation=true"]


@dataclass(frozen=True)
class Echo(Method):
    """Sends the received model straight back."""

    @exchange(down={"model": weights()}, up={"model": weights(), "loss": scalar("mean")})
    def train(self, client: Client, got: Any) -> dict[str, Any]:
        """Send the model back without training."""
        return {"model": got.model, "loss": 0.0}


def rounds(recipe: Recipe, folder: Path, stack: ExitStack) -> tuple[Iterator[float], int]:
    """Wall seconds of one round after another, and the bytes of the model."""
    folder.mkdir()
    _begin(folder, recipe)
    host = open_runtime(folder)
    kind, clients = recipe.engine.kind, recipe.clients
    engine: Any = (
        LocalEngine(host, folder, os.cpu_count() or 1)
        if kind == "local"
        else rehearsal(folder, recipe, host, clients, lambda text: None)
    )
    opened = stack.enter_context(engine)
    examples = {client: len(index) for client, index in enumerate(host.indices)}
    server = Server(examples, host.method.blueprint.shared())

    def played() -> Iterator[float]:
        current = server
        while True:
            current = replace(current, round=current.round + 1)
            driver = Driver(host.method, opened, Ledger(), masks=recipe.privacy.masks)
            began = time.perf_counter()
            current = driver.drive(host.method.round(current, current.everyone), current)
            yield time.perf_counter() - began

    return played(), codec.payload_bytes(server.model)


def measure(words: list[str], clients: int, count: int) -> dict[str, Any]:
    common = ["data=shapes", "data.count=60", "data.test_count=2", f"clients={clients}"]
    common += ["objective.norm=none", *words]
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        (local, size), (flower, _) = (
            rounds(Recipe.of("flower:Echo", *common, f"engine={kind}"), Path(base) / kind, stack)
            for kind in ("local", "flower")
        )
        next(local), next(flower)  # starts what must be started
        pairs = [(next(local), next(flower)) for _ in range(count)]
    here, there = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "bytes": size,
        "local": here,
        "flower": there,
        "ratio": statistics.median(b / a for a, b in pairs),
        "extra": there - here,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=3)
    options = parser.parse_args()
    results = {}
    for name, words in SIZES.items():
        results[name] = measure(words, options.clients, options.rounds)
        results[f"{name}, masked"] = measure([*words, *MASKED], options.clients, options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    rows = [
        {
            "model": name,
            "MB": row["bytes"] / 1e6,
            "local, s a round": row["local"],
            "flower, s a round": row["flower"],
            "ratio": row["ratio"],
            "flower adds, s": row["extra"],
        }
        for name, row in results.items()
    ]
    print(markdown(rows, digits=2))


if __name__ == "__main__":
    main()
