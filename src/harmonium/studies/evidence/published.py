"""Finished studies as pages of the documentation, and one table of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.errors import ConfigError
from harmonium.core.paths import home, make_folder
from harmonium.report.tables import markdown
from harmonium.studies.evidence.study import NOT_FINISHED, STUDY
from harmonium.studies.evidence.study_file import read_study

ABSOLUTE = re.compile(r"(?<![\w.:/~])/(?:[^\s/`'\",;:()\[\]|]+/)+([^\s/`'\",;:()\[\]|]*)")


def publish(what: str, into: str | Path, *, out: str | Path | None = None) -> list[Path]:
    """Copy the page of a finished study, its plots and its figures into a folder.

    Args:
        what: the study, as for `study`.
        into: where `NAME.md`, `NAME.json` and `NAME-*.png` go.
        out: the study's folder, if it is not the usual one.

    Returns:
        The files; no path of this machine is in any of them.
    """
    study = read_study(what)
    folder = Path(out) if out is not None else home() / STUDY.parent / study.name
    again = f"finish it with `harmonium study {what}` first"
    try:
        plain = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        text = (folder / "study.md").read_text(encoding="utf-8")
    except OSError:
        raise ConfigError(f"study {study.name} has no results in {folder}: {again}") from None
    if plain["verdict"] == NOT_FINISHED:
        raise ConfigError(f"study {study.name} is not finished: {again}")
    if plain["digest"] != study.digest:
        raise ConfigError(f"study {study.name}: its file was changed after it had run: {again}")
    plots = [name for path in plain["plots"] if (name := Path(path).name).endswith(".png")]
    for name in plots:
        text = text.replace(f"]({name})", f"]({study.name}-{name})")
    text = text.replace("`study.json`", f"[`{study.name}.json`]({study.name}.json)")
    shown = {key: value for key, value in plain.items() if key != "folder"}
    shown["plots"] = [f"{study.name}-{name}" for name in plots]
    place = make_folder(Path(into))
    contents = {
        f"{study.name}.md": without_paths(text).encode(),
        f"{study.name}.json": f"{json.dumps(_bare(shown), indent=1)}\n".encode(),
        **{f"{study.name}-{name}": (folder / name).read_bytes() for name in plots},
    }
    for stale in set(place.glob(f"{study.name}-*.png")) - {place / name for name in contents}:
        if stale.name in _plots_before(place, study.name):
            stale.unlink()
    for name, content in contents.items():
        files.write_atomic(place / name, content)
    return [place / name for name in contents]


def _plots_before(place: Path, name: str) -> Sequence[str]:
    """The plots that this study had when it was published last; another's are not touched."""
    path = place / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["plots"] if path.exists() else ()


def without_paths(text: str) -> str:
    """A text in which absolute paths of files are cut to their last part.

    >>> without_paths("failed: /home/me/runs/seed-1 holds another run; kNN 1/2/3, a/b/c")
    'failed: seed-1 holds another run; kNN 1/2/3, a/b/c'
    >>> without_paths("https://example.org/a/b data.path=/data/cells/all")
    'https://example.org/a/b data.path=all'
    """
    return ABSOLUTE.sub(r"\1", text)


def _bare(value: Any) -> Any:
    """The same JSON with texts that have no absolute path."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        return {without_paths(key): _bare(its) for key, its in value.items()}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def evidence_page(folder: Path, links: str = "studies/") -> str:
    """All published studies of a folder on one page: a table, then a section for each system.

    Args:
        folder: where `publish` has put them.
        links: what leads from the page to that folder.
    """
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    if not found:
        return ""
    every = dict.fromkeys(one for study in found for one in study["commits"])
    commits = ", ".join(f"`{one}`" for one in every)
    parts = [
        "# Evidence\n",
        "What became of papers' claims under `harmonium study` ([how](../evidence.md)): headroom "
        "first, one grid for all arms, fresh seeds that decide by a rule that was stated before. "
        "Leads by kNN and linear probes are in points of test accuracy, those by the global "
        "objective and its gradient norm in their own unit, and less of those is better; p is "
        "corrected by Holm's rule, intervals are not.\n",
        f"Figures of commit {commits}.\n",
        markdown([_summary(study, links) for study in found]),
    ]
    for system in sorted({study["system"] for study in found}, key=str.lower):
        parts.append(f"## {system}\n")
        for study in found:
            if study["system"] == system:
                parts += _section(study, links)
    return "\n".join(parts).rstrip() + "\n"


def _summary(study: Mapping[str, Any], links: str) -> dict[str, Any]:
    return {
        "study": f"[{study['study']}]({links}{study['study']}.md)",
        "claim": study["claim"],
        "regime": study["regime"],
        "headroom": _headroom(study["headroom"]),
        "verdict": study["verdict"],
        "lead (95 %)": "; ".join(_leads(study["decisions"])),
    }


def _headroom(checks: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    reached = {name: all(one["met"] for one in its) for name, its in checks.items()}
    if not reached:
        return "not tested"
    if len(set(reached.values())) == 1:
        return "reached" if all(reached.values()) else "not reached"
    return "; ".join(f"{name}: {'' if met else 'not '}reached" for name, met in reached.items())


def _leads(decisions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in decisions:
        where = f", {one['condition']}" if one["condition"] else ""
        what = f"{one['line']['better']} over {one['line']['than']}, {one['line']['by']}{where}"
        yield f"{what}: {_lead(one)}{_p(one)}"


def _lead(one: Mapping[str, Any]) -> str:
    if one["mean"] is None:
        return str(one["why"])
    interval = "" if one["low"] is None else f" [{one['low']:+.2f}, {one['high']:+.2f}]"
    return f"{one['mean']:+.2f}{interval}"


def _p(one: Mapping[str, Any]) -> str:
    return "" if one["p"] is None else f", p = {one['p']:.4f}"


def _section(study: Mapping[str, Any], links: str) -> Iterator[str]:
    yield f"### {study['title']}\n"
    if study["paper"]:
        yield f"*{study['paper']}*\n"
    yield f"{study['claim']}\n"
    rows = [
        {
            "the claim says": one["text"],
            **({"condition": one["condition"]} if one["condition"] else {}),
            "lead (95 %)": _lead(one),
            "p (Holm)": "–" if one["p"] is None else f"{one['p']:.4f}",
            "verdict": one["verdict"],
        }
        for one in study["decisions"]
    ]
    if rows:
        yield markdown(rows)
    failed = f" {len(study['failed'])} of its runs failed." if study["failed"] else ""
    page = f"[All figures]({links}{study['study']}.md)."
    yield f"**Verdict: {study['verdict']}.** {study['regime']}.{failed} {page}\n"
