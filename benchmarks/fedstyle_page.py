"""Tables, text and plot of the measurements of `benchmarks/fedstyle.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harmonium.report.plots import curves
from harmonium.report.tables import estimate, markdown

Measurement = dict[str, Any]

STYLES = ("mnist", "svhn", "usps")
BASE = "fedavg"
BY = " (Adam)"  # behind rows that another classifier judges
LAMBDAS = (0.0, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0)
ADAPTERS = {"own": "personal", "frozen": "G held still", "none": "content alone"}
KEEPERS = ("ditto", "fedstyle")
ROWS = (  # of the first table, in its order
    *("untrained", "centralised", "alone", "fedavg", "fedavg, with an MLP", "fedper", "fedrep"),
    *("fedprox, as printed", "fedprox", "apfl, crossed", "apfl", "ditto, updated", "ditto"),
    *("fedstyle", "fedstyle, G held still", "fedstyle, content alone"),
    "fedstyle, with an MLP for G",
)


def of(runs: Sequence[Measurement], label: str, objective: str) -> dict[int, Measurement]:
    """The measurements of a row, by seed."""
    same = [one for one in runs if (one["label"], one["objective"]) == (label, objective)]
    return {one["seed"]: one for one in same}


def mean(values: Sequence[float]) -> float:
    """The mean over styles."""
    return math.fsum(values) / len(values)


def by_style(its: Sequence[Measurement], key: str, title: str) -> dict[str, float]:
    """A column for each style, means over seeds."""
    columns = zip(*(one[key] for one in its), strict=True)
    return {f"{title}, {name}": mean(values) for name, values in zip(STYLES, columns, strict=True)}


def arms(runs: Sequence[Measurement], objective: str, by: str = "") -> str:
    """The table of all arms: both figures, and their differences to FedAvg of the same seed."""
    base = of(runs, BASE + by, objective)
    rows = []
    for label in (row + by for row in ROWS):
        its = {seed: one for seed, one in of(runs, label, objective).items() if seed in base}
        if not its:
            continue
        row: dict[str, Any] = {"row": label, "seeds": len(its)}
        for key, title in KINDS.items():
            if any(one[key] is None for one in its.values()):
                continue
            row[title] = estimate([mean(one[key]) for one in its.values()])
            apart = [mean(one[key]) - mean(base[seed][key]) for seed, one in its.items()]
            row[f"{title}, difference"] = "" if label == BASE + by else estimate(apart)
            row |= by_style(list(its.values()), key, title)
            if key == "personal":
                row |= {name: mean([one[name] for one in its.values()]) for name in SPREAD}
        rows.append(row)
    columns = [f"{title}{end}" for title in KINDS.values() for end in ENDS] if rows else []
    return markdown(rows, ["row", "seeds", *columns, *SPREAD], digits=1) if rows else ""


KINDS = {"general": "general", "personal": "personal"}
ENDS = ["", ", difference", *(f", {name}" for name in STYLES)]
SPREAD = ["spread", "worst"]


def added(runs: Sequence[Measurement], objective: str) -> str:
    """The table of how networks beside the classifier change personal accuracy."""
    rows = []
    for (label, other), words in PAIRS.items():
        row: dict[str, Any] = {"what": words}
        for by, title in (("", "by SGD"), (BY, "by Adam")):
            its, others = (of(runs, one + by, objective) for one in (label, other))
            apart = [
                mean(its[s]["personal"]) - mean(others[s]["personal"]) for s in its if s in others
            ]
            row |= {title: estimate(apart)} if apart else {}
        rows.append(row)
    return markdown(rows, ["what", "by SGD", "by Adam"], digits=1)


PAIRS = {
    ("fedstyle", "fedstyle, content alone"): "FedStyle: G that learns on, beyond content alone",
    ("fedstyle, G held still", "fedstyle, content alone"): "FedStyle: G held still, beyond that",
    ("fedstyle, with an MLP for G", "fedstyle, content alone"): "FedStyle: an MLP, beyond that",
    ("fedstyle", "fedstyle, with an MLP for G"): "FedStyle: G that learns on, beyond an MLP",
    ("fedavg, with an MLP", "fedavg"): "FedAvg: an MLP, beyond content alone",
    ("fedstyle", "fedavg, with an MLP"): "FedStyle with G, beyond FedAvg with an MLP",
}


def lambdas(runs: Sequence[Measurement], objective: str) -> str:
    """The table of weights of the infused loss."""
    rows = []
    for strength in LAMBDAS:
        its = list(of(runs, f"lambda {strength:g}", objective).values())
        if its:
            row: dict[str, Any] = {"lambda": f"{strength:g}", "seeds": len(its)}
            row["general"] = estimate([mean(one["general"]) for one in its])
            for name, title in ADAPTERS.items():
                row[title] = estimate([mean(one[name]) for one in its])
            for name, title in INSIDE.items():
                row[title] = f"{mean([one[name] for one in its]):.2f}"
            rows.append(row)
    return markdown(rows, digits=1) if rows else ""


INSIDE = {
    "content_rank": "rank of content",
    "generator_rank": "rank of G",
    "generator_spread": "spread of G",
    "generator_size": "size of G",
}


def near(runs: Sequence[Measurement]) -> str:
    """The table of how near images group, by three kinds of features."""
    its = list(of(runs, "styles", "simclr").values())
    rows = [
        {
            "features": title,
            "by": by,
            **{
                key: estimate([one["apart"][kind][by][key] for one in its])
                for key in ("purity", "chance", "silhouette")
            },
        }
        for kind, title in (MAPS if its else {}).items()
        for by in ("client", "style", "class")
    ]
    return markdown(rows, digits=2) if rows else ""


MAPS = {"own": "own style networks", "control": "one style network", "content": "content"}


def memory(runs: Sequence[Measurement]) -> str:
    """The table of memory and of states on disk."""
    rows = [
        {
            "method": label,
            "clients": one["seed"],
            "peak memory, MB": one["bytes"] / 1e6,
            "states on disk, MB": one["disk"] / 1e6,
            "a client, kB": one["disk"] / 1e3 / one["seed"],
            "seconds": one["seconds"],
        }
        for label in KEEPERS
        for one in sorted(of(runs, f"memory, {label}", "").values(), key=lambda one: one["seed"])
    ]
    return markdown(rows, digits=1) if rows else ""


def growth(runs: Sequence[Measurement]) -> float:
    """The largest ratio of the memory of many clients to that of few."""
    by_method = [of(runs, f"memory, {label}", "") for label in KEEPERS]
    return max(
        (one[max(one)]["bytes"] / one[min(one)]["bytes"] for one in by_method if one), default=1
    )


def draw(runs: Sequence[Measurement], path: Path) -> None:
    """Both figures over the weights of the infused loss, with FedAvg's as references."""
    series: dict[str, list[tuple[float, ...]]] = {}
    shown = {"general": "general", "own": "personal", "frozen": "personal, G held still"}
    for strength in LAMBDAS[1:]:
        its = list(of(runs, f"lambda {strength:g}", "simclr").values())
        for key, title in shown.items() if its else ():
            middle, error = estimate([mean(one[key]) for one in its])
            series.setdefault(title, []).append((math.log10(strength), middle, error or 0.0))
    bases = list(of(runs, BASE, "simclr").values())
    levels = {f"FedAvg, {key}": mean([mean(one[key]) for one in bases]) for key in KINDS if bases}
    if series:
        path.parent.mkdir(parents=True, exist_ok=True)
        title = "FedStyle on three styles of digits"
        below = "weight of the infused loss, as a power of ten"
        curves(path, series, below, "accuracy, %", title, levels)


# ---- the page ------------------------------------------------------------------------------------


def section(title: str, part: str, table: str, seeds: Sequence[int]) -> str:
    """A table with the command that makes it and the notes on it."""
    chosen = f" --seeds {' '.join(map(str, seeds))}" if seeds else ""
    command = f"`python benchmarks/fedstyle.py --part {part}{chosen}`"
    said = NOTES.get(part, "").strip()
    return f"\n## {title}\n\n{command}\n\n{table}\n{said}\n" if table else ""


def page(runs: Sequence[Measurement]) -> str:
    """The stored result: every table with the command that makes it."""
    text = ABOUT
    for part, title, made, label in (
        ("arms", "All methods", arms, BASE),
        ("classifier", "By another classifier", partial(arms, by=BY), BASE + BY),
        ("lambda", "Lambda", lambdas, f"lambda {LAMBDAS[-1]:g}"),
    ):
        tables = {one: made(runs, one) for one in OBJECTIVES}
        seeds = sorted({one["seed"] for one in runs if one["label"] == label})
        if part == "classifier":
            tables = {o: f"{t}\n{added(runs, o)}" for o, t in tables.items() if t}
        whole = "\n".join(
            f"{OBJECTIVES[one]}:\n\n{table}" for one, table in tables.items() if table
        )
        text += section(title, part, whole, seeds)
    styled = sorted(of(runs, "styles", "simclr"))
    text += section("What style features know", "styles", near(runs), styled)
    return text + section("Memory", "memory", memory(runs), [])


OBJECTIVES = {"simclr": "SimCLR", "simsiam": "SimSiam"}
ABOUT = """# FedStyle in short runs: what it is compared with, its lambda, its style, its memory

Runs are `fedstyle/digit-1-ho-OBJECTIVE/ROW@cpu` unless said: digits of MNIST, SVHN and USPS at 16
pixels, 1,350 training images of each on average, three clients with a style each, six rounds of
two epochs, a small CNN. SVHN was at hand as a part of 10,000 training and 3,000 test images.
`harmonium recipes fedstyle` lists the rows with both published figures, and `harmonium run
fedstyle/digit-1-ho-simclr@cpu --dry-run` shows all settings.

Figures are test accuracy in percent by `harmonium eval RUN personal`, on 1,000 test images of
each style; chance is 10. *General* is the federation's frozen encoder, with a classifier for every
style that has all training images of that style. *Personal* is each client's own features after
one more local round, with a classifier that has the client's images; with one client a style
these are the same images, and the two differ by the encoder. Classifiers are linear, trained by
SGD at 0.1 for 100 epochs on standardised features. A difference is paired by seed, to FedAvg; ± is
the standard error of a mean over seeds. Spread is the standard deviation over clients, worst the
worst client. Commands print the tables below them; figures of seed 100 are of trials before that.
"""
NOTES = {
    "arms": """
*Untrained* has BatchNorm's statistics measured and nothing learned; *alone* never averages, and its
general figure is the mean of three encoders. *As printed*, *crossed* and *updated* are FedProx,
APFL and Ditto as FedStyle's appendix adapts them, without those words they are as first published.
*With an MLP* sets a new network of G's size beside the classifier, on content features alone.

What came out: FedStyle's lead did not. Its encoder is level with FedAvg's (-0.2 ± 1.2), and its
clients' own features are 1.9 ± 1.0 behind. What is ahead of FedAvg for clients is Ditto as FedStyle
has it (1.5 ± 0.4); FedPer, FedProx and APFL are level; what stays far from the average, FedProx as
printed, Ditto as published with mu = 2, and training alone, loses 2.5 to 3.3 points, all of them on
SVHN. That FedProx as printed is the worst but for APFL is so in the paper, too. APFL crossed is far
behind in the paper and level here. Differences are decided by SVHN, where an encoder of so few
images knows little (15 untrained, 28, 44 with all styles in one place), while MNIST and USPS are
near 92 for everyone. In the paper SVHN has 85 to 90, after 500 epochs of some 40,000 images a
client; here there are 12 of 1,350.

With G, eq. 4 costs 1.4 ± 0.4 points of what content alone is worth (70.0). The next section says
that this is the classifier's doing.

How settings were chosen: on seed 100, by both figures on validation images (of 1,500 a style, as
many as for training; a standard error of about 0.5, without that of training). Untrained: 55.5.
Mirrored digits cost 5 points of kNN and are left out. With 600 images a style, width 16, ten
rounds of two epochs FedAvg has 69.9 and 71.4, or 70.9 and 70.0 with crops of half the image or
more; BatchNorm in the projector and temperature 0.2 changed nothing in kNN. With 1,500 images and
ten rounds of one epoch 74.7 and 74.8, with such crops out of 32 pixels 74.5 and 77.4, in five
rounds of two 73.5 and 76.8; Ditto, updated, 74.5 and 75.4; FedStyle with lambda 1, as published,
73.3 and 71.0, with 0.1 75.4 and 76.4. At half the width and six rounds of two epochs FedAvg has
73.9 and 74.4, FedStyle with lambda 0.1 73.8 and 77.4, with 0.5 73.3 and 75.6. That setting with
lambda 0.1 was taken: the best for FedStyle of those tried. Its lead of 3 points there did not come
again on seeds 0, 1 and 2. SimSiam's rows are recipes, too; FedAvg with it has 64.8, and with
momentum 0.9, which is taken, 66.9.
""",
    "classifier": """
The same runs, but classifiers and what learns beside them are trained by Adam (0.001, batches of
128, 100 epochs), on features that are standardised as before. This was measured after the table
above, because there SGD at 0.1, the rate of all of the paper's training, is too much for a G that
learns along: on seed 100 it ends with 76 % of SVHN's *training* images right and 36 % of the
validation images, and at 0.01 with 41 % of the latter.

Now G is worth something, 2.3 ± 0.3 points beyond content alone, and nothing when it is held still.
But a new MLP in its place, which knows nothing of style, is worth as much (2.3 ± 0.4; G is 0.0 ±
0.6 ahead of it), and under FedAvg no less (3.0 ± 0.6), which leaves FedStyle 1.1 ± 0.8 behind
FedAvg with an MLP. So the gain of eq. 4 is, here, one of parameters that learn with labels,
and neither of style nor of what G learned without labels. The paper's baselines have none of them.
""",
    "lambda": """
*Personal* has a G that learns on beside the classifier (by SGD, as in the first table), *G held
still* has it as it was, *content alone* has none. Ranks are effective ranks of a client's test
images, of at most 128; spread is that of unit vectors, near 0 where all are alike; size is the
mean length of G's output over that of content. Lambda 0 is FedAvg, with G at initialisation.

The collapse that the paper reports in table 4 comes out, in its order and for its reason: general
accuracy falls slowly (70.4 to 64.5; in the paper 54.2 to 53.4), personal accuracy falls off a
cliff (69.3 to 35.7; 51.8 to 2.1). G's output narrows from 62 directions to 5 and grows to eleven
times the size of content, so that it drowns it in eq. 4: with G held still 59.3 is left where
content alone has 63.8. Most of the fall comes when G learns on beside the classifier; steps of SGD
at 0.1 may be too long for a G of that size, which was not looked into. Where the paper breaks (at
1) G is as large as content. No lambda above 0 is better than 0 by either figure.

![Accuracy over the weight of the infused loss](../images/fedstyle.png)
""",
    "styles": """
Here every style has five clients (`fedstyle/digit-5-ho-simclr/fedstyle@cpu`, all in every round),
so that a client is not the same as a style. Figures are those of `harmonium eval RUN styles`, of
100 training images a client: the share of an image's ten nearest that are of its client, style
or class, what that would be by chance, and the silhouette of the groups.

The paper's figure 4 shows a cluster for each client and takes it for the client's style. By their
own style networks clients lie apart here, too (0.90 of the nearest are the same client's), though
five at a time have images of one kind. Seen by one client's network they do not (0.19, and 0.20
is chance among five clients of a style), and styles still do (0.97). So what parts clients of one
style are their networks, not their images. Classes are less pure by style (0.24 and 0.38) than by
content (0.55), as they should be, and content knows the style nearly as well as style does (0.93).
One seed.

![Training images by style and by content, coloured by client](../images/fedstyle-styles.png)
""",
    "memory": """
Every client has 8 images of 16 pixels; two rounds, all clients in both, an encoder of 29,000
weights, all in one process. Peak memory is the largest proportional set size. What a client keeps
lies on disk, a file a client, in two versions for resuming: one model for Ditto; a style network
and G for FedStyle. Seconds are of a busy machine.
""",
}
