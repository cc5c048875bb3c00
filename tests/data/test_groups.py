"""Images of one group, such as a patient, are in one part and at one client, or nothing runs."""

import numpy as np
import pytest
from PIL import Image

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.decoding import pool
from harmonium.data.grouping import regrouped, whole_groups
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import make_split, splits
from harmonium.data.sets.folder import Folder
from harmonium.data.sets.npz import Npz
from harmonium.data.sets.table import Table

RNG = np.random.default_rng
MOVING = ["iid", "quantity", "dirichlet", "lda", "orchestra", "pachinko", "rotation", "joint"]


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def archive(path, count=120, each=4, classes=3, **arrays):
    """Images with their own number as pixels, and groups of `each` whose members lie apart."""
    groups = np.arange(count) % (count // each)
    x = np.arange(count, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    columns = {
        "y": np.arange(count) % classes,
        "group": np.char.add("patient-", groups.astype(str)),
    }
    np.savez(path, x=x, **{**columns, **arrays})
    return path


def parts_of(data: Dataset) -> dict[str, set[int]]:
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    parts |= {"labelled": data.labelled} if data.labelled is not None else {}
    return {name: set(part.factors["group"].tolist()) for name, part in parts.items()}


def disjoint(sets):
    return sum(map(len, sets)) == len(set().union(*sets))


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_every_part_has_whole_groups(tmp_path, seed):
    path = str(archive(tmp_path / "a.npz"))
    data = Npz(path=path, validation=0.2, test=0.25, labelled=0.2, seed=seed).load()
    parts = parts_of(data)
    assert disjoint(parts.values()) and all(parts.values())
    assert len(data.test) == 28 or len(data.test) == 32
    assert abs(len(data.validation) - 0.2 * 90) <= 2
    counts = np.bincount(data.labelled.labels)
    assert (counts >= np.round(0.2 * np.bincount(data.train.labels))).all()
    total = sum(map(len, (data.train, data.validation, data.test, data.labelled)))
    assert total == 120 and Npz(path=path, seed=seed).load().digest != data.digest


def test_without_a_column_of_groups_nothing_changes(tmp_path):
    archive(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        np.savez(tmp_path / "b.npz", x=file["x"], y=file["y"])
    plain = Npz(path=str(tmp_path / "b.npz")).load()
    ignored = Npz(path=str(tmp_path / "a.npz"), group_column=None).load()
    assert np.array_equal(plain.test.pixels, ignored.test.pixels)
    assert "group" not in ignored.train.factors
    assert any("'group' is left out" in note for note in ignored.notes)


def test_the_column_may_have_another_name_and_its_values_are_kept_nowhere(tmp_path, home):
    path = archive(tmp_path / "a.npz")
    with np.load(path) as file:
        np.savez(tmp_path / "b.npz", x=file["x"], patient=file["group"])
    data = Npz(path=str(tmp_path / "b.npz"), group_column="patient").load()
    assert disjoint(parts_of(data).values()) and "patient" not in data.names
    kept = [file.read_bytes() for file in (home / "cache").rglob("*") if file.is_file()]
    assert kept and not any(b"patient-1" in content for content in kept)
    archive(tmp_path / "c.npz", group=np.arange(120) % 30 * 1000 + 7771)
    numbers = Npz(path=str(tmp_path / "c.npz"), test=0, validation=0).load().train.factors["group"]
    assert sorted(set(numbers.tolist())) == list(range(30))


def test_groups_too_large_for_a_share_are_an_error_with_a_share_that_works(tmp_path):
    path = str(archive(tmp_path / "a.npz", each=40))
    with pytest.raises(
        DataError, match=r"data.validation=0.1 is .* nearest .* 40 of 80: use data.validation=0.5"
    ):
        Npz(path=path, test=0.3).load()
    with pytest.raises(DataError, match=r"data.test=0.05.*data.test=0.33"):
        Npz(path=path, test=0.05, validation=0).load()
    data = Npz(path=path, test=0.33, validation=0).load()
    assert len(data.test) == 40
    with pytest.raises(DataError, match=r"data.labelled=0.1"):
        Npz(path=path, test=0, validation=0, labelled=0.1).load()


def test_a_group_in_two_parts_is_refused(tmp_path):
    x = np.zeros((6, 8, 8), np.uint8)
    groups = np.array([1, 1, 2, 2, 3, -1])
    arrays = {"train_x": x, "test_x": x, "train_group": groups, "test_group": groups + 2}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=r"2 groups .*train part.*test"):
        Npz(path=str(tmp_path / "a.npz")).load()
    data = Npz(path=str(tmp_path / "a.npz"), group_column=None).load()
    assert len(data.test) == 6


def test_images_without_a_label_do_not_stay_behind_in_training(tmp_path):
    labels = np.arange(120) % 3
    labels[60:90] = -1
    data = Npz(path=str(archive(tmp_path / "a.npz", y=labels)), labelled=0.1).load()
    assert disjoint(parts_of(data).values()) and (data.labelled.labels >= 0).all()
    total = sum(map(len, (data.train, data.validation, data.test, data.labelled)))
    note = next(note for note in data.notes if "without a label are left out" in note)
    assert int(note.split()[0]) == 120 - total > 0


def test_whole_groups_come_as_near_as_they_can():
    rng = RNG(0)
    for _ in range(200):
        groups = rng.integers(0, 8, 40)
        wanted = int(rng.integers(0, 40))
        taken = whole_groups(groups, wanted)
        assert all(len(set(taken[groups == group])) == 1 for group in set(groups.tolist()))
        assert abs(int(taken.sum()) - wanted) <= np.bincount(groups).max()
    assert not whole_groups(groups, 0).any() and whole_groups(groups, 40).all()


# ---- where groups come from ----------------------------------------------------------------------


def paint(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), level).save(path)


def test_a_column_of_a_table(tmp_path, home):
    lines = ["path;label;group"]
    for number in range(40):
        paint(tmp_path / f"{number}.png", number)
        lines.append(f"{number}.png;{number % 2};Jane Doe {number % 10}")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    spec = Table(path=str(tmp_path / "a.csv"), channels=1)
    assert disjoint(parts_of(spec.load()).values())
    assert "group" not in Table(path=spec.path, group_column=None).load().train.factors
    assert "group" not in Table(path=spec.path, group_column=None).load().names
    with pytest.raises(ConfigError, match="data.group_column=patient"):
        Table(path=spec.path, group_column="patient").load()
    kept = [file.read_bytes() for file in (home / "cache").rglob("*") if file.is_file()]
    assert not any(b"Jane" in content for content in kept)


def test_the_lowest_folder_may_be_the_group(tmp_path, home):
    for number in range(30):
        kind, patient = ("benign", "malignant")[number % 2], f"doe-{number % 10}"
        paint(tmp_path / "both" / kind / patient / f"{number}.png", number)
        paint(tmp_path / "bare" / patient / f"{number}.png", number)
    both = Folder(path=str(tmp_path / "both"), channels=1, group="folder").load()
    assert both.classes == ("benign", "malignant") and disjoint(parts_of(both).values())
    bare = Folder(path=str(tmp_path / "bare"), channels=1, group="folder").load()
    assert bare.classes == () and disjoint(parts_of(bare).values())
    kept = [file.read_bytes() for file in (home / "cache").rglob("*") if file.is_file()]
    assert kept and not any(b"doe-" in content for content in kept)
    with pytest.raises(ConfigError, match="data.group"):
        Folder(path=str(tmp_path / "both"), group="site").load()


def test_groups_of_arrays_in_memory(tmp_path, undrawn):
    images = RNG(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    data = {"images": images, "group": [f"p{k % 12}" for k in range(60)]}
    small = {"encoder.width": 4, "rounds": 1, "clients": 3, "engine.workers": 0}
    run = harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **small)
    assert any("groups are kept together" in note for note in run.notes)


# ---- clients -------------------------------------------------------------------------------------


def images(count=200, each=5, classes=4, seed=0):
    rng = RNG(seed)
    groups = rng.permutation(np.arange(count) % (count // each))
    labels = (groups + (rng.random(count) < 0.2)) % classes
    factors = {"group": groups, "coarse": labels // 2, "client": groups % 4}
    return Images(np.zeros((count, 8, 8, 1), np.uint8), labels, factors)


@pytest.mark.parametrize("rule", MOVING)
def test_rules_that_deal_images_out_give_whole_groups(rule):
    some = images()
    split = make_split(splits[rule](), some, "data", clients=4, seed=3)
    owners = [set(some.factors["group"][own].tolist()) for own in split.indices]
    assert disjoint(owners) and sum(len(own) for own in split.indices) == 200
    assert any("groups are kept together" in note for note in split.notes)
    if split.angles is not None:
        assert [len(own) for own in split.angles] == [len(own) for own in split.indices]
    assert make_split(splits[rule](), some, "data", clients=4, seed=3).digest == split.digest


def test_sizes_and_classes_stay_near_those_of_the_rule():
    some = images(2000)
    bare = Images(some.pixels, some.labels)
    sizes = [len(own) for own in make_split(splits["iid"](), some, "d", 8, 0).indices]
    assert max(sizes) - min(sizes) <= 10
    for rule in ("dirichlet", "orchestra"):
        ours, theirs = (make_split(splits[rule](alpha=0.3), x, "d", 8, 0) for x in (some, bare))
        shares = [
            np.array([np.bincount(some.labels[own], minlength=4) for own in split.indices])
            for split in (ours, theirs)
        ]
        assert np.abs(shares[0] - shares[1]).sum() < 0.35 * 2000


def test_rules_that_cannot_keep_groups_refuse_and_columns_that_do_keep_them_pass():
    some = images()
    for rule in (splits["by_class"](), splits["styles"](column="coarse")):
        with pytest.raises(DataError, match=rf"'{rule.name}' would divide \d+ groups.*split=iid"):
            make_split(rule, some, "data", clients=4, seed=0)
    assert len(make_split(splits["column"](), some, "data", clients=4, seed=0)) == 4
    crossed = Images(some.pixels, some.labels, {**some.factors, "client": np.arange(200) % 4})
    with pytest.raises(DataError, match="'column' would divide"):
        make_split(splits["column"](), crossed, "data", clients=4, seed=0)
    alone = Images(some.pixels, some.factors["group"] % 4, {"group": some.factors["group"]})
    assert len(make_split(splits["by_class"](), alone, "data", clients=4, seed=0)) == 4


def test_more_clients_than_groups_are_refused_and_as_many_all_get_one():
    some = images(40, each=10)
    with pytest.raises(DataError, match="4 groups.*at most 4"):
        make_split(splits["iid"](), some, "data", clients=5, seed=0)
    assert min(map(len, make_split(splits["iid"](), some, "data", clients=4, seed=0).indices)) == 10


def test_groups_of_very_unequal_size_leave_no_client_empty():
    groups = np.repeat(np.arange(6), [100, 1, 1, 1, 1, 1])
    given = np.array_split(RNG(0).permutation(105), 5)
    shares = regrouped(groups, np.zeros(105, np.int64), given, RNG(0))
    assert sorted(map(len, shares))[0] >= 1 and sum(map(len, shares)) == 105
