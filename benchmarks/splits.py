"""CPU seconds that every rule takes to share a million images out among ten thousand clients.

    python benchmarks/splits.py [--json] [--images 1000000] [--clients 10000]

The images have no pixels worth mentioning: ten classes, or a hundred fine ones in twenty coarse
ones where the rule looks at those, four styles, and a column that names clients. Concentrations
run from one class a client to no difference at all. "refused" is a message instead of a split.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.images import Images
from harmonium.data.partition import SplitRule, make_split, splits

ALPHAS = (1e-4, 1e-2, 0.1, 1.0, 100.0, 1e5)
LIMIT = 3.0  # seconds
VARIANTS = (
    ("iid", {}, None),
    ("dirichlet", {}, "alpha"),
    ("dirichlet", {"prior": True}, "alpha"),
    ("pachinko", {}, "alpha"),
    ("pachinko", {}, "beta"),
    ("rotation", {}, "alpha"),
    ("joint", {}, "alpha"),
    ("orchestra", {}, "alpha"),
    ("orchestra", {"rounding": "largest"}, "alpha"),
    ("orchestra", {"balance": False}, "alpha"),
    ("by_class", {"classes_per_client": 2}, None),
    ("by_class", {"classes_per_client": 2, "assignment": "least_used"}, None),
    ("lda", {}, "alpha"),
    ("quantity", {}, "alpha"),
    ("styles", {}, None),
    ("styles", {}, "beta"),
    ("column", {}, None),
)


def labelled_images(count: int, clients: int, classes: int) -> Images:
    rng = np.random.default_rng(0)
    fine = rng.integers(0, classes, count)
    owners = np.concatenate([np.arange(clients), rng.integers(0, clients, count - clients)])
    styles = rng.choice(4, count, p=[0.1, 0.2, 0.3, 0.4])
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, 1, 1, 1))
    return Images(pixels, fine, {"coarse": fine // 5, "style": styles, "client": owners})


def rules(folder: Path, images: Images, clients: int) -> Iterator[tuple[str, SplitRule]]:
    """Every rule, at every concentration where it has one; its name in the table comes first."""
    for name, settings, key in VARIANTS:
        for value in ALPHAS if key else (None,):
            chosen = settings if key is None else {**settings, key: value}
            words = " ".join(f"{k}={v}" for k, v in chosen.items())
            yield f"{name} {words}".strip(), splits[name](**chosen)
    saved = folder / "split.npz"
    make_split(splits["iid"](), images, "", clients, 0).save(saved)
    yield "file", splits["file"](path=str(saved))


def measure(count: int, clients: int) -> list[dict[str, str | float]]:
    ten, hundred = (labelled_images(count, clients, classes) for classes in (10, 100))
    rows: list[dict[str, str | float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for called, rule in rules(Path(folder), ten, clients):
            began = time.process_time()
            try:
                make_split(rule, hundred if rule.name == "pachinko" else ten, "", clients, 0)
                outcome = "made"
            except DataError:
                outcome = "refused"
            seconds = time.process_time() - began
            rows.append({"rule": called, "seconds": seconds, "outcome": outcome})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=10_000)
    options = parser.parse_args()
    rows = measure(options.images, options.clients)
    missing = set(splits.table()) - {str(row["rule"]).split()[0] for row in rows}
    if missing:
        raise SystemExit(f"nothing measures: {', '.join(sorted(missing))}")
    if options.json:
        print(json.dumps({"limit": LIMIT, "rows": rows}, indent=1))
        return
    print(f"{options.images:,} images among {options.clients:,} clients")
    for row in rows:
        note = "" if row["outcome"] == "made" else f"  {row['outcome']}"
        print(f"{row['rule']:52s}{row['seconds']:7.2f} s{note}")
    worst = max(float(row["seconds"]) for row in rows)
    verdict = "met" if worst <= LIMIT else "MISSED"
    print(f"at most {worst:.2f} s (limit {LIMIT} s: {verdict})")


if __name__ == "__main__":
    main()
