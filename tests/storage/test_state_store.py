"""What clients keep, on disk: versions, and large tensors that never change once."""

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harmonium.core import codec
from harmonium.core.callbacks import Callback
from harmonium.core.errors import StoreError
from harmonium.runs.start import resume, run
from harmonium.storage import state_store
from harmonium.storage.run_folder import RunFolder
from harmonium.storage.state_store import LARGE, Version

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

SETTINGS = {
    "clients": 3,
    "rounds": 3,
    "data": {"name": "shapes", "count": 120, "test_count": 10, "size": 8},
    "public": {"name": "shapes", "count": 60, "test_count": 10, "validation": 0},
    "encoder": {"name": "cnn-small", "width": 2, "out": 80},
    "method": {"name": "fedca", "size": 8, "align_epochs": 1, "align_batch": 8},
    "local": {"epochs": 1, "batch": 8},
    "views": {"name": "fedca", "size": 8},
    "evaluate": {"every": 9, "k": 3, "labels_per_class": []},
    "engine": {"workers": 0},
}


def big(fill: float, count: int = LARGE // 4) -> Tensor:
    return torch.full((count,), float(fill))


def grow(folder: Path, *states: dict, client: int = 7) -> list[tuple[Path, str, Version]]:  # type: ignore[type-arg]
    """Versions of a client, one after the other."""
    made, version = [], Version()
    for number, state in enumerate(states):
        file = folder / str(client) / f"{number:06d}-0-train.safetensors"
        digest = state_store.write(file, state, version)
        version = state_store.read(file, digest)
        made.append((file, digest, version))
    return made


def apart(folder: Path, client: int = 7) -> list[Path]:
    return sorted((folder / str(client)).glob("apart-*"))


def test_versions_come_back_with_names_in_their_order(tmp_path: Path) -> None:
    state = {
        "b": big(1),
        "a": {"y": big(2), 3: big(3), "n": 5, "none": None},
        "rows": [big(4)],
        "": torch.ones(2),
    }
    ((_, _, version),) = grow(tmp_path, state)
    assert codec.encode(version.state) == codec.encode(state)
    assert set(version.separate) == {("b",), ("a", "y"), ("a", 3)}


def test_what_stays_is_written_once_and_what_changed_goes_with_the_state(tmp_path: Path) -> None:
    states = [{"still": big(1), "moves": big(n), "small": torch.ones(n + 1)} for n in (5, 6, 7, 8)]
    made = grow(tmp_path, *states)
    assert [set(version.separate) for _, _, version in made] == [{("still",), ("moves",)}] + [
        {("still",)}
    ] * 3
    assert [version.inline for _, _, version in made[1:]] == [{("moves",)}] * 3
    for (_, _, version), state in zip(made, states, strict=True):
        assert codec.encode(version.state) == codec.encode(state)
    assert len(apart(tmp_path)) == 2  # of the first version alone
    assert made[-1][0].stat().st_size < 2 * LARGE
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.rglob("*.safet*"))


def test_a_tensor_changed_in_place_has_changed(tmp_path: Path) -> None:
    ((file, _, version),) = grow(tmp_path, {"x": big(1)})
    version.state["x"][3] = 9.0
    again = state_store.read(file, state_store.write(file, version.state, version))
    assert float(again.state["x"][3]) == 9.0 and again.inline == {("x",)}


def test_clients_share_what_is_the_same_until_the_last_forgets_it(tmp_path: Path) -> None:
    state = {"x": big(1)}
    for client in (1, 2, 3):
        grow(tmp_path, {**state, "mine": big(10.0 + client)}, client=client)
    (shared,) = {one for one in (tmp_path / "shared").iterdir() if one.stat().st_nlink == 4}
    own = [one for client in (1, 2, 3) for one in apart(tmp_path, client)]
    assert len(own) == 6 and sum(os.path.samefile(shared, one) for one in own) == 3
    for client in (1, 2, 3):
        assert shared.exists()
        for file in (tmp_path / str(client)).glob("[0-9]*"):
            file.unlink()
        state_store.remove_unused_tensors(tmp_path / str(client))
        assert not apart(tmp_path, client)
    assert not list((tmp_path / "shared").iterdir())


def test_tidying_keeps_what_any_version_needs(tmp_path: Path) -> None:
    first, second, third = grow(tmp_path, {"x": big(1)}, {"x": big(1), "y": big(2)}, {"x": big(3)})
    (tmp_path / "7" / "apart-torn.safetensors.part").write_bytes(b"half")
    state_store.remove_unused_tensors(tmp_path / "7")
    assert len(apart(tmp_path)) == 2
    for file, digest, version in (first, second, third):
        assert codec.encode(state_store.read(file, digest).state) == codec.encode(version.state)
    second[0].write_bytes(b"damaged")  # what it needs cannot be known, and it is lost anyway
    state_store.remove_unused_tensors(tmp_path / "7")
    assert len(apart(tmp_path)) == 1
    state_store.read(*first[:2])


def test_without_hard_links_every_client_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for client in (1, 2):
        made = grow(tmp_path, {"x": big(1)}, {"x": big(1), "n": 2}, client=client)
        assert len(apart(tmp_path, client)) == 1 and made[-1][2].state["n"] == 2


def test_damage_is_noticed_named_and_not_handed_on(tmp_path: Path) -> None:
    ((file, digest, _),) = grow(tmp_path, {"x": big(1)})
    (own,) = apart(tmp_path)
    state_store.check(file, digest, set())
    data = bytearray(own.read_bytes())
    data[-1] ^= 1
    own.write_bytes(data)  # the shared name is of the same, damaged file
    for wrong in (
        lambda: state_store.read(file, digest),
        lambda: state_store.check(file, digest, set()),
    ):
        with pytest.raises(StoreError, match=f"{own.name} is damaged"):
            wrong()
    ((other, its, _),) = grow(tmp_path, {"x": big(1)}, client=8)
    state_store.check(other, its, set())
    own.unlink()
    with pytest.raises(StoreError, match=f"{own.name} is missing"):
        state_store.check(file, digest, set())


class StopAfter(Callback):
    def __init__(self, last: int) -> None:
        self.last = last

    def round(self, row, seconds) -> None:  # type: ignore[no-untyped-def]
        if row["round"] == self.last:
            raise KeyboardInterrupt


def test_a_run_has_targets_once_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    calm = run("fedca", out=tmp_path / "calm", **SETTINGS)
    clients = tmp_path / "calm" / "clients"
    assert len(list((clients / "shared").iterdir())) == 2  # h and z of all clients
    for client in range(3):
        versions = list((clients / str(client)).glob("[0-9]*"))
        assert len(versions) == 2 and len(apart(clients, client)) == 2
        assert all(LARGE < one.stat().st_size < 2 * LARGE for one in versions)  # moving averages
    with pytest.raises(KeyboardInterrupt):
        run("fedca", out=tmp_path / "run", callbacks=StopAfter(2), **SETTINGS)
    resume(tmp_path / "run")
    for name in ("metrics.jsonl", "ledger.jsonl", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (calm.folder / name).read_bytes()
    for one, other in zip(
        *(RunFolder(tmp_path / n).snapshots() for n in ("calm", "run")), strict=True
    ):
        assert one == other
    torn = max(apart(clients, 1), key=lambda path: path.stat().st_size)
    torn.write_bytes(b"")
    with pytest.raises(StoreError, match=torn.name):
        RunFolder(tmp_path / "calm").newest_readable()
