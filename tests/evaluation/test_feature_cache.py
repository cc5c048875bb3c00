"""Features on disk: found only where everything is the same, and never in the way."""

import importlib
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.data.augment.views import plain
from harmonium.data.images import Images
from harmonium.evaluation import feature_cache
from harmonium.evaluation.feature_cache import FeatureCache, encoder_digest, features_folder
from harmonium.evaluation.features import embed

HOW: dict[str, Any] = {"size": None}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))


def pictures(seed: int = 0, count: int = 10) -> Images:
    rng = np.random.default_rng(seed)
    return Images(rng.integers(0, 256, (count, 4, 4, 1), np.uint8), np.zeros(count, np.int64))


def files() -> list[Path]:
    return sorted(features_folder().iterdir()) if features_folder().exists() else []


@pytest.mark.usefixtures("home")
def test_they_are_computed_once_for_the_same_weights_images_and_preparation() -> None:
    first = FeatureCache()
    made = first.features(network(), pictures(), plain, HOW)
    assert torch.equal(made, embed(network(), pictures(), plain))
    assert (first.computed, first.found) == (10, 0) and len(files()) == 1
    later = FeatureCache()
    relabelled = Images(pictures().pixels, np.arange(10))
    assert torch.equal(later.features(network(), relabelled, plain, HOW), made)
    assert (later.computed, later.found) == (0, 10)
    shifted = network()
    shifted[2].running_mean += 1  # a buffer, not a parameter
    other = Images(pictures().pixels.copy(), pictures().labels)
    other.pixels[9, 3, 3, 0] ^= 1
    for encoder, images, how in (
        (network(1), pictures(), HOW),
        (shifted, pictures(), HOW),
        (network(), other, HOW),
        (network(), pictures(count=9), HOW),
        (network(), pictures(), {"size": 4}),
    ):
        new = FeatureCache()
        assert torch.equal(new.features(encoder, images, plain, how), embed(encoder, images, plain))
        assert new.found == 0
    assert len(files()) == 6
    wider = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3, eps=0.1))
    wider.load_state_dict(network().state_dict())
    assert encoder_digest(wider) != encoder_digest(network())  # the same weights, another network


@pytest.mark.usefixtures("home")
def test_they_are_for_their_owner_and_a_damaged_or_deleted_file_is_made_anew() -> None:
    made = FeatureCache().features(network(), pictures(), plain, HOW)
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(features_folder().stat().st_mode) == 0o700
    whole = path.read_bytes()
    for damage in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50], b"", b"nothing"):
        path.write_bytes(damage)
        again = FeatureCache()
        assert torch.equal(again.features(network(), pictures(), plain, HOW), made)
        assert again.computed == 10 and path.read_bytes() == whole
    path.unlink()
    assert torch.equal(FeatureCache().features(network(), pictures(), plain, HOW), made)


@pytest.mark.usefixtures("home")
def test_those_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for seed in range(3):
        FeatureCache().features(network(), pictures(seed), plain, HOW)
        paths += [path for path in files() if path not in paths]
        os.utime(paths[-1], (1e9 + seed, 1e9 + seed))
    FeatureCache().features(network(), pictures(0), plain, HOW)  # used: now it is the newest
    torn = features_folder() / "x.safetensors.ab12.part"
    torn.write_bytes(b"half")
    os.utime(torn, (1, 1))
    size = paths[0].stat().st_size
    monkeypatch.setattr(feature_cache, "MOST", 3 * size)
    FeatureCache().features(network(), pictures(7), plain, HOW)
    assert [path.exists() for path in paths] == [True, False, True] and not torn.exists()
    monkeypatch.setattr(feature_cache, "MOST", size - 1)
    before = files()
    FeatureCache().features(
        network(), pictures(8), plain, HOW
    )  # never fits: nothing is deleted for it
    assert files() == before


def test_a_disk_that_cannot_be_written_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("in the way")
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    told: list[str] = []
    made = FeatureCache(note=told.append).features(network(), pictures(), plain, HOW)
    assert torch.equal(made, embed(network(), pictures(), plain))
    assert len(told) == 1 and "not kept" in told[0]


@pytest.mark.usefixtures("home")
def test_other_code_with_the_same_weights_has_other_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = """from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(x.flatten(1)){after}
"""
    for after in ("", ".relu()"):
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        (tmp_path / "mine.py").write_text(code.format(after=after))
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        torch.manual_seed(0)
        made = importlib.import_module("mine").Mine()
        found = FeatureCache().features(made, pictures(), plain, HOW)
        assert torch.equal(found, embed(made, pictures(), plain))
