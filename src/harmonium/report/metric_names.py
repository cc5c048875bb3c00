"""What people call the figures of an encoder, and their units."""

from __future__ import annotations

PROBES = {"knn": "kNN", "linear": "linear", "linear_labelled": "linear, known labels"}


def heading(key: str) -> str:
    """What people call a figure.

    >>> heading("linear_10"), heading("knn"), heading("balanced_knn")
    ('linear, 10 labels a class', 'kNN', 'kNN, balanced')
    """
    for kind, called in (("balanced_", "balanced"), ("auroc_", "AUROC")):
        if key.startswith(kind):
            return f"{heading(key.removeprefix(kind))}, {called}"
    name, _, count = key.partition("_")
    if count.isdigit():
        return f"{PROBES[name]}, {count} {'label' if count == '1' else 'labels'} a class"
    return PROBES.get(key, key.replace("_", " "))


def times(scale: float, figure: float | None) -> float | None:
    """A figure in other units; None, where an encoder has diverged, stays None."""
    return None if figure is None else scale * figure
