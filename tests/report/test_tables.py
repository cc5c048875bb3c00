import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from harmonium.cli import terminal
from harmonium.report.tables import (
    BEST,
    NEAR,
    Tabular,
    csv_text,
    estimate,
    latex,
    markdown,
    plus_minus,
    table,
)

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


def narrow(made, width):
    console = Console(width=width, file=io.StringIO())
    console.print(made)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


TEXTS = [
    {
        "name": "divergence-aware",
        "what": "FedAvg of BYOL with a twin kept at the client, and a predictor that stays",
        "paper": "Lubana et al., 2022; Zhuang et al., 2021",
        "linear, 10 labels a class": (88.1, 0.4),
        "p (Holm)": 0.0001,
    }
]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_word_is_split_and_no_number_cut_at_any_width(width):
    words = {word for key, value in TEXTS[0].items() for word in f"{key} {value}".split()}
    words -= {"(88.1,", "0.4)"}
    text = narrow(table(TEXTS), width)
    if "10/class" in text:
        words |= {"10/class", "10/class:"}
    assert set(text.replace("─", " ").split()) <= words | {"88.1", "±", "0.4", "0.000100"}
    for key, value in TEXTS[0].items():
        assert key.split()[-1] in text
        if isinstance(value, str):
            assert set(value.split()) <= set(text.split())


def test_columns_that_do_not_fit_follow_below_beside_what_names_a_row():
    assert [len(one.headings) for one in table(TEXTS).pieces(200)] == [5]
    pieces = [one.headings for one in table(TEXTS).pieces(40)]
    few = ["name", "linear, 10 labels a class"]
    assert pieces == [["name", "what", "paper"], few, ["name", "p (Holm)"]]
    rows = [{"figure": f, "method": m, "difference": 1.5, "mean rank": 2.5}
            for f in ("kNN", "linear") for m in ("fedavg", "fedprox")]  # fmt: skip
    pieces = [one.headings for one in table(rows).pieces(32)]
    assert pieces == [["figure", "method", "difference"], ["figure", "method", "mean rank"]]
    shown = narrow(table(TEXTS), 10)
    assert all(word in shown for word in ("Holm", "0.0001", "88.1"))


def test_the_tables_of_a_run_and_of_objectives_are_whole_at_60_columns():
    names = ["trained", "untrained", "commonest\nclass", "raw\npixels", "whitened\npixels"]
    probes = ["kNN", "  balanced", "10 labels a class"]
    run = table([{"probe": probe, **dict.fromkeys(names, 12.5)} for probe in probes], digits=1)
    assert len(list(run.pieces(60))) == 1
    assert [line.count("12.5") for line in narrow(run, 60).splitlines() if "12.5" in line] == [
        5
    ] * 3
    value = (-1.184, 0.013)
    row = {"method": "fedspectral", "loss": "spectral (form=haochen, mu=1)"}
    row |= dict.fromkeys(("over all clients", "mean of clients", "gradient norm"), value)
    text = narrow(table([row, {**row, "method": "fedsc"}], digits=3), 60)
    assert text.count("-1.184 ± 0.013") == 6 and "gradient" in text and text.count("fedsc") == 2


def test_a_heading_of_many_lines_is_shortened_and_explained():
    row = {"encoder": "fedavg", "kNN": 91.2, "linear, 10 labels a class": 71.2}
    text = narrow(table([row], digits=1), 30)
    assert "10/class: 10 labels a class" in text
    lines = text.split("─")[0].strip().splitlines()
    assert len(lines) == 2 and lines[-1].split() == ["10/class"]
    assert "10/class" not in narrow(table([row], digits=1), 60)
    wide = {"figure": "linear, 10 labels a class", "what": "federated " * 9, "mean": 1.5}
    assert "10/class" in narrow(table([wide]), 28).split()  # a word that stays whole


def test_a_column_can_be_kept_on_one_line():
    rows = [{"name": "a b c d e f", "text": "word " * 9}]
    assert "a b c d e f" in narrow(table(rows, unbroken=["name"]), 20)
    assert "a b c d e f" not in narrow(table(rows), 14)


def test_nothing_is_left_out_where_there_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(terminal, "out", Console(file=io.StringIO(), width=terminal.WIDE))
    many = {f"column {n}": "x" * 20 for n in range(30)}
    terminal.show_table([many])
    text = terminal.out.file.getvalue()
    assert text.count("x" * 20) == 30 and text.count("column 0") == 1


def test_a_long_path_is_split_rather_than_lost():
    rows = [{"file": "/" + "folder/" * 20}]
    assert narrow(table(rows), 60).replace("\n", "").replace(" ", "").count("folder") > 15


def test_several_runs_print_as_a_line_and_are_tables_in_a_notebook() -> None:
    class Found(Tabular):
        folder = Path("runs/both")

        def panels(self) -> list[tuple[str, list[dict[str, object]], int | None]]:
            rows: list[dict[str, object]] = [
                {"encoder": f"m{k}", "kNN": (k, 0.5)} for k in range(9)
            ]
            return [("title <i>", rows, 1), ("second", rows[:1], 1)]

    said = repr(Found())
    assert "\n" not in said and "m0" in said and "3 more" in said and "runs/both" in said
    drawn = Found()._repr_html_()
    assert drawn.count("<table>") == 2 and "8.0 ± 0.5" in drawn and "title &lt;i&gt;" in drawn


def test_latex_marks_groups_and_escapes():
    rows = [
        {"method": r"a_b 50% \x ~ λ < 2", "kNN": (91.23, 0.5), "why": "w" * 50},
        {"method": "b", "kNN": (90.0, 0.5), "why": None},
        {"method": "c", "kNN": None, "why": "short"},
    ]
    marks = {(0, "kNN"): BEST, (1, "kNN"): NEAR}
    made = latex(rows, "50 % & more", digits=1, label="tab:x", marks=marks, rules=(0, 2))
    assert made.count(r"\toprule") == made.count(r"\bottomrule") == 1
    assert made.count(r"\midrule") == 2  # below the heading, and above the third row
    assert r"\caption{50 \% \& more}" in made and r"\label{tab:x}" in made
    assert r"a\_b 50\% \textbackslash{}x \textasciitilde{} $\lambda$ $<$ 2" in made
    assert r"$\mathbf{91.2} \pm 0.5$" in made and r"$\underline{90.0} \pm 0.5$" in made
    assert r"p{" in made.partition(r"\toprule")[0]  # long texts are paragraphs
    body = [line for line in made.splitlines() if line.endswith(r"\\")]
    assert len(body) == 4 and all(line.replace(r"\&", "").count("&") == 2 for line in body)
    page = markdown(rows, digits=1, marks=marks)
    assert "**91.2 ± 0.5**" in page and " *90.0 ± 0.5*" in page
