"""Memory and disk that a run would take, from what a trial of it took."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harmonium.core import machine
from harmonium.core.types import ClientId
from harmonium.data.partition import Split
from harmonium.federation.aggregation import Mean
from harmonium.federation.method import Method
from harmonium.recipe.schema import Recipe
from harmonium.report.figure import plots_wanted
from harmonium.runs.replay import Replay
from harmonium.storage.state_store import APART

# Of a process that has imported all that a task needs, and done nothing yet: measured with torch
# 2.13 for CPUs on Linux. The libraries' code is shared between processes.
PRIVATE, LIBRARIES = 170_000_000, 125_000_000
PLOTTING = 60_000_000  # bytes that drawing and probes import beside it, in the main process

ENTRY = 140  # bytes of a client's state in the record of a commit
TEXTS, PLOT, ROW, TIMING, FIGURES = 14_000, 120_000, 130, 50, 320  # bytes of files and of lines
OBJECTIVE, BY_CLIENT = 150, 35  # bytes of a line with the global objective, and for each client


@dataclass(frozen=True)
class Memory:
    """Bytes of memory at the peak of a run."""

    main: int  # of the process that is started; it trains where there are no workers
    worker: int  # of each worker
    workers: int
    total: int  # of all processes, with the code of libraries counted once
    machine: int | None  # that processes of this machine can have; none: not known
    available: int | None  # now
    at_sites: bool = False  # whether `worker` is a site's process, on a machine of its own

    @property
    def one_worker(self) -> int:
        """What a worker adds to the total."""
        return self.worker - LIBRARIES


def memory_of(
    recipe: Recipe,
    method: Method,
    training: int | None,
    evaluation: int | None,
    features: int | None,
) -> Memory | None:
    """The memory of a run; None where processes cannot be measured.

    Args:
        recipe: of the run.
        method: as the recipe makes it.
        training: bytes by which this process grew in training.
        evaluation: by which it grew in the evaluation of a sample of images.
        features: what features of all images would take.
    """
    if training is None or evaluation is None or features is None:
        return None
    asked = recipe.participation.asked(recipe.training)
    workers = min(recipe.workers, asked)
    model = sum(v.numel() * v.element_size() for v in method.blueprint.shared().values())
    # The server's model, its average in double precision, a commit, and replies under way; an
    # aggregation that compares clients keeps them all.
    copies = (
        5 + (2 * workers if workers else 1) + (0 if type(recipe.aggregation) is Mean else asked)
    )
    growth = max(evaluation, features, copies * model)
    growth = growth if workers else max(growth, training)
    main, worker = PRIVATE + PLOTTING + growth, PRIVATE + training
    here = machine.memory()
    return Memory(
        main + LIBRARIES,
        worker + LIBRARIES if workers else 0,
        workers,
        LIBRARIES + main + workers * worker,
        here.total if here else None,
        here.available if here else None,
    )


def run_folder_size(
    recipe: Recipe,
    method: Method,
    split: Split,
    replay: Replay,
    trial: Path,
    cohort: Sequence[ClientId],
    due: int,
) -> int:
    """Bytes of a run's folder at its end.

    Args:
        recipe: of the run.
        method: as the recipe makes it.
        split: of its images.
        replay: of its rounds.
        trial: the folder of a trial, with what its clients keep.
        cohort: the clients of that trial.
        due: rounds that end with an evaluation.
    """
    split.save(trial / "split.npz")
    states, asked = _states(trial / "clients", cohort, replay.asked), replay.asked
    commit = replay.server + 660 + (ENTRY * asked if states else 0)
    objective = OBJECTIVE + 2 * BY_CLIENT * len(split.examples)
    row = FIGURES + (objective if method.measures_objective else 0)
    logs = replay.ledger + (recipe.rounds + 1) * (ROW + TIMING) + (due + 1) * row
    encoder = 0 if method.has_own_encoders else _weights(method.blueprint["encoder"])
    given = recipe.init.file if recipe.init is not None else None
    parts: Mapping[str, Any] = {
        "commits": 2 * commit,
        "states": states,
        "logs": logs,
        "encoder": encoder,
        "weights": Path(given).stat().st_size if given is not None else 0,
        "split": (trial / "split.npz").stat().st_size,
        "texts": TEXTS + (PLOT if plots_wanted() else 0),
    }
    return sum(parts.values())


def _states(folder: Path, cohort: Sequence[ClientId], clients: int) -> int:
    """Bytes of the states of so many clients, from those of a few.

    The last two versions of a state are kept. A large tensor that clients have in common is stored
    once.
    """
    versions = shared = own = 0
    seen = list[set[str]]()
    for client in cohort:
        files = sorted((folder / str(client)).glob("[0-9]*"))
        versions += sum(path.stat().st_size for path in files[-2:])
        seen.append({path.name for path in (folder / str(client)).glob(f"{APART}*")})
    common = set.intersection(*seen) if len(seen) > 1 else set[str]()
    for client, names in zip(cohort, seen, strict=True):
        sizes = {name: os.path.getsize(folder / str(client) / name) for name in names}
        own += sum(size for name, size in sizes.items() if name not in common)
        shared = sum(size for name, size in sizes.items() if name in common)
    return round((versions + own) * clients / max(1, len(cohort))) + shared


def _weights(network: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in network.state_dict().values())
