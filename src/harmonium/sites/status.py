"""The state of a federation for people: of the server or of a site, read from its folder.

Nobody is contacted and nothing is changed. What only the running process knows comes from the file
that it writes (`harmonium.sites.activity`). The result is plain data. Its list `attention` has what
somebody should look at, each with what to do; it is empty if all is well.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from harmonium import __version__
from harmonium.core.errors import HarmoniumError, StoreError, counted
from harmonium.engines.protocol import PROTOCOL
from harmonium.federation.spending import charged, recount
from harmonium.federation.wire import is_measuring
from harmonium.privacy.account import Account
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import read_recipe
from harmonium.sites import activity
from harmonium.sites.activity import FINISHED
from harmonium.sites.certificates import WARNING_DAYS, expiries
from harmonium.sites.folder import Federation, read_members
from harmonium.sites.kit import Kit, KitFile, read_kit_file
from harmonium.sites.limits import size_of_folder
from harmonium.sites.log import LEFT, SiteLog, last_image_count, totals
from harmonium.sites.policy import Policy
from harmonium.sites.settings import SiteSettings
from harmonium.sites.upkeep import RUNNING, SERVING, is_locked
from harmonium.storage.run_folder import ASKED, RESULT, SITE_REPORT, RunFolder

KEPT = "kept"  # folder in a kit: the log, and the site's files of each run
RECENT = 10  # rounds whose mean duration predicts the others'
SLOW, LEAST_WAIT = 5.0, 600.0  # a round is late after so many times the mean, or these seconds
LEAST_FREE = 1_000_000_000  # bytes of a disk
NEARLY = 0.9  # of a privacy budget
AHEAD, BEHIND = 3.0, 120.0  # seconds that a site's clock may be off; Flower accepts 5 and 305
MISSED = 3  # rounds in a row
GRACE = 60.0  # seconds in which a site may be away: Flower takes 20 to notice
REPORTED = 120.0  # seconds after which a running process should have written its file again

Attention = list[dict[str, str]]


def server_status(folder: str | Path) -> dict[str, Any]:
    """The state of a federation at its server.

    Args:
        folder: the federation's.

    Returns:
        `server`, `run` (none before the first), `sites`, `bytes`, `certificates`, `disk`,
        `attention` and `next`. Times are seconds since 1970.
    """
    folder, now = Path(folder), time.time()
    members = read_members(folder)
    facts, attention = activity.read(folder), Attention()
    process = _process(facts, is_locked(folder, SERVING))
    run, path = None, _run_folder(facts)
    if path is not None:
        try:
            run = _run(path, process["running"], now)
        except (HarmoniumError, OSError) as error:
            attention.append(_item(f"the run {path} cannot be read: {error}", "see the message"))
    sites = [
        _site(name, number, facts, run, process["running"]) for name, number in members.items()
    ]
    certificates = expiries(_certificates(folder))
    attention += _about_keys(lambda: Federation.read(folder))
    attention += _about_certificates(certificates, "harmonium server renew", now)
    process["waiting"] = process["running"] and (run is None or run["round"] is None)
    attention += _about_server(process, run, now)
    for site in sites:
        attention += _about_site(site, process, run, now)
    disk = _disk(path or folder)
    attention += _about_disk(disk)
    return {
        "folder": str(folder),
        "time": now,
        "server": process,
        "run": run,
        "sites": sites,
        "bytes": (facts or {}).get("bytes", {"up": 0, "down": 0}),
        "certificates": certificates,
        "disk": disk,
        "attention": attention,
        "next": list(_next_at_server(members, run, process["running"])),
    }


def client_status(folder: str | Path) -> dict[str, Any]:
    """The state of a site at its client.

    Args:
        folder: the kit.

    Returns:
        `site`, `client`, `server`, `run`, `policy`, `asks`, `sent`, `received`, `budget`, `images`,
        `certificates`, `disk`, `log`, `attention` and `next`. Times are seconds since 1970.
    """
    folder, now = Path(folder), time.time()
    file, kept = read_kit_file(folder), folder / KEPT
    facts, attention = activity.read(kept), Attention()
    process = _process(facts, is_locked(kept, RUNNING))
    attention += _about_keys(lambda: Kit.read(folder))
    policy, about_policy = _policy(folder, attention)
    entries = _entries(kept, attention)
    delta = policy.delta if policy is not None else Policy().delta
    summed = totals(entries, delta)
    budget = {"spent": summed["epsilon"], "delta": delta, "releases": summed["releases"]}
    budget["limit"] = None if policy is None else policy.epsilon
    used = [entry["policy"] for entry in entries if entry.get("policy")]
    about_policy |= {"used": used[-1] if used else ""}
    about_policy["changed"] = bool(used) and used[-1] != about_policy["digest"]
    images = _images(facts, entries)
    certificates = expiries({"authority": folder / "ca.crt"})
    disk = {**_disk(kept if kept.exists() else folder), "kept": size_of_folder(kept)}
    with suppress(HarmoniumError):
        disk["limit"] = SiteSettings.read(folder, limited=True).limits.disk
    attention += _about_certificates(certificates, "ask the server's operator for a new kit", now)
    kit = f"--kit {shlex.quote(str(folder))}"
    attention += _about_client(process, facts, now, kit)
    attention += _about_asks(entries, budget)
    attention += _about_images(images, kit)
    attention += _about_disk(disk, kit)
    return {
        "folder": str(folder),
        "time": now,
        "site": file.name,
        "server": _server_of(file, facts, process["running"]),
        "client": process | ({"device": facts["device"]} if facts else {}),
        "run": _run_at_site(kept, entries),
        "policy": about_policy,
        "asks": _by_outcome(entries),
        "sent": summed["bytes"],
        "received": sum(entry.get("down", 0) for entry in entries),
        "budget": budget,
        "images": images,
        "certificates": certificates,
        "disk": disk,
        "log": {"lines": len(entries)},
        "attention": attention,
        "next": list(_next_at_site(process["running"], facts, entries, kit)),
    }


# ---- both ----------------------------------------------------------------------------------------


def _item(what: str, action: str) -> dict[str, str]:
    return {"what": what, "do": action}


def _process(facts: Mapping[str, Any] | None, running: bool) -> dict[str, Any]:
    """The process: whether it runs, and since when; the last one if none does."""
    facts = facts or {}
    keys = ("pid", "host", "started", "updated", "ended", "why", "version", "protocol")
    return {"running": running, **{key: facts.get(key) for key in keys}}


def _certificates(folder: Path) -> dict[str, Path]:
    return {"server": folder / "server" / "server.crt", "authority": folder / "ca" / "ca.crt"}


def _about_keys(read: Any) -> Attention:
    """What is wrong with keys and certificates, where a command would stop because of it."""
    try:
        read()
    except HarmoniumError as error:
        if "expired" in str(error):  # reported with its date
            return []
        return [_item(str(error), "correct that: no command works before")]
    return []


def _about_certificates(ends: Mapping[str, float], remedy: str, now: float) -> Iterator[Any]:
    soon = timedelta(days=WARNING_DAYS).total_seconds()
    for name, end in ends.items():
        action = "make a new federation and new kits" if name == "authority" else remedy
        day = f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d}"
        if end <= now:
            yield _item(f"the certificate of the {name} expired on {day}", action)
        elif end - now < soon:
            days = int((end - now) // 86400)
            yield _item(f"the certificate of the {name} expires on {day}, in {days} days", action)


def _disk(folder: Path) -> dict[str, Any]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"free": None, "total": None}
    return {"free": usage.free, "total": usage.total}


def _about_disk(disk: Mapping[str, Any], kit: str = "--kit KIT") -> Iterator[Any]:
    if disk["free"] is not None and disk["free"] < LEAST_FREE:
        yield _item(
            f"the disk has {disk['free'] / 1e6:.0f} MB left",
            f"make room: harmonium server clean RUN, or harmonium client clean {kit}",
        )
    limit = disk.get("limit")
    if limit is not None and disk["kept"] > NEARLY * 1e9 * limit:
        yield _item(
            f"the kit keeps {disk['kept'] / 1e9:.2g} GB, and limits.disk is {limit:g} GB",
            f"harmonium client clean {kit} --days 30, or delete encoders that you have copied",
        )


# ---- the server ----------------------------------------------------------------------------------


def _run_folder(facts: Mapping[str, Any] | None) -> Path | None:
    run = (facts or {}).get("run") or {}
    path = Path(run["folder"]) if run.get("folder") else None
    return path if path is not None and (path / "recipe.yaml").exists() else None


def _run(path: Path, running: bool, now: float) -> dict[str, Any]:
    """The server's last run."""
    folder, recipe = RunFolder(path), read_recipe(path)
    about, rows = folder.about(), folder.read_log("metrics.jsonl")
    seconds = [row["seconds"] for row in folder.read_log("timings.jsonl") if row["round"] > 1]
    commits = sorted((path / "commits").glob("*.json"))
    done = rows[-1]["round"] if rows else None
    complete = (path / RESULT).exists()
    average = mean(seconds[-RECENT:]) if seconds else None
    left = None if average is None or complete else average * (recipe.rounds - (done or 0))
    return {
        "folder": str(path),
        "name": str(about["federation"]["run"])[:8],
        "method": recipe.method.name,
        "plan": recipe.digest,
        "rounds": recipe.rounds,
        "round": done,
        "committed": commits[-1].stat().st_mtime if commits else None,
        "began": (path / "recipe.yaml").stat().st_mtime,
        "loss": rows[-1].get("loss") if rows else None,
        "bytes": {way: sum(row[f"bytes_{way}"] for row in rows) for way in ("up", "down")},
        "seconds": average,
        "left": left if running else None,
        "complete": complete,
        "stopped": rows[-1].get("stopped", "") if rows else "",
        "sites": _records(folder, recipe, about["federation"]),
    }


def _records(
    folder: RunFolder, recipe: Recipe, about: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What a run's ledger has of each participant, by name."""
    ledger = folder.read_log("ledger.jsonl")
    spent = _spent(folder, recipe, about, ledger)
    records = {}
    for one in about["roll"]:
        mine = [entry for entry in ledger if entry["client"] == one["client"]]
        own = [entry for entry in mine if not _measures(entry)]
        rounds = {
            outcome: {entry["round"] for entry in own if entry["outcome"] == outcome}
            for outcome in ("answered", "no answer", "refused")
        }
        answered = rounds["answered"] - rounds["refused"] - rounds["no answer"]
        asked = sorted({entry["round"] for entry in own}, reverse=True)
        row = next((place for place, one in enumerate(asked) if one in answered), len(asked))
        reasons = [entry for entry in mine if entry.get("why")]
        records[one["name"]] = {
            "images": one["examples"],
            "answered": len(answered),
            "missed": len(rounds["no answer"]),
            "refused": len(rounds["refused"]),
            "row": row,
            "why": _reason(reasons[-1]) if reasons else "",
            "why_round": reasons[-1]["round"] if reasons else None,
            "epsilon": spent.get(one["client"]),
            "epsilon_limit": recipe.privacy.epsilon,
        }
    return records


def _measures(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of a ledger is of an ask that only measures."""
    return is_measuring(entry.get("of") or entry["step"], entry["round"])


def _reason(entry: Mapping[str, Any]) -> str:
    return f"evaluation: {entry['why']}" if _measures(entry) else str(entry["why"])


def _spent(
    folder: RunFolder, recipe: Recipe, about: Mapping[str, Any], ledger: Sequence[Any]
) -> dict[int, float]:
    """Epsilon that each client has spent, where anything is released with noise."""
    if not any(entry.get("releases") for entry in ledger):
        return {}
    account = Account(recipe.privacy.epsilon, recipe.privacy.delta)
    examples = {one["client"]: one["examples"] for one in about["roll"]}
    recount(account, recipe.any_method(), examples, charged(ledger, folder.read_log(ASKED)))
    return {client: account.spent(client) for client in examples}


def _site(
    name: str,
    number: int,
    facts: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
    running: bool,
) -> dict[str, Any]:
    """A site as the server knows it: from the running process, and from the run's ledger."""
    live = {**activity.NEW_SITE, **((facts or {}).get("sites") or {}).get(name, {})}
    record = ((run or {}).get("sites") or {}).get(name, {})
    recent = bool(live["why"])
    return {
        "site": name,
        "number": number,
        "connected": live["online"] if running else None,
        "seen": live["seen"],
        "in_run": bool(record) or (running and live["joined"]),
        "images": record.get("images"),
        "last_answer": live["answer"],
        "version": live["version"],
        "protocol": live["protocol"],
        "clock": live["clock"],
        "answered": record.get("answered", 0),
        "missed": record.get("missed", 0),
        "refused": record.get("refused", 0),
        "row": record.get("row", 0),
        "why": live["why"] if recent else record.get("why", ""),
        "why_at": live["why_at"] if recent else None,
        "epsilon": record.get("epsilon"),
        "epsilon_limit": record.get("epsilon_limit"),
    }


def _about_server(
    process: Mapping[str, Any], run: Mapping[str, Any] | None, now: float
) -> Iterator[Any]:
    if process["running"]:
        if process["updated"] is not None and now - process["updated"] > REPORTED:
            yield _item(
                f"the server runs but has not reported for {now - process['updated']:.0f} s",
                "see its log, and whether its disk is full",
            )
        since = (run or {}).get("committed") or process["started"]
        late = max(LEAST_WAIT, SLOW * ((run or {}).get("seconds") or 0))
        if run is not None and not run["complete"] and since and now - since > late:
            yield _item(
                f"no round was committed for {(now - since) / 60:.0f} minutes",
                "see below which sites are missing; engine.deadline and engine.patience set how "
                "long a round waits for them",
            )
    elif run is not None and not run["complete"]:
        why = f": {process['why']}" if process["why"] else ""
        killed = "" if process["ended"] else " without a word, so it was killed or crashed"
        yield _item(
            f"the server stopped after round {run['round'] or 0} of {run['rounds']}{killed}{why}",
            f"harmonium server resume {run['folder']}",
        )


def _about_site(
    site: Mapping[str, Any], process: Mapping[str, Any], run: Mapping[str, Any] | None, now: float
) -> Iterator[Any]:
    name, running = site["site"], process["running"]
    needed = running and (run is None or not run["complete"])
    absent = now - (site["seen"] or process["started"] or now)
    if needed and not site["connected"] and absent > GRACE:
        seen = "never" if site["seen"] is None else f"{(now - site['seen']) / 60:.0f} minutes ago"
        yield _item(
            f"{name} is not connected; last seen: {seen}",
            "its operator runs harmonium client status, which says why",
        )
    elif needed and not site["in_run"] and (run is not None or site["why"]):
        why = f": {site['why']}" if site["why"] else ""
        yield _item(f"{name} does not take part{why}", "ask its operator, whose policy it is")
    elif needed and site["row"] >= MISSED:
        yield _item(
            f"{name} has no counted answer in its last {counted(site['row'], 'round')}: "
            f"{site['why']}",
            "see the reason; an honest site that is often left out has unusual images",
        )
    clock = site["clock"]
    if running and clock is not None and not -BEHIND < clock < AHEAD:
        side = "ahead" if clock > 0 else "behind"
        yield _item(f"{name}'s clock is {abs(clock):.0f} s {side}", "synchronise both by NTP")
    if site["protocol"] not in (None, PROTOCOL):
        yield _item(
            f"{name} has Harmonium {site['version'] or '(unknown)'} with protocol "
            f"{site['protocol']}, and this is {__version__} with protocol {PROTOCOL}",
            "upgrade the one with the lower protocol",
        )
    if site["epsilon"] and site["epsilon_limit"]:
        yield from _about_budget(f"{name} has", site["epsilon"], site["epsilon_limit"])


def _about_budget(who: str, spent: float, limit: float | None) -> Iterator[Any]:
    if limit and spent >= NEARLY * limit:
        yield _item(
            f"{who} spent epsilon {spent:.4g} of {limit:g}",
            "further noisy releases will be refused; a larger budget is a decision of the site",
        )


def _next_at_server(
    members: Mapping[str, int], run: Mapping[str, Any] | None, running: bool
) -> Iterator[str]:
    if not members:
        yield "add sites: harmonium server add NAME --key site.pub"
    elif run is None and not running:
        yield "start a run: harmonium server start METHOD --out RUN"
    elif run is not None and run["complete"]:
        yield f"evaluate the encoder: harmonium eval {run['folder']} knn on=SET"
        yield f"train it further: harmonium server resume {run['folder']} rounds=N"


# ---- a site --------------------------------------------------------------------------------------


def _policy(folder: Path, attention: Attention) -> tuple[Policy | None, dict[str, Any]]:
    """The policy, if it is valid, and what is known of its file."""
    path = folder / "policy.yaml"
    try:
        policy, digest = Policy.read_with_digest(path)
    except HarmoniumError as error:
        attention.append(_item(str(error), "correct the file: until then nothing is answered"))
        return None, {"file": str(path), "digest": "", "valid": False}
    return policy, {"file": str(path), "digest": digest, "valid": True}


def _entries(kept: Path, attention: Attention) -> list[dict[str, Any]]:
    """The site's log; a broken one is empty, and reported."""
    try:
        return SiteLog(kept / "log.jsonl").entries()
    except StoreError as error:
        attention.append(
            _item(str(error), "restore it from a backup: the site sends nothing meanwhile")
        )
        return []


def _by_outcome(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    outcomes = [str(entry.get("outcome")) for entry in entries]
    return {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}


def _server_of(file: KitFile, facts: Mapping[str, Any] | None, running: bool) -> dict[str, Any]:
    """The server, and the connection to it."""
    facts = facts or {}
    address = facts.get("server") or f"{file.hosts[0]}:{file.port}"
    connection = {key: facts.get(key) for key in ("since", "contact", "lost")}
    return {"address": address, "connected": running and facts.get("connected"), **connection}


def _run_at_site(kept: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The run that the server asked for last."""
    runs = [entry for entry in entries if entry.get("run")]
    if not runs:
        return None
    last = runs[-1]
    mine = [entry for entry in runs if entry["run"] == last["run"]]
    folder = kept / "runs" / str(last["run"])
    return {
        "name": str(last["run"])[:8],
        "folder": str(folder),
        "plan": last.get("plan"),
        "round": max((entry.get("round") or 0 for entry in mine), default=0),
        "answers": sum(entry.get("outcome") in LEFT for entry in mine),
        "last": {key: last.get(key) for key in ("time", "step", "outcome", "why")},
        "finished": (folder / SITE_REPORT).exists(),
    }


def _images(
    facts: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The images that the client was started with, and whether they can be read now."""
    data = (facts or {}).get("data") or {}
    path = data.get("path") or ""
    count = data.get("images")
    return {
        "data": data.get("name"),
        "path": path,
        "readable": _is_readable(Path(path)) if path else None,
        "count": last_image_count(entries) if count is None else count,
        "unreadable": data.get("unreadable"),
    }


def _is_readable(path: Path) -> bool:
    try:
        if not path.is_dir():
            return os.access(path, os.R_OK)
        with os.scandir(path) as inside:
            return os.access(path, os.R_OK | os.X_OK) and any(inside)
    except OSError:
        return False


def _about_client(
    process: Mapping[str, Any], facts: Mapping[str, Any] | None, now: float, kit: str
) -> Iterator[Any]:
    if not process["running"]:
        if facts is not None and facts["why"] == FINISHED:
            return
        killed = facts is not None and not process["ended"]
        how = " (it was killed or crashed)" if killed else ""
        why = f": {process['why']}" if process["why"] and not killed else ""
        yield _item(
            f"the client is not running{how}{why}", f"harmonium client start {kit} --data …"
        )
        return
    if facts is not None and now - facts["updated"] > REPORTED:
        age = now - facts["updated"]
        yield _item(f"the client has not reported for {age:.0f} s", "see its log, and its disk")
    if facts is not None and facts["connected"] is False:
        yield _item(facts["lost"] or "the client is not connected", "it keeps trying by itself")


def _about_asks(entries: Sequence[Mapping[str, Any]], budget: Mapping[str, Any]) -> Iterator[Any]:
    asks = [entry for entry in entries if entry.get("run")]
    if asks and asks[-1].get("outcome") == "refused":
        yield _item(
            f"the last ask was refused: {asks[-1].get('why', '')}",
            "if it was agreed on, change what the reason names: policy.yaml, settings.yaml or the "
            "images",
        )
    if not math.isinf(budget["spent"]):
        yield from _about_budget("this site has", budget["spent"], budget["limit"])


def _about_images(images: Mapping[str, Any], kit: str) -> Iterator[Any]:
    if images["readable"] is False:
        yield _item(
            f"the images at {images['path']} cannot be read",
            "see whether the folder is mounted, and its access rights",
        )
    if images["unreadable"]:
        yield _item(
            f"{counted(images['unreadable'], 'image')} cannot be read and are left out",
            f"harmonium client start {kit} --data … in a terminal names them",
        )


def _next_at_site(
    running: bool,
    facts: Mapping[str, Any] | None,
    entries: Sequence[Mapping[str, Any]],
    kit: str,
) -> Iterator[str]:
    if not running and facts is None:
        yield f"read policy.yaml, then start: harmonium client start {kit} --data folder:PATH"
    if entries:
        yield f"see what left this site: harmonium client log {kit}"
