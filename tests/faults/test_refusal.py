"""A run that is refused leaves its folder to the corrected command."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harmonium
from harmonium.cli.main import main
from harmonium.core.callbacks import Callback
from harmonium.core.errors import CallbackError, ConfigError
from harmonium.data.sets.digits import Digits
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.recipe.presets import shipped_recipes
from harmonium.recipe.schema import Recipe

TINY = (
    "data=digits", "data.limit=60", "encoder.width=4", "clients=2", "rounds=1", "local.batch=12",
    "evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0",
)  # fmt: skip


@dataclass(frozen=True)
class Late(SimCLR):
    """An objective that is found at fault in the first round, after the setup was committed."""

    def score(self, parts: Any, seen: Any, context: Any) -> Any:
        return None


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"objective": "assignments", "views": "orchestra"}, "needs centroids: set method="),
        ({"views.pad_crop": 8}, "pad_crop is 8"),
        ({"objective": Late}, "returns nothing"),
    ],
)
def test_a_refused_run_leaves_its_folder_free(
    wrong: dict[str, Any], says: str, exists: bool, tmp_path: Path, home: Path, undrawn: None
) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    with pytest.raises(ConfigError, match=says):
        harmonium.run("fedavg", *TINY, out=folder, **wrong)
    assert folder.exists() == exists
    assert len(harmonium.run("fedavg", *TINY, out=folder).metrics) == 2


def test_objectives_that_need_another_method_are_refused_with_the_recipe() -> None:
    with pytest.raises(ConfigError, match="centroids.*method=orchestra"):
        Recipe.of("fedavg", "objective=assignments", "views=orchestra")
    Recipe.of("fedavg", "objective=assignments", "objective.cluster_weight=0", "views=orchestra")


class Stop(Callback):
    """Ends a run in its setup or after its first round."""

    def __init__(self, when: str) -> None:
        self.when = when

    def begin(self, *about: Any) -> None:
        if self.when == "begin":
            raise ConfigError("stopped")

    def round(self, *about: Any) -> None:
        raise ValueError("stopped") if self.when == "error" else ConfigError("stopped")


def test_what_was_trained_stays(tmp_path: Path, home: Path, undrawn: None) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="stopped"):
        harmonium.run("fedavg", *TINY, out=folder, callbacks=Stop("round"))
    with pytest.raises(ConfigError, match="holds another run"):
        harmonium.run("fedavg", *TINY, "seed=1", out=folder)
    assert len(harmonium.run("fedavg", *TINY, out=folder).metrics) == 2


def test_a_run_that_was_there_before_stays(tmp_path: Path, home: Path, undrawn: None) -> None:
    """An error of a callback's own is no refusal; the next call did not begin the run."""

    class Fail(Callback):
        def begin(self, *about: Any) -> None:
            raise ValueError

    folder = tmp_path / "run"
    with pytest.raises(CallbackError):
        harmonium.run("fedavg", *TINY, out=folder, callbacks=Fail())
    with pytest.raises(ConfigError, match="stopped"):
        harmonium.run("fedavg", *TINY, out=folder, callbacks=Stop("begin"))
    assert (folder / "recipe.yaml").exists()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_takes_grey_images(name: str) -> None:
    dataset = Digits(limit=20).load()
    method = Recipe.of(name, "data=digits").build_method(dataset)
    images = torch.from_numpy(np.array(dataset.train.batch(np.arange(2))))
    for view in (*method.views(images, torch.Generator()), method.views.plain(images)):
        assert view.shape == (2, 1, 8, 8)


def test_an_encoder_of_grey_images_states_one_mean(
    tmp_path: Path, home: Path, undrawn: None
) -> None:
    result = harmonium.run("fedsc", *TINY, out=tmp_path / "run")
    encoder = harmonium.load_encoder(result.folder)
    assert encoder.mean == (pytest.approx((0.4914 + 0.4822 + 0.4465) / 3),)
    assert encoder(np.zeros((2, 8, 8, 1), np.uint8)).shape == (2, encoder.features)


def test_a_refused_run_is_not_said_to_be_continued(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A WireError is curable once a round is trained; before, there is nothing to continue."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "undeclared_memory.py").write_text(
        "from dataclasses import replace\n"
        "from harmonium.federation.method import Method\n"
        "class Mine(Method):\n"
        "    def setup(self, server, cohort):\n"
        "        return replace(server, memory={'secret': 1})\n"
        "        yield\n"
    )
    words = ["undeclared_memory:Mine", *TINY, "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert "Mine.setup keeps `secret`" in said and "continue with" not in said


def test_names_in_messages_are_no_emoji(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", "fedavg", "init=no_such_module:x"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "init=no_such_module:x: cannot import" in capsys.readouterr().err
