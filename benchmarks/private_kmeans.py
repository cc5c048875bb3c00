"""Whether private centroids still say anything about the images.

    python benchmarks/private_kmeans.py [--seeds 0 1 2] [--write docs/results/private-clustering.md]

Rows are of unit length and lie around eight directions, as representations of eight kinds of
images might. The centroids of `privacy.kmeans.private_centroids` are held against those of plain
k-means, and against directions that were drawn without looking at any row.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from sklearn.metrics import adjusted_mutual_info_score
from torch import Tensor
from torch.nn.functional import normalize

from harmonium.core import seeds
from harmonium.privacy.budget import epsilon as spent
from harmonium.privacy.kmeans import multiplier, private_centroids, public_matrix, weighted_kmeans
from harmonium.privacy.mechanisms import Noise
from harmonium.report.tables import markdown
from stored import write_page

COLUMNS, GROUPS, SPREAD = 512, 8, 1.0
DELTA = 1e-3
EPSILONS = (0.8, 1.0, 10.0, math.inf)
DIMS = (None, 32)
ROWS = (128, 500, 5_000)
RELEASES = (1, 50, 101)


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit rows, and the group of each."""
    rng = seeds.torch_rng(seed, "rows", count)
    axes = normalize(torch.randn(GROUPS, COLUMNS, generator=rng), dim=1)
    group = torch.randint(GROUPS, (count,), generator=rng)
    grain = torch.randn(count, COLUMNS, generator=rng) / math.sqrt(COLUMNS)
    return normalize(axes[group] + SPREAD * grain, dim=1), group


def agreement(rows: Tensor, group: Tensor, centroids: Tensor) -> float:
    """How well the nearest centroids by angle identify the groups: 100 fully, 0 by chance."""
    nearest = (rows @ normalize(centroids, dim=1).T).argmax(1)
    return 100 * float(adjusted_mutual_info_score(group, nearest))


def cosine(centroids: Tensor, plain: Tensor) -> float:
    """The mean over centroids of the cosine with the nearest plain one."""
    both = normalize(centroids, dim=1) @ normalize(plain, dim=1).T
    return float(both.max(1).values.mean())


def measure(epsilon: float, dims: int | None, count: int, seed: int) -> list[float]:
    """Figures of private centroids, random directions and plain k-means on one draw of rows."""
    rows, group = draw(count, seed)
    rng = seeds.torch_rng(seed, "clustering", count)
    noise = Noise("simulated", seeds.torch_rng(seed, "noise", count))
    private, _ = private_centroids(
        rows, GROUPS, epsilon=epsilon, delta=DELTA, noise=noise, rng=rng, dims=dims
    )
    plain = weighted_kmeans(rows.double(), torch.ones(count).double(), GROUPS, rng).float()
    blind = torch.randn(GROUPS, COLUMNS, generator=rng)
    if dims is not None:
        matrix = public_matrix(COLUMNS, dims).float()
        blind = blind @ matrix @ matrix.T
    sets = (private, blind, plain)
    return [
        float(len(private)),
        *(cosine(some, plain) for some in sets[:2]),
        *(agreement(rows, group, some) for some in sets),
    ]


def table(seeds_: list[int]) -> str:
    lines = []
    for count in ROWS:
        for dims in DIMS:
            for epsilon in EPSILONS:
                runs = [measure(epsilon, dims, count, seed) for seed in seeds_]
                k, near, blind, *agreements = (
                    statistics.mean(column) for column in zip(*runs, strict=True)
                )
                lines.append(
                    {
                        "rows": count,
                        "dims": "all" if dims is None else dims,
                        "epsilon": "no noise" if math.isinf(epsilon) else f"{epsilon:g}",
                        "centroids": f"{k:.1f}",
                        "cosine": f"{near:.2f}",
                        "blind": f"{blind:.2f}",
                        "groups told": f"{agreements[0]:.0f}",
                        "by blind": f"{agreements[1]:.0f}",
                        "by k-means": f"{agreements[2]:.0f}",
                    }
                )
    return markdown(lines)


def budgets() -> str:
    """The table of the epsilon of several releases, for both kinds of neighbours."""
    lines = []
    for epsilon in EPSILONS[:-1]:
        noise = Noise("simulated", torch.Generator())
        settings = {"noise": noise, "rng": torch.Generator(), "delta": DELTA}
        _, releases = private_centroids(torch.zeros(1, 1), 1, epsilon=epsilon, **settings)
        line = {
            "epsilon of one": f"{epsilon:g}",
            "noise of sums": f"{multiplier(epsilon, DELTA):.3f}",
        }
        for times in RELEASES:
            some = [asdict(one) for one in releases] * times
            line[f"{times} more or less"] = f"{spent(some, DELTA):.1f}"
            line[f"{times} replaced"] = f"{spent(some, DELTA, neighbours='replace'):.1f}"
        lines.append(line)
    return markdown(lines)


def page(asked: list[int]) -> str:
    names = " ".join(map(str, asked))
    return f"""# What noise leaves of private centroids

`python benchmarks/private_kmeans.py --seeds {names}`

Rows of unit length in {COLUMNS} columns, around {GROUPS} random directions to which they have a
cosine of about {1 / math.sqrt(1 + SPREAD**2):.2f}: an easy case, for groups of true representations
lie closer together. At most {GROUPS} centroids, delta {DELTA:g}, epsilon of one release for one
image more or less, means over {len(asked)} seeds.

- `cosine`: of a private centroid with the nearest one of plain k-means; `blind`: of a random
  direction.
- `groups told`: how well the nearest centroid tells the groups (adjusted mutual information, 100 is
  fully, 0 is chance); `by blind` and `by k-means`: how well random directions and k-means do.
- With `dims` 32 all is in a random subspace, blind directions too. A cosine there is at most about
  {math.sqrt(32 / COLUMNS):.2f}; what counts is whether groups are told.

{table(asked).strip()}

With 128 rows and epsilon up to 1 private centroids tell groups no better than random directions;
with 500 six tenths of what k-means tells is left, with 5,000 most of it. Fewer columns make for
less noise, but what the projection loses was more than that here: 32 told groups less well than
all {COLUMNS} in every row with noise.

What releases amount to at delta {DELTA:g}, for one image more or less and for one in another's
place:

{budgets().strip()}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = page(options.seeds).rstrip() + "\n"
    print(text)
    if options.write:
        write_page(options.write, text)


if __name__ == "__main__":
    main()
