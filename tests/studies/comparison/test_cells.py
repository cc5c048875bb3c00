"""Which runs a comparison makes, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from harmonium.core.errors import ConfigError
from harmonium.data.partition import make_split
from harmonium.recipe.presets import tables
from harmonium.recipe.schema import Recipe
from harmonium.studies.comparison import fairness
from harmonium.studies.comparison.cells import plan, reference, references, seeds_of
from harmonium.studies.comparison.published import CLASSIFIERS, published
from harmonium.studies.comparison.study import compare

DIGITS = ("data=digits", "views=digits", "clients=2")


@pytest.mark.parametrize("rule", ["dirichlet", "rotation", "by_class"])
def test_the_centralised_reference_holds_what_all_clients_hold_together(rule: str, home: Path):
    recipe = Recipe.of("fedavg", "clients=10", f"split={rule}", "split.labels=0.2", "seed=3")
    merged = reference(recipe, "centralised")
    data = recipe.data.load()
    apart = make_split(recipe.split, data, None, 10, 3)
    together = make_split(merged.split, data, None, merged.clients, 3)
    assert len(together) == merged.clients == 1
    order = np.argsort(np.concatenate(apart.indices))
    np.testing.assert_array_equal(together.indices[0], np.concatenate(apart.indices)[order])
    if rule == "rotation":
        np.testing.assert_array_equal(together.angles[0], np.concatenate(apart.angles)[order])
    np.testing.assert_array_equal(together.seen(data.train).labels, apart.seen(data.train).labels)


@pytest.mark.parametrize("name", ["alone", "centralised"])
def test_references_are_not_asked_for(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{name}.*every comparison"):
        compare(name, "fedavg", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_references_may_have_settings_of_their_own():
    words = ["fedavg", "fedbyol", "centralised,local.lr=0.3,server=adam", *DIGITS]
    made = plan(words)
    both = [made.references[f"centralised ({name})"] for name in ("fedavg", "fedbyol")]
    assert {(one.local.lr, one.server.name) for one in both} == {(0.3, "adam")}
    others = [one for label, one in made.rows.items() if "centralised" not in label]
    assert 0.3 not in {one.local.lr for one in others}
    assert "centralised has local.lr=0.3 server=adam of its own" in made.remarks
    assert made.words == {"fedavg": "fedavg", "fedbyol": "fedbyol"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["centralised,rounds=7"], r"rounds \(20; 7\)"),
        (["centralised,local.epochs=9"], "local.epochs"),
        (["centralised,data.limit=9"], "data.limit"),
        (["alone,local.lr=1", "alone,local.lr=2"], "alone is given settings twice"),
        (["alone,local.lr=1", "compare.references=none"], "compare.references"),
        (["alone,local.lr=1", "local.lr=2"], "local.lr is given twice"),
        (["alone,local.lr=1,"], "comma"),
        (["alone,local.lrr=1"], "local.lrr"),
    ],
)
def test_references_keep_to_the_budget_of_the_methods(words: list[str], named: str):
    with pytest.raises(ConfigError, match=named):
        plan(["fedavg", *DIGITS, *words])


def test_the_advice_on_unequal_budgets_can_be_followed():
    apart = ["fedavg", "fedprox,split=dirichlet,split.alpha=0.3,encoder.width=8"]
    with pytest.raises(ConfigError, match="encoder.width=32") as refused:
        plan(apart)
    advice = str(refused.value).partition("e.g. ")[2].partition(", or")[0].split()
    assert "split=iid" in advice and not plan(["fedavg", "fedprox", *advice]).unfair


def test_a_reference_with_another_budget_can_be_allowed():
    made = plan(["fedavg", *DIGITS, "centralised,rounds=7"], allow_unfair=True)
    assert made.references["centralised"].rounds == 7 and "rounds (20; 7)" in made.unfair[0]


def test_every_objective_has_references_of_its_own():
    cells = {name: Recipe.of(name) for name in ("fedsimclr", "fedprox", "fedbyol")}
    assert list(references(cells)) == [
        "alone (fedsimclr)",
        "alone (fedbyol)",
        "centralised (fedsimclr)",
        "centralised (fedbyol)",
        "supervised",
    ]
    assert references(cells)["alone (fedbyol)"].objective.name == "byol"
    few = {"fedsimclr": Recipe.of("fedsimclr", "split.labels=0.1")}
    assert references(few)["supervised"].split.labels == 1.0
    assert list(references(cells, "first")) == ["alone", "centralised", "supervised"]
    made = plan(["fedsimclr", "fedprox", *DIGITS])
    assert list(made.rows) == ["alone", "fedsimclr", "fedprox", "centralised", "supervised"]


def test_references_do_not_stumble_over_what_many_clients_need():
    words = ("aggregation=trimmed", "participation.number=5", "participation.over=0.2")
    recipe = Recipe.of("fedavg", *words, "aggregation.trim=0.2", "clients=10")
    whole = reference(recipe, "centralised")
    assert whole.clients == 1 and whole.aggregation.name == "mean"
    assert reference(recipe, "alone").clients == 10


def test_references_have_neither_noise_nor_rounding():
    words = ("local.dp_clip=1", "local.dp_noise=2", "transport.up=int8", "transport.down=fp16")
    noisy = Recipe.of("fedavg", *words, "objective=supervised", "local.lr=0.3")
    for name in ("alone", "centralised"):
        bare = reference(noisy, name)
        assert bare.local.dp_clip is None and bare.local.dp_noise == 0 and bare.local.lr == 0.3
        assert bare.transport.is_plain


def test_one_recipe_is_not_compared_with_itself():
    with pytest.raises(ConfigError, match="fedavg and fedsimclr .*same"):
        plan(["fedavg", "fedsimclr"])


def test_references_measure_the_global_objective_where_they_can():
    found = plan(["fedsc", "evaluate.objective=true"])
    assert found.methods["fedsc"].evaluate.objective is True
    assert {one.evaluate.objective for one in found.references.values()} == {None}
    off = plan(["fedsc", "evaluate.objective=false"])
    assert {one.evaluate.objective for one in off.rows.values()} == {False}


def test_an_objective_that_only_its_method_can_train_has_no_references():
    both = ["orchestra", "fedsimclr", *DIGITS, "local.epochs=1", "local.batch=16"]
    assert list(plan(both).rows) == [
        "alone",
        "orchestra",
        "fedsimclr",
        "centralised",
        "supervised",
    ]
    assert list(plan(["orchestra", *DIGITS]).rows) == ["orchestra", "supervised"]


@pytest.mark.parametrize(
    ("second", "key", "word"),
    [
        (["rounds=3"], "rounds (20; 3)", "rounds=20"),
        (["local.epochs=7"], "local.epochs (2; 7)", "local.epochs=2"),
        (["local.batch=8"], "local.batch (64; 8)", "local.batch=64"),
        (["views=digits"], "views (simclr; digits)", "views=simclr"),
        (["encoder.width=8"], "encoder.width", "encoder.width="),
        (["split=dirichlet"], "split (iid; dirichlet)", "split=iid"),
        (["data.limit=100"], "data.limit (none; 100)", "data.limit=none"),
        (["participation.fraction=0.5"], "participation.fraction", "participation.fraction=1.0"),
        (["evaluate.k=3"], "evaluate.k (200; 3)", "evaluate.k=200"),
        (["clients=3"], "clients (10; 3)", "clients=10"),
        (["batch_norm=local"], "batch_norm (average; local)", "batch_norm=average"),
        (["local.joint_views=false"], "local.joint_views (true; false)", "local.joint_views=true"),
    ],
)
def test_unequal_budgets_are_refused_with_the_reason(second: list[str], key: str, word: str):
    recipes = {"a": Recipe.of("fedavg"), "b": Recipe.of("fedprox", *second)}
    with pytest.raises(ConfigError) as refused:
        fairness.check(recipes)
    assert f"a and b differ in {key}" in str(refused.value) and word in str(refused.value)
    assert "--allow-unfair" in str(refused.value) and "\n" not in str(refused.value)
    assert fairness.check(recipes, allow=True)[0].startswith(f"a and b differ in {key}")


def test_what_is_a_methods_own_is_fair():
    words = ("local.lr=0.3", "local.optimiser=adam", "server=adam", "objective=byol", "terms=uv")
    recipes = {"a": Recipe.of("fedavg"), "b": Recipe.of("fedavg", *words)}
    assert fairness.check(recipes) == []
    merged = {"a": recipes["a"], "c": reference(recipes["a"], "centralised")}
    assert fairness.check(merged) == []


def test_how_codes_make_batches_is_fair_but_said():
    words = ("local.epochs=1", "local.batch=8", "encoder.norm=batch")
    recipes = {"a": Recipe.of("fedavg", *words), "b": Recipe.of("fedavg", "objective=byol", *words)}
    assert fairness.check(recipes) == []
    (told,) = fairness.remarks(recipes)
    assert "pass in a, each has its own in b" in told and "local.joint_views=false" in told
    alike = {label: Recipe.of(*one, "local.joint_views=false") for label, one in (
        ("a", ("fedavg", *words)), ("b", ("fedavg", "objective=byol", *words)),
    )}  # fmt: skip
    assert fairness.check(alike) == [] and fairness.remarks(alike) == []
    bare = ("objective.norm=none", "encoder.norm=group", "objective.out=8")
    nowhere = {"a": Recipe.of("fedavg", *bare), "b": Recipe.of("fedavg", "objective=byol", *bare)}
    assert fairness.remarks(nowhere) == []  # no BatchNorm, no difference
    unlike = nowhere | {"b": Recipe.of("fedavg", *bare, "local.joint_views=false")}
    assert fairness.check(unlike) == []
    dropping = {"a": recipes["a"], "b": Recipe.of("fedprox", *words, "local.drop_last=true")}
    assert fairness.check(dropping) == []
    (told,) = fairness.remarks(dropping)
    assert "left out in b" in told and "local.drop_last=false" in told


def test_scaled_epochs_count_as_they_are_trained():
    scaled = Recipe.of("fedavg", "clients=10", "local.epochs=20", "local.for_clients=100")
    assert fairness.check({"a": Recipe.of("fedavg", "clients=10"), "b": scaled}) == []
    other = {"a": Recipe.of("fedavg", "clients=5"), "b": scaled.changed(clients=5)}
    with pytest.raises(ConfigError, match=r"e\.g\. local\.epochs=2 local\.for_clients=none, or"):
        fairness.check(other)


def test_what_methods_have_beside_is_told():
    recipes = {name: Recipe.of(name) for name in ("fedsimclr", "fedca", "semifed", "supervised")}
    told = fairness.remarks(recipes)
    assert len(told) == 3
    more = {"ditto": Recipe.of("ditto", "method.personal_epochs=3"), "fedrep": Recipe.of("fedrep")}
    assert fairness.remarks(more) == [
        "ditto trains for 2.5 passes where others have one",
        "fedrep trains for 2 passes where others have one",
    ]
    assert "fedca also has public images (shapes)" in told
    assert "semifed is trained with labels (split.labels=0.1) of its clients' images" in told
    assert "supervised is trained with all labels of its clients' images" in told


@pytest.mark.parametrize("asked", [0, -1, [], [-1], 1.5, True, "five", [1.5]])
def test_odd_seeds_are_refused(asked: object):
    with pytest.raises(ConfigError, match="seeds is"):
        seeds_of(asked, 0)


def test_seeds_begin_at_the_recipes_own():
    assert plan(["fedavg", "seed=7", "seeds=2"]).seeds == (7, 8)
    cells = [(label, seed, recipe.seed) for label, seed, recipe in plan(["fedavg"]).cells()]
    assert [one[:2] for one in cells] == [
        ("alone", 0), ("fedavg", 0), ("centralised", 0), ("supervised", 0),
    ]  # fmt: skip
    assert all(seed == own for _, seed, own in cells)


def test_published_figures_say_why_ours_are_others():
    name = "fedca/c10-iid-r50/fedae@cpu"
    found = published(name, Recipe.of(name))
    assert found is not None and found.figure == 65.47
    assert "encoder=cnn-small, not resnet50" in found.gap and "rounds=9, not 20" in found.gap
    full = "fedca/c10-iid-r50/fedae"
    same = published(full, Recipe.of(full, "seed=3", "engine.workers=0"))
    assert same is not None and same.gap == ("classifier=fast, not lp_fedca",)
    words = ("local.lr=0.5", "split=dirichlet", "encoder.norm=group", "participation.number=2")
    other = published(full, Recipe.of(full, *words))
    told = "also different: encoder.norm, split, local.lr, participation.number"
    assert other is not None and other.gap == (told, "classifier=fast, not lp_fedca")
    assert published("fedavg", Recipe.of("fedavg")) is None
    assert published("fedca/c10-iid-r50/alignment", Recipe.of("fedavg")) is None


def test_figures_of_few_labels_stand_beside_the_probe_of_those_labels():
    for row, probe in (("supervised", "linear"), ("semi-supervised", "linear_labelled")):
        name = f"fsimclr/c10-label/{row}@cpu"
        assert published(name, Recipe.of(name)).probe == probe  # type: ignore[union-attr]


def test_the_classifier_of_every_table_is_known():
    assert set(CLASSIFIERS) == set(tables())


def test_settings_of_one_method_follow_its_name():
    made = plan(["fedavg", "fedavg,transport.up=int8,local.milestones=[0.5,0.8]", *DIGITS])
    label = "fedavg transport.up=int8 local.milestones=[0.5 0.8]"
    assert list(made.methods) == ["fedavg", label]
    assert made.methods[label].transport.up == "int8"
    assert made.methods[label].local.milestones == (0.5, 0.8)
    assert made.methods["fedavg"].transport.up == "none" and made.methods[label].clients == 2
    with pytest.raises(ConfigError, match=r"fedavg and fedprox rounds=3 differ in rounds"):
        plan(["fedavg", "fedprox,rounds=3", *DIGITS])


def test_slips_name_the_words_of_a_comparison_too():
    with pytest.raises(ConfigError, match="'sedes'.*'seeds'"):
        plan(["fedavg", "sedes=2"])


def test_settings_of_the_comparison_are_checked():
    with pytest.raises(ConfigError, match="compare.target is 200"):
        plan(["fedavg", "compare.target=200"])
    with pytest.raises(ConfigError, match="compare.up is 0"):
        plan(["fedavg", "compare.up=0"])
    with pytest.raises(ConfigError, match="sped"):
        plan(["fedavg", "compare.sped=3"])


def test_references_that_see_more_are_told():
    assert plan(["fedavg", *DIGITS]).remarks == ()
    some = plan(["fedavg", "clients=10", "participation.number=2", "data=digits"])
    assert some.remarks == (
        "centralised, supervised: trained on all images in every round, the methods on those of "
        "2 of 10 clients",
    )
    none = ["fedavg", "clients=10", "participation.number=2", "compare.references=none"]
    assert plan(none).remarks == ()


def test_notes_call_rows_by_their_names():
    words = ["fedavg", "fedbyol", "ditto", "participation.number=2", "clients=4", "seeds=2"]
    words += ["label.fedavg=Average", "label.ditto=Ditto (ours)", "compare.references=first"]
    words += ["centralised,local.lr=0.3", "label.centralised=in one place"]
    made = plan(words)
    said = " ".join(made.remarks)
    assert "Ditto (ours) trains for 2 passes" in said and "BatchNorm pass in Average" in said
    assert "in one place, supervised: trained on all" in said
    assert "in one place has local.lr=0.3 of its own" in said
    assert not {"fedavg", "ditto", "centralised"} & set(said.replace(",", "").split())
    assert "Average, fedbyol, Ditto (ours), in one place" in made.headline
    unfair = plan([*words, "fedprox,rounds=3"], allow_unfair=True).unfair
    assert unfair[0].startswith("Average and fedprox rounds=3 differ in rounds")
    with pytest.raises(ConfigError, match="fedavg and fedprox rounds=3 differ in rounds"):
        plan([*words, "fedprox,rounds=3"])


def test_rows_are_named_by_words_and_from_python():
    words = ["fedavg", "fedavg,local.lr=0.1", "label.fedavg=FedAvg", "compare.references=first"]
    word = "label.fedavg local.lr=0.1='FedAvg, fast: #1'"
    made = plan([*words, word, "label.raw-pixels=pixels", "label.centralised=upper bound"])
    assert made.names == {
        "fedavg": "FedAvg", "fedavg local.lr=0.1": "FedAvg, fast: #1", "raw pixels": "pixels",
        "centralised": "upper bound",
    }  # fmt: skip
    assert list(made.methods) == ["fedavg", "fedavg local.lr=0.1"]  # folders keep their names
    assert made.methods["fedavg"].digest == plan(words).methods["fedavg"].digest
    named = plan(["fedavg"], {"label": {"fedavg": "A"}, "label.untrained": "start"}).names
    assert named == {"fedavg": "A", "untrained": "start"}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("label.fedagv=A", r"label\.fedagv.*'fedavg'"),
        ("label.raw=A", r"label\.raw.*raw pixels"),
        ("label.fedavg", r"label\.METHOD=NAME"),
        ("label.fedavg=", r"label\.fedavg is empty"),
        ("label.fedavg=untrained", r"label\.fedavg.*untrained"),
        ("label.alone=A", r"label\.alone"),  # there are no references here
    ],
)
def test_names_of_rows_that_are_none_are_refused(word: str, why: str):
    with pytest.raises(ConfigError, match=why):
        plan(["fedavg", "fedprox", "compare.references=none", word])
    with pytest.raises(ConfigError, match=r"label\.fedavg is given twice"):
        plan(["fedavg", "label.fedavg=A"], {"label": {"fedavg": "B"}})
