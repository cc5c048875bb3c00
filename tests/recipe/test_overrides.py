"""Settings from words and from Python: read in one way everywhere, and never dropped."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import harmonium
from harmonium.cli.main import main
from harmonium.core.errors import ConfigError, UnknownSetting
from harmonium.data.splits.dirichlet import Dirichlet
from harmonium.data.splits.iid import IID
from harmonium.evaluation.evaluator import Evaluation
from harmonium.federation.aggregation import Mean, NormBound
from harmonium.federation.method import Method
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.terms.proximal import Proximal
from harmonium.measures.evaluation import _with_settings
from harmonium.methods.fedprox import FedProx
from harmonium.recipe.overrides import as_words, changes_of
from harmonium.recipe.schema import Recipe
from harmonium.runs import start
from harmonium.sites.plan import federated
from harmonium.studies import diagnosis
from harmonium.studies.comparison import cells, sweep
from harmonium.studies.comparison.study import note_command
from harmonium.studies.tuning import grid, study

Settings = dict[str, Any]
Resolver = Callable[[list[str], Settings], Recipe]


class Resolved(Exception):
    """Carries the recipe that a command came to."""


def _stop(recipe: Any, *_: Any) -> NoReturn:
    raise Resolved(recipe)


def _caught(where: Any, name: str, stop: Any, call: Callable[[], Any]) -> Recipe:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, stop)
        with pytest.raises(Resolved) as end:
            call()
    recipe: Recipe = end.value.args[0]
    return recipe


def _run(words: list[str], settings: Settings) -> Recipe:
    return _caught(start, "new_folder", _stop, lambda: harmonium.run("fedavg", *words, **settings))


def _resume(words: list[str], settings: Settings) -> Recipe:
    """Of a run that has these very settings: whatever is resolved otherwise is refused."""
    recipe = Recipe.of("fedavg", *words, **settings)

    def resumed() -> None:
        _stop(start.changed_recipe(Path("nowhere"), changes_of(words, settings)))

    return _caught(start, "read_recipe", lambda folder: recipe, resumed)


def _compare(words: list[str], settings: Settings) -> Recipe:
    return cells.plan(["fedavg", *words], settings).methods["fedavg"]


def _sweep(words: list[str], settings: Settings) -> Recipe:
    asked = sweep.read(["fedavg", "sweep.clients=5,10", *words], settings)
    return asked.at_value("10").methods["fedavg"]


def _tune(words: list[str], settings: Settings) -> Recipe:
    def points(what: str, changes: Any, given: Any) -> None:
        found = grid.points(what, changes, given)
        assert found[0].recipe is not None
        _stop(Recipe.of(found[0].recipe, "evaluate.tuning=none"))

    tried = {"clients": [10]}
    return _caught(
        study, "points", points, lambda: harmonium.tune("fedavg", *words, grid=tried, **settings)
    )


def _diagnose(words: list[str], settings: Settings) -> Recipe:
    def split(rule: Any, dataset: Any, _: Any, clients: int, seed: int) -> None:
        whole = Recipe.of("fedavg", *words, **settings)  # the other sections have no part in it
        _stop(whole.changed(split=rule, clients=clients, seed=seed))

    return _caught(
        diagnosis, "make_split", split, lambda: harmonium.diagnose("fedavg", *words, **settings)
    )


EVERYWHERE: dict[str, Resolver] = {
    "run": _run,
    "resume": _resume,
    "compare": _compare,
    "sweep": _sweep,
    "tune": _tune,
    "diagnose": _diagnose,
}
WANTED = ["split=dirichlet", "split.alpha=0.5", "evaluate.every=1", "evaluate.k=7", "local.lr=0.2"]
WAYS: dict[str, tuple[list[str], Settings]] = {
    "words": (WANTED, {}),
    "a choice by name, its setting a word": (
        WANTED[1:],
        {"split": "dirichlet"},
    ),
    "a choice a word, its setting by name": (
        ["split=dirichlet", *WANTED[2:]],
        {"split.alpha": 0.5},
    ),
    "mappings": (
        ["evaluate.k=7"],
        {
            "split": {"name": "dirichlet", "alpha": 0.5},
            "evaluate": {"every": 1},
            "local": {"lr": 0.2},
        },
    ),
    "a mapping without a name": (
        ["split=dirichlet", "evaluate.every=1", "evaluate={k: 7}", "local.lr=2e-1"],
        {"split": {"alpha": 0.5}},
    ),
    "objects": (
        ["local.lr=0.2"],
        {"split": Dirichlet(alpha=0.5), "evaluate": Evaluation(every=1, k=7)},
    ),
    "a class": (WANTED[1:], {"split": Dirichlet}),
    "said twice, the same": (
        [*WANTED, "rounds=20"],
        {"split": "dirichlet", "local.lr": 0.2, "rounds": 20, "split.alpha": 0.5},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", EVERYWHERE)
def test_every_command_resolves_alike(command: str, way: str) -> None:
    words, settings = WAYS[way]
    wanted = Recipe.of("fedavg", *WANTED)
    assert wanted.split == Dirichlet(alpha=0.5) and wanted.evaluate.k == 7
    assert EVERYWHERE[command](words, settings).digest == wanted.digest


@pytest.mark.parametrize("command", EVERYWHERE)
@pytest.mark.parametrize(
    ("words", "settings", "names"),
    [
        (["split.alpha=0.5"], {"split": {"name": "dirichlet", "alpha": 0.1}}, ("0.5", "0.1")),
        ([], {"split": {"name": "dirichlet", "alpha": 0.1}, "split.alpha": 0.5}, ("0.1", "0.5")),
        (["split=dirichlet"], {"split": "iid"}, ("dirichlet", "iid")),
        (["split.alpha=0.7"], {"split": Dirichlet(alpha=0.5)}, ("0.7", "0.5", "split.alpha")),
        (["split=iid"], {"split": Dirichlet(alpha=0.5)}, ("iid", "Dirichlet")),
        (["split=iid"], {"split": Dirichlet}, ("iid", "Dirichlet")),
        (["rounds=5"], {"rounds": 6}, ("rounds", "5", "6")),
        (["rounds=5", "rounds=6"], {}, ("rounds", "5", "6")),
    ],
)
def test_sources_that_disagree_are_refused(
    command: str, words: list[str], settings: Settings, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        EVERYWHERE[command](words, settings)
    assert "\n" not in str(error.value)
    for name in names:
        assert name in str(error.value)


def test_words_of_commands_without_a_function_resolve_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Recipe.of("fedavg", *WANTED)
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", "fedavg", *WANTED, "--dry-run", "--json"])
    main()
    assert json.loads(capsys.readouterr().out)["digest"] == wanted.digest
    at_sites = federated("fedavg", WANTED)
    alike = at_sites.changed(data=wanted.data, aggregation="mean", participation={})
    assert alike.digest == wanted.digest
    assert at_sites.data.name == "sites"
    assert federated("fedavg", ["data=digits"]).data.name == "digits"


def test_a_real_federation_has_defaults_of_its_own_unless_told_otherwise() -> None:
    """Changes are bounded, a majority must answer; masks and the server's noise need the mean."""
    assert (
        Recipe.of("fedavg").aggregation == Mean() and Recipe.of("fedavg").participation.quorum == 1
    )
    made = federated("fedavg", ["participation.fraction=0.5"])
    assert made.aggregation == NormBound(agreement=0.0)
    assert made.participation.quorum == "majority"
    assert made.participation.fraction == 0.5
    told = federated("fedavg", ["aggregation=mean", "participation.quorum=2"])
    assert told.aggregation == Mean() and told.participation.quorum == 2
    for words in (
        ["privacy.secure_aggregation=true"],
        ["privacy.update_clip=1", "privacy.update_noise=1", "privacy.update_place=server"],
    ):
        made = federated("fedavg", ["encoder.norm=group", "objective.norm=none", *words])
        assert made.aggregation == Mean() and made.participation.quorum == "majority"


def test_mappings_change_only_the_keys_that_they_name() -> None:
    base = Recipe.of("fedavg", "terms.proximal.mu=0.5", "evaluate.k=3", "local.lr=0.7")
    changed = Recipe.of(base, evaluate={"every": 2}, local={}, terms={"proximal": {}})
    assert (changed.evaluate.k, changed.evaluate.every, changed.local.lr) == (3, 2, 0.7)
    assert changed.terms == (Proximal(0.5),)
    assert Recipe.of(base, terms={}).terms == Recipe.of(base, "terms=[]").terms == ()
    assert Recipe.of("fedavg", "terms=proximal,uv", "terms.proximal.mu=2").terms[0] == Proximal(2)


@dataclass(frozen=True)
class Mine(SimCLR):
    """An objective that no name finds."""

    more: float = 1.0


def test_objects_pass_through_and_stay() -> None:
    @dataclass(frozen=True)
    class Local(SimCLR):
        pass

    objective = Local(temperature=0.9)
    recipe = Recipe.of("fedavg", objective=objective, rounds=3)
    assert recipe.objective is objective
    again = Recipe.of(recipe, "rounds=4", split={"name": "dirichlet"})
    assert again.objective is objective and again.changed(seed=3).objective is objective
    compared = cells.plan(["fedavg", "fedprox"], {"objective": objective, "seeds": 2})
    assert all(one.objective is objective for one in compared.methods.values())
    assert compared.seeds == (0, 1)


def test_classes_stand_for_choices() -> None:
    recipe = Recipe.of(FedProx, "method.mu=0.3", objective=Mine, **{"objective.more": 2.0})
    assert recipe.method.cls is FedProx and recipe.method.options["mu"] == 0.3
    assert recipe.objective == Mine(more=2.0)

    class Own(Method):
        """One that no other process finds."""

    assert Recipe.of(Own).method.cls is Own
    with pytest.raises(UnknownSetting, match="split"):
        Recipe.of("fedavg", split=Mine)


def test_what_no_setting_can_stand_beside_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder.*ndarray.*encoder\.width=8"):
        Recipe.of("fedavg", "encoder.width=8", encoder=np.zeros(3))
    with pytest.raises(UnknownSetting, match=r"split\.alpha"):
        Recipe.of("fedavg", "split.alpha=1", split=IID())
    with pytest.raises(ConfigError, match="key=value"):
        Recipe.of("fedavg", 5)  # type: ignore[arg-type]
    with pytest.raises(UnknownSetting, match="split.alpha"):
        Recipe.of("fedavg", alpha=0.5)


def test_measures_take_settings_by_name_and_refuse_two_values() -> None:
    made, _ = _with_settings(
        ["knn"], changes_of(["knn.k=3"], {"knn": {"temperature": 0.5}, "knn.k": 3})
    )
    assert (made["knn"].k, made["knn"].temperature) == (3, 0.5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"knn\.k.*3.*5"):
        changes_of(["knn.k=3"], {"knn": {"k": 5}})


def test_a_command_is_written_down_with_what_was_given_by_name(tmp_path: Path) -> None:
    given: Settings = {"rounds": 2, "split": Dirichlet(alpha=0.5), "local": {"lr": 0.1}}
    words = as_words(changes_of([], given))
    assert Recipe.of("fedavg", *words).digest == Recipe.of("fedavg", **given).digest
    note_command(tmp_path, "compare", ["fedavg", "rounds=2"], given, allow_unfair=False)
    text = (tmp_path / start.COMMAND).read_text(encoding="utf-8").split()
    assert text[:4] == ["harmonium", "compare", "fedavg", "rounds=2"]
    assert Recipe.of("fedavg", *text[3:]).digest == Recipe.of("fedavg", **given).digest
    assert start.of_many(tmp_path).count("rounds=2") == 1
    note_command(tmp_path, "compare", ["fedavg"], {"encoder": object()}, allow_unfair=False)
    assert "out=" in start.of_many(tmp_path)


def test_an_empty_start_is_no_random_start() -> None:
    with pytest.raises(ConfigError, match="init"):
        changes_of(["init="])
    assert Recipe.of("fedavg", "init=none").init is None


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("local.amp=true", "local.precision"),
        ("engine.gpu=0", "engine.device"),
        ("engine.device=0", "cuda:1"),
        ("engine.device=[0,1]", "cuda:1"),
        ("engine.device=none", "cuda:1"),
    ],
)
def test_words_of_other_libraries_are_answered_with_ours(word: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Recipe.of("fedavg", word)
