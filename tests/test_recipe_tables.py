"""The tables of the papers as recipes: all of them can be built, small ones can be run."""

from pathlib import Path

import pytest

from harmonium.errors import ConfigError
from harmonium.recipe import Recipe
from harmonium.recipe_text import table, tables
from harmonium.runs import run

NAMES = [entry.name for name in tables() for entry in table(name)]


def test_every_row_of_every_setting_is_there() -> None:
    assert len(NAMES) == len(set(NAMES)) == 9 * 19


@pytest.mark.parametrize("name", NAMES[::7] + NAMES[:19])
@pytest.mark.parametrize("size", ["", "@cpu"])
def test_a_recipe_of_a_table_can_be_built(name: str, size: str) -> None:
    recipe = Recipe.of(f"{name}{size}")
    method = recipe.method_for((32, 32, 3), 10)
    uv = name.endswith("+uv") or "federated-simclr" in name
    assert ("uv" in method.blueprint) == uv
    semi = "semi" in name or "cbafed" in name
    assert recipe.split.labels == (0.1 if semi else 1.0)
    assert method.reads_labels == (semi or name.endswith("/supervised"))
    kind = {"label": "dirichlet", "cov": "rotation", "joint": "joint"}
    assert recipe.split.name == kind[name.split("/")[1].split("-")[1]]
    if size:
        assert sum(p.numel() for p in method.blueprint.parameters()) < 1e6
        assert recipe.clients == 10
    else:
        wanted = {"c10": 100, "c100": 500, "tiny": 100}[name.split("/")[1].split("-")[0]]
        assert recipe.clients == wanted and recipe.participation.number == 10
        assert recipe.local.epochs == 1 and recipe.local.lr == 0.1


def test_published_figures_are_those_of_the_paper() -> None:
    found = {entry.name: entry.published for entry in table("fsimclr")}
    assert found["fsimclr/c10-label/federated-simclr"] == 85.0
    assert found["fsimclr/c10-cov/local-simclr"] == 74.3
    assert found["fsimclr/c100-joint/spectral+uv"] == 21.5
    assert found["fsimclr/tiny-label/semi-simsiam+uv"] == 20.0
    assert found["fsimclr/c100-label/featarc"] is None


def test_a_setting_alone_is_its_first_row() -> None:
    assert Recipe.of("fsimclr/c10-joint").digest == (
        Recipe.of("fsimclr/c10-joint/federated-simclr").digest
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fsimclr/c10-labl", "did you mean 'fsimclr/c10-label/"),
        ("fsimclr/c10-label/spectral+vu", "did you mean 'fsimclr/c10-label/spectral\\+uv'"),
        ("fsimclr/c10-label@gpu", "end it with @cpu, or not"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.of(name)
    with pytest.raises(ConfigError, match="no tables called 'fsimcl': did you mean 'fsimclr'"):
        table("fsimcl")


@pytest.mark.parametrize("row", ["federated-simclr", "semifed+uv"])
def test_a_small_recipe_runs(row: str, tmp_path: Path) -> None:
    drawn = ["data=shapes", "data.count=120", "data.test_count=20", "data.size=16", "clients=4"]
    small = ["encoder.width=4", "encoder.out=16", "local.batch=16", "participation.number=3"]
    less = ["rounds=1", "evaluate.k=5", "evaluate.health=32", "engine.workers=0"]
    words = [*drawn, *small, *less]
    found = run(f"fsimclr/c10-joint/{row}@cpu", *words, out=tmp_path / "run")
    assert found.rounds[1]["bounds"]["clients"] == 3
