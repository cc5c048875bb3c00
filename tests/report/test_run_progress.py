"""What a run and other long work say while they go."""

import time
from io import BytesIO, StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from harmonium.core import codec, progress
from harmonium.data.catalogue import overview
from harmonium.data.heterogeneity import heterogeneity
from harmonium.data.partition import make_split
from harmonium.data.sets.shapes import Shapes
from harmonium.engines import local
from harmonium.federation.driver import Reply
from harmonium.recipe.schema import Recipe
from harmonium.report import display, run_progress
from harmonium.report.run_progress import LineWatcher
from harmonium.runs import worker
from harmonium.runs.start import run
from harmonium.studies.diagnosis import diagnose

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


def test_missing_sites_are_named_in_the_line_of_their_round():
    said = StringIO()
    watcher = LineWatcher(Console(file=said, width=200))
    watcher.names = {0: "north", 1: "south", 2: "west"}
    for number in (1, 2):
        replies = [Reply(0, {}, ""), Reply(1, {}, ""), Reply(2, None, "it was offline")]
        for reply in replies if number == 1 else replies[:2]:
            watcher.task(reply)
        watcher.round({**ROW, "round": number, "missing": 2 - number}, 1.0)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("round")]
    assert "1 missing (west)" in lines[0] and "west" not in lines[1]


def times_left(monkeypatch, seconds, rounds, due):
    """What is said to be left after each round that took so many seconds."""
    now = [0.0]
    monkeypatch.setattr(run_progress.time, "perf_counter", lambda: now[0])
    clock, told = run_progress._Clock(rounds, due), []
    for number, took in enumerate(seconds, 1):
        now[0] += took
        told.append(clock.left(number))
    return told


def test_the_first_round_says_nothing_of_those_after_it(monkeypatch):
    told = times_left(monkeypatch, [100, 10, 10, 10], 4, lambda number: False)
    assert told == ["", "0:20", "0:10", "0:00"]
    assert times_left(monkeypatch, [100], 1, lambda number: True) == ["0:00"]


def test_rounds_with_an_evaluation_are_estimated_apart(monkeypatch):
    def took(number):  # workers start in the first round
        return (30 if number == 1 else 0) + (5 if number % 10 == 0 else 1)

    told = times_left(monkeypatch, map(took, range(1, 101)), 100, lambda number: number % 10 == 0)
    assert told[0] == "" and told[1] == "1:38 or more"  # 98 rounds of 1 s; no evaluation was seen
    for number in range(10, 101):
        minutes, seconds = map(int, told[number - 1].split(":"))
        assert 60 * minutes + seconds == sum(map(took, range(number + 1, 101)))


def test_two_plain_rounds_and_an_evaluation_are_enough_for_an_estimate(monkeypatch):
    told = times_left(monkeypatch, [41, 1, 5], 60, lambda number: number % 3 == 0)
    minutes, seconds = map(int, told[-1].split(":"))
    assert 60 * minutes + seconds == pytest.approx(19 * (1 + 1 + 5), rel=0.2)
    every = times_left(monkeypatch, [45, 5, 5], 60, lambda number: True)
    assert every == ["", "4:50", "4:45"]
    second = times_left(monkeypatch, [41, 5, 1], 60, lambda number: number % 2 == 0)
    assert second == ["", "", "2:53"]  # how long plain rounds take is not known before


def test_a_run_says_no_time_left_before_it_is_known(passed, tmp_path):
    console = Console(file=StringIO(), width=200)
    watcher = LineWatcher(console)
    watcher.begin(Recipe.of("fedavg", "rounds=4", "evaluate.every=2"), tmp_path, 0, 10)
    for number, took in enumerate((60, 5, 1, 5), 1):
        passed(took)
        watcher.round({**ROW, "round": number}, took)
    rows = [line for line in console.file.getvalue().splitlines() if line.startswith("round")]
    found = [row.partition("training left ")[2].partition("  ")[0] for row in rows]
    assert found == ["", "", "0:05", "0:00"]
    watcher.close()


@pytest.fixture
def passed(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [1000.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(display, "TICK", 3600.0)  # the thread of `long_work` stays out of this

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def decode(count, seconds, passed, total=None):
    """A made-up decoding of `count` images, one every `seconds`."""
    for done in range(1, count + 1):
        passed(seconds)
        progress.emit("decoding photos", done, total)
    progress.emit("decoding photos", count, count)


def test_long_work_is_told_in_plain_lines_every_few_seconds(passed):
    console = Console(file=StringIO(), width=100)
    with run_progress.long_work(console):
        decode(20, 1.0, passed, total=30_000)
    assert console.file.getvalue().splitlines() == [
        f"decoding photos: {done} of 30,000 images, 1.0 a second, time left 8:19:{second}"
        for done, second in ((3, 57), (8, 52), (13, 47), (18, 42))
    ]


def test_work_within_work_is_told_with_what_it_is_a_part_of(passed):
    console = Console(file=StringIO(), width=100)
    with run_progress.long_work(console), progress.work("setup"), progress.work("server step"):
        with progress.work("training at the server", 1000, "images") as at:
            passed(3.0)
            at(250)
        passed(6.0)
        with progress.work("clustering", 500, "steps"):
            pass
    assert console.file.getvalue().splitlines() == [
        "setup; training at the server: 250 of 1,000 images",
        "setup; clustering: 0 of 500 steps",
    ]


def test_work_that_says_nothing_is_told_all_the_same(monkeypatch):
    monkeypatch.setattr(display, "PATIENCE", 0.05)
    monkeypatch.setattr(display, "TICK", 0.01)
    console = Console(file=StringIO(), width=100)
    with run_progress.long_work(console), progress.work("drawing run.png"):
        end = time.monotonic() + 10
        while not console.file.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert console.file.getvalue() == "drawing run.png\n"


def test_work_that_fails_is_over(passed):
    console = Console(file=StringIO(), width=100)
    with run_progress.long_work(console):
        with pytest.raises(ValueError), progress.work("clustering", 9, "steps"):
            raise ValueError
        passed(60.0)
        progress.emit("features", 1, 2)
    assert console.file.getvalue() == ""


def test_quick_decoding_is_not_worth_a_line(passed):
    for terminal in (False, True):
        console = Console(file=StringIO(), force_terminal=terminal)
        with run_progress.long_work(console):
            decode(30, 0.05, passed)
        assert console.file.getvalue() == ""


def test_nothing_is_told_where_one_document_of_json_is_asked_for(passed):
    console = Console(file=StringIO(), width=100)
    with run_progress.long_work(console, silent=True):
        decode(30, 1.0, passed)
    assert console.file.getvalue() == ""


def test_a_terminal_shows_work_that_goes_away(passed, monkeypatch):
    console = Console(file=StringIO(), force_terminal=True, width=100, _environ={})
    monkeypatch.setattr(display, "TICK", 0.25)
    with run_progress.long_work(console):
        decode(20, 1.0, passed)
        with Progress(console=console):  # another bar finds the place free
            pass
    assert "decoding photos: 20 images" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K\x1b[?25h")  # erased, and the cursor is back


def test_a_terminal_names_a_command_until_there_is_work_to_show(passed):
    console = Console(file=StringIO(), force_terminal=True, width=100, _environ={})
    with run_progress.long_work(console, command="evaluating"):
        assert "evaluating  0:00" in console.file.getvalue()
        with progress.work("fine-tuning", 10, "images") as at:
            passed(0.1)
            at(4)
            display.display_of(console).tick(at_once=True)
            assert "fine-tuning: 4 of 10 images" in console.file.getvalue()
            assert "evaluating; " not in console.file.getvalue()
        passed(65.0)
        display.display_of(console).tick(at_once=True)
        assert "evaluating  1:05" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[2K\x1b[?25h")  # erased


def test_a_command_is_named_neither_elsewhere_nor_beside_json(passed):
    for console, silent in (
        (Console(file=StringIO()), False),
        (Console(file=StringIO(), force_terminal=True), True),
    ):
        with run_progress.long_work(console, silent, "evaluating"):
            passed(60.0)
            display.display_of(console).tick(at_once=True)
        assert console.file.getvalue() == ""


def test_the_line_of_a_run_takes_the_place_of_the_command(passed):
    console = Console(file=StringIO(), force_terminal=True, width=100, _environ={})
    with run_progress.long_work(console, command="starting"):
        shown = display.display_of(console)
        shown.run = SimpleNamespace(line=lambda width: "round 1/2")
        assert shown.lines(100) == ["round 1/2"]
        shown.run = None
        assert shown.lines(100) == ["starting  0:00"]


def told_by(listener):
    with progress.send_events_to(listener), progress.work("client 3", 100, "images") as at:
        at(50)


def test_seldom_passes_on_what_lasts_and_its_end():
    events = []
    told_by(progress.throttled(lambda *event: events.append(event), spacing=0.0))
    assert events == [("client 3", n, 100, "images") for n in (0, 50, 100)]
    events.clear()
    told_by(progress.throttled(lambda *event: events.append(event)))
    assert events == []


def test_a_worker_process_passes_progress_on_before_its_answer(monkeypatch):
    def perform(runtime, message):
        told_by(progress.current_listener())
        return {"answer": 1}

    monkeypatch.setattr(worker.TaskServer, "_runtime_of", lambda self, of: None)
    monkeypatch.setattr(worker, "_perform", perform)
    monkeypatch.setattr(worker, "throttled", lambda listener: listener)
    tasks, results = BytesIO(), BytesIO()
    local.write_frame(tasks, codec.encode({"runtime": ["", "", ""]}))
    tasks.seek(0)
    worker.TaskServer().serve(tasks, results)
    results.seek(0)
    process = SimpleNamespace(stdin=BytesIO(), stdout=results)
    answering = SimpleNamespace(answered=True, process=process)
    heard = []
    assert local._ask(answering, b"", lambda *event: heard.append(event)) == {"answer": 1}
    assert heard == [("client 3", n, 100, "images") for n in (0, 50, 100)]


def test_real_decoding_is_told_from_first_to_last(home):
    told = []
    with progress.send_events_to(lambda *words: told.append(words)):
        Shapes(count=600, test_count=5, size=8).load()
        Shapes(count=600, test_count=5, size=8).load()  # decoded already
    what, unit = "decoding shapes", "images"
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


def test_a_run_tells_of_setup_clients_evaluation_and_probes(home, undrawn):
    """FedCA trains at the server before its first round, Orchestra clusters there."""
    heard = set()
    words = ["clients=2", "rounds=1", "data.limit=120", "encoder.width=4", "engine.workers=0"]
    with progress.send_events_to(lambda what, done, total, unit: heard.add((what, unit))):
        run("fedca", *words, "public=shapes", "public.count=64", "method.align_epochs=1")
        run("orchestra", *words, "method.clusters=4", "method.global_steps=3")
    assert {
        ("setup", ""),
        ("training at the server", "images"),
        ("features at the server", "images"),
        ("clustering at the server", "steps"),
        ("cluster", "clients"),
        ("train", "clients"),
        ("client 1", "images"),
        ("validation figures", ""),
        ("test figures", ""),
        ("features", "images"),
        ("linear probe", "penalties"),
        ("few-label probe", "draws"),
    } <= heard


def test_looking_at_data_and_at_clients_is_told_in_images(home):
    heard = set()
    with progress.send_events_to(lambda what, done, total, unit: heard.add((what, total, unit))):
        dataset = Shapes(count=90, test_count=10, size=8).load()
        overview(dataset)
        split = make_split(Recipe.of("fedavg").split, dataset, None, 2, 0)
        heterogeneity(split, dataset)
        diagnose("data=shapes", "data.count=90", "data.size=8", clients=2)
    learning = len(dataset.train) + len(dataset.validation)
    mine = len(split.indices[0])
    assert {
        ("levels of the channels", learning, "images"),
        ("styles of clients", sum(map(len, split.indices)), "images"),
        ("describing images at client 0", mine, "images"),
    } <= heard
