"""The command as a user meets it: its output and its exit code, as a process where that matters."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Call = Callable[..., tuple[str, str]]
SMALL = [
    "data=shapes",
    "data.count=80",
    "data.test_count=20",
    "data.size=10",
    "clients=3",
    "rounds=2",
    "encoder.width=4",
    "encoder.out=16",
    "local.batch=8",
    "local.epochs=1",
    "evaluate.k=5",
    "evaluate.labels_per_class=[2]",
    "engine.workers=0",
]
WORKER = [word.replace("workers=0", "workers=1") for word in SMALL]


def harmonium(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "harmonium", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def refused(call: Call) -> Callable[..., str]:
    """A command that ends with exit code 2 and one line."""

    def refusal(*words: str) -> str:
        said, told = call(*words, code=2)
        assert said == "" and len(told.strip().splitlines()) == 1
        return told

    return refusal


def test_a_run_from_start_to_encoder(tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "run"
    done = harmonium("run", "fedavg", *WORKER, "--out", str(folder))
    assert "kNN" in done.stdout and str(folder) in done.stdout
    assert "round 2/2" in done.stderr and "loss" in done.stderr  # plain lines, no terminal
    assert "\x1b[" not in done.stdout + done.stderr
    names = {path.name for path in folder.iterdir()}
    wanted = "recipe.yaml split.npz metrics.jsonl ledger.jsonl commits encoder.safetensors"
    assert {*wanted.split(), "result.json", "run.png"} <= names
    about = json.loads((folder / "about.json").read_text())
    assert len(about["recipe"]) == 64 and any("encoder mean" in line for line in about["card"])
    said, told = call("resume", str(folder), "--json")
    assert told == ""
    assert json.loads(said)["recipe"] == about["recipe"]
    assert json.loads(said)["figures"]["knn"] >= 0


def test_json_is_one_document_and_nothing_else(tmp_path: Path, call: Call) -> None:
    said, told = call("run", "fedavg", *SMALL, "--out", str(tmp_path / "run"), "--json")
    result = json.loads(said)
    assert [row["round"] for row in result["rounds"]] == [0, 1, 2]
    assert told == ""
    assert {"knn", "linear", "linear_2", "health"} <= set(result["figures"])
    assert result["rounds"][1]["bytes_up"] > 0
    probes = {"knn", "linear", "linear_2"}
    assert set(result["figures"]["balanced"]) == set(result["untrained"]["balanced"]) == probes
    assert list(result["references"]) == ["commonest class", "raw pixels", "whitened pixels"]
    assert all(set(one["balanced"]) == probes for one in result["references"].values())
    assert result["verdict"] == result["against"]["text"] != ""
    assert set(result["against"]["probes"]["knn"]) == {*result["references"], "untrained"}
    shown, _ = call("resume", str(tmp_path / "run"), "--formats", "pdf")
    assert "run.pdf" in shown and (tmp_path / "run" / "run.pdf").read_bytes()[:5] == b"%PDF-"
    words = ("raw pixels", "whitened", "commonest", "balanced", f"verdict  {result['verdict']}")
    assert all(word in shown for word in words)


def test_the_encoder_can_be_used_elsewhere(tmp_path: Path, call: Call, undrawn: None) -> None:
    import torch

    from harmonium import load_encoder

    call("run", "fedavg", *SMALL, "--out", str(tmp_path / "run"), "--json")
    encoder = load_encoder(tmp_path / "run")
    pictures = torch.randint(0, 255, (3, 10, 10, 3), dtype=torch.uint8)
    assert encoder(pictures).shape == (3, 16)
    assert encoder.about["method"] == "fedavg"


def test_an_encoder_file_cannot_choose_what_is_imported(tmp_path: Path) -> None:
    import safetensors.torch
    import torch

    from harmonium import load_encoder
    from harmonium.core.errors import StoreError

    about = {"encoder": {"name": "this:Encoder"}, "channels": 1, "side": 8}
    path = tmp_path / "encoder.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1)}, path, {"harmonium": json.dumps(about)})
    with pytest.raises(StoreError, match="import that module first"):
        load_encoder(path)
    assert "this" not in sys.modules


def test_images_in_a_folder_without_labels(tmp_path: Path, call: Call) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(40):
        pixels = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    words = ["data=folder", f"data.path={tmp_path / 'photos'}", "clients=2", "rounds=1"]
    small = ["encoder.width=4", "encoder.out=8", "local.batch=8", "engine.workers=0"]
    said, _ = call("run", "fedavg", *words, *small, "--out", str(tmp_path / "run"))
    assert "health" in said and "kNN" not in said
    _, told = call("run", "fedavg", *words, "split=dirichlet", code=2)
    assert "needs labels" in told


def test_comparisons_hold_the_references(tmp_path: Path, call: Call, undrawn: None) -> None:
    words = ["compare", "fedavg", *SMALL, "--out", str(tmp_path / "c")]
    said, _ = call(*words, "--json")
    rows = {row["encoder"]: row for row in json.loads(said)["rows"]}
    ends = (
        ["commonest class", "untrained", "raw pixels", "whitened pixels", "alone"],
        ["centralised", "supervised"],
    )
    assert list(rows) == [*ends[0], "fedavg", *ends[1]]
    assert (tmp_path / "c" / "compare.png").stat().st_size > 1000
    before = times(tmp_path / "c")
    said, _ = call(*words, "label.fedavg=FedAvg (ours)", "--formats", "pdf,svg")
    assert "centralised" in said and "FedAvg (ours)" in said and "compare.pdf, .svg" in said
    for kind in ("pdf", "svg"):
        assert (tmp_path / "c" / f"compare.{kind}").stat().st_size > 1000
    _, told = call(*words, "label.fedagv=x", code=2)
    assert "label.fedagv" in told and "'fedavg'" in told
    for command in (words, ["run", "fedavg"], ["resume", str(tmp_path)]):
        _, told = call(*command, "--formats", "jpg", code=2)
        assert "jpg" in told and "pdf" in told
    assert len(before) >= 3 and times(tmp_path / "c") == before  # what is complete is not run again


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/**/*.json")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "fedavgg"], "did you mean 'fedavg'?"),
        (["run", "fedavg", "rouns=3"], "did you mean 'rounds'?"),
        (["run", "fedavg", "data=cifar10"], "harmonium data fetch cifar10"),
        (["run", "fedavg", "data=folder", "data.path=nowhere"], "nowhere"),
        (["run", "fedavg", "data=npz"], "path"),
        (["run", "fedavg", "clients=5000"], "5000"),
        (["resume", "nowhere"], "holds no run"),
        (["explain", "fedsck"], "unknown method or recipe 'fedsck'"),
        (["data", "fetch", "cifar11"], "did you mean 'cifar10'?"),
        (["nonsense"], "nonsense"),
        (["rum"], "'run'"),
        (["run", "fedavg", "--rounds", "3"], "key=value"),
        (["run", "fedavg", "split.alpha=0.1"], "split=dirichlet does"),
        (["run", "fedavg", "rounds=3", "rounds=4"], "given twice"),
        (["run", "fedavg", "data.validation=1.5", "--dry-run"], "data.validation=1.5"),
        (["run", "fedavg", "data=folder", "data.path=setup.cfg"], "no such folder"),
        (["run", "fedavg", "data=npz", "data.path=."], "data=folder"),
        (["run", "fedavg", "data=folder", f"data.path={__file__}"], "data=npz"),
        (["explain", "harmonium.nowhere:X"], "cannot import method"),
        (["run"], "METHOD_OR_FILE"),
        (["compare", "rounds=3"], "name at least one method"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], message: str, home: Path, refused: Callable[..., str]
) -> None:
    assert message in refused(*words)


def test_a_mistake_is_exit_code_2_of_the_process_too() -> None:
    done = harmonium("run", "fedavgg", code=2)
    assert "did you mean 'fedavg'?" in done.stderr and done.stdout == ""


def test_recipe_files_that_cannot_be_right_are_named(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content, says in (
        ("twice", b"rounds: 3\nrounds: 4\n", "line 2 cannot be read: rounds is given twice"),
        ("binary", b"\xff\xfe\x00", "not text"),
        ("torn", b"rounds: [", "line 1"),
        ("list", b"- 1", "no settings"),
    ):
        path = tmp_path / f"{name}.yaml"
        path.write_bytes(content)
        assert says in refused("run", str(path), "--dry-run")
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = refused("explain", "broken:X")
    assert "SyntaxError" in told and "broken.py, line 1" in told


@pytest.mark.parametrize("words", [[], ["data"]])
def test_without_a_command_the_help_is_shown(words: list[str], call: Call) -> None:
    assert "Commands:" in call(*words, code=2)[1]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("flag", "small"), [([], WORKER), (["--json"], SMALL)])
def test_ctrl_c_stops_with_130_and_loses_nothing(
    tmp_path: Path, flag: list[str], small: list[str]
) -> None:
    words = ["run", "fedavg", *small, "rounds=500", "--out", str(tmp_path / "run"), *flag]
    words.remove("rounds=2")
    process = subprocess.Popen(
        [sys.executable, "-m", "harmonium", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run").glob("commits/*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "" and "Traceback" not in told
    assert flag or "harmonium resume" in told


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "file" / "home"))
    told = refused("run", "fedavg")
    assert "cannot create" in told and "HARMONIUM_HOME" in told


def test_everything_is_kept_under_home(home: Path, call: Call) -> None:
    call("run", "fedavg", *SMALL, "--json")
    assert {path.name for path in home.iterdir()} == {"cache", "references", "runs"}


@pytest.mark.parametrize(
    "what", ["methods", "objectives", "encoders", "datasets", "splits", "recipes"]
)
def test_listings_name_everything(what: str, call: Call) -> None:
    names = json.loads(call(what, "--json")[0])
    assert names and all(about for about in names.values())
    assert next(iter(names)) in call(what)[0]


def test_a_new_process_lists_what_this_one_does(call: Call) -> None:
    """Here tests have imported everything; there only the command can have."""
    there = harmonium("objectives", "--json").stdout
    assert json.loads(there) == json.loads(call("objectives", "--json")[0])


def test_a_method_is_explained(call: Call) -> None:
    text, _ = call("explain", "fedavg")
    for words in ("encoder mean", "Model weights leave the clients", "never reach a client task"):
        assert words in text
    card = json.loads(call("explain", "fedavg", "--json")[0])
    assert card["exchanges"]["train"]["up"]["model"]["kind"] == "weights"
    assert card["meaning"] and card["bytes"]["train"]["up"] > 0


def test_the_resolved_recipe_can_be_seen_and_used(tmp_path: Path, call: Call) -> None:
    shown, _ = call("run", "digits", "rounds=3", "--dry-run")
    (tmp_path / "mine.yaml").write_text(shown)
    again, _ = call("run", str(tmp_path / "mine.yaml"), "--dry-run")
    assert again == shown and "rounds: 3" in shown
    document = json.loads(call("run", "digits", "rounds=3", "--dry-run", "--json")[0])
    assert document["recipe"]["rounds"] == 3 and len(document["digest"]) == 64
    assert document["estimate"]["seconds"] > 0 and document["estimate"]["bytes_up"] > 0
    assert "# view 1: mode=faithful" in shown and "crop_min=0.5" in shown  # what `digits` means


def test_a_comparison_says_what_it_would_do(tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "compared"
    words = ["fedavg", "fedprox", "data=cifar10", "rounds=2", "--out", str(folder), "--dry-run"]
    said, _ = call("compare", *words)
    assert "fair     all methods have the same budget" in said
    assert "missing  cifar10 is not here yet: run `harmonium data fetch cifar10`" in said
    said, _ = call("sweep", *words, "sweep.local.epochs=1,2", "--json")
    assert len(json.loads(said)["cells"]) == 4 and not folder.exists()
    shown, told = call("run", "fedavg", "data=cifar10", "--dry-run", code=2)
    assert "cifar10 is not here yet" in told and "name: cifar10" in shown
    assert "not here" not in shown


def test_labels_that_mean_unknown_are_mentioned_and_one_class_is_no_probe(
    tmp_path: Path, call: Call
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (80, 10, 10, 1), dtype=np.uint8)
    np.savez(tmp_path / "pm.npz", x=pixels, y=np.arange(80) % 2 * 2 - 1)
    words = [word for word in SMALL if not word.startswith("data")]
    words += ["data=npz", f"data.path={tmp_path / 'pm.npz'}", "--out", str(tmp_path / "run")]
    said, told = call("run", "fedavg", *words)
    assert "40 of 80 train images are labelled -1" in told
    assert "kNN" not in said


def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['harmonium', '--help']\n"
        "try:\n    runpy.run_module('harmonium', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'sklearn', 'matplotlib', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "heavy: []" in done.stdout


def test_importing_harmonium_is_light() -> None:
    code = "import sys, harmonium; print(sorted({'torch', 'sklearn', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_progress_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    import pty

    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "harmonium", "run", "fedavg", *SMALL, "--out", str(tmp_path / "r")],
        stdout=subprocess.DEVNULL,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
    )
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert process.wait() == 0
    assert "round 2/2" in shown.decode() and "━" in shown.decode()
    assert b"\x1b[3" not in shown.replace(b"\x1b[3A", b"")  # NO_COLOR: no colours


def test_comparing_files_and_images_without_labels(
    tmp_path: Path, call: Call, undrawn: None
) -> None:
    for name, method in (("a", "fedavg"), ("b", "fedprox")):
        (tmp_path / f"{name}.yaml").write_text(f"method: {method}\n")
    files = [str(tmp_path / f"{name}.yaml") for name in ("a", "b")]
    words = [*SMALL, "data.unlabelled=true", "--out", str(tmp_path / "c")]
    said, _ = call("compare", *files, *words)
    assert "Label-free figures" in said and "percent" not in said
    assert (tmp_path / "c" / "b" / "seed-0" / "result.json").exists()


def test_a_method_of_ones_own_runs_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine, after McMahan et al., 2017."""\n'
        "from dataclasses import dataclass\n"
        "from harmonium import Method\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Method):\n"
        "    strength: float = 1.0\n"
    )
    words = ["run", "mine:Mine", "method.strength=2", *WORKER, "--out", "run", "--json"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "harmonium"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == "run"


def test_what_is_refused_leaves_no_folder_behind(home: Path, call: Call) -> None:
    call("run", "fedavg", "clients=5000", code=2)
    assert list((home / "runs").iterdir()) == []
