import math
import re
from contextlib import contextmanager

import pytest

from harmonium.core.errors import ConfigError
from harmonium.report import tuning_plots
from harmonium.report.figure import brief_names, formats, saved_figure
from harmonium.report.plots import bars, curves, plot_run

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
IMAGES = {
    "curves": lambda path: curves(
        path, SERIES, "round", "kNN", "Title", {"untrained": 0.4}, None, "95 %"
    ),
    "bars": lambda path: bars(path, GROUPS, "accuracy", "Title"),
    "run": lambda path: plot_run(path, ROUNDS, "Title"),
}


def texts(path):
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


@pytest.mark.parametrize("name", IMAGES)
def test_plots_are_written_in_every_format_and_the_same_twice(name, tmp_path):
    begins = {"png": b"\x89PNG", "pdf": b"%PDF-", "svg": b"<?xml"}
    with formats("png,pdf,svg"):
        IMAGES[name](tmp_path / "one.png")
        IMAGES[name](tmp_path / "two.png")
    for kind, begin in begins.items():
        first, second = (tmp_path / f"{stem}.{kind}" for stem in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
        assert first.read_bytes().startswith(begin) and first.stat().st_size > 3000
    assert b"CreationDate" not in (tmp_path / "one.pdf").read_bytes()
    assert b"/FontFile2" in (tmp_path / "one.pdf").read_bytes()  # text, in an embedded font
    IMAGES[name](tmp_path / "alone.pdf")  # one by its path is the same as one of three
    assert (tmp_path / "alone.pdf").read_bytes() == (tmp_path / "one.pdf").read_bytes()


def test_formats_are_those_of_the_block_and_others_are_refused(tmp_path):
    with formats(["svg"]):
        IMAGES["bars"](tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    IMAGES["bars"](tmp_path / "b.png")
    assert (tmp_path / "b.png").exists()
    with pytest.raises(ConfigError, match="'epd'.*png, pdf, svg"), formats("epd"):
        pass


def test_png_width_suits_a_readme(tmp_path):
    IMAGES["curves"](tmp_path / "a.png")
    width = int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big")
    assert 950 <= width <= 1100


def test_curves_name_every_line_and_reference(tmp_path):
    IMAGES["curves"](tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert {"FedSC", "alone", "point", "untrained (0.400)", "Title", "95 %"} <= set(words)
    assert "empty" not in words


def drawn(monkeypatch, call):
    """The figure of a plot, as it was when written."""
    held = []

    @contextmanager
    def watched(*words):
        with saved_figure(*words) as figure:
            yield figure
            held.append(figure)

    monkeypatch.setattr(f"{call.__module__}.saved_figure", watched)
    return held


def lines_of(figure):
    """The lines with data in the first panel of a figure."""
    return [line for line in figure.axes[0].lines if len(line.get_xdata())]


@pytest.mark.parametrize("count", [2, 12])
def test_nothing_but_data_and_references_is_drawn_as_a_line(count, tmp_path, monkeypatch):
    held = drawn(monkeypatch, curves)
    series = {f"m{k}": [(t, 50.0 + k + t, 1.0) for t in range(3)] for k in range(count)}
    levels = {"untrained": 49.0, "commonest class": 3.0}
    curves(tmp_path / "a.svg", series, "round", "kNN (%)", "t", levels, None, "95 % interval")
    (figure,) = held
    axes = figure.axes[0]
    assert len(lines_of(figure)) == count + 1  # 3 % is far below: it is named, with its value
    assert not axes.texts and not axes.patches
    words = " ".join(texts(tmp_path / "a.svg"))
    assert "untrained (49.0 %)" in words and "commonest class (3.0 %)," in words
    assert "below" in words
    assert "95 % interval" in words
    low, high = axes.get_xlim()
    assert low < 0 and high > 2  # the first and the last marker are inside
    assert axes.get_ylim()[0] < 49 and axes.get_ylim()[1] >= 52 + count - 2
    styles = {
        (line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines_of(figure)
    }
    assert len(styles) == count + 1
    assert len(figure.axes) == (1 if count == 2 else 2)  # many intervals stand beside, not on top


def test_a_missing_value_interrupts_its_line(tmp_path, monkeypatch):
    held = drawn(monkeypatch, curves)
    points = [(0, 1.0, 0.1), (1, math.nan), (2, 2.0, 0.1)]
    curves(tmp_path / "a.svg", {"a": points}, "x", "y", "t")
    line = lines_of(held[0])[0]
    assert math.isnan(line.get_ydata()[1])


def test_long_names_stay_apart():
    base = "fedavg objective.norm=none privacy.epsilon=2.5 privacy.noise=simulated local.lr="
    names = ["fedprox", *(f"{base}{k}" for k in range(3))]
    made = brief_names(names)
    assert len(set(made.values())) == 4 and made["fedprox"] == "fedprox"
    assert all(len(one) < 44 for one in made.values()) and "local.lr=2" in made[names[3]]
    middle = [f"{'x' * 30}{k}{'y' * 30}" for k in range(2)]
    assert len(set(brief_names(middle).values())) == 2


def test_a_pdf_has_no_title_for_a_caption_has_it(tmp_path, monkeypatch):
    held = drawn(monkeypatch, curves)
    with formats("pdf"):
        IMAGES["curves"](tmp_path / "a.png")
    assert not held[0].texts[0].get_visible() and held[0].get_suptitle() == "Title"
    names = {"costs $5 and $6": [(0, 1.0), (1, 2.0)]}  # no formula
    curves(tmp_path / "b.svg", names, "x", "y", "Title")
    assert {"costs $5 and $6", "Title"} <= set(texts(tmp_path / "b.svg"))


def test_bars_carry_their_values(tmp_path):
    IMAGES["bars"](tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert {"0.900", "0.950", "0.800", "FedSC", "FedCA", "linear"} <= set(words)


def test_a_run_shows_what_it_has(tmp_path):
    IMAGES["run"](tmp_path / "a.svg")
    words = set(texts(tmp_path / "a.svg"))
    assert {
        "Title",
        "validation kNN (%)",
        "effective rank",
        "up",
        "down",
        "bytes sent so far",
    } <= words
    plot_run(tmp_path / "b.svg", [{"round": 1, "loss": 2.0, "bytes": 5}])
    words = set(texts(tmp_path / "b.svg"))
    assert {"training loss", "bytes sent so far"} <= words
    assert "validation kNN (%)" not in words


def test_a_run_shows_the_references_of_its_knn(tmp_path, monkeypatch):
    held = drawn(monkeypatch, plot_run)
    levels = {"commonest class": 0.0, "raw pixels": 0.21, "whitened pixels": 0.3}
    plot_run(tmp_path / "a.svg", ROUNDS, "Title", levels)
    assert len(lines_of(held[0])) == 1 + 3
    words = " ".join(texts(tmp_path / "a.svg"))
    for name in ("commonest class (0.0 %)", "raw pixels (21.0 %)", "whitened pixels (30.0 %)"):
        assert name in words
    plot_run(tmp_path / "b.svg", [{"round": 1, "loss": 2.0}], "Title", levels)
    assert "raw pixels" not in " ".join(texts(tmp_path / "b.svg"))


def test_every_reference_line_is_drawn_in_a_style_of_its_own(tmp_path, monkeypatch):
    held = drawn(monkeypatch, curves)
    levels = {f"reference {n}": 50.0 + n for n in range(11)}
    curves(tmp_path / "a.svg", {"m": [(0, 50.0), (1, 60.0)]}, "round", "kNN (%)", "t", levels)
    lines = lines_of(held[0])[1:]
    styles = {(one.get_color(), one.get_linestyle(), str(one._dash_pattern)) for one in lines}
    assert len(lines) == len(styles) == 11
    assert {f"reference {n} ({50 + n}.0 %)" for n in range(11)} <= set(texts(tmp_path / "a.svg"))


def test_no_global_state_is_left(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    IMAGES["bars"](tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"\.png, \.pdf or \.svg"):
        IMAGES["bars"](tmp_path / "a.jpeg")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_run(tmp_path / "a.png", [{"round": 1}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [3, 12])
def test_long_names_of_settings_leave_room_for_what_is_drawn(count, tmp_path, monkeypatch):
    held = []

    @contextmanager
    def watched(*words):
        with saved_figure(*words) as figure:
            yield figure
            held.append(figure)

    monkeypatch.setattr(tuning_plots, "saved_figure", watched)
    much = " objective.momentum=0.99 method.style_epochs=10 local.optimiser=adam encoder.out=128"
    names = [f"local.lr={0.1 / (k + 1):.3g}{much} local.schedule=cosine" for k in range(count)]
    rows = [{"score": -k, "knn": 0.5, "state": "complete"} for k in range(count)]
    rows[-1]["state"] = "stopped"
    scored = {name: [{"round": 1, "score": -k}] for k, name in enumerate(names)}
    tuning_plots.plot_study(tmp_path / "a.svg", rows, scored, {"rho": 1.0, "settings": count})
    (figure,) = held
    assert all(axes.get_position().width > 0.3 for axes in figure.axes)
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    named = [" ".join(text.get_text().split()) for text in legend.get_texts()]
    assert named == [*(names if count == 3 else names[:1]), "dotted, hollow: stopped early"]
