"""Style against content: the numbers by hand, whose network sees what, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.shift import with_split_angles
from harmonium.evaluation.features import embed
from harmonium.measures import styles
from harmonium.measures.evaluation import evaluate_run
from harmonium.measures.run_reader import Run
from harmonium.measures.styles import KINDS, StyleMeasure, apart

DATA = {"name": "shapes", "count": 64, "test_count": 40, "size": 10, "styles": 2}
FEDSTYLE: dict[str, Any] = {
    "data": DATA,
    "method": {"name": "fedstyle", "style_epochs": 1, "hidden": 8},
    "objective": {"name": "simclr", "hidden": 16, "out": 8},
    "views": "fedstyle",
    "split": "styles",
}


@pytest.fixture(scope="module")
def fedstyle(made: Callable[..., Path]) -> Path:
    return made("fedstyle", **FEDSTYLE)


def random_rows(count: int, dim: int = 3) -> Tensor:
    made = torch.Generator().manual_seed(count)
    return functional.normalize(torch.randn(count, dim, generator=made))


# ---- the numbers ---------------------------------------------------------------------------------


def test_purity_counts_the_nearest_others_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group of 6, 5 neighbours count; one alone has none; rows of no group are left out."""
    monkeypatch.setattr(styles, "CHUNK", 7)
    sizes = [24, 17, 6, 6, 6, 1]
    rows, groups = random_rows(66), np.repeat([5, 2, 9, 8, 6, 7, -1], [*sizes, 6])
    shares = []
    for row in range(59):
        others = [other for other in range(60) if other != row]
        near = sorted(others, key=lambda other: -float(rows[row] @ rows[other]))
        wanted = min(10, int((groups == groups[row]).sum()) - 1)
        shares.append(np.mean(groups[near[:wanted]] == groups[row]))
    found = apart(rows, groups)
    assert found["purity"] == pytest.approx(np.mean(shares))
    assert found["chance"] == pytest.approx(sum(n * (n - 1) for n in sizes) / 59 / 59)


def test_the_silhouette_is_of_cosine_distances() -> None:
    rows, groups = random_rows(20), np.repeat([3, 1, 4], [9, 7, 4])
    far, widths = 1 - (rows @ rows.T).double().numpy(), []
    for row, own in enumerate(groups):
        inner = far[row, groups == own].sum() / ((groups == own).sum() - 1)
        outer = min(far[row, groups == other].mean() for other in {3, 1, 4} - {own})
        widths.append((outer - inner) / max(inner, outer))
    assert apart(rows, groups)["silhouette"] == pytest.approx(np.mean(widths), abs=1e-6)


def test_chance_is_what_features_that_know_nothing_have() -> None:
    rows, groups = random_rows(600, 8), np.repeat([0, 1, 2], [100, 200, 300])
    found = apart(rows, groups)
    assert found["purity"] == pytest.approx(found["chance"], abs=0.03)
    assert found["silhouette"] == pytest.approx(0, abs=0.05)
    near = functional.normalize(rows + 5 * torch.eye(8)[groups])
    close = apart(near, groups)
    assert close["purity"] == 1 and close["silhouette"] > 0.5  # type: ignore[operator]


@pytest.mark.parametrize("groups", [[0] * 12, list(range(12)), [-1] * 12])
def test_there_is_no_number_where_groups_say_nothing(groups: list[int]) -> None:
    assert set(apart(random_rows(12), np.array(groups)).values()) == {None}


# ---- whose network sees what ---------------------------------------------------------------------


def by_hand(run: Run, measure: StyleMeasure, clients: list[int], control: int) -> dict[str, Tensor]:
    """Unit features of images as held, by each client's style network, by one, and by content."""
    held = with_split_angles(run.dataset, run.split).train
    networks = {
        client: run.method.blueprint.copy_from(run.state(client)["parts"]).eval()["style"]
        for client in {*clients, control}
    }
    found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for client in clients:
        pictures = held.subset(measure._rows(run, client))
        content = run.method.represent(run.server, run.state(client))
        for kind, network in zip(
            KINDS, (networks[client], networks[control], content), strict=True
        ):
            found[kind].append(embed(network, pictures, run.method.views.plain))
    return {kind: functional.normalize(torch.cat(rows)) for kind, rows in found.items()}


def test_networks_see_the_images_that_their_clients_hold(
    fedstyle: Path, opened: Callable[..., Run]
) -> None:
    run, measure = opened(fedstyle), StyleMeasure(pictures=9, control=2)
    found = measure.compute(run)
    assert found.plain["clients"] == [0, 1, 2, 3] and found.plain["control"] == 2
    owner, names = found.arrays["owner"], found.arrays["names"]
    assert np.bincount(owner).tolist() == [9] * 4 and found.plain["pictures"] == 36
    style = run.dataset.names["style"]
    assert list(names) == [f"client {c} ({style[c // 2]})" for c in range(4)]
    rows = np.concatenate([measure._rows(run, client) for client in range(4)])
    train = run.dataset.train
    groups = {"client": owner, "style": train.factors["style"][rows], "class": train.labels[rows]}
    for kind, features in by_hand(run, measure, [0, 1, 2, 3], 2).items():
        assert found.plain["apart"][kind] == {by: apart(features, of) for by, of in groups.items()}
        assert found.arrays[kind].shape == (36, 2)
    numbers = [found.plain["apart"][kind]["client"]["purity"] for kind in KINDS]
    assert len(set(numbers)) == 3


def test_an_image_that_a_client_holds_twice_counts_once(
    fedstyle: Path, opened: Callable[..., Run]
) -> None:
    run = opened(fedstyle)
    held = run.split.indices
    assert any(len(set(own)) < len(own) for own in held)
    for client, own in enumerate(held):
        assert StyleMeasure(pictures=99)._rows(run, client).tolist() == sorted(set(own))
        assert set(StyleMeasure(pictures=3)._rows(run, client)) < set(own)


def test_runs_stand_in_one_table_and_one_image(fedstyle: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in fedstyle.rglob("*") if path.is_file()}
    told: list[str] = []
    done = evaluate_run(fedstyle, "styles", "styles.pictures=5", out=tmp_path, note=told.append)
    assert any("styles, 3 maps of" in text for text in told)
    assert any(text.endswith("features of 4 of 4 clients") for text in told)
    (shown,) = done.tables
    assert [(row["features"], row["by"]) for row in shown.rows] == [
        (words, by) for words in KINDS.values() for by in ("class", "client", "style")
    ]
    assert done.main_plots["styles"].stat().st_size > 1000
    assert {path: path.read_bytes() for path in before} == before
    again = evaluate_run(fedstyle, "styles", "styles.pictures=5", out=tmp_path)
    assert again.figures == done.figures and not again.notes


def test_turned_images_without_labels_or_styles_are_told_by_client_alone(
    made: Callable[..., Path], opened: Callable[..., Run]
) -> None:
    hidden = {**DATA, "unlabelled": True}
    settings = {"data": hidden, "split": "rotation", "batch_norm": "fedbn", "rounds": 1}
    norm = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    few = {"participation": {"number": 3}, "encoder": norm}
    run = opened(made("fedstyle", **{**FEDSTYLE, **settings, **few}))
    measure = StyleMeasure(pictures=12, clients=2)
    found = measure.compute(run)
    assert len(found.plain["clients"]) == 2 and str(found.plain["control"]) in run.commit.clients
    assert [set(one) for one in found.plain["apart"].values()] == [{"class", "client"}] * 3
    assert run.split.angles is not None and run.method.has_own_encoders
    features = by_hand(run, measure, found.plain["clients"], found.plain["control"])
    for kind, rows in features.items():
        assert found.plain["apart"][kind]["client"] == apart(rows, found.arrays["owner"])
    said = " ".join(found.notes)
    assert "no column 'style'" in said and "no image has a label" in said
    assert "no style network yet: 1 client did not take part" in said
    (shown,) = measure.tables({"run": found})
    assert {row["by"] for row in shown.rows} == {"client"}
    away = next(client for client in range(4) if str(client) not in run.commit.clients)
    with pytest.raises(ConfigError, match=f"styles.control is {away}"):
        StyleMeasure(control=away).compute(run)


def test_other_runs_and_settings_are_refused(
    fedca: Path, opened: Callable[..., Run], made: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="styles .*fedstyle's clients, .* a run of fedca"):
        StyleMeasure().compute(opened(fedca))
    for name, value in {"clients": 1, "pictures": 1, "control": -1, "perplexity": 0.5}.items():
        with pytest.raises(ConfigError, match=f"styles.{name} is {value}"):
            StyleMeasure(**{name: value})  # type: ignore[arg-type]
