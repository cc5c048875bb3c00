"""A further round is the one that the run itself would play, and leaves no trace in it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.data.images import UNKNOWN
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.evaluation.features import embed
from harmonium.measures.evaluation import evaluate_run
from harmonium.measures.extra_round import further
from harmonium.measures.run_reader import Run
from harmonium.runs.open_run import read_recipe
from harmonium.storage.run_folder import RunFolder

from .conftest import FEDCA, SMALL

TRIMMED = {"name": "trimmed", "trim": 0.25}
Made = Callable[..., Path]
Opened = Callable[..., Run]


def content(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def committed(run: Run) -> dict[str, torch.Tensor]:
    return dict(run.method.represent(run.server).state_dict())


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedca", FEDCA),
        ("scaffold", {"participation": {"number": 2}, "server": "adam"}),
    ],
)
def test_it_is_what_the_next_round_of_the_run_uploads(
    name: str, settings: dict[str, Any], made: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[int, Any] = {}
    deliver = LocalEngine.deliver

    def spied(engine: LocalEngine, ask: Any, turn: Any) -> Any:
        for reply in deliver(engine, ask, turn):
            if turn.round == 3 and ask.step == "train":
                sent[reply.client] = reply.up["model"]  # type: ignore[index]
            yield reply

    run = opened(made(name, **settings))
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "deliver", spied)
        made(name, **settings, rounds=3)
    assert sorted(sent) == run.cohort and len(sent) == (2 if name == "scaffold" else 4)
    found = further(run, run.cohort)
    few = further(run, run.cohort[1:2])  # who else trains changes nothing
    assert same(few[run.cohort[1]].state_dict(), found[run.cohort[1]].state_dict())
    for client, up in sent.items():
        wanted = {k.removeprefix("encoder."): up[k] for k in up if k.startswith("encoder.")}
        assert same(found[client].state_dict(), wanted)
        assert not same(found[client].state_dict(), committed(run))


def test_nothing_in_the_runs_folder_changes(fedca: Path, tmp_path: Path) -> None:
    assert any((fedca / "clients").rglob("*.safetensors"))  # states that a round would replace
    before = content(fedca)
    evaluate_run(fedca, "angles", "tsne", out=tmp_path)
    assert content(fedca) == before


def test_workers_change_nothing_and_leave_nothing(
    fedca: Path, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = content(fedca)
    found = further(opened(fedca, "engine.workers=1"), [1])
    assert same(found[1].state_dict(), further(opened(fedca), [1])[1].state_dict())
    assert content(fedca) == before and not list(tmp_path.iterdir())


def test_labels_never_reach_a_task(
    fedca: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    perform = ClientRuntime.perform

    def spied(host: ClientRuntime, task: Task, broadcast: bytes) -> Any:
        for images in (host.images, host.public):
            assert images is not None and (images.labels == UNKNOWN).all() and not images.factors
        seen.append(task.step)
        return perform(host, task, broadcast)

    monkeypatch.setattr(ClientRuntime, "perform", spied)
    run = opened(fedca)
    assert run.dataset.train.labelled and run.dataset.test.labelled
    run.encoders([0, 1])
    assert seen == ["train", "train"]


def test_a_run_of_an_earlier_version_is_judged_but_its_clients_do_not_train(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe lacks settings that have come since, whose defaults need not be what it did."""
    old = Path(shutil.copytree(made("fedavg", data=FEDCA["data"]), tmp_path / "old"))
    tree = read_recipe(old).tree()
    del tree["local"]["joint_views"], tree["local"]["drop_last"]
    (old / "recipe.yaml").write_text(json.dumps(tree))
    about = {key: value for key, value in RunFolder(old).about().items() if key != "files"}
    RunFolder(old).write_about({**about, "recipe": "0" * 64})
    monkeypatch.setattr(ClientRuntime, "perform", None)  # nobody trains
    lacking = r"local\.drop_last, local\.joint_views: .*measures that do not train"
    for name in ("angles", "geometry"):
        with pytest.raises(DataError, match=lacking) as refused:
            evaluate_run(old, name, out=tmp_path / name)
        assert "\n" not in str(refused.value)
    found = evaluate_run(old, "knn", "angles", "knn.k=5", out=tmp_path / "both")
    assert list(found.figures) == ["knn"]


def test_after_a_schedule_that_ends_the_last_rate_is_kept(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg"))

    def after(**changes: Any) -> Any:
        local = {**SMALL["local"], **changes}
        return further(replace(run, recipe=run.recipe.changed(local=local)), [0])[0].state_dict()

    assert run.commit.round == run.recipe.rounds == 2
    assert same(after(schedule="linear"), after(lr=0.025))  # in round 2 of 2 it was half of 0.05
    assert not same(after(lr=0.025), after()) and not same(after(lr=0.025), committed(run))


def test_masked_runs_and_other_aggregations_show_local_models(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg"))
    plain = further(run, [2])[2].state_dict()
    for change in ({"privacy": {"secure_aggregation": True}}, {"aggregation": TRIMMED}):
        other = replace(run, recipe=run.recipe.changed(**change))
        assert same(further(other, [2])[2].state_dict(), plain)


@pytest.mark.parametrize("policy", ["recalibrate", "fedbn"])
def test_statistics_of_batch_norm_are_the_clients(policy: str, made: Made, opened: Opened) -> None:
    encoder = {**SMALL["encoder"], "norm": "batch"}
    run = opened(made("fedavg", encoder=encoder, batch_norm=policy))
    first, other = further(run, [0, 1]).values()
    keys = [key for key in first.state_dict() if "running" in key]
    assert keys
    for key in keys:
        drawn = run.method.blueprint.state_dict()[f"encoder.{key}"]
        assert not torch.equal(first.state_dict()[key], drawn)
        assert not torch.equal(first.state_dict()[key], other.state_dict()[key])
    if policy == "recalibrate":  # statistics of plain images of its own, to the last digit
        held = run.dataset.train.subset(run.split.indices[0])
        begin = next(m for m in first.modules() if isinstance(m, torch.nn.BatchNorm2d))
        conv = next(m for m in first.modules() if isinstance(m, torch.nn.Conv2d))
        pixels = run.method.views.plain(torch.from_numpy(np.array(held.pixels)))
        mean = conv(pixels).mean((0, 2, 3))
        assert torch.allclose(begin.running_mean, mean, atol=1e-4)  # type: ignore[arg-type]


def test_encoders_that_stay_local_are_taken_as_they_are(
    made: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(made("alone", participation={"number": 2}, rounds=1))
    monkeypatch.setattr(ClientRuntime, "perform", None)  # nobody trains
    took_part = sorted(int(client) for client in run.commit.clients)
    assert run.clients(4, 0, "angles") == took_part and len(took_part) == 2
    for client, encoder in run.encoders(took_part).items():
        kept = run.state(client)["parts"]
        assert all(torch.equal(kept[f"encoder.{k}"], v) for k, v in encoder.state_dict().items())


def test_clients_of_the_next_cohort_come_first(made: Made, opened: Opened) -> None:
    run = opened(made("scaffold", participation={"number": 2}, server="adam"))
    for seed in range(5):
        assert run.clients(2, seed, "angles") == run.cohort
        assert set(run.clients(3, seed, "angles")) > set(run.cohort)
    assert len({tuple(run.clients(1, seed, "angles")) for seed in range(9)}) == 2
    assert run.clients(9, 0, "angles") == [0, 1, 2, 3]


def test_too_few_clients_are_refused(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg"))
    lonely = replace(run.split, indices=run.split.indices[:1])
    run = replace(run, split=lonely, recipe=run.recipe.changed(clients=1))
    with pytest.raises(ConfigError, match="at least 2 clients"):
        run.clients(5, 0, "angles", least=2)


def test_images_are_the_same_for_all_runs_and_not_the_first(fedca: Path, opened: Opened) -> None:
    run, again = opened(fedca), opened(fedca)
    some, same_ones = run.images(10, 0), again.images(10, 0)
    assert len(some) == 10 and np.array_equal(some.pixels, same_ones.pixels)
    assert not np.array_equal(some.pixels, run.dataset.test.subset(np.arange(10)).pixels)
    assert not np.array_equal(some.pixels, run.images(10, 1).pixels)
    assert len(run.images(999, 0)) == 40
    plain = run.method.represent(run.server)
    assert torch.equal(run.features(plain, some, "all"), embed(plain, some, run.method.views.plain))


def test_features_that_are_no_numbers_are_refused(made: Made, opened: Opened) -> None:
    run = opened(made("fedavg"))
    broken = run.method.represent(run.server)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="features of client 3 are not finite"):
        run.features(broken, run.images(5, 0), "client 3")


def test_a_run_that_has_not_begun_is_refused(fedca: Path, tmp_path: Path, opened: Opened) -> None:
    for name in ("recipe.yaml", "about.json", "split.npz"):
        (tmp_path / name).write_bytes((fedca / name).read_bytes())
    with pytest.raises(StoreError, match="no committed round"):
        opened(tmp_path)
