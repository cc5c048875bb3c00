"""Runs trained further: `resume RUN rounds=N` gives a run more rounds than it began with.

The rounds that are done stay as they are. From the next round on, everything is as in a run of N
rounds: schedules that run over all rounds (cosine, linear, step, FedSC's alpha) take their place in
the new total, so a rate that had come down may go up again. A run whose settings do not depend on
the number of rounds ends with the same bits as one that began with N.

The run's history is in `about.json`: for each part the last round of the part before, the rounds
before and after, and the digests of both recipes. The results that the run had are kept in
`earlier/ROUND`. The new `recipe.yaml` is written last: until then the run is the old one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.errors import ConfigError, Key
from harmonium.core.paths import make_folder
from harmonium.federation.method import Method
from harmonium.federation.spending import costs
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import ENCODER, RECIPE, RESULT, RunFolder

EARLIER = "earlier"  # folder of the results that a run had before it was trained further
ENDS = (RESULT, ENCODER, "run.png", "run.pdf", "run.svg")
# Moved in this order: without the first, the run is incomplete, and missing files are rewritten


def check_more_rounds(folder: Path, recipe: Recipe, longer: Recipe) -> None:
    """Refuse a recipe that changes more than the number of rounds."""
    if longer.rounds == recipe.rounds:
        raise ConfigError(
            Key("rounds"),
            f"={longer.rounds}: {folder} already has as many. To continue it, leave rounds out; to "
            "train it further, give more",
        )
    if longer.rounds < recipe.rounds:
        raise ConfigError(
            Key("rounds"),
            f"={longer.rounds}: {folder} has {recipe.rounds}, and rounds cannot be removed: give "
            "more, or start a new run",
        )
    rows = RunFolder(folder).read_log("metrics.jsonl")
    if rows and (why := rows[-1].get("stopped")):
        raise ConfigError(Key("rounds"), f"={longer.rounds}: {folder} ended early: {why}")
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
    """Give a run more rounds; if killed at any instant, it is either the old run or the new one."""
    run = RunFolder(folder)
    commit, _ = run.newest_readable(with_states=False)
    part: dict[str, Any] = {
        "round": commit.round if commit else 0,
        "rounds": [recipe.rounds, longer.rounds],
        "recipe": [recipe.digest, longer.digest],
    }
    about = run.about()
    parts = list(about.get("history", ()))
    while parts and parts[-1]["recipe"][1] != recipe.digest:  # begun by a process that was killed
        parts.pop()
    about |= {"recipe": longer.digest, "history": [*parts, part]}
    longer = longer.changed(init=about["init"]) if "init" in about else longer  # not its copy
    comments = "".join(f"# {line}\n" for line in history_lines(about["history"]))
    text = (longer.yaml() + comments).encode()
    digests = about.get("files")  # none in runs of earlier versions
    if digests:  # until the new recipe is written, the old one is valid, too
        old = files.digest_of((folder / RECIPE).read_bytes())
        about["files"] = {**digests, RECIPE: [files.digest_of(text), old]}
    run.write_about(about)
    _move_results(folder, part["round"])
    files.write_atomic(folder / RECIPE, text)
    if digests:
        unchanged = {name: digest for name, digest in digests.items() if name not in ENDS}
        run.write_about({**about, "files": {**unchanged, RECIPE: files.digest_of(text)}})


def _move_results(folder: Path, number: int) -> None:
    """Move the results that a run had after a round into the folder of earlier ones."""
    if any((folder / name).exists() for name in ENDS):
        place = make_folder(folder / EARLIER / f"{number:06d}")
        for name in ENDS:
            if (folder / name).exists():
                os.replace(folder / name, place / name)
        files.sync_folder(place)
        files.sync_folder(folder)


def history_lines(history: list[Mapping[str, Any]]) -> list[str]:
    """A run's history in words, one line for each time that it was trained further."""
    return [
        f"trained further after round {part['round']}: {part['rounds'][1]} rounds instead of "
        f"{part['rounds'][0]}; schedules run over {part['rounds'][1]} from there on"
        for part in history
    ]
