"""The same federation on Harmonium."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import round_over, task

import harmonium


class Reports(harmonium.Callback):
    """Tells the benchmark of every round."""

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """A round was committed."""
        round_over(row["round"])


def main() -> None:
    """The whole run."""
    of = task()
    out = Path(sys.argv[1]).with_suffix(".run")
    harmonium.run("fedavg", *of.words(), out=out, callbacks=Reports())


if __name__ == "__main__":
    main()
