"""Newcomers: who they are, and that they are nowhere in training."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.images import Images
from harmonium.data.newcomers import in_turn, most_common
from harmonium.data.partition import Split, make_split, splits
from harmonium.data.splits.column import Column
from harmonium.data.splits.file import SavedSplit
from harmonium.data.splits.iid import IID
from harmonium.data.splits.styles import StyleSplit
from harmonium.recipe.schema import Recipe
from harmonium.sites.plan import planned


@pytest.fixture(scope="module")
def images() -> Images:
    count = 240
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, 1, 1, 1))
    rows = np.arange(count)
    factors = {"style": rows % 4, "client": rows % 12, "coarse": rows // 5 % 6 // 3}
    return Images(pixels, rows // 5 % 6, factors)


SETTINGS: dict[str, dict[str, Any]] = {
    "by_class": {"classes_per_client": 2},
    "file": {"path": "needed"},
    "quantity": {"min_size": 2},
}


@pytest.mark.parametrize("name", sorted(splits.table()))
def test_any_rule_may_have_newcomers_and_shares_stay(
    name: str, images: Images, tmp_path: Path
) -> None:
    given = dict(SETTINGS.get(name, {}))
    if name == "file":
        given["path"] = str(tmp_path / "split.npz")
        make_split(IID(), images, "d", 12, 0).save(tmp_path / "split.npz")
    rule = splits[name]
    plain = make_split(rule(**given), images, "d", 12, 3)
    made = make_split(rule(**given, newcomers=4), images, "d", 12, 3)
    assert plain.newcomers == () and len(plain.examples) == 12
    assert len(set(made.newcomers)) == 4 and len(made) == 12
    assert set(made.examples) == set(range(12)) - set(made.newcomers)
    assert all(made.examples[c] == len(made.indices[c]) for c in made.examples)
    for one, other in zip(plain.indices, made.indices, strict=True):
        assert np.array_equal(one, other)
    assert plain.digest != made.digest and "newcomers" not in plain.spec
    assert made.spec["newcomers"] == 4 and "never train" in made.notes[-1]
    made.save(tmp_path / "new.npz")
    again = Split.load(tmp_path / "new.npz")
    assert again.newcomers == made.newcomers and again.digest == made.digest


def test_the_digest_of_a_split_without_newcomers_is_what_it_was(images: Images) -> None:
    made = make_split(StyleSplit(), images, "d", 8, 0)
    settings = {"labels": 1.0, "labelled": 1.0, "merge": 1}
    settings |= {"column": "style", "beta": None, "equalise": True}
    spec = {"name": "styles", **settings, "clients": 8, "seed": 0}
    total = hashlib.sha256(json.dumps([spec, "d"], sort_keys=True).encode())
    for own in made.indices:
        total.update(len(own).to_bytes(8, "little") + own.astype("<i8").tobytes())
    assert made.digest == total.hexdigest()


def test_they_are_drawn_by_seed_and_of_every_style_in_turn(images: Images) -> None:
    drawn = set()
    for seed in range(8):
        made = make_split(StyleSplit(newcomers=4), images, "d", 12, seed)
        assert {client // 3 for client in made.newcomers} == {0, 1, 2, 3}  # three of each style
        drawn.add(made.newcomers)
        mixed = make_split(IID(newcomers=3), images, "d", 12, seed).newcomers
        drawn.add(mixed)
    assert len(drawn) > 10
    same = [make_split(StyleSplit(newcomers=2), images, "d", 8, 5).newcomers for _ in range(2)]
    assert same[0] == same[1]
    own = make_split(Column("style", newcomers=1), images, "d", 4, 0)
    assert len(own.newcomers) == 1


def test_turns() -> None:
    rng = np.random.default_rng(0)
    groups = ["a"] * 5 + ["b"] * 2 + ["c"]
    for _ in range(20):
        order = in_turn(groups, rng)
        assert sorted(order) == list(range(8))
        assert {groups[k] for k in order[:3]} == {"a", "b", "c"}
        assert sorted(groups[k] for k in order[3:5]) == ["a", "b"]
    assert most_common(np.array([3, -1, -1, -1, 3, 2])) == 3 and most_common(np.array([-1])) == -1


def test_all_but_they_are_merged(images: Images) -> None:
    apart = make_split(StyleSplit(newcomers=3), images, "d", 8, 1)
    one = make_split(StyleSplit(newcomers=3, merge=8), images, "d", 1, 1)
    assert len(one) == 4 and one.newcomers == (1, 2, 3) and list(one.examples) == [0]
    rest = [apart.indices[client] for client in sorted(apart.examples)]
    assert np.array_equal(one.indices[0], np.sort(np.concatenate(rest)))
    for new, before in zip(one.newcomers, apart.newcomers, strict=True):
        assert np.array_equal(one.indices[new], apart.indices[before])
    pairs = make_split(IID(newcomers=2, merge=2, labels=0.5), images, "d", 6, 1)
    assert len(pairs) == 6 and len(pairs.newcomers) == 2
    assert pairs.labelled is not None and len(pairs.labelled) == 6


def test_a_file_says_who_they_are(images: Images, tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    made = make_split(IID(newcomers=3), images, "d", 12, 7)
    made.save(path)
    read = make_split(SavedSplit(str(path), newcomers=3), images, "d", 12, 0)
    assert read.newcomers == made.newcomers
    whole = make_split(SavedSplit(str(path), newcomers=3, merge=12), images, "d", 1, 0)
    assert sum(whole.examples.values()) == sum(made.examples.values())
    for rule, clients, words in (
        (SavedSplit(str(path)), 12, "set split.newcomers=3"),
        (SavedSplit(str(path), newcomers=2), 12, "set split.newcomers=3"),
        (SavedSplit(str(path), newcomers=3, merge=2), 6, "leave split.merge out"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_split(rule, images, "d", clients, 0)
    other = Split(made.indices, made.spec, "d", made.digest, newcomers=(0, 1, 2))
    other.save(path)
    with pytest.raises(DataError, match="digest"):
        Split.load(path)
    for wrong in ((12,), (1, 1), (3, 2), (-1,), tuple(range(12))):
        with pytest.raises(DataError, match="damaged"):
            Split(made.indices, made.spec, "d", "", newcomers=wrong).validate(240)


def test_fractions_and_numbers_count_those_who_train() -> None:
    recipe = Recipe.of("fedavg", "clients=10", "split.newcomers=4", "participation.fraction=0.5")
    assert recipe.training == 6 and recipe.participation.size(recipe.training) == 3
    assert recipe.method_for((8, 8, 1), 2).world.clients == 10
    scaled = Recipe.of("fedavg", "clients=10", "split.newcomers=4", "local.for_fraction=0.25")
    assert scaled.method_for((8, 8, 1), 2).local.lr == pytest.approx(2 * scaled.local.lr)
    whole = Recipe.of("centralised", "clients=10", "split.newcomers=4")
    assert (whole.clients, whole.training, whole.split.merge) == (1, 1, 10)
    for words, message in (
        (["split.newcomers=10"], "there are 10 clients"),
        (["split.newcomers=-1"], "must be 0 or more"),
        (["split.newcomers=4", "participation.number=7"], "there are 6 clients"),
        (["split.newcomers=4", "participation.quorum=7"], "asks only 6"),
        (
            ["split.newcomers=4", "participation.number=6", "participation.over=0.5"],
            "all 6 clients",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Recipe.of("fedavg", "clients=10", *words)
    for words in (["split.newcomers=4", "split.merge=2"], ["split.newcomers=10"]):
        with pytest.raises(ConfigError, match="newcomers"):
            Recipe.of("centralised", "clients=10", *words)
    with pytest.raises(ConfigError, match="not joined"):
        planned(Recipe.of("fedavg", "data=sites", "data.size=8", "split.newcomers=1"), 4)
