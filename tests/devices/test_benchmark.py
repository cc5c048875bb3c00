"""`benchmarks/device.py`: its formats, its counts, and all of it on a pretend accelerator."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, counted

from harmonium.core import devices

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import device as benchmark

TINY: dict[str, Any] = {"data": {"name": "shapes", "count": 90, "test_count": 10, "size": 12}}
TINY["data"]["validation"] = 0.5


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretence is the accelerator of this machine, and everything is small."""
    monkeypatch.setattr(devices, "accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
    monkeypatch.setattr("harmonium.evaluation.logistic.PASSES", 2)
    network = {"name": "cnn-small", "width": 4, "out": 16}
    monkeypatch.setattr(benchmark, "FEW", {**benchmark.FEW, **TINY, "encoder": network})
    steps = {**benchmark.STEPS, "batch": 8, "max_steps": 2}
    monkeypatch.setattr(benchmark, "STEPS", steps)
    cases = {"fedavg, simclr": ("fedavg", {}), "wrong": ("fedavg", {"objective": "nothing"})}
    monkeypatch.setattr(benchmark, "CASES", cases)
    whole = {**benchmark.WHOLE, **TINY, "encoder": network, "rounds": 1}
    monkeypatch.setattr(benchmark, "WHOLE", whole)
    monkeypatch.setattr(benchmark, "ENCODERS", {"cnn-small": network, "none": {"name": "none"}})
    monkeypatch.setattr(benchmark, "BATCHES", (4,))
    monkeypatch.setattr(benchmark, "SHORTEST", 0.02)
    monkeypatch.setattr(benchmark, "IMAGES", 16)
    yield
    devices.allow_tf32(False)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    benchmark.main([*arguments, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_an_accelerator_that_is_a_cpu_agrees_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "LONGEST", 0.1)
    found = document(capsys, "--seconds", "30")
    assert found["device"] == str(DEVICE)
    machine, agreement, run, reads, speed = (one["rows"] for one in found["tables"].values())
    assert {"torch", "device", "CPU"} <= {row["what"] for row in machine}
    first = agreement[0]
    assert first["weights"] == first["losses"] == first["features"] == 0
    assert first["verdict"] == "met" and "UnknownSetting" in agreement[1]["error"]
    names = [row["case"].rpartition(", ")[2] for row in agreement[2:]]
    assert names == ["bf16", "fp16", "fast views"]
    assert agreement[-1]["verdict"] == "told apart" and agreement[2]["weights"] > 0
    assert all(row["points"] == 0 and row["verdict"] == "met" for row in run)
    assert all(row["verdict"] == "met" for row in reads)
    assert {row["step"] for row in reads} >= {"train"}
    assert all(("rate" in row) != ("error" in row) for row in speed)
    measured = [row for row in speed if row["encoder"] == "cnn-small"]
    assert {row["device"] for row in measured} == {"cpu", str(DEVICE)}
    assert {row["precision"] for row in measured} == {"fp32", "bf16", "fp16"}
    assert {row["layout"] for row in measured} == {"last, as chosen", "first"}
    assert {row["images"] for row in measured} == {None, "sent by batch"}


def test_a_cpu_alone_is_compared_with_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    benchmark.main(["--markdown", "--seconds", "0.5"])
    printed = capsys.readouterr().out
    assert "the CPU alone" in printed and "### Speed" in printed and "Read-backs" not in printed
    assert "ends with the same bits" in printed
    assert printed.splitlines()[-1].startswith("0 MISSED, ")


def test_what_does_not_fit_into_the_time_is_counted() -> None:
    table = benchmark.speed(devices.CPU, -1.0, False, Path())
    assert table.rows == [] and table.notes[-1].startswith("4 more rows")


def test_a_device_that_is_not_here_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cuda:7"])
    assert "--device is cuda:7" in capsys.readouterr().err


def test_tables_leave_out_empty_columns_and_show_what_is_missing() -> None:
    columns = {"a": ("first", str), "b": ("second", benchmark.percent), "c": ("third", str)}
    rows = [{"a": "x|y", "b": 0.125}, {"a": "z", "b": None}]
    table = benchmark.Table("Title", columns, rows, ["A note."])
    assert table.text().splitlines() == [
        "Title",
        "first  second",
        "x|y    12.5",
        "z      –",
        "A note.",
    ]
    assert table.markdown().splitlines() == [
        "### Title",
        "",
        "| first | second |",
        "|---|---|",
        "| x\\|y | 12.5 |",
        "| z | – |",
        "",
        "- A note.",
    ]


def test_numbers_and_errors_are_short() -> None:
    assert benchmark.small(0.0) == "0" and benchmark.small(1.25e-7) == "1.2e-07"
    assert benchmark.rate(9.876) == "9.88" and benchmark.rate(12345.6) == "12,346"
    assert benchmark.megabytes(3 * 2**20) == "3 MiB"
    long = RuntimeError("out of memory\nwith a trace")
    assert benchmark.one_line(long) == "RuntimeError: out of memory"
    assert benchmark.one_line(KeyError()) == "KeyError"


def test_kernels_that_overlap_are_busy_once_and_others_do_not_count() -> None:
    events = [
        {"cat": "kernel", "ts": 10.0, "dur": 5.0},
        {"cat": "gpu_memcpy", "ts": 12.0, "dur": 6.0},
        {"cat": "gpu_memset", "ts": 30.0, "dur": 1.0},
        {"cat": "kernel", "ts": 11.0, "dur": 1.0},
        {"cat": "cpu_op", "ts": 0.0, "dur": 100.0},
        {"cat": "gpu_user_annotation", "ts": 0.0, "dur": 100.0},
        {"name": "no kind"},
    ]
    assert benchmark.busy(events) == 9.0
    assert benchmark.busy([]) == 0.0


def test_nan_is_no_agreement() -> None:
    row = {"weights": 0.0, "losses": 0.0, "features": 0.0, "knn": 0.51, "knn_cpu": 0.5}
    assert benchmark.agrees(row)
    assert not benchmark.agrees({**row, "losses": float("nan")})
    assert not benchmark.agrees({**row, "knn": 0.515})


def test_read_backs_are_those_that_the_pretence_counts() -> None:
    there = torch.arange(4, device=DEVICE)
    with counted() as waits, benchmark.read_backs(DEVICE) as found:
        there[torch.tensor([1])], there[there > 2], there.sum().item(), there.to("cpu")
        torch.nonzero(there), torch.empty(4, dtype=torch.int64).copy_(there)
        torch.arange(3).to(DEVICE)
    names = {"numbers": "item", "copies": "copy", "shapes": "shape", "indices": "index"}
    assert waits.pop("send") == 1  # on CUDA devices the driver tells
    assert {names[key]: count for key, count in found.items()} == waits
    assert waits == Counter(item=1, copy=2, shape=2, index=1)
