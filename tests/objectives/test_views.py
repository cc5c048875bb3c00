"""How many views an objective can look at is known before a run begins."""

import pytest

from harmonium.errors import ConfigError
from harmonium.objectives import objectives
from harmonium.objectives.spectral import Spectral
from harmonium.recipe import Recipe

ANY = {"rotation", "autoencoder", "supervised"}


@pytest.mark.parametrize("name", objectives.table())
def test_one_view_is_refused_by_those_that_compare(name: str) -> None:
    recipe = Recipe.of("fedavg", f"objective={name}", "views=orch_rot")
    if name in ANY:
        assert recipe.known_method().objective.name == name
    else:
        with pytest.raises(ConfigError, match=f"objective={name} compares 2 .*views are 1"):
            recipe.known_method()


@pytest.mark.parametrize("name", objectives.table())
def test_three_views_are_refused_by_those_that_take_two(name: str) -> None:
    recipe = Recipe.of("fedavg", f"objective={name}", "views=orchestra_turned")
    if name in ANY | {"swav"}:
        assert recipe.known_method().objective.name == name
    else:
        with pytest.raises(ConfigError, match="these views are 3"):
            recipe.known_method()


def test_fedscs_form_takes_pairs() -> None:
    Spectral(form="fedsc").check_views(4)
    with pytest.raises(ConfigError, match=r"form=fedsc .* these views are 3"):
        Spectral(form="fedsc").check_views(3)
    with pytest.raises(ConfigError, match=r"form=orchestra .* these views are 4"):
        Spectral(form="orchestra").check_views(4)
