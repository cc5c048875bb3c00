"""Evaluation of a federation's run at its sites, after it has ended or stopped.

The sites that took part are asked for counts on their own labelled images, as `evaluate.sites` asks
for them during a run. The plan that they check is the run's own with these settings, so it has
another digest. Nothing is written into the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.callbacks import Callback, called
from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.core.paths import make_folder
from harmonium.core.settings import plain
from harmonium.federation import site_evaluation
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Server
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.schema import Recipe
from harmonium.report import sites as report
from harmonium.report.writer import ResultTable, write_results
from harmonium.runs.loop import RunLoop
from harmonium.runs.open_run import read_about, read_recipe
from harmonium.runs.start import locked
from harmonium.sites.activity import ServerActivity
from harmonium.sites.plan import planned
from harmonium.sites.server import ListenSettings, Session, connected, read_federation
from harmonium.sites.upkeep import owner_only
from harmonium.storage.result_folder import FolderKind, refuse_run
from harmonium.storage.run_folder import Commit, RunFolder

EVALUATION = FolderKind("evaluation", "evaluations")
SETTINGS = ("sites", "sites_held_out", "sites_least", "sites_bins", "sites_classes")


@dataclass(frozen=True)
class SitesResult:
    """Figures of an evaluation at the sites, and where they were written."""

    folder: Path
    figures: Mapping[str, Any]  # as `federation.site_evaluation.report` gives them, with names


def evaluate_at_sites(
    path: Path,
    *changes: str,
    out: Path | None = None,
    watcher: Callback | None = None,
    listening: ListenSettings | None = None,
) -> SitesResult:
    """Ask the sites of a federation's run for counts on their own labelled images.

    Args:
        path: the run's folder at the server.
        changes: `evaluate.sites=probe` and other settings of `evaluate.sites*` and `engine.*`.
        out: where the figures and the ledger go; a new folder if left out.
        watcher: told about sites that do not answer.
        listening: where the server listens.
    """
    about = read_about(path)["federation"]
    if not about:
        raise ConfigError(f"{path} is not a run of a federation: use harmonium eval {path} sites")
    federation = read_federation(Path(about["folder"]))
    asked = _asked(read_recipe(path), changes)
    folder = out if out is not None else EVALUATION.new(f"{path.resolve().name}-sites")
    refuse_run(folder, [path])
    plan, dataset = planned(asked, asked.clients)
    _ = plan.engine.devices  # a device that is not here is refused before any site is asked
    with owner_only(), locked(path):
        commit = RunFolder(path).newest(with_states=False)
        if commit is None:
            raise StoreError(f"{path} has no committed round yet: continue the run first")
        reporter = ServerActivity(federation.folder, (site.name for site in federation.sites))
        with called([watcher or Callback(), reporter]) as every:
            loop = RunLoop(path, plan, every)
            facts = {"folder": str(path.absolute()), "rounds": plan.rounds}
            complete = loop.is_complete()
            reporter.about_run(
                **facts, complete=complete, method=plan.method.name, plan=plan.digest
            )
            with connected(loop, dataset, federation, True, listening, reporter) as both:
                session, engine = both
                _say_who_is_asked(session)
                engine.restore(commit.clients)
                engine.prune(*loop.folder.snapshots())
                figures, ledger = _counted(session, engine, commit)
        names = {one.client: one.name for one in session.participants.joined}
        figures = site_evaluation.named(figures, names, plan.evaluate.sites_classes)
        _write(make_folder(folder), path, plan, commit, figures, ledger)
    if "all" not in figures:
        why = figures.get("why") or "no site answered; the ledger has the reasons"
        raise DataError(f"no counts: {why}: {folder / 'ledger.jsonl'}")
    return SitesResult(folder, figures)


def _say_who_is_asked(session: Session) -> None:
    names = ", ".join(one.name for one in session.participants.joined)
    waits = session.loop.recipe.engine
    session.loop.watcher.note(
        f"asking {names}; a site that is not connected is awaited for up to "
        f"{min(waits.patience, waits.deadline):g} s (engine.patience)"
    )


def _asked(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The run's recipe with the settings of this evaluation; by default a common classifier."""
    given = changes_of(changes)
    for change in given:
        section, _, name = change.key.partition(".")
        if section != "engine" and not (section == "evaluate" and name in SETTINGS):
            raise ConfigError(
                f"{change.key} cannot be set here: only evaluate.sites, "
                f"{', '.join(f'evaluate.{name}' for name in SETTINGS[1:])} and engine.*"
            )
    asked = recipe.with_changes(given)
    if asked.evaluate.sites is None:
        asked = asked.changed(evaluate={**plain(asked.evaluate), "sites": "ridge"})
    return asked


def _counted(session: Session, engine: Any, commit: Commit) -> tuple[dict[str, Any], list[str]]:
    """The figures from the counts of all sites that answer, and the lines of the ledger."""
    loop, method = session.loop, session.method
    server, ledger = Server(dict(session.examples), **commit.server), Ledger()
    masks = loop.recipe.privacy.masks
    loop.watcher.names = {one.client: one.name for one in session.participants.joined}
    driver = Driver(method, engine, ledger, watch=loop.watcher.task, masks=masks)
    after = driver.drive(site_evaluation.evaluated(method, server), server)
    return site_evaluation.report(after.memory), ledger.take()


def _write(
    folder: Path,
    path: Path,
    plan: Recipe,
    commit: Commit,
    figures: Mapping[str, Any],
    ledger: Sequence[str],
) -> None:
    about = {"run": str(path), "plan": plan.digest, "round": commit.round}
    tables = [ResultTable(report.title(figures), report.rows(figures), 1, legend=report.LEGEND)]
    document = {**about, "sites": dict(figures)}
    write_results(folder, "sites", document, tables, notes=report.remarks(figures))
    text = "".join(f"{line}\n" for line in ledger)
    files.write_atomic(folder / "ledger.jsonl", text.encode())
