from pathlib import Path

import pytest

from harmonium.errors import ConfigError
from harmonium.recipe import Recipe, shipped_recipes
from harmonium.terms.proximal import Proximal


def test_words_of_the_command_line_become_settings() -> None:
    words = "objective=simclr data.limit=500 encoder=cnn-small clients=10 split=dirichlet"
    recipe = Recipe.of("fedavg", *words.split(), "split.alpha=0.3", "local.lr=1e-3", "rounds=7")
    assert (recipe.data.limit, recipe.clients, recipe.rounds) == (500, 10, 7)
    assert recipe.split.alpha == 0.3  # type: ignore[attr-defined]
    assert recipe.local.lr == 1e-3


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    words = ["terms.proximal.mu=0.5", "views.blur=0.5", "split=by_class", "server=adam"]
    recipe = Recipe.of("fedavg", *words, "local.clip=3", "encoder.width=8", "views.mean=[0.1]")
    again = Recipe.from_tree(__import__("yaml").safe_load(recipe.yaml()))
    assert again.tree() == recipe.tree()
    assert again.digest == recipe.digest
    assert again.terms == (Proximal(0.5),)


def test_the_digest_is_of_what_changes_results() -> None:
    plain = Recipe.of("fedavg")
    assert Recipe.of("fedavg", "engine.workers=7").digest == plain.digest
    for word in ("seed=1", "local.lr=0.07", "data.limit=9", "evaluate.k=3", "views.flip=0.1"):
        assert Recipe.of("fedavg", word).digest != plain.digest, word


def test_files_say_the_same_as_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("method: fedavg\ndata: {name: digits, limit: 300}\nrounds: 3\n")
    assert Recipe.of(str(path)).digest == Recipe.of("fedavg", "data.limit=300", "rounds=3").digest
    assert Recipe.of(str(path), "rounds=4").rounds == 4


def test_another_choice_drops_the_settings_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("split: {name: dirichlet, alpha: 0.5}\n")
    assert Recipe.of(str(path), "split=by_class").split.name == "by_class"
    assert Recipe.of(str(path), "split=dirichlet").split.alpha == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name: str) -> None:
    assert Recipe.of(name).tree()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedavgg"], "unknown method or recipe 'fedavgg': did you mean 'fedavg'?"),
        (["fedavg", "round=3"], "unknown key 'round': did you mean 'rounds'?"),
        (["fedavg", "alpha=3"], "unknown key 'alpha': did you mean 'split.alpha'?"),
        (["fedavg", "local.lrr=3"], "unknown key 'local.lrr': did you mean 'local.lr'?"),
        (["fedavg", "split.alpha=3"], "unknown key 'split.alpha': split=iid has no settings"),
        (["fedavg", "method.mu=3"], "unknown key 'method.mu': method=fedavg has no settings"),
        (["fedavg", "data=digitz"], "unknown data set 'digitz': did you mean 'digits'?"),
        (["fedavg", "views=simcrl"], "unknown views 'simcrl': did you mean 'simclr'?"),
        (["fedavg", "rounds=many"], "rounds=many: should be a whole number"),
        (["fedavg", "local.epochs=1.5"], "local.epochs=1.5: should be a whole number"),
        (["fedavg", "local.schedule=cosinus"], "local.schedule=cosinus: should be one of"),
        (["fedavg", "clients=0"], "clients=0"),
        (["fedavg", "participation.number=11"], "participation.number is 11, but there are 10"),
        (["fedavg", "participation.fraction=2"], "above 0 and at most 1"),
        (["fedavg", "objective.temperature=0"], "it must be positive"),
        (["fedavg", "rounds"], "'rounds' is no setting: write key=value"),
        (["no/such.yaml"], "cannot read recipe no/such.yaml"),
        (["nowhere.module:Thing"], "cannot import method"),
        (["harmonium.errors:ConfigError"], "is no method"),
    ],
)
def test_mistakes_are_named_with_what_would_be_right(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Recipe.of(*words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("rounds: 3\nlocal: {lr: 1\n")
    with pytest.raises(ConfigError, match="broken.yaml line 3 is not YAML"):
        Recipe.of(str(path))


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"rounds: !!python/object/apply:os.mkdir [{tmp_path / 'canary'}]\n")
    with pytest.raises(ConfigError):
        Recipe.of(str(path))
    assert not (tmp_path / "canary").exists()


def test_terms_can_be_named_and_set() -> None:
    assert Recipe.of("fedavg", "terms=proximal", "terms.proximal.mu=0.1").terms == (Proximal(0.1),)
    assert Recipe.of("fedavg", "terms=proximal").terms == (Proximal(),)


def test_paths_of_data_do_not_depend_on_where_one_stands() -> None:
    path = Path(Recipe.of("fedavg", "data=folder", "data.path=pictures").data.path)  # type: ignore
    assert path.is_absolute() and path.name == "pictures"
