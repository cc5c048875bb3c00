"""An encoder as a transformer of scikit-learn: its own checks, and images in every form."""

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.runs.export import load_encoder
from harmonium.sklearn import Encoder, _loaded

from .conftest import save_image

# The checks fit tables of 1 to 20 columns of any numbers, so each row is an image of one line. One
# image passes the network at a time: how float32 is rounded depends on how many pass together, by
# more than the 1e-7 that check_methods_subset_invariance allows.
CHECKED = Encoder("encoder.safetensors", shape=(1, -1), value_range=(-6, 103), batch=1)


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


@pytest.mark.usefixtures("here")
@parametrize_with_checks([CHECKED])  # all of them: none is expected to fail
def test_it_passes_the_estimator_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)


def test_every_form_of_images_gives_the_encoders_features(
    trained: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    wanted = load_encoder(trained).embed(pixels).numpy()
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number:02d}.png")
    files = sorted(tmp_path.glob("*.png"))
    forms: list[tuple[Any, dict[str, Any]]] = [
        (pixels, {}),
        (pixels.transpose(0, 3, 1, 2), {"layout": "NCHW"}),
        (pixels.reshape(20, -1), {"shape": (12, 12, 3)}),
        (pixels.reshape(20, -1), {"shape": (12, -1, 3)}),
        (pixels.transpose(0, 3, 1, 2).reshape(20, -1), {"shape": (3, 12, 12), "layout": "NCHW"}),
        (pixels.astype(np.int64), {"value_range": (0, 255)}),
        (pixels / 255, {"value_range": (0, 1)}),
        (pixels.reshape(20, -1) / 127.5 - 1, {"value_range": (-1, 1), "shape": (12, 12, 3)}),
        (files, {}),
        ([str(file) for file in files], {}),
        (np.array([str(file) for file in files])[:, None], {}),
        (np.array([str(file) for file in files], object), {}),
    ]
    for images, how in forms:
        encoder = Encoder(trained, **how)
        found = encoder.fit_transform(images)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert found.dtype == np.float32
        np.testing.assert_allclose(encoder.transform(images[3:5]), wanted[3:5], atol=1e-5)
    swapped = Encoder(trained).fit_transform([files[2], files[0], files[2]])
    np.testing.assert_allclose(swapped, wanted[[2, 0, 2]], atol=1e-5)


def test_images_are_resized_as_in_training(trained: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (3, 30, 20), dtype=np.uint8)
    wanted = load_encoder(trained).embed(list(grey)).numpy()
    np.testing.assert_allclose(Encoder(trained).fit_transform(grey), wanted, atol=1e-5)
    flat = Encoder(trained, shape=(30, 20)).fit_transform(grey.reshape(3, -1))
    np.testing.assert_allclose(flat, wanted, atol=1e-5)


def test_whitened_features_have_names(trained: Path, pixels: np.ndarray) -> None:
    encoder = Encoder(trained, whiten=3).fit(pixels)
    assert encoder.transform(pixels).shape == (20, 3)
    assert encoder.get_feature_names_out().tolist() == ["encoder0", "encoder1", "encoder2"]


def test_pipelines_and_searches_take_it(trained: Path, pixels: np.ndarray) -> None:
    labels = np.arange(20) % 2
    pipeline = make_pipeline(Encoder(trained, shape=(12, 12, 3)), LogisticRegression())
    search = GridSearchCV(pipeline, {"encoder__whiten": [False, 3]}, cv=2, error_score="raise")
    search.fit(pixels.reshape(20, -1), labels)
    assert search.predict(pixels.reshape(20, -1)).shape == (20,)


def test_pickles_and_copies_hold_a_path_and_no_weights(
    trained: Path, other: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained / "encoder.safetensors", run)
    encoder = Encoder(run).fit(pixels)
    wanted, data = encoder.transform(pixels), pickle.dumps(encoder)
    assert len(data) < 2000 < (run / "encoder.safetensors").stat().st_size
    _loaded.cache_clear()
    assert np.array_equal(pickle.loads(data).transform(pixels), wanted)
    assert clone(encoder).get_params() == encoder.get_params()
    shutil.copy(other / "encoder.safetensors", run)
    with pytest.raises(StoreError, match="fit again"):
        encoder.transform(pixels)
    assert not np.array_equal(encoder.fit_transform(pixels), wanted)


@pytest.mark.parametrize(
    ("how", "images", "named"),
    [
        ({}, np.zeros((4, 64), np.uint8), "shape="),
        ({"shape": (8, 9)}, np.zeros((4, 64), np.uint8), "72"),
        ({"shape": (8, -1, -1)}, np.zeros((4, 64), np.uint8), "shape"),
        ({"shape": (3, -1)}, np.zeros((4, 64), np.uint8), "shape"),
        ({}, np.zeros((4, 8, 8)), "float64"),
        ({}, np.zeros((4, 8, 8), int), r"value_range=\(0, 255\)"),
        ({"value_range": (0, 1)}, np.full((4, 8, 8), 2.0), "2 to 2"),
        ({"value_range": (0, 1)}, np.full((4, 8, 8), np.nan), "nan"),
        ({"value_range": (1, 0)}, np.zeros((4, 8, 8)), "value_range"),
        ({}, np.zeros((4, 3, 8, 8), np.uint8), "layout="),
        ({}, np.zeros((8, 8, 3), np.uint8), "one image"),
        ({"batch": 0}, np.zeros((4, 8, 8), np.uint8), "batch"),
        ({}, "image.png", "list of files"),
    ],
    ids=str,
)
def test_images_that_could_be_misread_are_refused(
    trained: Path, how: dict[str, Any], images: Any, named: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=named) as refused:
        Encoder(trained, **how).fit(images)
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read_are_named(trained: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", 0)
    (tmp_path / "torn.png").write_bytes(b"")
    files = sorted(tmp_path.glob("*.png"))
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "torn.png"))) as raised:
        Encoder(trained).fit_transform(files)
    assert "--" not in str(raised.value)
    with pytest.raises(StoreError, match=r"encoder\.safetensors"):
        Encoder(tmp_path).fit(files)
