"""How fast probes are, and how close to exact solutions.

    python benchmarks/probes.py [--repeats 3] [--write docs/results/probes.md] [--quick]

Linear probes against scikit-learn's lbfgs with the same penalty: CPU seconds of one thread, in turn
in one process, and how far either stays above the converged objective. kNN against the plain
formula, and against the matrix product alone, with the most memory that each adds. `--quick` takes
a tenth of the images. Needs CIFAR-10: `harmonium data fetch cifar10`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.seeds import numpy_rng
from harmonium.data.datasets import datasets
from harmonium.evaluation import embed, few_label_probe, knn_predict, linear_probe
from harmonium.evaluation.linear import FEW_STRENGTH, STRENGTHS, _draw, standard
from harmonium.evaluation.logistic import regressions
from harmonium.report.tables import markdown
from stored import write_page

FILTERS, SIDE, BIAS = 64, 6, 0.25  # of the features
CONVERGED = 1e-6  # largest slope of a converged solution
USUAL = 1e-4  # scikit-learn's default
K, TEMPERATURE = 200, 0.1
LIMITS = {"times": 3.0, "points": 0.3, "megabytes": 200.0}

Labelled = tuple[Tensor, Tensor]  # features and labels
Weights = tuple[Tensor, Tensor]  # (classes, dim) and (classes,)


class Patches(nn.Module):
    """Random whitened patches of training images as filters, rectified both ways, in quarters.

    One layer of Coates and Ng (2011): 64 filters, 2 signs and 4 quarters make 512 features.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        corners = rng.integers((len(pixels), *[pixels.shape[1] - SIDE + 1] * 2), size=(20000, 3))
        cut = [pixels[n, y : y + SIDE, x : x + SIDE] for n, y, x in corners]
        patches = self.prepare(torch.from_numpy(np.stack(cut))).flatten(1)
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T))
        white = vectors * (values + 0.01).rsqrt() @ vectors.T
        filters = functional.normalize((patches[:FILTERS] - mean) @ white, dim=1) @ white
        self.filters = nn.Parameter(filters.view(FILTERS, 3, SIDE, SIDE), requires_grad=False)
        self.shift = nn.Parameter(-filters @ mean, requires_grad=False)

    @staticmethod
    def prepare(pixels: Tensor) -> Tensor:
        """From bytes, channels last, to numbers around 0, channels first."""
        return pixels.permute(0, 3, 1, 2).float() / 64 - 2

    def forward(self, images: Tensor) -> Tensor:
        """Features `(n, 512)`."""
        answers = functional.conv2d(images, self.filters, self.shift)
        pooled = [
            functional.adaptive_avg_pool2d((sign * answers - BIAS).relu_(), 2) for sign in (1, -1)
        ]
        return torch.cat(pooled, dim=1).flatten(1)


def cifar10_features(share: float) -> tuple[Labelled, Labelled, Tensor, Tensor]:
    """Train and test features with classes, and the 100 finer labels of either.

    The finer ones are class and decile of brightness within the class, over training images.
    """
    data = datasets["cifar10"](validation=0).load()
    parts = [part.subset(np.arange(int(share * len(part)))) for part in (data.train, data.test)]
    encoder = Patches(np.array(parts[0].batch(np.arange(len(parts[0])))))
    features, labels, light = [], [], []
    for part in parts:
        features.append(embed(encoder, part, encoder.prepare, batch=250))
        labels.append(np.array(part.labels))
        light.append(np.array(part.batch(np.arange(len(part)))).mean(axis=(1, 2, 3)))
    fine = [np.zeros_like(some) for some in labels]
    for name in range(10):
        edges = np.quantile(light[0][labels[0] == name], np.arange(1, 10) / 10)
        for part in range(2):
            inside = labels[part] == name
            fine[part][inside] = 10 * name + np.searchsorted(edges, light[part][inside])
    train, test = ((features[i], torch.from_numpy(labels[i])) for i in range(2))
    return train, test, torch.from_numpy(fine[0]), torch.from_numpy(fine[1])


def seconds(job: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a job, and what it returned."""
    gc.collect()
    before = time.process_time()
    result = job()
    return time.process_time() - before, result


def peak(job: Callable[[], Any]) -> tuple[float, float, Any]:
    """CPU seconds of a job, most megabytes that it had beyond those before it, its result."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark
    before = _status("VmRSS")
    spent, result = seconds(job)
    return spent, (_status("VmHWM") - before) / 1e3, result


def _status(key: str) -> float:
    """A value of /proc/self/status in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(key)).split()[1])


def sklearn_solution(
    train: Labelled, strength: float, start: Weights | None = None, **words: Any
) -> Weights:
    """The solution of scikit-learn's lbfgs with one thread, from 0 or from an earlier solution."""
    features, labels = (part.numpy() for part in train)
    model = LogisticRegression(
        C=1 / (strength * len(features)), warm_start=start is not None, **words
    )
    if start is not None:
        model.coef_, model.intercept_ = (part.numpy() for part in start)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # where a limit on iterations ends it
        model.fit(features, labels)
    return torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)


def own_solution(train: Labelled, strength: float) -> Weights:
    """The solution of Harmonium's solver, which linear probes use."""
    (weights,) = regressions(*train, int(train[1].max()) + 1, [strength])
    return weights[:, :-1], weights[:, -1]


def objective(train: Labelled, solution: Weights, strength: float) -> float:
    """Mean cross entropy and penalty, in float64."""
    weights, intercept = (part.double() for part in solution)
    loss = sum(
        float(functional.cross_entropy(x.double() @ weights.T + intercept, y, reduction="sum"))
        for x, y in zip(train[0].split(5000), train[1].split(5000), strict=True)
    )
    return loss / len(train[0]) + strength / 2 * float(weights.square().sum())


def accuracy(test: Labelled, solution: Weights) -> float:
    """Accuracy of a solution in percent."""
    scores = test[0] @ solution[0].float().T + solution[1].float()
    return 100 * float((scores.argmax(1) == test[1]).double().mean())


def as_near(train: Labelled, strength: float, most: float) -> float:
    """CPU seconds of lbfgs to an objective of at most `most`, with ever smaller tolerances."""
    for power in range(1, 10):
        words = {"max_iter": 50_000, "tol": USUAL / 3**power}
        spent, solution = seconds(lambda words=words: sklearn_solution(train, strength, **words))
        if objective(train, solution, strength) <= most:
            return spent
    raise SystemExit(f"lbfgs does not come as near with a penalty of {strength:g}")


def solutions(train: Labelled, test: Labelled, repeats: int) -> list[dict[str, Any]]:
    """A row for every penalty of the probe's grid, each solved from 0."""
    rows = []
    for strength in STRENGTHS:
        pairs = []
        for _ in range(repeats):
            ours, found = seconds(lambda s=strength: own_solution(train, s))
            theirs, usual = seconds(lambda s=strength: sklearn_solution(train, s, max_iter=10_000))
            pairs.append((ours, theirs))
        wide = train[0].double(), train[1]
        best = sklearn_solution(wide, strength, usual, max_iter=50_000, tol=CONVERGED)
        floor = objective(train, best, strength)
        ours, theirs = (objective(train, one, strength) for one in (found, usual))
        gaps = [ours - floor, theirs - floor]
        spent = [statistics.median(some) for some in zip(*pairs, strict=True)]
        near = spent[1] if theirs <= ours else as_near(train, strength, ours)
        right = [accuracy(test, one) for one in (found, usual, best)]
        row: dict[str, Any] = {
            "classes": int(train[1].max()) + 1,
            "penalty": f"{strength:g}",
            "harmonium, s": f"{spent[0]:.2f}",
            "lbfgs, s": f"{spent[1]:.2f}",
            "lbfgs as near, s": f"{near:.2f}",
            "times": f"{near / spent[0]:.1f}",
            "harmonium, gap": f"{gaps[0]:.1e}",
            "lbfgs, gap": f"{gaps[1]:.1e}",
            "harmonium, %": f"{right[0]:.2f}",
            "lbfgs, %": f"{right[1]:.2f}",
            "converged, %": f"{right[2]:.2f}",
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def probes(train: Labelled, test: Labelled) -> list[dict[str, Any]]:
    """Whole probes: features as they come, penalty chosen on half of the test images."""
    half = len(test[0]) // 2
    parts = (*train, *(part[:half] for part in test), *(part[half:] for part in test))

    def path() -> tuple[float, float]:
        shift, scale = (torch.from_numpy(part) for part in standard(train[0].numpy()))
        known, chosen, asked = ((part - shift) / scale for part in parts[::2])
        best, last = (-1.0, 0.0, 0.0), None
        for strength in STRENGTHS:
            last = sklearn_solution((known, train[1]), strength, last, max_iter=10_000)
            right = [accuracy(some, last) for some in ((chosen, parts[3]), (asked, parts[5]))]
            best = max(best, (right[0], right[1], strength), key=lambda one: one[0])
        return best[1:]

    def ours() -> tuple[float, float]:
        found = linear_probe(*parts)
        return 100 * found.accuracy, found.strength

    def few() -> tuple[float, float]:
        shift, scale = (torch.from_numpy(part) for part in standard(train[0].numpy()))
        asked = (test[0] - shift) / scale, test[1]
        right = []
        for draw in range(5):
            rows = _draw(train[1].numpy(), 10, numpy_rng(0, "few_labels", 10, draw))
            some = (train[0][rows] - shift) / scale, train[1][rows]
            right.append(accuracy(asked, sklearn_solution(some, FEW_STRENGTH, max_iter=10_000)))
        return statistics.mean(right), FEW_STRENGTH

    def our_few() -> tuple[float, float]:
        return 100 * few_label_probe(*train, *test, per_class=10).accuracy, FEW_STRENGTH

    Job = Callable[[], tuple[float, float]]  # to accuracy and penalty
    jobs: dict[str, tuple[Job, Job]] = {
        "linear, five penalties": (ours, path),
        "10 labels a class, 5 draws": (our_few, few),
    }
    rows = []
    for name, (mine, theirs) in jobs.items():
        (spent, (right, own)), (long, (other, its)) = seconds(mine), seconds(theirs)
        rows.append(
            {
                "probe": name,
                "harmonium, s": f"{spent:.2f}",
                "with lbfgs, s": f"{long:.2f}",
                "times": f"{long / spent:.1f}",
                "harmonium, %": f"{right:.2f}",
                "with lbfgs, %": f"{other:.2f}",
                "penalty": f"{own:g}",
                "with lbfgs, penalty": f"{its:g}",
            }
        )
    return rows


def neighbours(train: Labelled, test: Labelled, repeats: int) -> list[dict[str, Any]]:
    """kNN, the plain formula and the matrix product alone."""

    def plain() -> Tensor:
        bank, asked = (functional.normalize(part) for part in (train[0], test[0]))
        named = []
        for some in asked.split(1000):
            near, rows = (some @ bank.T).topk(K, dim=1)
            votes = torch.zeros(len(some), 10, dtype=torch.float64)
            votes.scatter_add_(1, train[1][rows], (near.double() / TEMPERATURE).exp())
            named.append(votes.argmax(1))
        return torch.cat(named)

    def product() -> None:
        space = torch.empty(256, len(train[0]))
        for some in test[0].split(256):
            torch.mm(some, train[0].T, out=space[: len(some)])

    jobs: dict[str, Callable[[], Any]] = {
        "harmonium": lambda: knn_predict(*train, test[0], k=K, temperature=TEMPERATURE),
        "plain formula": plain,
        "matrix product alone": product,
    }
    measured = [{name: peak(job) for name, job in jobs.items()} for _ in range(repeats)]
    truth, rows = measured[0]["plain formula"][2], []
    for name in jobs:
        named = measured[0][name][2]
        rows.append(
            {
                "": name,
                "s": f"{statistics.median(one[name][0] for one in measured):.2f}",
                "MB more": f"{max(one[name][1] for one in measured):.0f}",
                "answers as the plain formula": ""
                if named is None
                else f"{int((named == truth).sum()):,} of {len(truth):,}",
                "right, %": ""
                if named is None
                else f"{100 * float((named == test[1]).double().mean()):.2f}",
            }
        )
    return rows


def page(repeats: int, share: float) -> str:
    """Run all measurements and return the page of results."""
    torch.set_num_threads(1)
    train, test, fine, fine_test = cifar10_features(share)
    near = neighbours(train, test, repeats)
    torch.set_num_threads(2)
    _, two, _ = peak(lambda: knn_predict(*train, test[0], k=K, temperature=TEMPERATURE))
    torch.set_num_threads(1)
    whole = probes(train, test)
    shift, scale = (torch.from_numpy(part) for part in standard(train[0].numpy()))
    known, asked = ((part - shift) / scale for part, _ in (train, test))
    solved = solutions((known, train[1]), (asked, test[1]), repeats)
    solved += solutions((known, fine), (asked, fine_test), repeats)
    least = min(float(row["times"]) for row in solved)
    apart = max(abs(float(row["harmonium, %"]) - float(row["converged, %"])) for row in solved)
    most = float(near[0]["MB more"])
    return f"""# Probes

`python benchmarks/probes.py --repeats {repeats}`

CPU seconds of one thread, in turn in one process, the median of {repeats}. Features:
{len(known):,} training and {len(asked):,} test images of CIFAR-10, {known.shape[1]} wide, from
one layer of random whitened patches. The 100 classes are the ten, each in deciles of brightness.

## Linear probes

Each penalty of the probe's grid from 0, on standardised features. `lbfgs` is scikit-learn's with
its default tolerance and no limit on iterations. `gap` is how far the objective, in nats an image,
stays above the converged one, for which lbfgs goes on in float64 until no slope is above
{CONVERGED:g}. Where lbfgs stops farther off than Harmonium, `as near` is what it takes with a
smaller tolerance, down to the same gap or less; `times` counts that. The last columns are
accuracies on test images.

{markdown(solved).strip()}

Least gain {least:.1f} times; largest difference from the converged accuracy {apart:.2f} points.

Whole probes, from features as they come to an accuracy; the penalty is chosen on half of the test
images, where the two best are nearly level, and the accuracy is of the other half:

{markdown(whole).strip()}

## Nearest neighbours

{len(asked):,} queries, {K} neighbours, temperature {TEMPERATURE}. `MB more` is the highest mark
of the process above what it had before, features not counted.

{markdown(near).strip()}

With two threads kNN has {two:.0f} MB more.

Limits: {verdict(least, apart, max(most, two))}
"""


def verdict(times: float, points: float, megabytes: float) -> str:
    """Whether limits are met."""
    checks = {
        f"at least {LIMITS['times']:g} times as fast": times >= LIMITS["times"],
        f"within {LIMITS['points']:g} points": points <= LIMITS["points"],
        f"below {LIMITS['megabytes']:g} MB": megabytes < LIMITS["megabytes"],
    }
    return "; ".join(f"{name}: {'met' if met else 'MISSED'}" for name, met in checks.items()) + "."


def main(words: Sequence[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(words)
    text = page(options.repeats, 0.1 if options.quick else 1.0).rstrip() + "\n"
    print(text)
    if options.write:
        write_page(options.write, text)


if __name__ == "__main__":
    main()
