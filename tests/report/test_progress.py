"""What a run says while it goes."""

from io import StringIO

from rich.console import Console

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
