"""Progress and tables in a real pseudo-terminal, at the widths that people have."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from harmonium.cli.main import main

WIDTHS = (60, 80, 100, 140)

# One process draws the same at every width; a form feed is between two of them.
SCENE = """
import fcntl, struct, sys, termios
from pathlib import Path
from types import SimpleNamespace as Named
from harmonium.cli import terminal
from harmonium.core import progress
from harmonium.report import display, run_progress

recipe = Named(rounds=200, clients=10, split=Named(newcomers=0), objective=Named(name="simclr"),
    terms=(), method=Named(name="fedavg"), data=Named(name="digits"))
row = {"answered": 9, "missing": 1, "bytes_up": 3e6, "bytes_down": 3e6, "reported": {}}
display.PATIENCE = 0.0
run_progress._Clock.left = lambda self, number: "12:34:56 or more"
for width in json_widths:
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    with run_progress.long_work(terminal.err):
        watcher = run_progress.watcher_for(terminal.err, "fedavg, seed 1 (3 of 12)")
        watcher.begin(recipe, Path("run"), 0, 10)
        with progress.work("setup"), progress.work("training at the server", 12800, "images") as at:
            at(6400)
            terminal.err.file.flush()
            display.display_of(terminal.err).tick(at_once=True)
        watcher.round({**row, "round": 198, "loss": 12.3456, "knn": 0.456}, 1.0)
        watcher.note("a remark above the line")
        watcher.round({**row, "round": 199, "loss": 11.3456}, 1.0)
        watcher.end(None)
        watcher.close()
    terminal.say_prose(f"verdict  {prose}")
    terminal.say_prose(f"probably {path} is too small; go on with: {command}", terminal.err)
    terminal.say(f"run      {path}")
    terminal.show_table([
        {"encoder": label, "kNN": (91.25, 0.41), "linear": (93.5, 0.3),
         "linear, 10 labels a class": (71.25, 1.2), "95 % interval": "71.0 to 73.5",
         "rounds to 90 %": 140, "what": "federated averaging of self-supervised encoders"}
        for label in ("centralised", "alone (divergence-aware)", "fedavg")
    ], "Test accuracy", digits=1, unbroken=["95 % interval"])
    print("\\f", end="", flush=True)
"""
PROSE = (
    "Probes of the trained encoder are no better than those of raw pixels, beyond the noise of "
    "the test part: 71.2 against 70.9 % by kNN and 80.0 against 81.1 % by the linear probe."
)
PATH = f"/home/{'long-name/' * 12}my-run"
COMMAND = "harmonium resume runs/of/mine rounds=40 engine.workers=2 local.lr=0.003"
SCENE = f"prose, path, command = {PROSE!r}, {PATH!r}, {COMMAND!r}\n{SCENE}"


class Screen:
    """The little of a terminal that progress and tables need; remembers every drawing."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows, self.row, self.column = [""], 0, 0
        self.drawings: list[list[str]] = []  # as the screen was before each erasure

    def feed(self, text: str) -> None:
        for control, what, character in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", text, re.S):
            if what == "A":
                self.row -= int(control or 1)
            elif what == "K":
                self.drawings.append(list(self.rows))
                self.rows[self.row] = ""
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._down()
            elif character:
                self._put(character)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self.column = 0
            self._down()
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def drawn(self, pattern: str) -> str:
        """The last row of any drawing that has a pattern."""
        rows = [row for one in [*self.drawings, self.rows] for row in one]
        return next(row for row in reversed(rows) if re.search(pattern, row))


def read(held: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(held, 65536)
        except OSError:  # Linux says so when the other side is closed
            return
        if not piece:
            return
        yield piece


def in_terminal(width: int, *words: str, code: int = 0) -> str:
    """All that Python shows in a terminal of some width, until it ends with a code."""
    held, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    hidden = ("COLUMNS", "LINES")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**environment, "TERM": "xterm", "NO_COLOR": "1"},
        start_new_session=True,
    )
    os.close(side)
    shown = b"".join(read(held)).decode()
    os.close(held)
    assert process.wait() == code, shown
    return shown


@pytest.fixture(scope="module")
def screens() -> dict[int, Screen]:
    shown = in_terminal(80, "-c", SCENE.replace("json_widths", json.dumps(WIDTHS)))
    made = {width: Screen(width) for width in WIDTHS}
    for screen, text in zip(made.values(), shown.split("\f"), strict=False):
        screen.feed(text)
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_round_loss_knn_and_time_left_stay_at_any_width(
    screens: dict[int, Screen], width: int
) -> None:
    line = screens[width].drawn(r"round 199/200")
    assert re.search(r"round 199/200.*loss 11\.346  kNN 45\.6 %  left 12:34:56", line)
    assert len(line) <= width
    others = ["(3 of 12)", "━", "9 clients, 1 missing", "6.0 MB", "elapsed", "or more"]
    found = [word in line for word in others]
    assert all(found) if width == 140 else not all(found)
    assert ("━" in line and "(3 of 12)" in line) is (width >= 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_work_is_shown_below_the_run_and_is_gone_in_the_end(
    screens: dict[int, Screen], width: int
) -> None:
    line = screens[width].drawn("training at the server")
    assert "training at the server: 6,400 of 12,800 images" in line and len(line) <= width
    setups = [one for one in screens[width].drawings if any("12,800" in row for row in one)]
    assert any(re.search(r"^(.*\) +)?setup", row) for one in setups for row in one)
    left = "\n".join(screens[width].rows)
    assert "training at the server" not in left and "setup" not in left
    assert left.count("a remark above the line") == 1
    assert left.count("round 199/200") == 1 and "round 198/200" not in left


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_split_no_word_and_leave_out_no_column(
    screens: dict[int, Screen], width: int
) -> None:
    rows = screens[width].rows
    begin = next(i for i, row in enumerate(rows) if "Test accuracy" in row)
    body = "\n".join(rows[begin + 1 :])
    assert {"centralised", "(divergence-aware)", "91.2", "0.4"} <= set(body.split())
    assert "…" not in body and "self-supervised" in body.split()
    for heading in ("kNN", "linear", "95 % interval", "rounds to 90 %", "what"):
        assert heading.split()[-1] in body.split()
    assert "class" in body.split() or "10/class" in body.split()
    assert body.count("71.0 to 73.5") == 3
    assert (body.count("centralised") == 1) is (width >= 100)  # it names rows of every piece


@pytest.mark.parametrize("width", WIDTHS)
def test_prose_is_broken_between_words_below_its_label(
    screens: dict[int, Screen], width: int
) -> None:
    rows = screens[width].rows
    begin = next(i for i, row in enumerate(rows) if row.startswith("verdict  "))
    end = next(i for i, row in enumerate(rows) if row.startswith("probably "))
    assert " ".join(row[9:] for row in rows[begin:end]) == PROSE
    assert all(row.startswith(" " * 9) and row[9] != " " for row in rows[begin + 1 : end])
    # a path and a command are whole, so that the terminal alone breaks what is wider than it
    text = "".join(rows[end:])
    assert text.count(PATH) == 2
    assert COMMAND in text if len(COMMAND) + 9 > width else any(COMMAND in row for row in rows)


# Both commands in one process, for each imports torch.
EXPLAINED = """
import sys
from harmonium.cli.main import main
for more in [], ["--json"]:
    sys.argv = ["harmonium", "explain", "fsimclr", *more]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    print(end="\\f", flush=True)
"""


def test_explain_says_the_same_in_a_terminal_and_one_line_each_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harmonium", "explain", "fsimclr"])
    main()
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) > 140
    in_colours, as_json, _ = in_terminal(60, "-c", EXPLAINED).split("\f")
    screen = Screen(60)
    screen.feed(in_colours)
    assert " ".join(screen.rows).split() == plain.split()
    told = [line for line in screen.rows if line.startswith("server    keeps")]
    follows = screen.rows[screen.rows.index(told[0]) + 1]
    assert follows.startswith(" " * 10) and follows[10] != " "
    meaning = str(json.loads(as_json)["meaning"])
    assert "secure aggregation cannot hide that, for the reasons above." in meaning


# ---- before torch is imported ------------------------------------------------------------------
# A command that ends where it would import torch; prints the CPU time until then, last of all.
BEFORE = """
import os, sys
before = os.times().user

class Ends:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise SystemExit(f"{os.times().user - before:.3f}")

sys.meta_path.insert(0, Ends())
sys.argv = ["harmonium", *WORDS]
from harmonium.cli.main import main
main()
"""
FIRST = {  # what a terminal shows of a command first
    "run fedavg": "loading",
    "run fedavg --dry-run": "loading",
    "resume runs/a": "loading",
    "compare fedavg fedprox": "loading",
    "compare fedavg fedprox --dry-run": "estimating",
    "sweep fedavg sweep.local.lr=0.1,0.2": "loading",
    "sweep fedavg sweep.local.lr=0.1,0.2 --dry-run": "estimating",
    "demo": "loading",
    "diagnose data=digits": "diagnosing",
    "eval runs/a knn": "evaluating",
    "plan fedavg": "planning",
    "privacy runs/a": "reading the ledger",
    "privacy plan epsilon=3": "planning",
    "tune fedavg grid.local.lr=0.1,0.2": "loading",
    "explain fedavg": "loading",
    "data show digits": "reading the data",
    "data split digits": "splitting the data",
    "server start fedavg": "loading",
    "server resume runs/a": "loading",
    "client start --data digits": "loading",
    "client check fedavg": "checking the plan",
    "client log": "reading the log",
}


def before_torch(words: str) -> str:
    return BEFORE.replace("WORDS", json.dumps(words.split()))


@pytest.mark.parametrize("words", FIRST)
def test_a_command_says_something_before_torch_is_imported(words: str, soon: float) -> None:
    """And takes it away. A second try, for the machine may be busy."""
    for _ in range(2):
        shown = in_terminal(80, "-c", before_torch(words), code=1)
        screen = Screen(80)
        screen.feed(shown)
        assert screen.drawn(f"^{FIRST[words]}  0:0")
        assert not any(FIRST[words] in row for row in screen.rows)
        if float(next(row for row in reversed(screen.rows) if row)) < soon:
            return
    raise AssertionError(shown)


@pytest.mark.parametrize("words", ["run fedavg --json", "eval runs/a knn --json"])
def test_with_json_nothing_is_shown(words: str) -> None:
    shown = in_terminal(80, "-c", before_torch(words), code=1)
    assert "\x1b" not in shown and len(shown.split()) == 1


def test_without_a_terminal_nothing_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-c", before_torch("run fedavg")], capture_output=True, text=True
    )
    assert done.stdout == "" and len(done.stderr.split()) == 1
