import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from harmonium.core import files
from harmonium.core.errors import StoreError


def test_trees_come_back(tmp_path: Path) -> None:
    digest = files.write_tree(tmp_path / "deep" / "a", {"x": torch.ones(3), "n": 2})
    assert files.read_tree(tmp_path / "deep" / "a", digest)["n"] == 2


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_flipped_bit_is_noticed_and_named(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a"
    digest = files.write_tree(path, {"x": torch.ones(30)})
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=f"{path} is damaged"):
        files.read_tree(path, digest)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    digest = files.write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=f"cannot write {path}: No space left"):
        files.write_atomic(path, b"new")
    assert files.read_checked(path, digest) == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_private_files_are_for_their_owner_only(tmp_path: Path) -> None:
    files.write_tree(tmp_path / "mine", {}, private=True)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600
