"""The sweeps of the papers at the size of a laptop.

    python benchmarks/sweeps.py [--seeds 1] [--only heterogeneity ...] [--out FOLDER]
                                [--write docs/results/sweeps.md]

Every sweep is `harmonium sweep NAME@cpu`, in FOLDER/NAME: given again, the command repeats nothing.
Needs CIFAR-10 (`harmonium data fetch cifar10`). Those of FedStyle (`lambda`, `style-epochs`) need
the Digit archives and are left out unless named; docs/results/fedstyle.md has the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harmonium import sweep
from harmonium.recipe.presets import about, sweeps
from harmonium.report.tables import markdown
from stored import studies, write_page

OTHERS = ("lambda", "style-epochs")


def section(name: str, seeds: int, folder: Path, workers: int | None) -> str:
    """The section of one sweep: its command and its table."""
    own = [] if workers is None else [f"engine.workers={workers}"]
    result = sweep(f"{name}@cpu", f"seeds={seeds}", *own, out=folder / name)
    what, paper = about(sweeps()[name])
    words = f"`harmonium sweep {name}@cpu seeds={seeds}`"
    return f"\n## {name}\n\n{what} {paper}.\n{words}\n\n{markdown(result.shown(), digits=1)}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the page."""
    usual = [name for name in sweeps() if name not in OTHERS]
    options = studies(__doc__, sweeps(), usual, seeds=1).parse_args(words)
    with tempfile.TemporaryDirectory() as passing:
        folder = options.out or Path(passing)
        parts = [section(name, options.seeds, folder, options.workers) for name in options.only]
    only = "" if options.only == usual else f" --only {' '.join(options.only)}"
    text = ABOUT.format(seeds=options.seeds, only=only) + "".join(parts) + f"\n{CAME.strip()}\n"
    print(text)
    if options.write:
        write_page(options.write, text)


ABOUT = """# Sweeps of the papers

`python benchmarks/sweeps.py --seeds {seeds}{only}`

Each is one recipe, here at the size of a laptop: CIFAR-10, 5,000 training images at 16 pixels, a
small CNN, 12 rounds (50 in Federated SimCLR's). Figures are kNN on test images in percent, of
frozen encoders. With one seed a difference of a point or two says nothing: this page shows that the
sweeps run, and what is larger than that.

![kNN over heterogeneity, a line a method](../images/sweep.png)
"""
CAME = """
What came out: training with labels suffers most where clients hold few classes, from 43.9 down to
20.7; methods without labels lose 4 points at most there, as the paper says. In twelve short rounds
SimCLR is ahead of Orchestra at every heterogeneity, number of clients and participation but one,
against the paper. Numbers of clusters show no trend, nor do numbers of clients where the training
stays the same in all; the fewest clients a round are the worst for SimCLR and for rotation
prediction. By nearest neighbours raw pixels are ahead of every encoder that learnt without labels:
this little training leaves much to learn.
"""


if __name__ == "__main__":
    main()
