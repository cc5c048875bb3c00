"""What holds for every rule, whatever the data: nothing twice, nothing endless, nothing unsaid."""

import inspect
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harmonium.core.errors import DataError
from harmonium.data.partition import SplitRule, make_split, splits

ALPHAS = (1e-4, 1e-2, 0.1, 1.0, 100.0, 1e5)
VARIANTS = (
    ("iid", {}, None),
    ("dirichlet", {}, "alpha"),
    ("dirichlet", {"prior": True}, "alpha"),
    ("pachinko", {}, "alpha"),
    ("pachinko", {}, "beta"),
    ("rotation", {}, "alpha"),
    ("joint", {}, "alpha"),
    ("joint", {}, "angle_alpha"),
    ("orchestra", {}, "alpha"),
    ("orchestra", {"rounding": "largest"}, "alpha"),
    ("orchestra", {"balance": False}, "alpha"),
    ("orchestra", {"balance": False, "rounding": "largest"}, "alpha"),
    ("by_class", {"classes_per_client": 2}, None),
    ("by_class", {"classes_per_client": 3, "assignment": "least_used"}, None),
    ("lda", {}, "alpha"),
    ("quantity", {}, "alpha"),
    ("styles", {}, None),
    ("styles", {"equalise": False}, None),
    ("styles", {}, "beta"),
    ("column", {}, None),
    ("file", {"path": ""}, None),
)
EQUAL = {"iid", "dirichlet", "pachinko", "rotation", "joint"}
FEW = [(name, given | ({key: 0.3} if key else {})) for name, given, key in VARIANTS]
ALL = [
    (name, given | ({key: value} if key else {}))
    for name, given, key in VARIANTS
    for value in (ALPHAS if key else (None,))
]


def named(pair):
    return "-".join([pair[0], *(f"{key}={value}" for key, value in pair[1].items() if value)])


@pytest.fixture(scope="module")
def many(make_images):
    """20,000 images: 10 unequal classes of 2 coarse ones, 4 unequal styles, 200 clients."""
    rng = np.random.default_rng(5)
    labels = rng.choice(10, 20_000, p=np.arange(1, 11) / 55)
    owner = np.concatenate([np.arange(200), rng.integers(0, 200, 19_800)])
    style = rng.choice(4, 20_000, p=[0.1, 0.2, 0.3, 0.4])
    return make_images(labels, coarse=labels // 5, client=owner, style=style)


@pytest.fixture(scope="module")
def rule_of(many, tmp_path_factory):
    """The rule called so; `file` gets one that was saved."""
    saved = tmp_path_factory.mktemp("saved") / "split.npz"
    make_split(splits["iid"](labels=0.5), many, "d", 200, 0).save(saved)

    def make(name, settings):
        if name == "file":
            settings = {"path": str(saved)}
        return splits[name](**settings)

    return make


def check(rule, images, split, clients):
    """Everything that any split keeps to."""
    assert len(split) == clients
    owner = np.full(len(images), -1)
    for client, own in enumerate(split.indices):
        assert own.dtype == np.int64 and len(own)
        assert own[0] >= 0 and own[-1] < len(images)
        steps = np.diff(own)
        assert (steps >= 0).all() if rule.name == "styles" else (steps > 0).all()
        assert (owner[own] == -1).all()  # nobody else holds any of them
        owner[own] = client
    sizes = np.array([len(own) for own in split.indices])
    if rule.name in EQUAL or getattr(rule, "rounding", "") == "largest" and rule.balance:
        assert (sizes == len(images) // clients).all()
    if rule.name == "styles" and rule.equalise:
        styles = len(np.unique(images.factors["style"]))
        assert (sizes == len(images) // styles // (clients // styles)).all()
    if rule.name in ("lda", "quantity"):
        assert sizes.min() >= rule.min_size and sizes.sum() == len(images)
    if rule.name in ("rotation", "joint"):
        for own, angles in zip(split.indices, split.angles, strict=True):
            assert angles.dtype == np.float32 and angles.shape == own.shape
            assert angles.min() >= 0 and angles.max() <= 360
    nobody = int((owner < 0).sum())
    if nobody and rule.name not in EQUAL | {"file"}:  # equal shares leave a known remainder
        assert f"{nobody} of {len(images)} training images are held by no client" in split.notes


def test_every_rule_is_tried_here():
    assert {name for name, _, _ in VARIANTS} == set(splits.table())


@pytest.mark.parametrize("pair", ALL, ids=named)
def test_a_split_is_right_and_quick_for_every_concentration(many, rule_of, pair):
    rule = rule_of(*pair)
    start = time.perf_counter()
    try:
        split = make_split(rule, many, "d", 200, 1)
    except DataError as error:
        # Without balance a class may go to few clients, and the others would have nothing.
        assert pair[1]["balance"] is False and pair[1]["alpha"] <= 0.1
        assert "of 200 clients without an image: use split.balance=true" in str(error)
        split = None
    assert time.perf_counter() - start < 2
    if split is not None:
        check(rule, many, split, 200)


@pytest.mark.parametrize("pair", FEW, ids=named)
def test_the_seed_decides(many, rule_of, pair):
    one, same, other = (make_split(rule_of(*pair), many, "d", 200, seed) for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    drawn = pair[0] not in ("column", "file")  # the others draw nothing
    equal = all(map(np.array_equal, one.indices, other.indices))
    assert equal != drawn


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_small_data_are_shared_out_or_refused_in_one_line(make_images, data):
    count = data.draw(st.integers(1, 60), "images")
    column = st.lists(st.integers(-1, 4), min_size=count, max_size=count)
    images = make_images(
        data.draw(column, "labels"),
        coarse=data.draw(column, "coarse"),
        style=data.draw(column, "styles"),
        client=data.draw(column, "clients"),
    )
    names = [pair for pair in VARIANTS if pair[0] != "file"]
    name, given, key = data.draw(st.sampled_from(names), "rule")
    given = given | ({key: data.draw(st.floats(1e-6, 1e6))} if key else {})
    if name in ("lda", "quantity"):
        given["min_size"] = data.draw(st.integers(1, 4))
    rule, clients = splits[name](**given), data.draw(st.integers(1, 12), "number of clients")
    try:
        split = make_split(rule, images, "d", clients, data.draw(st.integers(0, 99), "seed"))
    except DataError as error:
        assert "\n" not in str(error) and ": " in str(error)
        return
    check(rule, images, split, clients)


@pytest.mark.parametrize("pair", FEW, ids=named)
def test_images_without_labels_work_or_are_refused_in_one_line(many, make_images, rule_of, pair):
    images = make_images(np.full(len(many), -1), **many.factors)
    rule = rule_of(*pair)
    if not rule.needs_labels and getattr(rule, "beta", None) is None:
        check(rule, images, make_split(rule, images, "d", 200, 1), 200)
        return
    with pytest.raises(DataError, match=r"needs (labels|a label).*: (use|leave)") as error:
        make_split(rule, images, "d", 200, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(splits.table()))
def test_the_first_line_explains_the_rule(name):
    lines = [(cls.__doc__ or "").splitlines()[0] for cls in splits.table().values()]
    first = splits[name].__doc__.splitlines()[0]
    assert first.endswith((".", ").")) and 30 < len(first) < 100 and lines.count(first) == 1
    assert not first.startswith(splits[name].__name__ + "(")  # what a dataclass says by itself


def test_every_setting_is_explained_beside_it():
    for cls in splits.table().values():
        source = inspect.getsource(cls)
        for field in cls.__dict__.get("__annotations__", {}):
            if field not in SplitRule.__annotations__:
                line = next(row for row in source.splitlines() if row.startswith(f"    {field}: "))
                assert "  # " in line, f"{cls.__name__}.{field}"


def test_settings_of_all_rules_do_not_take_the_first_place():
    """Positions belong to the rule: a share of labels in front would be taken for its alpha."""
    rule = splits["dirichlet"](0.25)
    assert (rule.alpha, rule.labels) == (0.25, 1.0)
