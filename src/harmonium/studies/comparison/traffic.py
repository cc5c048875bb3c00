"""The cost of a run's accuracy: rounds, bytes according to the ledger, and modelled time.

Time is modelled, so that it does not depend on this machine and can stand for other devices: a
round takes as long as its slowest client, which receives, passes its images through its networks,
and sends. Passes other than training are forward only and count a third.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium.core.errors import ConfigError
from harmonium.federation.method import Method
from harmonium.federation.wire import is_measuring
from harmonium.report.tables import MISSING
from harmonium.storage.run_folder import RunFolder

FORWARD = 1 / 3  # of the time that a forward and a backward pass take
MEGA = 1e6
SMALL = 0.01  # of a method's bytes: a smaller component has no column of its own
WAYS = ("down", "up")


@dataclass(frozen=True)
class Device:
    """A client's bandwidth and speed, for modelled time."""

    down: float = 50.0  # megabits a second from the server
    up: float = 10.0  # megabits a second to it
    speed: float = 200.0  # images a second that it trains on, all their views together

    def __post_init__(self) -> None:
        for name in ("down", "up", "speed"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"compare.{name} is {getattr(self, name)}; it must be above 0")

    def seconds(self, down: float, up: float, images: float) -> float:
        """Seconds that a client takes for these bytes and images.

        >>> Device(down=8, up=4, speed=10).seconds(down=1e6, up=1e6, images=20)
        5.0
        """
        return 8 * down / (MEGA * self.down) + 8 * up / (MEGA * self.up) + images / self.speed


@dataclass(frozen=True)
class Point:
    """A round of a run: its accuracy, and the cost until then."""

    round: int
    knn: float | None  # on validation images; none: not evaluated, or diverged
    bytes: int  # sent and received by all clients
    seconds: float  # modelled


def course(folder: Path, method: Method, examples: Sequence[int], device: Device) -> list[Point]:
    """The course of a run, one point a round."""
    rows = {row["round"]: row for row in RunFolder(folder).lines("metrics.jsonl")}
    loads: dict[int, dict[int, list[float]]] = {}
    for line in _of_method(folder):
        load = loads.setdefault(line["round"], {}).setdefault(line["client"], [0.0, 0.0, 0.0])
        load[0] += sum(line["down"].values())
        load[1] += sum(line["up"].values())
        images = examples[line["client"]]
        load[2] += passes(method, line["step"], images) * images
    points, total, time = [], 0, 0.0
    for number in sorted(rows):
        clients = loads.get(number, {}).values()
        total += int(sum(down + up for down, up, _ in clients))
        time += max((device.seconds(*load) for load in clients), default=0.0)
        points.append(Point(number, rows[number].get("knn"), total, time))
    return points


def passes(method: Method, step: str, images: int) -> float:
    """Passes over a client's `images` images in one ask, in units of a training pass."""
    return method.workload * method.local.passes(images) if step == "train" else FORWARD


def reached(points: Sequence[Point], knn: float) -> Point | None:
    """The first point with at least this kNN accuracy; none: it is never reached.

    >>> reached([Point(1, 0.2, 10, 1.0), Point(2, None, 20, 2.0), Point(3, 0.6, 30, 3.0)], 0.5)
    Point(round=3, knn=0.6, bytes=30, seconds=3.0)
    """
    return next((one for one in points if one.knn is not None and one.knn >= knn), None)


def components(folder: Path) -> dict[str, dict[str, float]]:
    """Bytes that a client sends and receives in a round, by component, over all rounds and clients.

    A component is a part of the model or another field of a message.
    """
    sums: dict[str, Counter[str]] = {"down": Counter(), "up": Counter()}
    visits: set[tuple[int, int]] = set()
    for line in _of_method(folder):
        if line["round"] == 0:
            continue
        visits.add((line["round"], line["client"]))
        for way, count in sums.items():
            for key, amount in named(line, way):
                count[key] += amount
    each = max(1, len(visits))
    return {way: {key: n / each for key, n in count.items()} for way, count in sums.items()}


def mean_components(
    several: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """The mean of `components` over seeds; a component that a seed never sent counts 0.

    >>> mean_components([{"down": {"a": 4}, "up": {}}, {"down": {"a": 2}, "up": {"b": 1}}])
    {'down': {'a': 3.0}, 'up': {'b': 0.5}}
    """
    return {
        way: {
            key: sum(one[way].get(key, 0.0) for one in several) / len(several)
            for key in dict.fromkeys(key for one in several for key in one[way])
        }
        for way in WAYS
    }


def by_component(sent: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, str]]:
    """One row per method and one column per component, the largest first: megabytes down / up.

    A component below a hundredth of every method's bytes has no column. Empty if no method sends
    two components.

    >>> by_component({"a": {"down": {"encoder": 3e6, "centroids": 1e5}, "up": {"encoder": 3e6}}})
    [{'method': 'a', 'encoder': '3 / 3', 'centroids': '0.1 / 0'}]
    """
    shares: dict[str, float] = {}
    for counts in (its[way] for its in sent.values() for way in WAYS):
        whole = sum(counts.values()) or 1.0
        shares |= {key: max(shares.get(key, 0.0), n / whole) for key, n in counts.items()}
    large = [key for key in sorted(shares, key=lambda key: -shares[key]) if shares[key] >= SMALL]
    if not any(len({*large} & {*its["down"], *its["up"]}) > 1 for its in sent.values()):
        return []

    def cell(its: Mapping[str, Mapping[str, float]], key: str) -> str:
        both = [its[way].get(key, 0.0) / MEGA for way in WAYS]
        return " / ".join(f"{n:.3g}" for n in both) if any(both) else MISSING

    return [
        {"method": label, **{key: cell(its, key) for key in large}} for label, its in sent.items()
    ]


def named(line: Mapping[str, Any], way: str) -> Iterator[tuple[str, int]]:
    """The bytes of one line of the ledger by component; models are listed by part.

    >>> parts = {"up": {name: {"encoder": 3, "head": 1} for name in ("model", "control")}}
    >>> line = {"up": {"model": 4, "control": 4, "loss": 8}, "parts": parts}
    >>> [name for name, _ in named(line, "up")]
    ['encoder', 'head', 'control: encoder', 'control: head', 'loss']
    """
    parts = line.get("parts", {}).get(way, {})
    for field, count in line[way].items():
        if field in parts:
            of = "" if field == "model" else f"{field}: "
            yield from ((f"{of}{part}", amount) for part, amount in parts[field].items())
        else:
            yield field, count


def mean_course(courses: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds, at rounds that all of them evaluated."""
    shared = set.intersection(*({one.round for one in some} for some in courses))
    by_round = [{one.round: one for one in some} for some in courses]
    means = []
    for number in sorted(shared):
        here = [some[number] for some in by_round]
        known = [one.knn for one in here if one.knn is not None]
        means.append(
            Point(
                number,
                sum(known) / len(known) if len(known) == len(here) else None,
                round(sum(one.bytes for one in here) / len(here)),
                sum(one.seconds for one in here) / len(here),
            )
        )
    return means


def _of_method(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's ledger that belong to the method, without evaluation."""
    for line in RunFolder(folder).lines("ledger.jsonl"):
        if not is_measuring(line.get("of", line["step"]), line["round"]):
            yield line
