"""What a bundle tells of its run: data, rounds, figures, privacy, and what left each client.

Names of clients, files and folders stay out of it: they may be those of patients or of sites that
do not want to be named. Clients are told apart by their numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import StoreError
from harmonium.core.types import ClientId
from harmonium.federation.method import Method
from harmonium.federation.site_evaluation import FIGURES
from harmonium.federation.wire import STEPS
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Result, RunLoop
from harmonium.runs.open_run import read_recipe
from harmonium.runs.privacy_report import examples_by_client, report
from harmonium.runs.start import of_many
from harmonium.storage.run_folder import ABOUT, RECIPE, RESULT, SITE_REPORT, RunFolder

Left = Mapping[ClientId, Mapping[str, int]]  # bytes that left each client, by kind
MASKING = "secure aggregation"  # the kind of what its own steps send


@dataclass(frozen=True)
class Account:
    """A finished run, as far as its bundle tells of it."""

    recipe: Recipe
    result: Result
    left: Left
    federation: Mapping[str, Any] | None = None  # of the server's `about.json`
    at_site: bool = False  # the folder is a site's, which knows of itself alone
    examples: Mapping[ClientId, int] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # of images and of split
    method: tuple[str, ...] = ()  # the card of the method, in lines
    privacy: tuple[str, ...] = ()  # the privacy report, in lines

    @property
    def simulated(self) -> bool:
        """Whether all clients were on one machine, which had their images."""
        return self.federation is None and not self.at_site

    @property
    def rounds(self) -> int:
        """How many rounds were trained."""
        rows = self.result.rounds
        return int(rows[-1]["round"]) if rows else 0


def read_account(path: Path) -> Account:
    """The account of a finished run; an error says why there is none."""
    if of_many(path):
        inside = sorted(one.parent for one in path.rglob(RECIPE))
        which = f", e.g. harmonium export {inside[0]} --out DIR" if inside else ""
        raise StoreError(f"{path} holds several runs: export one of them{which}")
    if not (path / RECIPE).exists():
        raise StoreError(f"{path} holds no run: give the folder of a finished run")
    if (path / SITE_REPORT).exists() and not (path / ABOUT).exists():
        return _of_site(path)
    recipe, run = read_recipe(path), RunFolder(path)
    if not (path / RESULT).exists():
        raise StoreError(
            f"{path} has not finished: {run.remedy.replace('recreates it', 'continues it')}"
        )
    run.check(RESULT, run.remedy)
    about = run.about()
    method = recipe.any_method()
    return Account(
        recipe,
        RunLoop(path, recipe, Callback()).result(),
        left_by_client(method, run.lines("ledger.jsonl")),
        about.get("federation"),
        examples=examples_by_client(path, about),
        digests={key: about[key] for key in ("data", "split") if about.get(key)},
        method=tuple(about.get("card", ())),
        privacy=tuple(report(path).lines()),
    )


def _of_site(path: Path) -> Account:
    """The account of a federation's run at one of its sites, from the server's summary."""
    remedy = "take part in a new run"
    with files.reading(path / SITE_REPORT, remedy):
        about = files.read_sealed(path / SITE_REPORT, remedy)
        left = Counter[str]()
        for by_kind in about["left"].values():
            left.update(by_kind)
        recipe = read_recipe(path)
        result = Result(
            path,
            recipe,
            about.get("figures", {}),
            about.get("untrained", {}),
            tuple(about.get("metrics", ())),
            references=about.get("references", {}),
            against=about.get("verdict", {}),
            sites=about.get(FIGURES, {}),
        )
        return Account(recipe, result, {0: dict(left)}, at_site=True)


def left_by_client(method: Method, entries: Iterable[Mapping[str, Any]]) -> Left:
    """Bytes that left each client by the kind that its exchange declares, from a ledger's lines."""
    exchanges = method.exchanges()
    left: dict[ClientId, Counter[str]] = {}
    for entry in entries:
        step, sizes = entry["step"], left.setdefault(entry["client"], Counter())
        declared = exchanges[step].up if step in exchanges else {}
        for name, size in entry.get("up", {}).items():
            unknown = MASKING if step in STEPS else "not declared"
            kind = declared[name].kind.replace("_", "-") if name in declared else unknown
            sizes[kind] += size
    return {client: dict(left[client]) for client in sorted(left)}
