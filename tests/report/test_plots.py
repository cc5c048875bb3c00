import math
import re
from contextlib import contextmanager

import pytest

from harmonium.errors import ConfigError
from harmonium.report import tuning_plots
from harmonium.report.plots import _apart, bars, curves, picture, run_picture

SERIES = {
    "FedSC": [(t, 0.9 - 0.5 * math.exp(-t / 5), 0.01) for t in range(20)],
    "alone": [(0, 0.4), (1, math.nan), (19, 0.6)],
    "empty": [],
    "point": [(3, 0.5)],
}
GROUPS = {"FedSC": {"kNN": (0.9, 0.01), "linear": (0.95, None)}, "FedCA": {"kNN": (0.8, 0.02)}}
ROUNDS = [
    {
        "round": t,
        "knn": 0.1 * t if t % 2 else None,
        "loss": 5 - t,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "health": {"uniformity": -t, "alignment": 0.1, "effective_rank": 20 + t},
    }
    for t in range(4)
]
PICTURES = {
    "curves": lambda path: curves(path, SERIES, "round", "kNN", "Title", {"untrained": 0.4}),
    "bars": lambda path: bars(path, GROUPS, "accuracy", "Title"),
    "run": lambda path: run_picture(path, ROUNDS, "Title"),
}


def texts(path):
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_are_written_and_the_same_twice(name, kind, tmp_path):
    first, second = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
    PICTURES[name](first)
    PICTURES[name](second)
    assert first.read_bytes() == second.read_bytes()
    start = first.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<svg" in first.read_bytes()[:1000]
    assert len(first.read_bytes()) > 3000


def test_png_width_suits_a_readme(tmp_path):
    PICTURES["curves"](tmp_path / "a.png")
    width = int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big")
    assert 950 <= width <= 1100


def test_curves_name_every_line_and_reference(tmp_path):
    PICTURES["curves"](tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert {"FedSC", "alone", "point", "untrained", "Title", "round", "kNN"} <= set(words)
    assert "empty" not in words


def test_bars_carry_their_values(tmp_path):
    PICTURES["bars"](tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert {"0.900", "0.950", "0.800", "FedSC", "FedCA", "linear"} <= set(words)


def test_a_run_shows_what_it_has(tmp_path):
    PICTURES["run"](tmp_path / "a.svg")
    words = set(texts(tmp_path / "a.svg"))
    assert {
        "Title",
        "validation kNN (%)",
        "effective rank",
        "up",
        "down",
        "bytes sent so far",
    } <= words
    run_picture(tmp_path / "b.svg", [{"round": 1, "loss": 2.0, "bytes": 5}])
    words = set(texts(tmp_path / "b.svg"))
    assert {"training loss", "bytes sent so far"} <= words
    assert "validation kNN (%)" not in words


def test_labels_are_pushed_apart():
    for wanted in (
        [0.5, 0.5, 0.5],
        [0.84, 0.99, 1.0],
        [0.0, 0.01, 0.9, 0.95, 1.0],
        [0.1, 0.4, 0.8],
    ):
        places = _apart(wanted, 0.1)
        assert all(b - a >= 0.1 - 1e-9 for a, b in zip(places, places[1:], strict=False))
        assert places[0] >= -1e-9
        assert places[-1] <= 1 + 1e-9
    assert _apart([0.1, 0.4, 0.8], 0.1) == [0.1, 0.4, 0.8]
    assert _apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])


def test_no_global_state_is_left(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    PICTURES["bars"](tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        PICTURES["bars"](tmp_path / "a.jpeg")
    with pytest.raises(ConfigError, match="nothing to draw"):
        run_picture(tmp_path / "a.png", [{"round": 1}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [3, 12])
def test_long_names_of_settings_leave_room_for_what_is_drawn(count, tmp_path, monkeypatch):
    held = []

    @contextmanager
    def watched(*words):
        with picture(*words) as figure:
            yield figure
            held.append(figure)

    monkeypatch.setattr(tuning_plots, "picture", watched)
    much = " objective.momentum=0.99 method.style_epochs=10 local.optimiser=adam encoder.out=128"
    names = [f"local.lr={0.1 / (k + 1):.3g}{much} local.schedule=cosine" for k in range(count)]
    rows = [{"score": -k, "knn": 0.5, "state": "complete"} for k in range(count)]
    rows[-1]["state"] = "stopped"
    scored = {name: [{"round": 1, "score": -k}] for k, name in enumerate(names)}
    tuning_plots.study_picture(tmp_path / "a.svg", rows, scored, {"rho": 1.0, "settings": count})
    (figure,) = held
    assert all(axes.get_position().width > 0.3 for axes in figure.axes)
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    named = [" ".join(text.get_text().split()) for text in legend.get_texts()]
    assert named == [*(names if count == 3 else names[:1]), "dotted, hollow: stopped early"]
