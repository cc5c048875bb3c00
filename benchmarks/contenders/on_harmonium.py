"""The same federation on Harmonium."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import answered, round_over, task

import harmonium


class Reports(harmonium.Callback):
    """Tells the benchmark of the first answer and of every round."""

    def task(self, reply: Any) -> None:
        """A client answered."""
        answered()

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """A round was committed."""
        round_over(row["round"])


def main() -> None:
    """The whole run."""
    of = task()
    words = [line for line in (Path(of.folder) / "recipe.txt").read_text().splitlines() if line]
    words += [f"rounds={of.rounds}", f"views.mode={of.views}", f"engine.workers={of.workers}"]
    out = Path(sys.argv[1]).with_suffix(".run")
    harmonium.run("fedavg", *words, out=out, callbacks=Reports())


if __name__ == "__main__":
    main()
