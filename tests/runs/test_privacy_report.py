"""Privacy reports of runs: noisy releases and their epsilon, and what was sent without noise."""

import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harmonium import run
from harmonium.cli.main import app
from harmonium.core.errors import ConfigError, StoreError
from harmonium.federation.spending import in_words
from harmonium.privacy.budget import epsilon, epsilon_rdp
from harmonium.recipe.schema import Recipe
from harmonium.runs.privacy_report import Report, plot, report, reported_delta, summary
from harmonium.storage.run_folder import ASKED, RunFolder
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

SMALL: dict[str, Any] = {
    **TINY,
    "rounds": 3,
    "split": {"name": "dirichlet", "alpha": 1.0},
    "evaluate": {"labels_per_class": [], "every": 100},
    "engine": {"workers": 0},
}
FORM = {"name": "spectral", "form": "fedsc", "mu": 3.0, "hidden": 16, "out": 8, "norm": "none"}


def small(name: str, folder: Path, **changes: Any) -> Path:
    run(name, out=folder, **{**SMALL, **changes})
    return folder


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedSC in which answers are lost."""
    return small(
        "fedsc",
        tmp_path_factory.mktemp("runs") / "noisy",
        method={"name": "fedsc", "sigma": 0.5, "passes": 1, "coefficient": "share"},
        objective=FORM,
        privacy={"noise": "simulated", "delta": 1e-2},
        participation={"number": 3, "dropout": 0.3},
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small("fedavg", tmp_path_factory.mktemp("runs") / "plain", rounds=1)


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").open()]


def words(found: Report) -> str:
    return "\n".join(found.lines())


def test_every_client_is_counted_worst_first(noisy: Path) -> None:
    found = report(noisy)
    told = entries(noisy)
    assert found.delta == 1e-2 and found.rounds == 3 and found.neighbours == "replace"
    assert {one.client for one in found.clients} == {0, 1, 2, 3}
    assert [one.epsilon for one in found.clients] == sorted(
        (one.epsilon for one in found.clients), reverse=True
    )
    for one in found.clients:
        asked = [e for e in told if e["client"] == one.client and e["step"] == "correlate"]
        made = [{"sensitivity": math.sqrt(2) * 3 / one.examples, "sigma": 0.5}] * len(asked)
        assert one.releases == {"corr by gaussian": len(asked)} and len(asked) > 1
        assert one.epsilon == pytest.approx(epsilon(made, 1e-2))
        assert one.rdp == pytest.approx(epsilon_rdp(made, 1e-2))
        assert one.pld is None or one.pld == pytest.approx(one.epsilon, rel=0.01)
        assert one.lost == sum(e["outcome"] == "no answer" for e in asked)
    assert sum(one.lost for one in found.clients) > 0
    assert report(noisy, 1e-6).clients[0].epsilon > found.clients[0].epsilon
    last, worst, middle = found.curve[-1]
    assert [number for number, _, _ in found.curve] == [1, 2, 3] == [*range(1, last + 1)]
    assert worst == found.clients[0].epsilon > found.clients[-1].epsilon
    assert middle == statistics.median(one.epsilon for one in found.clients)
    assert found.curve[0][1] < found.curve[1][1] < worst


def test_it_says_in_plain_words_what_epsilon_does_not_cover(noisy: Path) -> None:
    found = report(noisy)
    sent = [e["up"]["model"] for e in entries(noisy) if "model" in e.get("up", {})]
    (weights,) = [one for one in found.unprotected if one.field == "model"]
    assert (weights.times, weights.bytes, weights.kind) == (len(sent), sum(sent), "weights")
    assert "corr" not in {one.field for one in found.unprotected}
    said = words(found)
    assert f"model of `train`, weights: left clients {len(sent)} times" in said
    assert "without noise" in said and "epsilon covers the noisy fields only" in said
    assert "between  one image of a client and another in its place" in said
    assert "noise was simulated: whoever knows the run's seed can subtract it" in said
    assert "delta 0.01 is not below 1 / examples" not in said  # clients are smaller than 100
    assert "delta 0.1 is not below 1 / examples for" in words(report(noisy, 0.1))
    assert "releases in answers that never arrived" in said
    assert "secure aggregation was off" in said


def test_the_package_has_it_when_nothing_else_was_imported(plain: Path) -> None:
    code = "import sys, harmonium; print(harmonium.privacy.report(sys.argv[1]).rounds)"
    told = subprocess.run([sys.executable, "-c", code, str(plain)], capture_output=True, text=True)
    assert told.stdout == "1\n", told.stderr


def test_a_run_without_noise_has_no_epsilon(plain: Path) -> None:
    found = report(plain)
    assert not found.clients and not found.neighbours and summary(plain) == ""
    said = words(found)
    assert "there is no epsilon" in said
    assert "model of `train`, weights: left clients 4 times" in said
    assert "noise was simulated" not in said and "epsilon covers" not in said
    assert plot(found, plain / "privacy.png") is None


def test_sums_and_rows_of_single_images_are_told(tmp_path: Path) -> None:
    masked = small("fedavg", tmp_path / "m", rounds=1, privacy={"secure_aggregation": True})
    said = words(report(masked))
    assert "without noise (the server saw sums over clients only)" in said
    assert "secure aggregation was on" in said and "mask_keys" not in said
    method = {"name": "fedca", "strength": 0.0, "size": 8}
    rows = small("fedca", tmp_path / "r", rounds=1, method=method, public=None)
    said = words(report(rows))
    assert "rows of `train`, per-example: left clients 4 times" in said
    assert "rows of single images left clients without noise: rows" in said


def test_releases_that_a_kill_kept_out_of_the_ledger_count(noisy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(noisy, tmp_path / "run"))
    asked = [{k: e[k] for k in ("round", "ask", "step", "client")} for e in entries(noisy)]
    asked = [one for one in asked if one["step"] == "correlate"]
    again = [one for one in asked if one["round"] > 1 and one["client"] == 1]
    (folder / ASKED).write_text("".join(f"{json.dumps(one)}\n" for one in asked + again))
    before, after = ({one.client: one for one in report(f).clients} for f in (noisy, folder))
    more = before[1].releases["corr by gaussian"] + len(again)
    assert after[1].releases == {"corr by gaussian": more} and again
    assert after[1].lost == before[1].lost + len(again)
    assert after[1].epsilon > before[1].epsilon and after[0] == before[0]


def test_a_servers_run_is_read_by_its_roll(noisy: Path, tmp_path: Path) -> None:
    """Numbers of images are as sites told them, and names are the sites'."""
    folder = Path(shutil.copytree(noisy, tmp_path / "run"))
    (folder / "split.npz").unlink()
    about = RunFolder(folder).about()
    sizes = {one.client: one.examples for one in report(noisy).clients}
    about["clients"] = [f"site {c}" for c in range(4)]
    about["federation"] = {"roll": [{"client": c, "examples": sizes[c]} for c in range(4)]}
    RunFolder(folder).write_about(about)
    found = report(folder)
    assert [one.epsilon for one in found.clients] == [one.epsilon for one in report(noisy).clients]
    assert {one.name for one in found.clients} == set(about["clients"])


def test_the_command_shows_it(noisy: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["privacy", str(noisy), "--delta", "1e-3"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "by RDP" in said and "at delta 0.001 for the worst client" in said
    assert (noisy / "privacy.png").stat().st_size > 10_000
    app(["privacy", str(noisy), "--formats", "pdf,svg", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert [Path(path).name for path in told["plots"]] == ["privacy.pdf", "privacy.svg"]
    assert all(Path(path).stat().st_size > 1000 for path in told["plots"])
    with pytest.raises(ConfigError, match="unknown format 'jpg'"):
        app(["privacy", str(noisy), "--formats", "jpg"], standalone_mode=False)
    assert told["clients"][0]["epsilon"] == report(noisy).clients[0].epsilon
    assert told["unprotected"][0]["field"] == "model" and told["warnings"]
    app(["privacy", "plan", "epsilon=3", "rounds=9", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(3.0)
    app(["privacy", "plan", "sigma=1", "examples=10", "mu=4", "dim=8"], standalone_mode=False)
    assert "beside a matrix of norm 4 at most" in capsys.readouterr().out
    with pytest.raises(StoreError, match="holds no run"):
        app(["privacy", str(noisy.parent)], standalone_mode=False)
    with pytest.raises(ConfigError, match="one word too many"):
        app(["privacy", str(noisy), str(plain)], standalone_mode=False)
    with pytest.raises(ConfigError, match="'pln'.*'plan'"):
        app(["privacy", "pln", "epsilon=3"], standalone_mode=False)
    with pytest.raises(ConfigError, match="delta is 2.0"):
        report(noisy, 2.0)


@pytest.mark.parametrize(
    ("own", "privacy", "expected"),
    [
        ({"sigma": 0.5, "delta": 1e-3}, {}, (1e-5, "privacy.delta")),
        ({"epsilon": 3.0, "delta": 1e-3}, {}, (1e-3, "method.delta")),
        ({"epsilon": 3.0, "delta": 1e-3}, {"epsilon": 9.0, "delta": 1e-4}, (1e-4, "privacy.delta")),
    ],
)
def test_epsilon_is_told_at_the_delta_of_the_budget(
    own: dict[str, float], privacy: dict[str, float], expected: tuple[float, str]
) -> None:
    method = {"name": "fedsc", **own}
    tree = {**SMALL, "method": method, "objective": FORM, "privacy": privacy}
    assert reported_delta(Recipe.from_tree(tree)) == expected


def test_the_end_of_a_run_has_one_line(noisy: Path) -> None:
    line = summary(noisy)
    assert "\n" not in line and f"harmonium privacy {noisy}" in line
    assert (
        f"epsilon {report(noisy).clients[0].epsilon:.4g} at delta 0.01, of privacy.delta, for"
        in line
    )


def test_releases_of_one_field_are_not_added_upin_words() -> None:
    made = {"centroids by gaussian": 4, "centroids by discrete-laplace": 84, "corr by gaussian": 1}
    assert in_words(made) == (
        "centroids: 4 with gaussian, 84 with discrete-laplace noise; corr: 1 with gaussian noise"
    )
