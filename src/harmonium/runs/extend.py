"""Runs trained further: `resume RUN rounds=N` gives a run more rounds than it began with.

The rounds that are done stay as they are. From the next round on, everything is as in a run of N
rounds: schedules that run over all rounds (cosine, linear, step, FedSC's alpha) take their place in
the new total, so a rate that had come down may go up again. A run whose settings do not depend on
the number of rounds ends with the same bits as one that began with N.

The run's history is in `about.json`: for each part the last round of the part before, the rounds
before and after, and the digests of both recipes. What the run had come to is kept in
`earlier/ROUND`. The new `recipe.yaml` is written last: until then the run is the one it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harmonium.core import files as store
from harmonium.core.errors import ConfigError, Key
from harmonium.core.paths import make_folder
from harmonium.federation.method import Method
from harmonium.federation.spending import costs
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import ENCODER, RECIPE, RESULT, RunFolder

EARLIER = "earlier"  # folder of what a run had come to before it was trained further
ENDS = (RESULT, ENCODER, "run.png", "run.pdf", "run.svg")
# In this order: without the first, the run is not complete, and what is missing is made again


def check_further(folder: Path, recipe: Recipe, longer: Recipe) -> None:
    """Refuse a recipe that does more than give a run more rounds."""
    if longer.rounds == recipe.rounds:
        raise ConfigError(
            Key("rounds"),
            f"={longer.rounds}: {folder} has so many already. To continue it, leave rounds out; to "
            "train it further, give more",
        )
    if longer.rounds < recipe.rounds:
        raise ConfigError(
            Key("rounds"),
            f"={longer.rounds}: {folder} has {recipe.rounds}, and rounds are not taken back: give "
            "more, or start a new run",
        )
    rows = RunFolder(folder).read_log("metrics.jsonl")
    if rows and (why := rows[-1].get("stopped")):
        raise ConfigError(
            Key("rounds"), f"={longer.rounds}: {folder} stopped for its privacy budget: {why}"
        )
    before, after = (_noise(one.any_method()) for one in (recipe, longer))
    if any(releases != after.get(step) for step, releases in before.items()):
        raise ConfigError(
            Key("rounds"),
            f"={longer.rounds}: the noise of {folder} was calibrated for {recipe.rounds} rounds, "
            "and more would spend more than its budget: start a new run",
        )


def _noise(method: Method) -> Mapping[str, Any]:
    """What each step releases; calibrated noise follows from the number of rounds."""
    return {step: costs(method, step, 1000) for step in method.exchanges()}


def extend(folder: Path, recipe: Recipe, longer: Recipe) -> None:
    """Give a run more rounds; killed at any instant, it is the old run or the new one."""
    commit, _ = RunFolder(folder).last(with_states=False)
    part = {
        "round": commit.round if commit else 0,
        "rounds": [recipe.rounds, longer.rounds],
        "recipe": [recipe.digest, longer.digest],
    }
    held = RunFolder(folder)
    about = held.about()
    parts = list(about.get("history", ()))
    while parts and parts[-1]["recipe"][1] != recipe.digest:  # begun by a process that was killed
        parts.pop()
    about |= {"recipe": longer.digest, "history": [*parts, part]}
    longer = longer.changed(init=about["init"]) if "init" in about else longer  # not its copy
    comments = "".join(f"# {text}\n" for text in told(about["history"]))
    text = (longer.yaml() + comments).encode()
    files = about.get("files")  # none in runs of earlier versions
    if files:  # until the new recipe is there, the old one is as good
        old = store.digest_of((folder / RECIPE).read_bytes())
        about["files"] = {**files, RECIPE: [store.digest_of(text), old]}
    held.tell(about)
    if any((folder / name).exists() for name in ENDS):
        place = make_folder(folder / EARLIER / f"{part['round']:06d}")
        for name in ENDS:
            if (folder / name).exists():
                os.replace(folder / name, place / name)
        store.sync_folder(place)
        store.sync_folder(folder)
    store.write_atomic(folder / RECIPE, text)
    if files:
        kept = {name: digest for name, digest in files.items() if name not in ENDS}
        held.tell({**about, "files": {**kept, RECIPE: store.digest_of(text)}})


def told(history: list[Mapping[str, Any]]) -> list[str]:
    """A run's history in words, a line for each time that it was trained further."""
    return [
        f"trained further after round {part['round']}: {part['rounds'][1]} rounds instead of "
        f"{part['rounds'][0]}; schedules run over {part['rounds'][1]} from there on"
        for part in history
    ]
