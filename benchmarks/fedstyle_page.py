"""Tables, text and picture of what `benchmarks/fedstyle.py` has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harmonium.report.plots import curves
from harmonium.report.tables import estimate, markdown

Found = dict[str, Any]

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


def of(runs: Sequence[Found], label: str, objective: str) -> dict[int, Found]:
    """The measurements of a row, by seed."""
    same = [one for one in runs if (one["label"], one["objective"]) == (label, objective)]
    return {one["seed"]: one for one in same}


def mean(values: Sequence[float]) -> float:
    """Over styles."""
    return math.fsum(values) / len(values)


def by_style(its: Sequence[Found], key: str, title: str) -> dict[str, float]:
    """A column a style, means over seeds."""
    columns = zip(*(one[key] for one in its), strict=True)
    return {f"{title}, {name}": mean(values) for name, values in zip(STYLES, columns, strict=True)}


def arms(runs: Sequence[Found], objective: str, by: str = "") -> str:
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


def lambdas(runs: Sequence[Found], objective: str) -> str:
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


def near(runs: Sequence[Found]) -> str:
    """The table of what near pictures have in common, by three kinds of features."""
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


def memory(runs: Sequence[Found]) -> str:
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


def growth(runs: Sequence[Found]) -> float:
    """How many times the memory of few clients many need, at most."""
    found = [of(runs, f"memory, {label}", "") for label in KEEPERS]
    return max((one[max(one)]["bytes"] / one[min(one)]["bytes"] for one in found if one), default=1)


def draw(runs: Sequence[Found], path: Path) -> None:
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
    """A table with the command that makes it and what is to be said of it."""
    chosen = f" --seeds {' '.join(map(str, seeds))}" if seeds else ""
    command = f"`python benchmarks/fedstyle.py --part {part}{chosen}`"
    said = NOTES.get(part, "").strip()
    return f"\n## {title}\n\n{command}\n\n{table}\n{said}\n" if table else ""


def page(runs: Sequence[Found]) -> str:
    """The stored result: every table with the command that makes it."""
    text = ABOUT
    for part, title, made, label in (
        ("arms", "All methods", arms, BASE),
        ("classifier", "By another classifier", partial(arms, by=BY), BASE + BY),
        ("lambda", "Lambda", lambdas, f"lambda {LAMBDAS[-1]:g}"),
    ):
        tables = {one: made(runs, one) for one in OBJECTIVES}
        seeds = sorted({one["seed"] for one in runs if one["label"] == label})
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
pixels, 1,350 training pictures of each on average, three clients with a style each, six rounds of
two epochs, a small CNN. SVHN was at hand as a part of 10,000 training and 3,000 test pictures.
`harmonium recipes fedstyle` lists the rows with both published figures, and `harmonium run
fedstyle/digit-1-ho-simclr@cpu --dry-run` shows all settings.

Figures are test accuracy in percent by `harmonium eval RUN personal`, on 1,000 test pictures of
each style; chance is 10. *General* is the federation's frozen encoder, with a classifier for every
style that has all training pictures of that style. *Personal* is each client's own features after
one more local round, with a classifier that has the client's pictures; with one client a style
these are the same pictures, and the two differ by the encoder. Classifiers are linear, trained by
SGD at 0.1 for 100 epochs on standardised features. A difference is paired by seed, to FedAvg; ± is
the standard error of a mean over seeds. Spread is the standard deviation over clients, worst the
worst client. Seconds and seeds aside, every number here is printed by the command above its table.
"""
NOTES = {
    "arms": """
Three seeds tell little: most differences are within two standard errors. Federation helps (alone
-3.6 general), and centralised training is ahead by 6.0, nearly all of it on SVHN, which all
methods find hard at this size. No method leads FedAvg in general. FedStyle's published gain of
0.3 (general) and 0.9 points (personal) over FedAvg did not come out here: -0.2 and -1.9. FedProx
as printed, whose clients never load the average, is behind in both, as published. Ditto pulled
towards the client's updated copy (1.5 ± 0.4) is ahead in personal, pulled towards the received
model it is behind. APFL is as good as FedAvg, not far behind as published. Clients train for 12
epochs here and 500 in the paper.
""",
    "classifier": """
The same runs with classifiers trained by Adam (`personal.protocol=lp_easyfl`). Equation 4 trains
the generator beside the classifier, and SGD at 0.1 is too steep for that here, for features are
divided by their deviation behind the generator. With Adam FedStyle's own features gain 1.9 over
FedAvg's. But any residual network of as many weights gains as much: 3.0 on FedAvg's features, 1.9
in G's place. With G held still nothing is gained. So here the gain of equation 4 is one of more
parameters beside the classifier, not of style.
""",
    "lambda": """
The collapse that the paper tells of comes out: with a strong infused loss the generator's output
falls from 62 directions to 5, grows to eleven times the content's length, and personal accuracy
goes with it, from 69 to 36; general accuracy loses 6 points. Published for SimCLR on Office-Home:
51.8 at 0.01, 53.5 at 0.5, 2.1 at 10. Small weights change nothing beyond the error. *Personal* is
by the steep classifier of the first table; *G held still* and *content alone* do not depend on
it.

![General and personal accuracy over lambda](../images/fedstyle.png)
""",
    "styles": """
Five clients of each style. Clients seem to part by their style features (purity 0.90 by client),
as in the paper's Figure 4. One client's style network on everyone's pictures, the control, parts
styles just as well (0.97) but not clients of one style (0.19, chance within a style 0.20): those
clusters come from networks being different, not from pictures. Content still knows the style
(0.93), and twice as much of the class as style does. One seed.

![Maps of style features and of content features](../images/fedstyle-styles.png)
""",
    "memory": """
Ten times as many clients, each with a model of its own: memory stays, states grow on disk.
FedStyle's states hold a style network and a generator, Ditto's a whole model.
""",
}
