"""A site's policy: no plan gets more than it allows, and no odd plan does any harm."""

import copy
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harmonium.core import codec
from harmonium.core.errors import ConfigError, HarmoniumError, PolicyRefusal
from harmonium.data.augment.pipeline import View
from harmonium.data.partition import make_split
from harmonium.data.splits.iid import IID
from harmonium.engines.runtime import Task
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import LABELLED, exchange, per_example, statistic, weights
from harmonium.learning.client import counted_reading
from harmonium.methods import methods
from harmonium.privacy.budget import epsilon
from harmonium.recipe.privacy import Privacy
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.sites.plan import frame_of, method_of, planned
from harmonium.sites.policy import MOST_DEPTH, TEMPLATE, Policy, changes_of
from harmonium.testing import TINY

PAGE = Path(__file__).parents[2] / "docs" / "site-policy.md"
CANARY = "planted_canary"
CODE = f"{CANARY}:Thing"
PLAN = Recipe().tree()
SMALL = (8, 8, 1)
NORMED = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
RELEASE = {"field": "corr", "mechanism": "gaussian", "sensitivity": 1.0, "sigma": 1.0}


@dataclass(frozen=True)
class Guarded(Method):
    head_epochs: int = 1

    @exchange(
        down={"model": weights()},
        up={**TRAINED, "corr": statistic("each", guarded=True)},
    )
    def train(self, client, got):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@dataclass(frozen=True)
class Rows(Method):
    @exchange(up={"rows": per_example()})
    def show(self, client, got):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def check_plan(policy: Policy, recipe: Recipe, pictures: int = 100) -> None:
    policy.check_plan(recipe, recipe.method_for(SMALL, 2), pictures)


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the planted module writes when it is imported."""
    (tmp_path / f"{CANARY}.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('sung').touch()\nThing = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "sung"
    sys.modules.pop(CANARY, None)


# ---- the file -------------------------------------------------------------------------------


def test_the_template_is_the_defaults_and_explains_every_key(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(TEMPLATE)
    assert Policy.read(path) == Policy()
    keys = re.findall(r"^(\w+):", TEMPLATE, re.MULTILINE)
    assert keys == [field.name for field in fields(Policy)]
    assert all(len(line) <= 100 for line in TEMPLATE.splitlines())
    assert Policy().yaml() == TEMPLATE.replace("0.00001", "1.0e-05")


def test_a_policy_is_written_and_read_back(tmp_path: Path) -> None:
    policy = Policy(
        methods=("fedavg", "mine.own:Method"),
        exchanges=("train",),
        kinds=("weights",),
        guarded=("weights",),
        epochs=3,
        rounds=50,
        answers=100,
        answers_in_all=500,
        pictures=20,
        batch=16,
        steps=5,
        lr=0.1,
        views=("crop", "jitter"),
        initial_weights=("2" * 64, "/srv/weights.safetensors"),
        join_late=True,
        epsilon=None,
        delta=1e-7,
        simulated_noise=True,
        labels=True,
        evaluation=True,
        evaluation_least=20,
        own_code=("mine.own:Method",),
        public=("digits",),
        plans=("1" * 64,),
        secure_aggregation=True,
    )
    assert all(getattr(policy, f.name) != f.default for f in fields(Policy))
    path = tmp_path / "policy.yaml"
    path.write_text(policy.yaml())
    assert Policy.read(path) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "unknown key 'policy.epoch': did you mean 'policy.epochs'?"),
        ("epochs: 0", "policy.epochs is 0"),
        ("epochs: many", "policy.epochs=many"),
        ("pictures: 0", "policy.pictures is 0"),
        ("epsilon: -1", "policy.epsilon is -1"),
        ("epsilon: .nan", "policy.epsilon is nan"),
        ("delta: 1", "policy.delta is 1"),
        ("kinds: [weight]", "policy.kinds"),
        ("methods: fedavg", "should be a list"),
        ("methods: [fedavgg]", "did you mean 'fedavg'"),
        ("methods: ['my.method:Mine']", "which policy.own_code does not name"),
        ("own_code: [fedavg]", "write it as module:Class"),
        ("public: [digit]", "did you mean 'digits'"),
        ("plans: [abc]", "a digest is 64"),
        ("answers: 0", "policy.answers is 0"),
        ("answers_in_all: -1", "policy.answers_in_all is -1"),
        ("batch: 1", "policy.batch is 1"),
        ("steps: 0", "policy.steps is 0"),
        ("lr: 0", "policy.lr is 0"),
        ("views: [crops]", "did you mean 'crop'"),
        ("guarded: [weight]", "policy.guarded"),
        (
            "initial_weights: [encoder.st]",
            "write a digest of 64 digits of 0-9a-f, or the full path",
        ),
        ("labels: perhaps", "should be true or false"),
        ("epochs: 1\nepochs: 2", "epochs is given twice"),
        ("1: 2", "1 is not a valid key"),
        ("? [a]\n: 2", "is not a valid key"),
        ("epochs: 2030-99-99", "cannot be read: month must be in"),
        ("- a", "holds no settings"),
        ("# nothing", "holds no settings"),
        ("a: [", "cannot be read"),
        ("epochs: \x00", "cannot be read"),
        ("labels: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Policy.read(path)
    assert "\n" not in str(error.value)
    assert "policy" in str(error.value)
    assert "recipe" not in str(error.value)


def test_a_policy_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read policy .*No such file"):
        Policy.read(tmp_path / "policy.yaml")
    (tmp_path / "policy.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="policy.yaml"):
        Policy.read(tmp_path / "policy.yaml")


def test_the_page_explains_every_key_and_its_example_is_a_policy(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert named == [field.name for field in fields(Policy)]
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        Policy.read(path)


# ---- the plan as plain values ---------------------------------------------------------------


def test_plans_that_come_with_harmonium_pass() -> None:
    for name in methods.table():
        recipe = Recipe.of(name)
        tree, policy = recipe.tree(), Policy()
        if recipe.public is not None:  # which data sets a site reads beside its own, it says itself
            with pytest.raises(PolicyRefusal, match="`public` allows none"):
                policy.check_tree(tree)
            policy = Policy(public=(recipe.public.name,))
        policy.check_tree(tree)
        assert policy.open_plan(tree).tree() == tree


@pytest.mark.parametrize(
    "plan",
    [
        *({key: CODE} for key in ("method", "objective", "encoder", "data", "public", "split")),
        *({key: {"name": CODE}} for key in ("method", "objective", "encoder", "data", "public")),
        *({key: CODE} for key in ("aggregation", "server", "views", "terms")),
        *({key: {"name": CODE}} for key in ("split", "aggregation", "server", "views")),
        {"terms": f"proximal,{CODE}"},
        {"terms": [CODE]},
        {"terms": [{"name": CODE}]},
        {"terms": {CODE: {}}},
        {"data": {"name": "styles", "sets": ["mnist", CODE]}},
        {"public": {"name": "styles", "sets": ["mnist", CODE]}},
    ],
    ids=str,
)
def test_no_code_of_a_plan_is_imported(plan: dict[str, Any], canary: Path) -> None:
    with pytest.raises(PolicyRefusal, match=f"uses the code '{CODE}', but `own_code` allows none"):
        Policy().open_plan(plan)
    assert not canary.exists()
    allowed = Policy(own_code=(CODE,), public=(CODE, "styles", "mnist"))
    allowed.check_tree(plan)
    assert not canary.exists()
    if "views" not in plan and "sets" not in str(plan):
        with pytest.raises(HarmoniumError, match="is no"):  # so the refusal was what kept it out
            allowed.open_plan(plan)
        assert canary.exists()


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def planted(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    tree: Any = copy.deepcopy(PLAN)
    spot = tree
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = value
    return tree  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [CODE, "~/secret", "/etc/hostname", "..\\secret"])
def test_neither_code_nor_files_stand_anywhere(value: str) -> None:
    for path in places(PLAN):
        with pytest.raises(PolicyRefusal):
            Policy(public=("digits",)).check_tree(planted(path, value))


@pytest.mark.parametrize(
    "plan",
    [
        {"public": {"name": "npz", "path": "images.npz"}},
        {"public": {"name": "csv", "root": "pictures"}},
        {"public": {"name": "folder", "path": ["pictures"]}},
        {"public": {"name": "styles", "sets": ["/srv/a.npz", "/srv/b.npz"]}},
        {"data": {"name": "styles", "sets": ["~somebody/a.npz", "mnist"]}},
        {"data": {"name": "styles", "sets": ["/srv/pictures", "mnist"]}},
        {"encoder": {"name": "cnn-small", "path": "weights"}},
        {"data": {"name": "folder", "path": "~somebody/pictures"}},
        {"data": {"name": "folder", "path": {"path": "pictures"}}},
        {"path": "pictures"},
    ],
    ids=str,
)
def test_no_plan_reads_files(plan: dict[str, Any]) -> None:
    with pytest.raises(PolicyRefusal, match="names the file .*reads files"):
        Policy(public=("npz", "csv", "folder", "styles")).check_tree(plan)


def test_the_servers_own_data_may_lie_in_its_files() -> None:
    plan = {
        "data": {"name": "folder", "path": "/srv/pictures: all"},
        "split": {"name": "file", "path": "/srv/split.npz"},
    }
    recipe = Policy().open_plan(plan)
    assert recipe.data.path == "/srv/pictures: all"  # type: ignore[attr-defined]
    Policy().open_plan({"data": {"name": "styles", "sets": ["/srv/a.npz", "/srv/b.npz"]}})


def test_a_file_is_no_public_set_wherever_the_site_stands() -> None:
    plan = {"public": {"name": "styles", "sets": ["mnist", "secret.npz"]}}
    with pytest.raises(PolicyRefusal, match="reads the data set 'secret.npz'"):
        Policy(public=("npz", "styles", "mnist")).check_tree(plan)


@pytest.mark.parametrize(
    "public",
    ["digits", {"name": "digits"}, {"name": "styles", "sets": ["mnist", "usps"]}, {"limit": 5}, 7],
    ids=str,
)
def test_public_images_are_those_that_the_site_allows(public: Any) -> None:
    plan = {"public": public}
    for policy in (Policy(), Policy(public=("cifar10", "styles", "mnist"))):
        with pytest.raises(PolicyRefusal, match="`public` allows (none|only cifar10)"):
            policy.check_tree(plan)
    if isinstance(public, str) or "name" in str(public):
        Policy(public=("digits", "styles", "mnist", "usps")).check_tree(plan)
    Policy().check_tree({"public": None})


def deep(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = {"a": tree}
    return tree


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP
BOMB: Any = ["x"] * 10
for _ in range(9):
    BOMB = [BOMB] * 10


@pytest.mark.parametrize(
    "plan",
    [
        None,
        [],
        "fedavg",
        LOOP,
        {"terms": BOMB},
        {"terms": BOMB[0][0]},
        deep(MOST_DEPTH + 1),
        deep(100_000),
        {"seed": 10**5_000},
        {"seed": -(10**5_000)},
        {"method": "x" * 10_000_000},
        {"x" * 10_000_000: 1},
        {str(number): 1 for number in range(10_000)},
        {1: 2},
        {None: 2},
        {("method",): 2},
        {"method": b"fedavg"},
        {"method": {1, 2}},
        {"method": object()},
        {"method": "fed\navg"},
        {"method": "\x1b[2J"},
        {"method": "\ud800"},
        yaml.safe_load("rounds: 2030-01-01"),
    ],
)
def test_odd_plans_are_refused_in_one_short_line(plan: Any) -> None:
    with pytest.raises(PolicyRefusal) as error:
        Policy().check_tree(plan)
    assert str(error.value).startswith("the site's policy refuses this plan: it ")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_a_setting_beyond_all_bounds_is_no_traceback() -> None:
    plan = {"participation": {"over": 1e308, "fraction": 0.5}}
    with pytest.raises(HarmoniumError):
        Policy().open_plan(plan)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**64, -(10**400), math.nan, math.inf, 1e308, 5e-324, b"x", {1}, object()]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([CODE, f"proximal,{CODE}", "proximal", "~x", "/etc", "digits", "none", "name"]),
)
KEYS = st.one_of(
    st.sampled_from([*PLAN, "name", "path", "root", "sets", "proximal", CODE]),
    st.text(max_size=5),
    st.integers(),
    st.none(),
)
TREES = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        TREES,
        st.dictionaries(st.sampled_from(list(PLAN)), TREES, max_size=3),
        st.builds(planted, st.sampled_from(list(places(PLAN))), TREES),
    )
)
def test_any_plan_is_a_recipe_or_one_clear_error(canary: Path, plan: Any) -> None:
    try:
        Policy(public=("digits",)).open_plan(plan)
    except HarmoniumError as error:
        assert "\n" not in str(error)
    assert not canary.exists()
    assert CANARY not in sys.modules


# ---- the plan as a method -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (Policy(methods=("fedprox",)), {}, "runs the method fedavg, but `methods` allows only fed"),
        (Policy(exchanges=("calibrate",)), {}, "the exchange train, but `exchanges` allows only c"),
        (Policy(kinds=("weights",)), {}, "`loss` of the kind scalar .* but `kinds` allows only w"),
        (Policy(epochs=1), {}, "has local.epochs=2, but `epochs` is 1"),
        (Policy(rounds=19), {}, "has rounds=20, but `rounds` is 19"),
        (Policy(pictures=101), {}, r"runs on 100 images, but `pictures` asks for 101"),
        (Policy(), {"objective": "supervised"}, "reads labels, but `labels` is false"),
        (Policy(plans=("0" * 64,)), {}, "has the digest .* but `plans` does not list it"),
        (Policy(lr=0.01), {}, "has local.lr=0.05, but `lr` is 0.01"),
        (Policy(batch=65), {}, "has local.batch=64, but `batch` is 65"),
        (Policy(batch=101), {"local": {"batch": 512}}, "steps of 100 images, but `batch` is 101"),
        (Policy(steps=5), {}, "sends weights of 4 steps by the exchange train, but `steps` is 5"),
        (Policy(views=("crop", "blur")), {}, "has crop, flip, .* in view 1, but .* asks for blur"),
        (Policy(guarded=("weights",)), {}, "`model` of the kind weights .* without noise, but `gu"),
        (Policy(secure_aggregation=True), {}, "single answers, but `secure_aggregation` is true"),
        (Policy(), {"public": "digits"}, "reads the data set 'digits', but `public` allows none"),
        (
            Policy(exchanges=("train",)),
            {"batch_norm": "recalibrate", "encoder": {"name": "cnn-small", "norm": "batch"}},
            "the exchange calibrate",
        ),
    ],
)
def test_a_plan_that_wants_more_is_refused(
    policy: Policy, changes: dict[str, Any], message: str
) -> None:
    recipe = Recipe().changed(**changes)
    with pytest.raises(PolicyRefusal, match=message) as error:
        check_plan(policy, recipe)
    assert "\n" not in str(error.value)
    lifted = {field.name: field.default for field in fields(Policy)}
    lifted |= {"labels": True, "public": ("digits",)}
    check_plan(Policy(**lifted), recipe)  # the key that is named is the one that refused


@pytest.mark.parametrize(
    ("limit", "words", "message"),
    [
        (
            9,
            ["fedsc", "evaluate.objective=false"],
            r"over the images 10 times .*5 by correlate and 5 by train.*`epochs`",
        ),
        (5, ["fedsc", "method.passes=1000000000"], "1e.09 by correlate"),
        (15, ["fedstyle"], "16 by train"),
        (19, ["fedx"], "20 by train"),
        (2, ["fedavg", "encoder.norm=batch", "batch_norm=recalibrate"], "2 by train and 1 by cal"),
        (3, ["fedrep"], "4 by train"),
        (9, ["fedavg", "local.epochs=10"], "has local.epochs=10"),
    ],
)
def test_passes_of_every_kind_count(limit: int, words: list[str], message: str) -> None:
    recipe = Recipe.of(*words)
    with pytest.raises(PolicyRefusal, match=message):
        check_plan(Policy(epochs=limit), recipe)
    if "1e" not in message:
        check_plan(Policy(epochs=limit + 1), recipe)


@pytest.mark.parametrize(
    ("name", "step", "settings"),
    [
        ("fedavg", "train", {}),
        ("fedavg", "calibrate", {"encoder": NORMED, "batch_norm": "recalibrate"}),
        ("fedsc", "correlate", {}),
        ("fedstyle", "train", {"method": {"name": "fedstyle", "style_epochs": 2}}),
        ("fedrep", "train", {"encoder": NORMED, "batch_norm": "recalibrate"}),
        ("fedx", "train", {}),
        ("featarc", "train", {}),
        ("ditto", "train", {}),
        ("orchestra", "cluster", {}),
    ],
)
def test_no_answer_takes_more_passes_than_its_method_says(
    tmp_path: Path, name: str, step: str, settings: dict[str, Any]
) -> None:
    own = [f"{key}={value}" for key, value in settings.items() if isinstance(value, str)]
    recipe = Recipe.of(name, "clients=4", *own).changed(
        data=TINY["data"],
        encoder=settings.get("encoder", TINY["encoder"]),
        local={"epochs": 2, "batch": 6},
        **{key: value for key, value in settings.items() if key == "method"},
    )
    dataset = recipe.data.load()
    host = make_runtime(recipe, dataset, make_split(IID(), dataset, None, 4, 0), tmp_path)
    model = host.method.blueprint.shared()
    if step == "calibrate":
        down = {"encoder": {k: v for k, v in model.items() if k.startswith("encoder.")}}
    else:
        down = {"model": model}
    with counted_reading() as reading:
        done = host.perform(Task(step, 0, 1, 0, {}, None), codec.encode(down))
    assert done["up"] is not None  # type: ignore[index,call-overload]
    said = host.method.passes_of(step)
    assert 0.5 * said <= reading.passes <= said + 1e-6


def test_what_may_be_of_one_image_is_per_example() -> None:
    for words in (["method.k_min=1"], ["method.k_min=1", "method.local_clusters=100"]):
        recipe = Recipe.of("orchestra", *words)
        with pytest.raises(PolicyRefusal, match="sends `centroids` of the kind per_example"):
            check_plan(Policy(), recipe)
    check_plan(Policy(), Recipe.of("orchestra"))
    guarded = Recipe.of("orchestra", "method.k_min=1", "method.epsilon=1", "privacy.noise=system")
    check_plan(Policy(), guarded)
    with pytest.raises(PolicyRefusal, match="sends `total` of the kind per_example"):
        check_plan(Policy(), Recipe.of("diagnosis"), pictures=1)


@pytest.mark.parametrize(
    "name",
    ["fedavg", "fedsimclr", "fedsc", "orchestra", "fedstyle", "orchestra/c10-silo/orchestra@cpu"],
)
def test_ordinary_plans_are_within_the_default_policy(name: str) -> None:
    recipe = Recipe.of(name, "data=sites", "data.size=8", "data.channels=1")
    plan, _ = planned(recipe, recipe.clients)
    policy = Policy()
    policy.check_plan(policy.open_plan(json.loads(frame_of(plan))), method_of(plan), 50)


def test_a_plan_that_asks_some_of_the_sites_needs_late_joining() -> None:
    words = ["data=sites", "data.size=8", "data.channels=1", "participation.fraction=0.5"]
    plan, _ = planned(Recipe.of("fedavg", *words), 4)
    with pytest.raises(PolicyRefusal, match="asks only 2 of 4 sites.*`join_late` is false"):
        Policy().check_plan(plan, method_of(plan), 50)
    Policy(join_late=True).check_plan(plan, method_of(plan), 50)


def test_changes_of_a_view_must_be_likely_and_strong_to_count() -> None:
    still = {"crop_min": 1.0, "flip": 0.0, "jitter": 0.0, "gray": 0.0}
    for faint in (
        {"flip": 0.01},
        {"jitter": 1.0, "brightness": 0.01, "contrast": 0, "saturation": 0, "hue": 0.0},
        {"crop_min": 0.6},
        {"pad_crop": 1},
        {"rotate": 0.1},
        {"randaugment": 2, "randaugment_magnitude": 0},
    ):
        assert not changes_of(View(**{**still, **faint}))
    assert changes_of(View(**still, pad_crop=4)) == {"crop"}
    assert changes_of(View(**still, quarter_turn=True)) == {"quarter_turn"}


def test_a_plan_within_all_limits_passes() -> None:
    recipe = Recipe()
    limits = {"methods": ("fedavg",), "exchanges": ("train",), "kinds": ("weights", "scalar")}
    bounds = {"epochs": 2, "rounds": 20, "pictures": 100, "plans": (recipe.digest,)}
    check_plan(Policy(**limits, **bounds), recipe)  # type: ignore[arg-type]


def test_epochs_are_those_after_scaling() -> None:
    recipe = Recipe().changed(local={"epochs": 10, "for_clients": 100}, clients=20)
    check_plan(Policy(epochs=2), recipe)
    with pytest.raises(PolicyRefusal, match="local.epochs=2, but `epochs` is 1"):
        check_plan(Policy(epochs=1), recipe)


def test_a_methods_own_epochs_count_as_well() -> None:
    quiet = Policy(epochs=5, simulated_noise=True)
    check_plan(quiet, Recipe(method=Guarded))  # type: ignore[arg-type]
    recipe = Recipe(method=Guarded)  # type: ignore[arg-type]
    longer = replace(recipe.method, options={"head_epochs": 6})
    with pytest.raises(PolicyRefusal, match="method.head_epochs=6, but `epochs` is 5"):
        check_plan(quiet, recipe.model_copy(update={"method": longer}))


def test_rows_of_single_images_stay_unless_allowed() -> None:
    recipe = Recipe(method=Rows)  # type: ignore[arg-type]
    with pytest.raises(PolicyRefusal, match="sends `rows` of the kind per_example by .* show"):
        check_plan(Policy(), recipe)
    check_plan(Policy(kinds=("weights", "scalar", "per_example")), recipe)


def test_guarded_fields_need_noise_that_nobody_can_subtract() -> None:
    simulated = Recipe(method=Guarded, privacy=Privacy(noise="simulated"))  # type: ignore[arg-type]
    with pytest.raises(PolicyRefusal, match="privacy.noise=simulated, but `simulated_noise`"):
        check_plan(Policy(), simulated)
    check_plan(Policy(simulated_noise=True), simulated)
    system = simulated.model_copy(update={"privacy": Privacy(noise="system")})
    check_plan(Policy(), system)
    with pytest.raises(PolicyRefusal, match="guarded fields, but `epsilon` is 0"):
        check_plan(Policy(epsilon=0), system)
    check_plan(Policy(epsilon=0), Recipe())  # nothing of it is guarded


def test_delta_is_at_most_one_image() -> None:
    recipe = Recipe(method=Guarded, privacy=Privacy(noise="system"))  # type: ignore[arg-type]
    check_plan(Policy(delta=0.001), recipe, pictures=1_000)
    with pytest.raises(PolicyRefusal, match="`delta` is 0.001, above 1 / 1001: set it to 0.0005"):
        check_plan(Policy(delta=0.001), recipe, pictures=1_001)
    check_plan(Policy(delta=0.001), Recipe(), pictures=1_001)


def test_secure_aggregation_is_a_setting_of_the_plan() -> None:
    @dataclass(frozen=True)
    class Masked(Privacy):
        secure_aggregation: bool = True

    recipe = Recipe().model_copy(update={"privacy": Masked()})
    check_plan(Policy(secure_aggregation=True), recipe)


# ---- answers --------------------------------------------------------------------------------


def test_the_budget_is_spent_by_all_releases_together() -> None:
    one = {**RELEASE, "noise": "system"}
    limit = epsilon([one] * 3, 1e-5)
    policy = Policy(epsilon=limit)
    policy.check_release([], [])
    policy.check_release([one] * 2, [one])
    policy.check_release([], [one] * 3)
    for past, new in (([one] * 3, [one]), ([], [one] * 4)):
        with pytest.raises(PolicyRefusal, match=r"epsilon is .* at delta 1e-05, but `epsilon` is"):
            policy.check_release(past, new)
    policy.check_release([one] * 9, [])  # an answer without guarded fields still leaves
    Policy(epsilon=None).check_release([one] * 99, [one])


def test_the_default_budget_is_finite() -> None:
    bare = {**RELEASE, "sigma": 0.0, "noise": "system"}
    with pytest.raises(PolicyRefusal, match="epsilon is inf"):
        Policy().check_release([], [bare])


def test_an_answer_with_noise_from_the_seed_stays() -> None:
    simulated = {**RELEASE, "noise": "simulated"}
    for new in ([simulated], [RELEASE], [{**RELEASE, "noise": "system"}, simulated]):
        with pytest.raises(PolicyRefusal, match="noise can be subtracted"):
            Policy().check_release([], new)
    Policy(simulated_noise=True).check_release([], [simulated])


def test_a_release_that_cannot_be_counted_stays() -> None:
    odd = {"noise": "system", "sensitivity": math.nan, "sigma": 1.0}
    with pytest.raises(PolicyRefusal, match="cannot be counted"):
        Policy().check_release([], [odd])


def test_counts_and_sums_spend_one_budget_for_replaced_images() -> None:
    old = {**RELEASE, "noise": "system"}  # written before releases named their neighbours
    new = [
        {"sensitivity": 1.0, "scale": 9.0, "mechanism": "gaussian"},
        {"sensitivity": 1, "scale": 180.0, "mechanism": "discrete-laplace", "count": 21},
    ]
    new = [one | {"noise": "system", "neighbours": "add-remove"} for one in new]
    for past in ([], [old]):
        limit = epsilon([*past, *new], 1e-5, neighbours="replace")
        Policy(epsilon=limit).check_release(past, new)
        with pytest.raises(PolicyRefusal, match="after which epsilon is"):
            Policy(epsilon=0.999 * limit).check_release(past, new)
    assert epsilon(new, 1e-5) < epsilon(new, 1e-5, neighbours="replace") / 2
    odd = {**new[1], "mechanism": "laplace"}
    with pytest.raises(PolicyRefusal, match="cannot be counted"):
        Policy().check_release([], [odd])


# ---- counts on labelled images -----------------------------------------------------------------


def counting(*changes: str) -> Recipe:
    return Recipe.of("fedavg", "evaluate.sites=ridge", *changes)


def test_a_site_trains_in_a_plan_whose_evaluation_it_declines() -> None:
    for policy in (Policy(), Policy(exchanges=("train",)), Policy(epochs=2)):
        check_plan(policy, counting())
        for step in LABELLED:
            with pytest.raises(PolicyRefusal, match="`evaluation` is false"):
                policy.check_evaluation(counting(), step)
        policy.check_evaluation(counting(), "train")
    assert not Policy().evaluation_refusal(Recipe.of("fedavg"))


def test_a_site_that_evaluates_holds_the_exchanges_to_its_other_keys() -> None:
    allowed = Policy(evaluation=True)
    check_plan(allowed, counting())
    for step in LABELLED:
        allowed.check_evaluation(counting(), step)
    with pytest.raises(PolicyRefusal, match="can_evaluate"):
        check_plan(replace(allowed, exchanges=("train",)), counting())
    with pytest.raises(PolicyRefusal, match="statistic"):
        check_plan(replace(allowed, kinds=("weights", "scalar", "public")), counting())
    with pytest.raises(PolicyRefusal, match="`epochs`"):
        check_plan(replace(allowed, epochs=2), counting())
    check_plan(replace(allowed, epochs=4), counting())


def test_small_counts_stay() -> None:
    policy = Policy(evaluation=True, evaluation_least=20)
    with pytest.raises(PolicyRefusal, match=r"evaluate\.sites_least=10.*`evaluation_least` is 20"):
        policy.check_evaluation(counting(), "can_evaluate")
    policy.check_evaluation(counting("evaluate.sites_least=20"), "can_evaluate")
