"""The figures of an evaluation at the sites, as rows and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harmonium.core.errors import counted
from harmonium.report.metric_names import times

LEGEND = (
    "commonest: always naming the site's commonest class; balanced: mean recall over classes; "
    "AUROC: of one class against all others, the mean over classes, off by at most the number "
    "behind ±, because scores are counted in bins"
)
HOW = {
    "ridge": "one ridge regression for all sites, learned from sums",
    "probe": "a linear probe of each site's own",
}


def title(figures: Mapping[str, Any]) -> str:
    """What the figures are of."""
    return f"Held-out images of the sites, percent; {HOW[figures['protocol']]}"


def rows(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each site, the lowest balanced accuracy first, then for all of them.

    >>> one = {"images": 20, "accuracy": 0.5, "commonest": 0.4, "balanced": 0.45, "auroc": None}
    >>> figures = {"by_site": [{"client": 1, "site": "south", **one}], "all": one, "mean": one}
    >>> [row["site"] for row in rows(figures)]
    ['south', 'all images', 'mean of sites']
    """
    return [*site_rows(figures), *overall_rows(figures)]


def site_rows(figures: Mapping[str, Any], column: str = "site") -> list[dict[str, Any]]:
    """A row for each site, the lowest balanced accuracy first; none of sums over sites."""
    return [{column: _name(row), **_cells(row)} for row in figures.get("by_site", ())]


def overall_rows(figures: Mapping[str, Any], column: str = "site") -> list[dict[str, Any]]:
    """A row for the counts of all sites together, and one for the mean of their figures."""
    named = {"all images": "all", "mean of sites": "mean"}
    return [{column: name, **_cells(figures[key])} for name, key in named.items() if key in figures]


def sentence(figures: Mapping[str, Any]) -> str:
    """Balanced accuracy over all images and at the worst site; empty without any.

    >>> sentence({"all": {"balanced": 0.9}, "by_site": [{"client": 3, "balanced": 0.8}]})
    'balanced accuracy 90.0 % over all held-out images, 80.0 % at the worst (client 3)'
    """
    if "all" not in figures:
        return ""
    text = f"balanced accuracy {100 * figures['all']['balanced']:.1f} % over all held-out images"
    for worst in figures.get("by_site", ())[:1]:
        text += f", {100 * worst['balanced']:.1f} % at the worst ({_name(worst)})"
    return text


def _cells(one: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {"images": one.get("images")}
    cells |= {key: times(100, one[key]) for key in ("accuracy", "commonest", "balanced")}
    if one["auroc"] is not None:
        cells["AUROC"] = (100 * one["auroc"], 100 * one["auroc_error"])
    return cells


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("site", f"client {row['client']}"))


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """Who answered, what is missing and why, and what the encoder had seen."""
    told = [f"{figures['answered']} of {counted(figures['of'], 'site')} sent counts"]
    if why := figures.get("why"):
        told.append(why)
    if "all" in figures and "by_site" not in figures:
        told.append("with secure aggregation there are no figures of single sites")
    if seen := figures.get("all", {}).get("seen"):
        told.append(
            f"{seen:,} of the {figures['all']['images']:,} held-out images are among those that "
            "the encoder was trained on, without labels"
        )
    return ["; ".join(told)]
