"""Errors carry the keys that they name, so that users' paths are never rewritten."""

import copy
import pickle
from pathlib import Path

import pytest

from harmonium.core.errors import ConfigError, DataError, HarmoniumError, Key
from harmonium.data.sets.digits import Digits
from harmonium.measures.eval_data import sets_of
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import load_public
from harmonium.sites.policy import Policy


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file that is not there, in a folder whose name holds what keys hold."""
    return str(tmp_path / "data.old" / "recipe.data.path=" / "x.npz")


def test_public_images_that_are_not_there_are_named_by_their_own_path(path: str) -> None:
    recipe = Recipe.of("fedavg", "public=npz", f"public.path={path}")
    for raised in (recipe.check, lambda: load_public(recipe, (8, 8, 1))):
        with pytest.raises(DataError) as error:
            raised()
        assert path in str(error.value) and error.value.key == "public.path"
        assert str(error.value).startswith("public.path=")


def test_sets_to_evaluate_on_are_named_by_their_own_path(path: str) -> None:
    sets, _ = sets_of(changes_of(["on=npz", f"on.npz.path={path}"]))
    with pytest.raises(DataError) as error:
        sets.load("npz", (8, 8, 1), Digits())
    assert path in str(error.value) and error.value.key == "on.npz.path"


def test_a_member_of_styles_is_named_by_its_own_path(path: str) -> None:
    recipe = Recipe.of("fedavg", "data=styles", f"data.sets=[digits, '{path}']")
    with pytest.raises(DataError) as error:
        recipe.check()
    assert path in str(error.value) and error.value.key == "data.sets"


def test_public_settings_are_named_as_such_whatever_they_are() -> None:
    recipe = Recipe.of("fedavg", "public=digits", "public.limit=99999")
    with pytest.raises(DataError) as error:
        load_public(recipe, (8, 8, 1))
    assert "data." not in str(error.value) and str(error.value).count("public.limit") == 2


def test_a_policy_that_cannot_be_read_is_named_by_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "recipe of policy.yaml"
    path.write_text("[", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        Policy.read(path)
    assert str(path) in str(error.value) and str(error.value).startswith("policy ")


def test_errors_keep_their_keys_on_their_way() -> None:
    with pytest.raises(ConfigError) as error:
        Recipe.of("fedavg", "local.lr=fast")
    assert error.value.key == "local.lr"
    with pytest.raises(ConfigError) as error:
        Recipe.of("fedavg", "rounds=0")
    assert error.value.key == "rounds"
    made = DataError(Key("data", "path"), "=data.old; see ", Key("split", "path"))
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), made.within("data")):
        assert str(other) == "data.path=data.old; see split.path" and other.key == made.key
    assert str(made.within("public")) == "public.path=data.old; see split.path"
    assert isinstance(made.within("public"), DataError) and HarmoniumError("plain").key is None
