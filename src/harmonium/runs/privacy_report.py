"""The privacy report of a run, from its ledger: epsilon of noisy releases, and open fields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId
from harmonium.federation.method import Method
from harmonium.federation.spending import (
    charged,
    costs,
    in_words,
    left_out,
    paid_at_server,
    records,
)
from harmonium.federation.wire import STEPS
from harmonium.privacy.budget import epsilon, epsilon_rdp
from harmonium.privacy.library import epsilon_pld, together
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import size_of
from harmonium.runs.open_run import read_recipe, read_split
from harmonium.storage.run_folder import ASKED, RunFolder

MOST = 40  # points of the curves over rounds
WORST = 10  # clients that a table shows, and whose epsilon a library counts as well
NEIGHBOURS = {
    "replace": "one image of a client and another in its place",
    "add-remove": "a client's images with and without one of them",
    "client": "all of a client's images and any others in their place",
}

Kinds = tuple[tuple[tuple[str, Any], ...], ...]  # of releases, as sorted keys and values
ByClient = Mapping[ClientId, Sequence[tuple[int, Mapping[str, Any]]]]  # round and release


class _Released(NamedTuple):
    """The noisy releases that a ledger has."""

    by_client: ByClient  # of clients with at least one
    lost: Mapping[ClientId, int]  # how many of a client's were in answers that never arrived
    unknown: int  # lost answers whose releases the method does not declare in advance


class Open(NamedTuple):
    """A field that left clients without noise."""

    step: str
    field: str
    kind: str
    times: int
    bytes: int


class Refused(NamedTuple):
    """A step that clients were no longer asked for, as their budget was spent."""

    step: str
    clients: int
    of: int
    since: int  # the round in which the first of them was left out


@dataclass(frozen=True)
class Spent:
    """The noisy releases of one client."""

    client: ClientId
    name: str
    examples: int
    releases: Mapping[str, int]  # field and mechanism -> how many
    lost: int  # of them, those whose answers never arrived
    epsilon: float  # exact
    rdp: float  # by Renyi divergences
    pld: float | None  # by dp-accounting; none where that was not used


@dataclass(frozen=True)
class Report:
    """The privacy report of a run."""

    folder: Path
    rounds: int  # until now
    delta: float
    delta_of: str  # the setting it comes from; empty where the reader chose it
    limit: float | None  # the recipe's budget
    neighbours: str  # between which epsilon holds; empty where nothing was released
    clients: tuple[Spent, ...]  # those who released anything, worst first
    curve: tuple[tuple[int, float, float], ...]  # round; epsilon of the worst and the median client
    unprotected: tuple[Open, ...]
    refused: tuple[Refused, ...]
    masked: bool
    warnings: tuple[str, ...]
    _everyone: int = field(default=0, repr=False)

    def plain(self) -> dict[str, Any]:
        """The report as plain values, for JSON; infinite values become none."""
        tree = {k: v for k, v in asdict(self).items() if not k.startswith("_")}
        tree |= {"folder": str(self.folder), "unprotected": [u._asdict() for u in self.unprotected]}
        tree["refused"] = [one._asdict() for one in self.refused]
        finite: dict[str, Any] = _finite(tree)
        return finite

    def lines(self) -> list[str]:
        """The report in plain words."""
        if not self.clients:
            lines = [
                "nothing was sent with noise, so there is no epsilon: see the open fields below"
            ]
        else:
            worst = self.clients[0]
            lines = [
                f"epsilon  {worst.epsilon:.4g} at {self._at} for the worst client, "
                f"{median(one.epsilon for one in self.clients):.4g} for the median of "
                f"{len(self.clients)}, after {self.rounds} rounds"
                + (f"; the budget is {self.limit:g}" if self.limit is not None else ""),
                f"between  {NEIGHBOURS[self.neighbours]}",
            ]
        for step, clients, everyone, since in self.refused:
            who = f"{clients} of {everyone} clients"
            lines.append(f"budget   {who} could afford no further `{step}` from round {since} on")
        hidden = " (the server saw sums over clients only)" if self.masked else ""
        for one in self.unprotected:
            lines.append(
                f"open     {one.field} of `{one.step}`, {one.kind}: left clients {one.times:,} "
                f"times, {size_of(one.bytes)}, without noise{hidden}"
            )
        return [*lines, *(f"warning  {text}" for text in self.warnings)]

    @property
    def _at(self) -> str:
        return f"delta {self.delta:g}" + (f", of {self.delta_of}," if self.delta_of else "")

    def table(self) -> list[dict[str, Any]]:
        """The worst clients, for `report.tables`."""
        return [
            {
                "client": one.name or one.client,
                "examples": one.examples,
                "releases": in_words(one.releases),
                "epsilon": one.epsilon,
                "by RDP": one.rdp,
                "by PLD": one.pld,
            }
            for one in self.clients[:WORST]
        ]


def report(folder: str | Path, delta: float | None = None) -> Report:
    """Report on a run from its ledger, also while it is running.

    Args:
        folder: of a run on this machine, of a rehearsal, or of a server.
        delta: at which epsilon is reported; none: that of the budget, the recipe's or the method's
            own.
    """
    path = Path(folder)
    recipe, run = read_recipe(path), RunFolder(path)
    method = recipe.any_method()
    delta, delta_of = reported_delta(recipe) if delta is None else (delta, "")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be above 0 and below 1, e.g. 1e-5")
    about = run.about()
    examples = examples_by_client(path, about)
    entries = charged(run.read_log("ledger.jsonl"), run.read_log(ASKED))
    released = _released(method, entries, examples)
    left = left_out(run.read_log("metrics.jsonl"))
    every = [release for some in released.by_client.values() for _, release in some]
    result = Report(
        path,
        max((entry["round"] for entry in entries), default=0),
        delta,
        delta_of,
        recipe.privacy.epsilon,
        together(every) if every else "",
        tuple(_spent(released, delta, examples, about.get("clients") or [])),
        tuple(_curve(released.by_client, delta)),
        tuple(_open(method, entries)),
        tuple(Refused(s, len(by), len(examples), min(by.values())) for s, by in left.items()),
        recipe.privacy.masks is not None,
        (),
        len(examples),
    )
    sources = {str(release.get("noise", "")) for release in every}
    trusting = any(paid_at_server(method, step) for step in method.exchanges())
    warnings = [
        *_warnings_on_epsilon(result, sources, trusting),
        *_warnings_on_the_rest(result, released.unknown),
    ]
    return replace(result, warnings=tuple(warnings))


def summary(folder: str | Path) -> str:
    """One line on a run's noisy releases; empty where there are none."""
    if not any("releases" in line for line in RunFolder(Path(folder)).lines("ledger.jsonl")):
        return ""
    result = report(folder)
    if not result.clients:
        return ""
    worst = result.clients[0]
    return (
        f"epsilon {worst.epsilon:.4g} at {result._at} for the worst client, of noisy "
        f"releases alone: harmonium privacy {folder}"
    )


def plot(report: Report, path: Path) -> Path | None:
    """Plot epsilon of the worst and the median client over rounds; none if there is nothing."""
    from harmonium.report.plots import curves

    points = [point for point in report.curve if math.isfinite(point[1])]
    if not points:
        return None
    series = {
        "worst": [(float(number), worst) for number, worst, _ in points],
        "median": [(float(number), middle) for number, _, middle in points],
    }
    budget = {"budget": report.limit} if report.limit is not None else None
    title = f"Epsilon of noisy releases at delta {report.delta:g}, {report.folder.name}"
    curves(path, series, "round", "epsilon", title, budget)
    return path


def reported_delta(recipe: Recipe) -> tuple[float, str]:
    """The delta of the budget, and its setting: the recipe's, else the method's."""
    own = recipe.method.options
    if recipe.privacy.epsilon is None and own.get("epsilon") is not None and "delta" in own:
        return float(own["delta"]), "method.delta"
    return recipe.privacy.delta, "privacy.delta"


def examples_by_client(path: Path, about: Mapping[str, Any]) -> dict[ClientId, int]:
    """Every client's number of examples: of the split here, or as sites registered it."""
    if about.get("federation"):
        return {one["client"]: one["examples"] for one in about["federation"]["roll"]}
    return dict(enumerate(map(len, read_split(path).indices)))


def _released(
    method: Method, entries: Sequence[Mapping[str, Any]], examples: Mapping[ClientId, int]
) -> _Released:
    """The releases of all entries of a ledger, by client."""
    by_client: dict[ClientId, list[tuple[int, Mapping[str, Any]]]] = {}
    lost, unknown = Counter[ClientId](), 0
    for entry in entries:
        client, releases = entry["client"], entry.get("releases", [])
        if entry["outcome"] == "lost":  # by a kill, with its round
            releases = records(costs(method, entry["step"], examples[client]))
        if releases:
            rounds = [entry["round"]] * len(releases)
            by_client.setdefault(client, []).extend(zip(rounds, releases, strict=True))
        if entry["outcome"] in ("lost", "no answer"):
            lost[client] += len(releases)
            unknown += not releases and _guards(method, entry["step"])
    return _Released(by_client, lost, unknown)


def _spent(
    released: _Released, delta: float, examples: Mapping[ClientId, int], names: Sequence[object]
) -> Iterator[Spent]:
    """What each client has spent, the worst client first."""
    releases = {
        client: [release for _, release in some] for client, some in released.by_client.items()
    }
    kinds = {client: _counted(some) for client, some in releases.items()}
    exact = {client: _epsilon(some, delta) for client, some in kinds.items()}
    for place, client in enumerate(sorted(exact, key=lambda client: (-exact[client], client))):
        yield Spent(
            client,
            str(names[client]) if client < len(names) else "",
            examples[client],
            dict(_by_field(releases[client])),
            released.lost[client],
            exact[client],
            epsilon_rdp(_mappings(kinds[client]), delta),
            epsilon_pld(_mappings(kinds[client]), delta) if place < WORST else None,
        )


def _by_field(releases: Iterable[Mapping[str, Any]]) -> Counter[str]:
    counts = Counter[str]()
    for one in releases:
        counts[f"{one['field']} by {one['mechanism']}"] += one.get("count", 1)
    return counts


def _guards(method: Method, step: str) -> bool:
    declared = method.exchanges().get(step)
    return declared is not None and any(one.guarded for one in declared.up.values())


def _open(method: Method, entries: Sequence[Mapping[str, Any]]) -> list[Open]:
    """Fields that left clients without noise, the largest first."""
    exchanges = method.exchanges()
    times, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for entry in entries:
        for name, size in entry.get("up", {}).items() if entry["step"] not in STEPS else ():
            declared = exchanges[entry["step"]].up.get(name) if entry["step"] in exchanges else None
            noisy = name == "model" and paid_at_server(method, entry["step"])
            if declared is None or not (noisy or declared.guarded or declared.kind == "public"):
                times[entry["step"], name] += 1
                sizes[entry["step"], name] += size
    return [
        Open(step, name, _kind(method, step, name), times[step, name], size)
        for (step, name), size in sizes.most_common()
    ]


def _kind(method: Method, step: str, name: str) -> str:
    try:
        return method.exchanges()[step].up[name].kind.replace("_", "-")
    except KeyError:
        return "not declared"


def _counted(releases: Sequence[Mapping[str, Any]]) -> Kinds:
    """Releases by kind, with how many there are of each."""
    counts = Counter[tuple[tuple[str, Any], ...]]()
    for release in releases:
        kind = {k: v for k, v in release.items() if k not in ("field", "noise", "count")}
        counts[tuple(sorted(kind.items()))] += release.get("count", 1)
    return tuple((*kind, ("count", count)) for kind, count in sorted(counts.items()))


def _mappings(kinds: Kinds) -> list[dict[str, Any]]:
    return [dict(kind) for kind in kinds]


def _epsilon(kinds: Kinds, delta: float) -> float:
    return epsilon(_mappings(kinds), delta)


def _curve(by_client: ByClient, delta: float) -> list[tuple[int, float, float]]:
    """Epsilon so far of the worst and the median client, after some of the rounds."""
    rounds = sorted({number for some in by_client.values() for number, _ in some})
    if len(rounds) > MOST:
        rounds = [rounds[round(i * (len(rounds) - 1) / (MOST - 1))] for i in range(MOST)]
    points = []
    for last in rounds:
        so_far = [
            _counted([release for number, release in some if number <= last])
            for some in by_client.values()
        ]
        known = {kinds: _epsilon(kinds, delta) for kinds in set(so_far)}  # many have the same
        epsilons = [known[kinds] for kinds in so_far]
        points.append((last, max(epsilons), median(epsilons)))
    return points


def _warnings_on_epsilon(report: Report, sources: set[str], trusting: bool) -> Iterator[str]:
    """Caveats on epsilon; none where there is no epsilon.

    `sources` are those of the noise; with `trusting`, the server adds it.
    """
    if not report.clients:
        return
    if trusting:
        seen = "sums of" if report.masked else "all"
        yield (
            f"the server added the noise: it saw {seen} model updates without it, and epsilon "
            "holds against everyone but the server"
        )
    yield from _warnings_on_delta(report)
    if "simulated" in sources:
        yield (
            "noise was simulated: whoever knows the run's seed can subtract it, so epsilon is what "
            "the same noise from the operating system would give"
        )
    if lost := sum(client.lost for client in report.clients):
        yield (
            f"releases in answers that never arrived: {lost}; they count, because they may have "
            "left their clients"
        )
    if report.unprotected:
        yield (
            "epsilon covers the noisy fields only: the fields listed as open were computed from "
            "the same images and are not included in it"
        )


def _warnings_on_delta(report: Report) -> Iterator[str]:
    """Warnings that delta is so large that epsilon means nothing."""
    if report.neighbours == "client":
        if report.delta >= 1 / report._everyone:
            yield (
                f"delta {report.delta:g} is not below 1 / {report._everyone} clients: it would "
                "allow publishing all data of one client, so epsilon is not meaningful"
            )
        return
    small = [one.examples for one in report.clients if report.delta >= 1 / max(one.examples, 1)]
    if small:
        yield (
            f"delta {report.delta:g} is not below 1 / examples for {len(small)} of "
            f"{len(report.clients)} clients, the smallest with {min(small)}: it would allow "
            "publishing one image as it is, so epsilon is not meaningful for them"
        )


def _warnings_on_the_rest(report: Report, unknown: int) -> Iterator[str]:
    """What epsilon does not cover, and what the server could see."""
    if unknown:
        yield (
            f"{unknown} answers that never arrived may have had releases that this method does not "
            "declare in advance; they are not counted"
        )
    if rows := [field for field in report.unprotected if field.kind == "per-example"]:
        names = ", ".join(sorted({field.field for field in rows}))
        yield f"rows of single images left clients without noise: {names}"
    yield (
        "secure aggregation was on: the server saw sums over clients, which can still reveal "
        "whether an image was trained on"
        if report.masked
        else "secure aggregation was off: the server saw the answer of every client"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
