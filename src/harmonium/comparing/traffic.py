"""What a run's accuracy cost on the way: rounds, bytes as the ledger has them, and modelled time.

Time is modelled, so that it is the same on every machine and says something of devices that are not
here: a round takes as long as its slowest client, who receives, passes its pictures through its
networks, and sends. Passes beside training are forward only and count a third.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium.errors import ConfigError
from harmonium.federation.method import Method

FORWARD = 1 / 3  # of the time that a forward and a backward pass take
MEGA = 1e6


@dataclass(frozen=True)
class Device:
    """A client's line and speed, for modelled time."""

    down: float = 50.0  # megabits a second from the server
    up: float = 10.0  # megabits a second to it
    speed: float = 200.0  # pictures a second that it trains on, all their views together

    def __post_init__(self) -> None:
        for name in ("down", "up", "speed"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"compare.{name} is {getattr(self, name)}; it must be above 0")

    def seconds(self, down: float, up: float, pictures: float) -> float:
        """How long a client takes for so many bytes and pictures.

        >>> Device(down=8, up=4, speed=10).seconds(down=1e6, up=1e6, pictures=20)
        5.0
        """
        return 8 * down / (MEGA * self.down) + 8 * up / (MEGA * self.up) + pictures / self.speed


@dataclass(frozen=True)
class Point:
    """A run when it was looked at: what it had cost until then."""

    round: int
    knn: float | None  # on validation pictures; none: not judged, or diverged
    bytes: int  # sent and received by all clients
    seconds: float  # modelled


def course(folder: Path, method: Method, examples: Sequence[int], device: Device) -> list[Point]:
    """A run from its start to its end, a point a round."""
    rows = {row["round"]: row for row in _lines(folder / "metrics.jsonl")}
    loads: dict[int, dict[int, list[float]]] = {}
    for line in _lines(folder / "ledger.jsonl"):
        load = loads.setdefault(line["round"], {}).setdefault(line["client"], [0.0, 0.0, 0.0])
        load[0] += sum(line["down"].values())
        load[1] += sum(line["up"].values())
        load[2] += passes(method, line["step"]) * examples[line["client"]]
    found, total, time = [], 0, 0.0
    for number in sorted(rows):
        clients = loads.get(number, {}).values()
        total += int(sum(down + up for down, up, _ in clients))
        time += max((device.seconds(*load) for load in clients), default=0.0)
        found.append(Point(number, rows[number].get("knn"), total, time))
    return found


def passes(method: Method, step: str) -> float:
    """How often a client passes its pictures through networks in one ask, in passes of training."""
    return method.workload * method.local.epochs if step == "train" else FORWARD


def reached(points: Sequence[Point], knn: float) -> Point | None:
    """The first point at which a run is as good as that; none: it never is.

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
    for line in _lines(folder / "ledger.jsonl"):
        if line["round"] == 0:
            continue
        visits.add((line["round"], line["client"]))
        for way, count in sums.items():
            count.update(dict(named(line, way)))
    each = max(1, len(visits))
    return {way: {key: n / each for key, n in count.items()} for way, count in sums.items()}


def named(line: Mapping[str, Any], way: str) -> Iterator[tuple[str, int]]:
    """The bytes of one line of the ledger, a model's by its parts."""
    parts = line.get("parts", {}).get(way, {})
    for field, count in line[way].items():
        if field in parts:
            yield from parts[field].items()
        else:
            yield field, count


def mean_course(courses: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds, at rounds that all of them looked at."""
    shared = set.intersection(*({one.round for one in some} for some in courses))
    by_round = [{one.round: one for one in some} for some in courses]
    found = []
    for number in sorted(shared):
        here = [some[number] for some in by_round]
        known = [one.knn for one in here if one.knn is not None]
        found.append(
            Point(
                number,
                sum(known) / len(known) if len(known) == len(here) else None,
                round(sum(one.bytes for one in here) / len(here)),
                sum(one.seconds for one in here) / len(here),
            )
        )
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, itertools.filterfalse(str.isspace, lines))
