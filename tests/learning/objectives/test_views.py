"""How many views an objective can look at is known before a run begins."""

import pytest

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views, preset
from harmonium.learning.objectives import objectives
from harmonium.learning.objectives.spectral import Spectral
from harmonium.recipe.schema import Recipe

ANY = {"rotation", "autoencoder", "supervised"}


@pytest.mark.parametrize("name", objectives.table())
def test_one_view_is_refused_by_those_that_compare(name: str) -> None:
    words = ("fedavg", f"objective={name}", "views=orch_rot")
    if name in ANY:
        assert Recipe.of(*words).objective.name == name
    else:
        with pytest.raises(ConfigError, match=f"objective={name} compares 2 .*views are 1"):
            Recipe.of(*words)


@pytest.mark.parametrize("name", objectives.table())
def test_three_views_are_refused_by_those_that_take_two(name: str) -> None:
    words = ("fedavg", f"objective={name}", "views=orchestra_turned")
    if name in ANY | {"swav"}:
        assert Recipe.of(*words).objective.name == name
    else:
        turns = "quarter_turn has turned them already"  # it takes three, but turns them itself
        why = turns if name == "assignments" else "these views are 3"
        with pytest.raises(ConfigError, match=why):
            Recipe.of(*words)


def of(count: int) -> Views:
    return Views(preset("simclr").pipelines[:1] * count)


def test_turned_views_are_not_turned_again() -> None:
    with pytest.raises(ConfigError, match=r"objective.augment=false or views.quarter_turn=false"):
        Recipe.of("fedavg", "objective=rotation", "objective.augment=true", "views=orch_rot")


def test_fedscs_form_takes_pairs() -> None:
    Spectral(form="fedsc").check_views(of(4))
    with pytest.raises(ConfigError, match=r"form=fedsc .* these views are 3"):
        Spectral(form="fedsc").check_views(of(3))
    with pytest.raises(ConfigError, match=r"form=orchestra .* these views are 4"):
        Spectral(form="orchestra").check_views(of(4))
