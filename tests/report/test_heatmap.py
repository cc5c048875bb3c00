import io
import re

import numpy as np
import pytest
from rich.console import Console

from harmonium.report.heatmap import ROWS, SHADES, heat_map, size_bars

COUNTS = np.array([[36, 0, 1], [9, 4, 0]])
NAMES = ["cat", "dog", "frog"]


def console(width=60, **settings):
    return Console(width=width, file=io.StringIO(), _environ={}, **settings)


def coloured(**settings):
    return console(force_terminal=True, color_system="truecolor", **settings)


def lines(where, draw, *args):
    where.print(draw(where, *args))
    return where.file.getvalue().splitlines()


def test_plain_characters_by_hand():
    """Square-root steps of the largest, 36, in six levels: 1, 4, 9, 16, 25, 36 end them."""
    found = lines(console(width=24), heat_map, COUNTS, NAMES)
    assert found[:3] == [
        "client cat dog fro  all",
        "     0 @36     . 1   37",
        "     1 = 9 : 4       13",
    ]
    scale = " ".join(" ".join(found[3:]).split())
    assert scale == "images . 1 : 2-4 = 5-9 * 10-16 # 17-25 @ 26-36"


def test_names_that_begin_alike_are_told_apart():
    names = ["scanner A", "scanner B", "scanner CX"]
    found = lines(console(width=24), heat_map, COUNTS, names)
    assert found[0] == "client  A   B  CX   all"


def test_where_numbers_do_not_fit_marks_say_how_many():
    found = lines(console(width=24), heat_map, COUNTS * 1000, NAMES)
    assert found[1:3] == ["     0 @@    ..  37000", "     1 == ::     13000"]


@pytest.mark.parametrize("where", [console(), coloured(no_color=True)])
def test_without_colour_there_are_no_escapes_and_only_ascii(where):
    text = "\n".join(lines(where, heat_map, COUNTS, NAMES))
    assert text.isascii() and not re.search(r"\x1b\[[34]8", text)
    assert "@" in text


def test_with_colour_the_numbers_stand_on_their_shades():
    text = "\n".join(lines(coloured(), heat_map, COUNTS, NAMES))
    lightest = ";".join(str(int(SHADES[-1][i : i + 2], 16)) for i in (1, 3, 5))
    assert re.search(rf"48;2;{lightest}m *36 ", text)
    assert "@" not in text and "██" in text  # the scale
    narrow = "\n".join(lines(coloured(width=15), heat_map, COUNTS * 100, NAMES))
    assert "3600 " not in narrow.replace(" 3700", "") and narrow.count("█") > 4


def test_every_count_lies_on_the_scale():
    for most in (1, 2, 5, 17, 1000):
        scale = lines(console(width=200), heat_map, np.array([[most]]), ["a"])[2]
        numbers = [int(word) for word in re.findall(r"\d+", scale.replace("-", " "))]
        assert numbers[0] == 1 and numbers[-1] == most
        spans = re.findall(r"(\d+)(?:-(\d+))?", scale)
        ends = [int(last or first) for first, last in spans]
        assert [int(first) for first, _ in spans[1:]] == [end + 1 for end in ends[:-1]]


@pytest.mark.parametrize("width", [40, 80, 133])
@pytest.mark.parametrize("classes", [1, 10, 47, 100, 1000])
@pytest.mark.parametrize("where", [console, coloured])
def test_nothing_is_wider_than_the_terminal(width, classes, where):
    counts = np.random.default_rng(0).integers(0, 5, (3, classes))
    names = [f"class number {n}" for n in range(classes)]
    found = lines(where(width=width), heat_map, counts, names)
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in found]
    assert max(map(len, plain)) <= width
    assert len({len(line) for line in plain[:4]}) == 1  # header and rows end together
    assert not any("…" in line for line in plain)


def test_many_classes_share_columns_and_it_says_so():
    counts = np.zeros((2, 100), int)
    counts[0, 98:] = 50, 50
    found = lines(console(width=60), heat_map, counts, [str(n) for n in range(100)])
    assert "each column is 3 neighbouring classes" in found[-1]
    assert found[1].split() == ["0", "@@", "100"]  # 96 to 98, and 99


def test_of_many_clients_some_are_shown_and_it_says_so():
    found = lines(console(), heat_map, np.ones((10_000, 2), int), ["a", "b"])
    assert len(found) == 1 + ROWS + 2
    assert found[-1] == "30 of 10,000 clients, evenly spaced"
    assert found[1].split()[0] == "0" and found[ROWS].split()[0] == "9999"


def test_sizes_are_bars():
    found = lines(console(width=20), size_bars, np.array([100, 50, 1, 0]))
    assert [line.count("#") for line in found] == [0, 9, 5, 1, 0]
    assert [line.split()[-1] for line in found[1:]] == ["100", "50", "1", "0"]
    assert max(map(len, found)) <= 20
    assert "█" in "\n".join(lines(coloured(), size_bars, np.array([3, 4])))
    assert "30 of 31 clients" in lines(console(), size_bars, np.ones(31, int))[-1]
