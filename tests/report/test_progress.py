"""What a run says while it goes."""

from io import StringIO

from rich.console import Console
from rich.progress import Progress

from harmonium import telling
from harmonium.data.sets.shapes import Shapes
from harmonium.federation.drive import Reply
from harmonium.report import progress
from harmonium.report.progress import LineWatcher

ROW = {"answered": 2, "missing": 0, "loss": 1.5, "bytes_up": 10, "bytes_down": 10}


def test_a_warning_is_said_when_it_begins_and_when_it_comes_back():
    said = StringIO()
    watcher = LineWatcher(Console(file=said))
    warnings = [["Collapsed: spread 0.01"], ["Collapsed: spread 0.009"], [], ["Collapsed: again"]]
    for number, found in enumerate(warnings):
        watcher.round({**ROW, "round": number, "health": {"warnings": found}}, 1.0)
    watcher.round({**ROW, "round": 9}, 1.0)
    notes = [line for line in said.getvalue().splitlines() if "note:" in line]
    assert notes == ["note: Collapsed: spread 0.01", "note: Collapsed: again"]


def test_the_first_round_says_little_of_those_after_it(monkeypatch):
    now = iter([0.0, 100.0, 110.0, 120.0, 130.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    clock = progress._Clock()
    told = [clock.left(number, 4) for number in (1, 2, 3, 4)]
    assert told == ["5:00 or less", "0:20", "0:10", "0:00"]


def decode(count, seconds, monkeypatch, total=None):
    """A made-up decoding of `count` pictures, one every `seconds`."""
    clock = iter(range(10_000, 20_000))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock) * seconds)
    for done in range(1, count + 1):
        telling.tell("decoding photos", done, total)
    telling.tell("decoding photos", count, count)


def test_long_decoding_is_told_in_plain_lines(monkeypatch):
    console = Console(file=StringIO(), width=100)
    with progress.long_work(console):
        decode(30, 1.0, monkeypatch, total=30_000)
    assert console.file.getvalue().splitlines() == [
        f"decoding photos: {done} of 30,000 pictures" for done in (3, 14, 25)
    ]


def test_quick_decoding_is_not_worth_a_line(monkeypatch):
    for terminal in (False, True):
        console = Console(file=StringIO(), force_terminal=terminal)
        with progress.long_work(console):
            decode(30, 0.05, monkeypatch)
        assert console.file.getvalue() == ""


def test_a_terminal_shows_a_bar_that_goes_away(monkeypatch):
    console = Console(file=StringIO(), force_terminal=True, width=100, _environ={})
    with progress.long_work(console):
        decode(20, 1.0, monkeypatch)
        with Progress(console=console):  # a run's own bar finds the place free
            pass
    assert "decoding photos: 20 pictures" in console.file.getvalue()


def test_real_decoding_is_told_from_first_to_last(home):
    told = []
    with telling.listening(lambda *words: told.append(words)):
        Shapes(count=600, test_count=5, size=8).load()
        Shapes(count=600, test_count=5, size=8).load()  # decoded already
    what, unit = "decoding shapes", "pictures"
    parts = [(what, n, None, unit) for n in (512, 600, 605)]
    assert told == [*parts, (what, 605, 605, unit)]


def test_a_client_that_does_not_answer_is_named_once_with_the_reason():
    said = StringIO()
    watcher = LineWatcher(Console(file=said, width=200))
    for _ in range(2):
        watcher.task(Reply(3, None, "it has 1 example, too few for one step"))
        watcher.task(Reply(4, {}))
    assert said.getvalue().splitlines() == [
        "note: client 3 did not take part: it has 1 example, too few for one step"
    ]
