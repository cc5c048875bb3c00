import re
from contextlib import contextmanager

import pytest

from harmonium.core.errors import ConfigError
from harmonium.report import arms
from harmonium.report.arms import arms_plot
from harmonium.report.figure import saved_figure

ARMS = {
    "FedAvg": {"kNN": (40.0, 2.0), "linear": (50.0, 1.0)},
    "FedSC (ours)": {"kNN": (60.0, None), "linear": None},
    "centralised": {"kNN": (80.0, 1.0)},
}
LEVELS = {"untrained": {"kNN": 20.0, "linear": 30.0}, "commonest class": {"kNN": 10.0}}


def texts(path):
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


@pytest.fixture
def figures(monkeypatch):
    held = []

    @contextmanager
    def watched(*words):
        with saved_figure(*words) as figure:
            yield figure
            held.append(figure)

    monkeypatch.setattr(arms, "saved_figure", watched)
    return held


def upright(axes):
    """The vertical lines of a panel."""
    return [x[0] for line in axes.lines if len(x := list(line.get_xdata())) == 2 and x[0] == x[1]]


def test_a_panel_a_probe_with_values_intervals_and_reference_lines(figures, tmp_path):
    arms_plot(
        tmp_path / "a.svg", ARMS, "Title", references=LEVELS, interval="95 % interval",
        muted=["centralised"], strong=["FedSC (ours)"],
    )  # fmt: skip
    (figure,) = figures
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["kNN", "linear"]
    assert [upright(axes) for axes in figure.axes] == [[20.0, 10.0], [30.0]]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [40.0, 60.0, 80.0]
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == 3
    words = texts(tmp_path / "a.svg")
    assert {"40.0", "60.0", "80.0", "50.0", "95 % interval", *ARMS, *LEVELS} <= set(words)
    assert words.count("no value") == 2  # one is None, the other left out
    assert words.count("untrained") == 1  # one legend for both panels


def test_values_that_are_close_are_dots_on_a_part_of_the_axis(figures, tmp_path):
    some = {f"m{k}": {"kNN": (90 + 0.2 * k, 0.1)} for k in range(3)}
    arms_plot(tmp_path / "a.svg", some)
    arms_plot(tmp_path / "b.svg", some, references={"untrained": {"kNN": 30.0}})
    near, far = (figure.axes[0] for figure in figures)
    assert not near.patches and 80 < near.get_xlim()[0] < 89.9
    assert len(far.patches) == 3 and far.get_xlim()[0] == 0  # bars begin at 0


@pytest.mark.parametrize("count", [1, 12])
def test_names_and_values_stay_inside(count, figures, tmp_path):
    long = "privacy.noise=simulated local.schedule=cosine objective.momentum=0.99"
    names = [f"fedavg {long} seed={k}" for k in range(count)]
    probes = ("kNN", "linear", "linear, 10 labels a class", "linear, known labels", "x")
    some = {name: dict.fromkeys(probes, (99.9, 3.0)) for name in names}
    arms_plot(tmp_path / "a.svg", some)
    (figure,) = figures
    for axes in figure.axes[: len(probes)]:
        assert axes.get_window_extent().width > 0.9 * figure.dpi
        inside = [*axes.texts, axes.title, axes._left_title]
        assert max(one.get_window_extent().x1 for one in inside) <= figure.bbox.x1
        assert max(tick for tick in axes.get_xticks()) <= 100


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no arm"):
        arms_plot(tmp_path / "a.svg", {"a": {"kNN": None}})
    assert not list(tmp_path.iterdir())
