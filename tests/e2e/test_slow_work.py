"""A terminal shows that a command is at work while anything in it is slow."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from harmonium.cli import terminal
from harmonium.runs.start import run
from harmonium.sites.folder import init

TINY = ["data=shapes", "data.count=60", "data.test_count=20", "clients=2", "rounds=1"]
TINY += ["encoder.width=4", "evaluate.labels_per_class=[]", "engine.workers=0"]
SLOW = {  # a command, and a function that takes long in it
    "eval RUN knn": "measures.evaluation:open_run",
    "eval RUN semi semi.epochs=1 semi.fractions=[0.5] semi.draws=1": "measures.training:finetune",
    "eval RUN personal": "measures.extra_round:_furnish",
    "eval RUN angles": "measures.angles:angles",
    "eval RUN geometry": "measures.geometry:health",
    "eval RUN tsne tsne.perplexity=3": "measures.tsne:separation",
    "diagnose data=digits data.limit=100 clients=2": "studies.diagnosis:finding",
    "data show digits": "data.catalogue:overview",
    "data split digits": "data.partition:make_split",
    "privacy RUN": "runs.privacy_report:report",
    "privacy plan epsilon=3 delta=1e-5 examples=50": "privacy.planning:epsilon_pld",
    "explain fedavg": "federation.card:card",
    "client check fedavg clients=2 --kit KIT": "sites.plan:planned",
    f"tune fedavg grid.local.lr=0.1,0.2 {' '.join(TINY)}": "studies.tuning.study:_write",
    "run fedavg --dry-run": "runs.plan:measured",
    "plan fedavg data.limit=200": "runs.plan:measured",
    "resume RUN --formats svg": "runs.privacy_report:summary",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run and a site's kit."""
    folder = tmp_path_factory.mktemp("places")
    run("fedavg", *TINY, out=folder / "run")
    init(folder / "federation", ["north", "south"], ["localhost"], 8443, 10)
    kit = next(path.parent for path in (folder / "federation").rglob("site.key"))
    return {"RUN": str(folder / "run"), "KIT": str(kit)}


@pytest.mark.parametrize("words", SLOW)
def test_slow_work_is_shown_within_two_seconds(
    words: str,
    places: dict[str, str],
    call: Callable[..., tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow function goes on once something is on the screen."""
    module, name = SLOW[words].split(":")
    found = importlib.import_module(f"harmonium.{module}")
    original, shown = getattr(found, name), list[str]()

    def slow(*given: Any, **named: Any) -> Any:
        capsys.readouterr()
        end = time.monotonic() + 2
        while time.monotonic() < end and not shown:
            time.sleep(0.02)
            shown.extend(capsys.readouterr().err.split())
        return original(*given, **named)

    monkeypatch.setattr(found, name, slow)
    monkeypatch.setattr(terminal.err, "_force_terminal", True)
    monkeypatch.setattr(terminal.err, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    call(*(places.get(word, word) for word in words.split()))
    assert shown
