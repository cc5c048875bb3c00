"""Runs that start from given weights: whatever holds them, checked everywhere, the same for all."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import harmonium
from harmonium.cli.main import main
from harmonium.core.errors import ConfigError, DataError, HarmoniumError
from harmonium.evaluation.references import GIVEN
from harmonium.evaluation.whitening import STORED
from harmonium.federation.card import card
from harmonium.recipe.initial_weights import COPY, Init, digest_of
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Callback, Result
from harmonium.runs.open_run import open_runtime, read_recipe
from harmonium.sites.flower_pair import FlowerPair
from harmonium.sites.plan import frame_of, method_of, planned
from harmonium.sites.policy import Policy
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.comparison.cells import plan
from harmonium.testing import check_parity, first_trial

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

SMALL = [
    *("data=shapes", "data.count=80", "data.test_count=30", "data.size=12", "clients=3"),
    *("encoder.width=4", "encoder.out=8", "local.batch=8", "local.epochs=1", "rounds=1"),
    *("evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, undrawn: None, unprobed: None) -> Result:
    return harmonium.run("fedavg", *SMALL, out=tmp_path_factory.mktemp("source") / "run")


@pytest.fixture
def file(source: Any, tmp_path: Path) -> Path:
    return Path(shutil.copy(source.folder / "encoder.safetensors", tmp_path / "weights.st"))


def committed(folder: Path) -> Mapping[str, Tensor]:
    commit, _ = RunFolder(folder).newest_readable(with_states=False)
    assert commit is not None
    model: Mapping[str, Tensor] = commit.server["model"]
    return model


def blueprint(*words: str, **settings: Any) -> dict[str, Tensor]:
    return Recipe.of("fedavg", *SMALL, *words, **settings).known_method().blueprint.state_dict()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


def encoder_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith("encoder.")}


def test_an_encoder_starts_from_a_file_and_a_model_from_a_run(source: Any, file: Path) -> None:
    model, drawn = committed(source.folder), blueprint()
    by_file, by_run = blueprint(f"init={file}"), blueprint(init=source.folder)
    assert same(encoder_of(by_file), encoder_of(model)) and not same(encoder_of(drawn), by_file)
    others = {key: value for key, value in drawn.items() if not key.startswith("encoder.")}
    assert others and all(torch.equal(by_file[key], value) for key, value in others.items())
    assert same(by_run, model)  # the whole of it, the projector included
    other = blueprint(f"init={source.folder}", "objective=vicreg")  # whose projector differs
    assert same(encoder_of(other), encoder_of(model))


def test_a_twin_of_the_encoder_starts_from_the_same_weights(source: Any, file: Path) -> None:
    state = blueprint(f"init={file}", "objective=byol")
    twins = {key: value for key, value in state.items() if key.startswith("target")}
    found = {value.shape: value for key, value in encoder_of(state).items()}
    assert twins and any(torch.equal(v, found[v.shape]) for v in twins.values() if v.shape in found)


def test_a_function_gives_a_state_dict(
    source: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from safetensors.torch import load_file\ndef given(): return load_file({str(file)!r})"
    (tmp_path / "pretrained_module.py").write_text(f"{code}\ndef none(): return 5\nfive = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    by_name = Recipe.of("fedavg", *SMALL, "init=pretrained_module:given")
    assert by_name.digest == Recipe.of("fedavg", *SMALL, init=file).digest
    assert same(by_name.known_method().blueprint.state_dict(), blueprint(init=file))
    module, wanted = "pretrained_module", "names a function that returns a state dict"
    for name, told in (
        ("none", "state dict"),
        ("gone", f"module {module} has no `gone`: .*{wanted}"),
        ("five", f"`five` of module {module} is of type int: .*{wanted}"),
        ("given.x", "init"),
    ):
        with pytest.raises(HarmoniumError, match=told):
            Recipe.of("fedavg", f"init={module}:{name}")
    with pytest.raises(ConfigError, match=f"cannot import module no_such .*: .*{wanted}"):
        Recipe.of("fedavg", "init=no_such:x")


def test_a_state_dict_and_a_module_are_given_from_python(source: Any, file: Path) -> None:
    state, wanted = load_file(file), Recipe.of("fedavg", *SMALL, init=file)
    loaded = harmonium.load_encoder(source.folder)
    for given in (
        state,
        {name: value.numpy() for name, value in state.items()},
        {name: nn.Parameter(value) for name, value in state.items()},
        {**state, f"{STORED}mean": torch.zeros(3)},
        loaded.network,
        loaded,
    ):
        recipe = Recipe.of("fedavg", *SMALL, init=given)
        assert recipe.digest == wanted.digest
        assert Recipe.from_tree(recipe.tree()).init == recipe.init
    assert same(blueprint(init=state), blueprint(init=file))
    for wrapped in (loaded.state_dict(), {f"module.{name}": one for name, one in state.items()}):
        assert same(blueprint(init=wrapped), blueprint(init=file))
    whole = committed(source.folder)  # with the projector
    assert same(blueprint(init=whole), whole)
    made = plan(["fedavg", "fedprox", *SMALL], {"init": loaded})
    assert {recipe.init for recipe in made.rows.values()} == {recipe.init}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "init is empty"),
        (nn.ReLU(), "init=<ReLU> holds no tensors"),
        (nn.LazyLinear(3), "init is a LazyLinear with lazy layers"),
        ({"weight": torch.zeros(2), "epoch": 3}, "init=<dict>: 'epoch' is a int, not a tensor"),
        ({"weight": torch.full((2,), torch.nan)}, "`weight` has values that are not finite"),
        (nn.Linear(3, 2), "do not fit the encoder"),
    ],
    ids=str,
)
def test_objects_that_hold_no_weights_are_refused(given: Any, says: str) -> None:
    with pytest.raises(HarmoniumError, match=re.escape(says)) as error:
        Recipe.of("fedavg", *SMALL, init=given).check()
    assert "\n" not in str(error.value)


def test_a_run_from_a_state_dict_is_resumed_elsewhere(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    run, state = tmp_path / "run", load_file(file)
    longer = Recipe.of(Recipe.of("fedavg", *SMALL), rounds=2, init=state)
    with pytest.raises(KeyboardInterrupt):
        harmonium.run(longer, out=run, callbacks=Stop())
    shutil.rmtree(tmp_path / "home" / "data" / "weights")
    other = {name: value + 1 for name, value in state.items()}
    with pytest.raises(ConfigError, match="keeps its recipe"):
        harmonium.resume(run, init=other)
    copy = (run / COPY).rename(tmp_path / "away")
    command = ["harmonium", "resume", str(run)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as lost:
        main()
    told = capsys.readouterr().err
    assert (
        lost.value.code == 2
        and f"{run / COPY} is missing: restore it" in told
        and "Traceback" not in told
    )
    copy.rename(run / COPY)
    subprocess.run([sys.executable, "-m", *command], capture_output=True, check=True)
    again = harmonium.run(longer, init=state, out=tmp_path / "whole")
    assert again.metrics == harmonium.resume(run).metrics


def test_the_recipe_has_the_digest_and_an_absolute_path(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    recipe = Recipe.of("fedavg", *SMALL, f"init={file.name}")
    assert recipe.init == Init(str(file), digest_of(load_file(file)))
    plain = Recipe.of("fedavg", *SMALL)
    assert recipe.digest != plain.digest and "init" in recipe.tree()
    assert Recipe.from_tree(recipe.tree()).digest == recipe.digest
    moved = shutil.copy(file, file.with_name("moved"))
    again = Recipe.of(recipe, f"init={moved}")
    assert again.digest == recipe.digest and again.init != recipe.init
    assert Recipe.of(recipe, "init=none").digest == plain.digest
    with pytest.raises(DataError, match="init"):
        Recipe.of("fedavg", f"init={file}", f"init.digest={'a' * 64}").check()


def test_a_run_shows_where_it_started_beside_a_random_initialisation(
    source: Any, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = harmonium.run("fedavg", *SMALL, init=file, out=tmp_path / "run")
    assert found.untrained == source.untrained  # given weights have no part in it
    assert found.references[GIVEN]["knn"] == source.figures["knn"]
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    digest = digest_of(load_file(file))
    assert about["init"] == {"file": str(file), "digest": digest}
    assert digest in card(open_runtime(tmp_path / "run").method).text()
    assert any(digest in line for line in about["card"])
    assert read_recipe(tmp_path / "run").digest == found.recipe.digest


def test_workers_end_with_the_same_bits(file: Path, tmp_path: Path) -> None:
    """With a method that never sends its encoder, so that workers must read the weights."""
    recipe = Recipe.of("alone", *SMALL, init=file)
    for workers in (0, 1):
        words = f"engine.workers={workers}"
        harmonium.run(recipe, words, out=tmp_path / str(workers))
    results = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("0", "1")]
    assert results[0] == results[1]


def test_both_engines_end_with_the_same_bits(tmp_path: Path) -> None:
    """Clients over Flower's messages start as those here do, in what stays with them, too."""
    save_file({**first_trial("fedper").server.model}, tmp_path / "model.safetensors")
    with FlowerPair() as together:
        check_parity("fedper", together, init=str(tmp_path / "model.safetensors"))


class Stop(Callback):
    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", ["trained further", "deleted"])
def test_a_run_goes_on_whatever_became_of_the_run_it_started_from(
    source: Any, tmp_path: Path, after: str
) -> None:
    """The encoder of `alone` is never sent, so clients start from the weights in every round."""
    first = Path(shutil.copytree(source.folder, tmp_path / "first"))
    recipe = Recipe.of(Recipe.of("alone", *SMALL), rounds=2, init=first)
    harmonium.run(recipe, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        harmonium.run(recipe, out=tmp_path / "run", callbacks=Stop())
    if after == "deleted":
        shutil.rmtree(first)
    else:
        harmonium.resume(first, rounds=2)
        assert Recipe.of("alone", *SMALL, init=first).init != recipe.init
    workers = int(after == "deleted")  # a worker reads the weights as this process does
    found = harmonium.resume(tmp_path / "run", f"engine.workers={workers}")
    for name in ("metrics.jsonl", "ledger.jsonl", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert found.recipe.digest == recipe.digest
    harmonium.resume(tmp_path / "run", rounds=3)  # its recipe still says where it started
    assert f"file: {first}" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert open_runtime(tmp_path / "run").method.blueprint


def test_a_run_that_is_killed_while_it_begins_begins_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(init: Init, folder: Path) -> None:
        keep(init, folder)
        raise KeyboardInterrupt

    keep, folder = Init.keep, tmp_path / "run"
    folder.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Init, "keep", killed)
        harmonium.run("fedavg", *SMALL, init=file, out=folder)
    assert (folder / COPY).exists() and not (folder / "recipe.yaml").exists()
    assert harmonium.run("fedavg", *SMALL, init=file, out=folder).figures


def test_a_copy_of_weights_that_changed_does_not_continue_a_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = Recipe.of(Recipe.of("fedavg", *SMALL), rounds=2, init=file)
    with pytest.raises(KeyboardInterrupt):
        harmonium.run(longer, out=tmp_path / "run", callbacks=Stop())
    file = tmp_path / "run" / COPY
    held = load_file(file)
    first = next(iter(held))
    save_file({**held, first: held[first] + 1}, file)
    for refused in (
        lambda: harmonium.resume(tmp_path / "run"),
        lambda: open_runtime(tmp_path / "run"),
    ):
        with pytest.raises(DataError, match="changed") as error:
            refused()
        assert error.value.key == "init"
    monkeypatch.setattr(sys, "argv", ["harmonium", "resume", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and str(file) in capsys.readouterr().err
    save_file(held, file)
    assert harmonium.resume(tmp_path / "run").figures


def _renamed(held: dict[str, Tensor]) -> dict[str, Tensor]:
    first, *rest = held
    return {"other": held[first], **{key: held[key] for key in rest}}


def _reshaped(held: dict[str, Tensor]) -> dict[str, Tensor]:
    first = next(iter(held))
    return {**held, first: held[first][:1].clone()}


def _broken(held: dict[str, Tensor]) -> dict[str, Tensor]:
    first = next(iter(held))
    return {**held, first: held[first] * torch.nan}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_renamed, ("missing", "unexpected: other")),
        (_reshaped, ("another shape",)),
        (_broken, ("not finite",)),
    ],
)
def test_weights_that_do_not_fit_are_named(file: Path, change: Any, names: tuple[str, ...]) -> None:
    held = load_file(file)
    save_file(change(held), file)
    with pytest.raises(HarmoniumError) as error:
        Recipe.of("fedavg", *SMALL, f"init={file}").check()
    text = str(error.value)
    assert "\n" not in text and "init" in text and all(name in text for name in names)
    assert next(iter(held)) in text


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pickled.pt")  # never unpickled
    for name in ("pickled.pt", "gone", "."):
        with pytest.raises(DataError) as error:
            Recipe.of("fedavg", f"init={tmp_path / name}")
        assert error.value.key == "init" and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="init.digest"):
        Recipe.of("fedavg", "init.digest=abc")


def test_all_arms_of_a_comparison_start_alike(file: Path) -> None:
    made = plan(["fedavg", "fedprox", *SMALL], {"init": str(file)})
    assert len({recipe.init for recipe in made.rows.values()}) == 1 and len(made.rows) > 3
    with pytest.raises(ConfigError, match="init"):
        plan(["fedavg", f"fedprox,init={file}", *SMALL])


def test_sites_get_given_weights_with_the_first_model_and_no_path(file: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("data", "engine"))]
    recipe = Recipe.of("fedavg", *words, "data=sites", "data.size=12", f"init={file}")
    made, _ = planned(recipe, 3)
    frame = frame_of(made)
    assert str(file).encode() not in frame and made.init is not None
    there = Policy().open_plan(json.loads(frame))
    assert there.digest == made.digest and there.init == Init(None, made.init.digest)
    first, site = method_of(made).blueprint, method_of(there).blueprint
    assert not same(first.state_dict(), site.state_dict())  # the site has only its own draw
    assert same(site.copy_from(first.shared()).state_dict(), first.state_dict())
    with pytest.raises(ConfigError, match="init"):
        planned(Recipe.of(recipe, "method=alone"), 3)


def test_weights_that_are_known_by_digest_only_start_nothing(tmp_path: Path) -> None:
    words = [*SMALL, f"init.digest={'a' * 64}"]
    with pytest.raises(DataError, match="init"):
        harmonium.run("fedavg", *words, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="init"):
        Recipe.of("fedavg", *words).check()
    with pytest.raises(DataError, match="init"):
        planned(Recipe.of("fedavg", *words), 3)


@pytest.mark.parametrize("rule", ["local", "fedbn"])
def test_sites_that_keep_some_of_the_encoder_are_refused_given_weights(
    tmp_path: Path, rule: str
) -> None:
    words = [*SMALL, "encoder.norm=batch"]
    state = encoder_of(blueprint("encoder.norm=batch"))
    file = tmp_path / "weights.st"
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, file)
    with pytest.raises(ConfigError, match=f"init.*batch_norm={rule}"):
        planned(Recipe.of("fedavg", *words, f"batch_norm={rule}", f"init={file}"), 3)
    assert planned(Recipe.of("fedavg", *words, f"batch_norm={rule}"), 3)
    assert planned(Recipe.of("fedavg", *words, "batch_norm=recalibrate", f"init={file}"), 3)


def test_the_encoder_of_a_whitened_run_starts_another(file: Path, tmp_path: Path) -> None:
    state = load_file(file)
    extra = {f"harmonium.whitening.{name}": torch.zeros(2) for name in ("mean", "matrix")}
    save_file(state | extra, tmp_path / "whitened.st")
    assert same(blueprint(f"init={tmp_path / 'whitened.st'}"), blueprint(f"init={file}"))


def test_a_run_with_statistics_measured_anew_starts_another(tmp_path: Path) -> None:
    words = ["encoder.norm=batch", "batch_norm=recalibrate"]
    found = harmonium.run("fedavg", *SMALL, *words, out=tmp_path / "run")
    encoder = load_file(found.folder / "encoder.safetensors")
    made = encoder_of(blueprint("encoder.norm=batch", f"init={found.folder}"))
    for key, value in encoder.items():
        if not key.endswith("num_batches_tracked"):
            assert torch.equal(made[f"encoder.{key}"], value), key
