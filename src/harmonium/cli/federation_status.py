"""`harmonium server status` and `client status`: the state of a federation for people and cron."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from harmonium.cli.terminal import Json, err, out, say, say_prose, show_table
from harmonium.core.errors import ConfigError, counted

Watch = Annotated[bool, typer.Option("--watch", help="Show it again every few seconds.")]
PAUSE = 5.0  # seconds between two looks
Lines = Iterator[str]


def server_status(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]")] = Path("federation"),
    as_json: Json = False,
    watch: Watch = False,
) -> None:
    """Show the state of a federation at its server: the run, the sites, what needs attention.

    It reads files and contacts nobody. The exit code is 0 if all is well, 1 if something needs
    attention, 2 for errors.
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "reading the federation"):
        from harmonium.sites import status

    _show(lambda: status.server_status(folder), _server_lines, as_json, watch)


def client_status(
    folder: Annotated[Path, typer.Argument(metavar="[KIT]")] = Path("kit"),
    as_json: Json = False,
    watch: Watch = False,
) -> None:
    """Show the state of this site: its server, policy, budget, images, what needs attention.

    It reads files and contacts nobody. The exit code is 0 if all is well, 1 if something needs
    attention, 2 for errors.
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "reading the kit"):
        from harmonium.sites import status

    _show(lambda: status.client_status(folder), _client_lines, as_json, watch)


def _show(
    read: Callable[[], dict[str, Any]],
    lines: Callable[[Mapping[str, Any]], Lines],
    as_json: bool,
    watch: bool,
) -> None:
    """Print a status, once or again and again, and end with its exit code."""
    if watch and as_json:
        raise ConfigError("--watch is for people: leave out --json")
    while True:
        found = read()
        if as_json:
            print(json.dumps(found))
        else:
            if watch and out.is_terminal:
                out.clear()
            for line in lines(found):
                say_prose(line)
            _show_sites(found)
            _show_attention(found)
        if not watch:
            sys.exit(1 if found["attention"] else 0)
        time.sleep(PAUSE)
        say("")


def _show_attention(found: Mapping[str, Any]) -> None:
    for one in found["attention"]:
        say_prose(f"warning   {one['what']}")
        say_prose(f"          what to do: {one['do']}")
    for text in found["next"]:
        say_prose(f"next      {text}")
    if not found["attention"]:
        waiting = found.get("server", {}).get("waiting")
        say(f"status    {'waiting for sites' if waiting else 'all is well'}")


def _process_line(name: str, process: Mapping[str, Any], now: float) -> str:
    if process["running"]:
        since = process["started"]
        began = f" since {_when(since)} ({_ago(since, now)})" if since else ""
        return f"{name} running, process {process['pid'] or 'unknown'}{began}"
    if process["started"] is None:
        return f"{name} not running"
    if process["ended"] is None:
        return f"{name} not running; it ended unexpectedly, last seen {_when(process['updated'])}"
    why = f", {process['why']}" if process["why"] else ""
    return f"{name} not running since {_when(process['ended'])}{why}"


def _server_lines(found: Mapping[str, Any]) -> Lines:
    from harmonium.report.display import clock
    from harmonium.report.run_progress import size_of

    now, run = found["time"], found["run"]
    yield f"folder    {found['folder']}"
    yield _process_line("server   ", found["server"], now)
    if run is None:
        away = [one["site"] for one in found["sites"] if not one["in_run"]]
        waiting = f"not begun: the server waits for {', '.join(away) or 'its sites'}"
        yield f"run       {waiting if found['server']['waiting'] else 'none yet'}"
    else:
        yield f"run       {run['name']}, {run['method']}, plan {run['plan'][:16]}, {run['folder']}"
        ended = ", complete" if run["complete"] else ""
        ended = f", stopped: {run['stopped']}" if run["stopped"] else ended
        left = f", {clock(run['left'])} left" if run["left"] is not None else ""
        at = run["committed"]
        last = f", last commit {_when(at)} ({_ago(at, now)})" if at else ""
        number = "setup" if run["round"] is None else f"{run['round']} of {run['rounds']}"
        yield f"round     {number}{last}{left}{ended}"
        yield (
            f"bytes     {size_of(run['bytes']['down'])} to sites and "
            f"{size_of(run['bytes']['up'])} from them in committed rounds"
        )
    sent = found["bytes"]
    if sent["up"] or sent["down"]:
        yield (
            f"traffic   {size_of(sent['down'])} to sites and {size_of(sent['up'])} from them in "
            "all messages since the server's start"
        )
    yield from _certificate_lines(found)
    yield _disk_line(found["disk"])


def _show_sites(found: Mapping[str, Any]) -> None:
    """The table of sites at a server."""
    now, rows = found["time"], []
    for one in found.get("sites", ()):
        clock = one["clock"]
        limit = one["epsilon_limit"]
        spent = None if one["epsilon"] is None else f"{one['epsilon']:.3g}"
        rows.append(
            {
                "site": one["site"],
                "connected": {None: None, True: "yes", False: "no"}[one["connected"]],
                "in the run": _part(one),
                "last answer": one["last_answer"] and _ago(one["last_answer"], now),
                "answered": one["answered"],
                "missed": one["missed"],
                "refused": one["refused"],
                "epsilon": f"{spent} of {limit:g}" if spent and limit else spent,
                "version": one["version"] or None,
                "clock": None if clock is None else f"{clock:+.0f} s",
                "last reason": one["why"] or None,
            }
        )
    kept = [key for key in (rows[0] if rows else ()) if any(row[key] is not None for row in rows)]
    rows = [{key: row[key] for key in kept} for row in rows]
    show_table(rows, "Sites; rounds answered, missed and refused")
    if rows:
        say("")


def _part(site: Mapping[str, Any]) -> str:
    """Whether a site takes part, and with how many images."""
    if site["images"] is not None:
        return f"{site['images']:,} images"
    return "yes" if site["in_run"] else "no"


def _client_lines(found: Mapping[str, Any]) -> Lines:
    now, server = found["time"], found["server"]
    yield f"site      {found['site']}, kit {found['folder']}"
    yield _process_line("client   ", found["client"], now)
    contact = server["contact"]
    spoke = f", last contact {_when(contact)} ({_ago(contact, now)})" if contact else ""
    state = {True: ", connected", False: ", not connected"}.get(server["connected"], "")
    yield f"server    {server['address']}{state}{spoke}"
    if run := found["run"]:
        last, over = run["last"], ", finished" if run["finished"] else ""
        yield (
            f"run       {run['name']}, round {run['round']}, {counted(run['answers'], 'answer')}"
            f"{over}; last ask {last['step']} at {last['time']}: {last['outcome']}"
        )
    yield from _sent_lines(found)
    yield from _rule_lines(found)
    images = found["images"]
    if images["count"] is not None:
        states = {True: ", readable", False: ", not readable now", None: ""}
        name = ":".join(filter(None, (images["data"], images["path"]))) or "not known"
        yield f"images    {images['count']:,} in {name}{states[images['readable']]}"
    yield from _certificate_lines(found)
    yield _disk_line(found["disk"])


def _sent_lines(found: Mapping[str, Any]) -> Lines:
    from harmonium.report.run_progress import size_of

    if outcomes := found["asks"]:
        yield f"asks      {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}"
    sent = ", ".join(f"{size_of(size)} of {kind}" for kind, size in found["sent"].items())
    yield f"sent      {sent or 'nothing'}; received {size_of(found['received'])}"


def _rule_lines(found: Mapping[str, Any]) -> Lines:
    """Policy and budget."""
    policy, budget = found["policy"], found["budget"]
    digest = policy["digest"][:16] or "not valid"
    changed = " (changed since the last ask; the next one goes by it)" if policy["changed"] else ""
    yield f"policy    {policy['file']}, {digest}{changed}"
    limit, spent = budget["limit"], budget["spent"]
    left = "no limit" if limit is None else f"{max(0.0, limit - spent):.4g} of {limit:g} left"
    yield (
        f"budget    epsilon {spent:.4g} spent at delta {budget['delta']:g}, by "
        f"{counted(budget['releases'], 'noisy release')}; {left}"
    )


def _certificate_lines(found: Mapping[str, Any]) -> Lines:
    ends = [f"{name} until {_when(end)[:10]}" for name, end in found["certificates"].items()]
    if ends:
        yield f"valid     {', '.join(ends)}"


def _disk_line(disk: Mapping[str, Any]) -> str:
    from harmonium.report.run_progress import size_of

    kept = f"{size_of(disk['kept'])} kept, " if "kept" in disk else ""
    free = "free space not known" if disk["free"] is None else f"{size_of(disk['free'])} free"
    return f"disk      {kept}{free}"


def _when(seconds: float) -> str:
    """A time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def _ago(seconds: float, now: float) -> str:
    """How long ago a time was.

    >>> _ago(0, 59), _ago(0, 3 * 3600), _ago(0, 200 * 3600)
    ('59 s ago', '3 h ago', '8 days ago')
    """
    age = max(0.0, now - seconds)
    for unit, scale, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if age < most:
            return f"{age / scale:.0f} {unit} ago"
    return f"{age / 86400:.0f} days ago"
