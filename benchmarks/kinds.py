"""What `harmonium inspect` makes of published sets: kinds, measurements and near-duplicates.

    python benchmarks/kinds.py [--json] NAME_OR_PATH...

A name is a set that has been fetched, which is inspected as an archive; a path is inspected as it
is. The table is Markdown, as docs/your-images.md has it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from harmonium.core.errors import HarmoniumError
from harmonium.data.datasets import datasets
from harmonium.data.inspection import Inspection, inspect

COLUMNS = (
    *("set", "images", "kind", "grey", "background", "thick ink", "one hue", "mirror told"),
    *("turn told", "bare crops", "blur leaves", "near-duplicates", "changes to the preset"),
)


def inspected(name: str, folder: Path) -> Inspection:
    """A path as it is, or a set as an archive of its parts."""
    if name not in datasets.table():
        return inspect(name)
    parts = datasets[name]().stored().parts
    file = folder / f"{name}.npz"
    arrays = {f"{part}_x": images.pixels for part, images in parts.items() if part != "validation"}
    np.savez(file, **arrays)
    found = inspect(file)
    file.unlink()
    return found


def row(name: str, found: Inspection) -> dict[str, object]:
    """One line of the table."""
    m, alike = found.measures, found.duplicates
    changes = [setting for removal in found.removals for setting in removal.settings]
    values = (
        *(Path(name).stem, f"{found.images:,}", found.kind, m.grey, m.background, m.thick),
        *(m.one_hue, m.mirrored, m.turned, m.bare_crops[0.2], m.blurred),
        *(f"{alike.images} in {alike.groups}", " ".join(changes) or "none"),
    )
    return dict(zip(COLUMNS, values, strict=True))


def shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names:
            try:
                rows.append(row(name, inspected(name, Path(folder))))
            except HarmoniumError as error:
                print(f"{name}: {error}")
    if options.json:
        print(json.dumps(rows))
        return
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for one in rows:
        print(f"| {' | '.join(shown(value) for value in one.values())} |")


if __name__ == "__main__":
    main()
