"""Bytes by part: what the ledger counts of every component of a model."""

import json
from typing import Any

import pytest
import torch

from harmonium.core import codec
from harmonium.federation.ledger import Ledger, LedgerEntry, by_part
from harmonium.testing import first_trial

WAYS = {"up": 0, "down": None}  # of rows a client sends its own and gets all
FLOATS = {"name": "simclr", "norm": "none"}


def lines_of(name: str, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    found = first_trial(name, rounds=1, **settings)
    return found, [json.loads(line) for line in found.lines]


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("fedavg", {}, ["encoder", "projector"]),
        ("fedavg", {"objective": "byol"}, ["encoder", "projector", "predictor", "target"]),
        ("fsimclr", {}, ["encoder", "projector", "uv_projector", "uv"]),
        ("fedavg", {"objective": FLOATS, "privacy": {"secure_aggregation": True}}, None),
    ],
    ids=["simclr", "byol", "rows", "masked"],
)
def test_bytes_of_parts_are_those_of_their_tensors(
    name: str, settings: dict[str, Any], parts: list[str] | None
) -> None:
    found, lines = lines_of(name, **settings)
    trained = [line for line in lines if line["step"] == "train"]
    assert trained and all("parts" not in line for line in lines if not line["down"])
    shared = {way: found.method.blueprint.shared(client) for way, client in WAYS.items()}
    for line in trained:
        for way in ("up", "down"):
            told = line["parts"][way]
            assert set(told) == {"model"}  # of `loss` and of masks there is one part
            assert sum(told["model"].values()) == line[way]["model"]
            if parts is None and way == "up":
                continue  # whole numbers under masks, eight bytes each
            for part in parts or ["encoder", "projector"]:
                own = {k: v for k, v in shared[way].items() if k.partition(".")[0] == part}
                assert told["model"][part] == codec.payload_bytes(own)
        assert parts is None or list(line["parts"]["up"]["model"]) == parts


def test_a_field_with_one_part_or_without_dotted_names_has_no_parts() -> None:
    one, other = torch.ones(3), torch.ones(2)
    assert by_part({"encoder": {"encoder.a": one, "encoder.b": other}}) == {}
    assert by_part({"masks": {"clients": one, "shares": other}, "loss": 1.0, "rows": one}) == {}
    assert by_part({"clusters": {"0/encoder.a": one, "1/encoder.a": other}}) == {
        "clusters": {"0/encoder": 12, "1/encoder": 8}
    }


def test_a_line_without_parts_is_what_it_was() -> None:
    ledger = Ledger()
    entry = LedgerEntry(1, 0, "train", 2, "no answer", "away", {"model": 8})
    entry.parts = {"down": {}}
    ledger.write(entry)
    assert json.loads(ledger.lines[0]) == {
        "round": 1,
        "ask": 0,
        "step": "train",
        "client": 2,
        "outcome": "no answer",
        "why": "away",
        "down": {"model": 8},
        "up": {},
    }
