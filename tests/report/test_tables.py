import csv
import io

import pytest
from rich.console import Console

from harmonium.report.tables import csv_text, estimate, markdown, plus_minus, table

ROWS = [
    {"method": "fedsc", "knn": (0.9134, 0.0042), "loss": 4.03125, "bytes": 1048576, "ok": True},
    {"method": "a|b [red]", "knn": (0.5, None), "loss": 12.5, "bytes": 12, "ok": None},
]


def shown(drawn, **settings):
    console = Console(width=100, file=io.StringIO(), **settings)
    console.print(drawn)
    return console.file.getvalue()


def test_estimate_by_hand():
    mean, stderr = estimate([1, 2, 3, 4])
    assert mean == 2.5
    assert stderr == pytest.approx((5 / 3) ** 0.5 / 2)
    assert estimate([7.0]) == (7.0, None)


def test_plus_minus():
    assert plus_minus(0.12345, 0.006, digits=2) == "0.12 ± 0.01"
    assert plus_minus(0.12345, None, digits=2) == "0.12"
    assert plus_minus(0.12345, float("nan"), digits=2) == "0.12"


def test_the_terminal_table():
    text = shown(table(ROWS, title="All"))
    lines = text.splitlines()
    assert lines[0].startswith("All")
    assert "a|b [red]" in text  # not swallowed as markup
    assert "0.913 ± 0.004" in text
    assert "1048576" in text
    assert "–" in text
    first, second = (next(line for line in lines if name in line) for name in ("fedsc", "a|b"))
    assert first.index("4.0") + 3 == second.index("12.5") + 4  # decimal points under each other
    assert first.index("1048576") + 7 == second.rindex("12") + 2


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(table(ROWS, title="All"), force_terminal=True)
    assert "\x1b[3" not in text.replace("\x1b[3m", "")  # italics may stay, colours may not


def test_columns_choose_order_and_headings():
    text = markdown(ROWS, {"loss": "Loss", "method": "Method"}, digits=1)
    assert text.splitlines() == [
        "| Loss | Method     |",
        "| ---: | ---------- |",
        "|  4.0 | fedsc      |",
        "| 12.5 | a\\|b [red] |",
    ]
    assert markdown([{"a": 1}, {"b": "x"}]).splitlines() == [
        "|   a | b   |",
        "| --: | --- |",
        "|   1 | –   |",
        "|   – | x   |",
    ]
    assert markdown([]) == ""


def test_csv_keeps_every_digit():
    read = list(csv.reader(io.StringIO(csv_text(ROWS))))
    assert read[0] == ["method", "knn", "knn stderr", "loss", "bytes", "ok"]
    assert read[1] == ["fedsc", "0.9134", "0.0042", "4.03125", "1048576", "True"]
    assert read[2] == ["a|b [red]", "0.5", "", "12.5", "12", ""]


def test_decimals_follow_the_size_of_a_column():
    text = markdown([{"small": 0.000123456, "large": 12345.678, "bad": float("nan")}])
    assert "0.000123" in text
    assert "12346" in text
    assert "nan" in text


def test_decimals_can_be_chosen_by_row():
    rows = [{"what": "size", "mean": 1234.5, "max": 2000}, {"what": "share", "mean": 0.12345}]
    by_row, by_column = shown(table(rows, by_row=True)), shown(table(rows))
    assert "0.123" in by_row and "1234" in by_row and "–" in by_row
    assert "0.123" not in by_column


def test_a_column_can_be_kept_whole():
    rows = [{"name": "breastmnist", **{f"text {n}": "word " * 9 for n in range(3)}}]
    for unbroken, whole in ((["name"], True), ([], False)):
        narrow = Console(width=44, file=io.StringIO())
        narrow.print(table(rows, unbroken=unbroken))
        assert ("breastmnist" in narrow.file.getvalue()) is whole
