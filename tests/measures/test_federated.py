"""A federation's run judged at the server and at a site, with any data set."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.core import files
from harmonium.core.errors import ConfigError, StoreError
from harmonium.engines.runtime import ClientRuntime
from harmonium.runs.open_run import read_recipe
from harmonium.sites.client import SiteImages, open_runtime, save_final_encoder
from harmonium.storage.run_folder import RunFolder

from .conftest import SMALL

ON = ("on=digits", "on.digits.limit=80", "knn.k=5")


@pytest.fixture(scope="module")
def at_server(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose images are at sites, as a server keeps it."""
    data = {**SMALL["data"], "channels": 1}
    held = tmp_path_factory.mktemp("server") / "run"
    shutil.copytree(made("fedavg", data=data), held)
    about = files.read_sealed(held / "about.json")
    about["federation"] = {"id": "x", "folder": "nowhere", "run": "y", "roll": []}
    (held / "about.json").write_bytes(files.sealed(about))
    (held / "split.npz").unlink()  # a server has none
    return held


def taken_home(at_server: Path, folder: Path, **told: Any) -> Path:
    """The same run as a site keeps it."""
    plan = read_recipe(at_server)
    host: ClientRuntime = open_runtime(
        SiteImages.parse("digits", ["data.limit=20"]), plan, folder, 0
    )
    weights = harmonium.load_encoder(at_server).network.state_dict()
    model = host.method.blueprint.shared()
    model |= {f"encoder.{key}": value for key, value in weights.items()}
    statistics = {k: v for k, v in model.items() if k not in host.method.blueprint.shared()}
    said = {"model": model, "statistics": statistics, "told": json.dumps({"round": 2, **told})}
    save_final_encoder(plan, host, folder, said, {}, {"train": {"weights": 7}})
    return folder


def test_server_and_site_judge_the_same_encoder_alike(
    at_server: Path, made: Callable[..., Path], tmp_path: Path
) -> None:
    site = taken_home(at_server, tmp_path / "site", figures={"knn": 0.5}, participants=["north"])
    here = made("fedavg", data={**SMALL["data"], "channels": 1})  # with its images
    figures = [
        next(iter(harmonium.evaluate_run(run, "knn", *ON).figures["knn"].values()))
        for run in (here, at_server, site)
    ]
    assert figures[0] == figures[1] == figures[2] and "digits" in str(figures[0])


def test_a_site_has_figures_participants_and_what_left_it(at_server: Path, tmp_path: Path) -> None:
    site = taken_home(at_server, tmp_path, figures={"knn": 0.5}, participants=["north", "south"])
    about = json.loads((site / "run.json").read_text())
    assert about["figures"] == {"knn": 0.5} and about["participants"] == ["north", "south"]
    assert about["left"] == {"train": {"weights": 7}}
    assert (site / "run.json").stat().st_mode & 0o077 == 0


def test_without_a_set_one_line_says_where_the_images_are(at_server: Path, tmp_path: Path) -> None:
    for folder in (at_server, taken_home(at_server, tmp_path)):
        with pytest.raises(ConfigError, match=r"images stay at the sites.* e.g. on=digits") as told:
            harmonium.evaluate_run(folder, "knn")
        assert "\n" not in str(told.value)


def test_what_needs_clients_is_left_out_or_refused(at_server: Path, tmp_path: Path) -> None:
    found = harmonium.evaluate_run(at_server, "knn", "angles", *ON, out=tmp_path / "eval")
    assert list(found.figures) == ["knn"] and any("stay at the sites" in n for n in found.notes)
    with pytest.raises(ConfigError, match="digits"):
        harmonium.evaluate_run(at_server, "angles", "on=digits")


def test_what_cannot_be_judged_says_why(at_server: Path, tmp_path: Path) -> None:
    site = taken_home(at_server, tmp_path / "site")
    (site / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run.json cannot be read"):
        harmonium.evaluate_run(site, "knn", *ON)
    (site / "run.json").write_text('{"round": 2}')
    (site / "encoder.safetensors").unlink()
    with pytest.raises(StoreError, match="there is no encoder"):
        harmonium.evaluate_run(site, "knn", *ON)


def test_a_site_notices_damage_to_what_it_took_home(at_server: Path, tmp_path: Path) -> None:
    site = taken_home(at_server, tmp_path / "site")
    recipe = site / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rounds: 2", "rounds: 3"))
    with pytest.raises(StoreError, match=r"recipe.yaml is damaged, edited.*run.json"):
        harmonium.evaluate_run(site, "knn", *ON)


def test_advice_on_a_federation_s_run_names_its_own_commands(
    at_server: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(at_server, tmp_path / "run")
    assert RunFolder(run).remedy.startswith(f"harmonium server resume {run} ")
    with (run / "recipe.yaml").open("a") as file:
        file.write("# edited\n")
    with pytest.raises(StoreError, match="harmonium server start"):
        read_recipe(run)
