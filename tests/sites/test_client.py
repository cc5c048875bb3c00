"""What a site takes part with, and what it keeps to itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import (
    ConfigError,
    DataError,
    EngineError,
    PolicyRefusal,
    StoreError,
    WireError,
)
from harmonium.data.sets.sites import Sites
from harmonium.engines.runtime import StateRef, Task
from harmonium.recipe.schema import Recipe
from harmonium.sites.client import (
    SiteImages,
    _discreet,
    describe_budget,
    open_runtime,
    save_final_encoder,
)
from harmonium.sites.plan import classes_of, frame_of, method_of, planned
from harmonium.sites.policy import Policy

SMALL = ("encoder.width=4", "encoder.out=16", "local.epochs=1", "rounds=2")


def plan_of(*changes: str, method: str = "scaffold") -> Recipe:
    named = () if any(change.startswith("data=") for change in changes) else ("data=sites",)
    shape = ("data.size=8", "data.channels=1") if named else ()
    return planned(Recipe.of(method, *named, *shape, *SMALL, *changes), 3)[0]


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_fixes_the_shape_of_the_servers_own_images() -> None:
    plan, dataset = planned(Recipe.of("fedavg", "data=digits", "clients=7"), 3)
    assert (plan.data.size, plan.data.channels, plan.clients) == (8, 1, 3)
    assert dataset is not None and method_of(plan).world.side == 8
    assert planned(plan, 3)[0].digest == plan.digest  # a resumed run has the plan it began with


def test_a_server_without_images_has_none() -> None:
    plan, dataset = planned(Recipe.of("fedavg", "data=sites", "data.size=16"), 2)
    assert dataset is None and isinstance(plan.data, Sites)
    with pytest.raises(ConfigError, match="harmonium server start"):
        plan.data.load()


def test_a_plan_is_sent_without_the_engine() -> None:
    plans = [plan_of(), plan_of("engine.patience=7")]
    assert frame_of(plans[0]) == frame_of(plans[1]) and b"engine" not in frame_of(plans[0])


def test_labels_need_one_list_of_classes() -> None:
    with pytest.raises(ConfigError, match=r"data=sites data.classes=\[one,other\]"):
        plan_of(method="supervised")
    with pytest.raises(ConfigError, match="data.classes"):
        plan_of("data=digits", method="supervised")
    plan = plan_of("data.classes=[cat,dog]", method="supervised")
    assert classes_of(plan) == ("cat", "dog") and method_of(plan).world.classes == 2


# ---- images ------------------------------------------------------------------------------------


def archive(path: Path, **more: np.ndarray) -> str:
    pixels = np.arange(6, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2)
    np.savez(path, images=pixels, **more)
    return f"npz:{path}"


def test_a_bare_path_is_answered_with_the_right_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--data folder:{tmp_path}"):
        SiteImages.parse(str(tmp_path))
    archive(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=f"--data npz:{tmp_path / 'a.npz'}"):
        SiteImages.parse(str(tmp_path / "a.npz"))


def test_all_images_are_used_unless_a_setting_says_so(tmp_path: Path) -> None:
    words = archive(tmp_path / "a.npz")
    assert len(SiteImages.parse(words).load(8, 1)[1]) == 6
    assert len(SiteImages.parse(words, ["data.limit=4"]).load(8, 1)[1]) == 4
    parts = [
        SiteImages.parse(words, part=f"{k}/4").load(8, 1)[1].pixels[:, 0, 0, 0] for k in range(1, 5)
    ]
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))


@pytest.mark.parametrize(
    ("words", "changes", "part", "message"),
    [
        ("digits:x", [], "", "the data set digits has no path"),
        ("folder", [], "", "--data folder:PATH"),
        ("folders:x", [], "", "unknown data set 'folders'"),
        ("digits", ["rounds=3"], "", "rounds=3"),
        ("digits", ["data.limits=3"], "", "data.limit"),
        ("digits", [], "0/3", "write K/N"),
        ("digits", [], "4/3", "write K/N"),
    ],
)
def test_what_cannot_be_right_is_one_line(words, changes, part, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SiteImages.parse(words, changes, part)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_read_is_told_before_anything_connects(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "sub").mkdir()
    for place in (tmp_path, tmp_path / "sub"):
        Image.new("L", (8, 8)).save(place / "a.png")
    with pytest.raises(DataError, match="both directly in it"):
        SiteImages.parse(f"folder:{tmp_path}")


def test_broken_files_are_named_at_once_and_cost_no_run(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(9):
        Image.new("L", (8, 8 + number), number).save(tmp_path / f"{number}.png")
    for number in range(7):
        (tmp_path / f"broken-{number}.png").write_bytes(b"no image")
    (tmp_path / "scan.nii").write_bytes(b"no image")
    notes: list[str] = []
    SiteImages.parse(f"folder:{tmp_path}").inspect(notes.append)
    assert all(f"broken-{number}.png" in notes[0] for number in range(7))
    assert "not read as images: 1 .nii" in notes[1] and notes[-1] == "9 images to take part with"
    host = open_runtime(SiteImages.parse(f"folder:{tmp_path}"), plan_of(), tmp_path / "kept", 0)
    assert len(host.images) == 9
    with pytest.raises(DataError, match="7 of 16 images cannot be read: broken-0.png"):
        SiteImages.parse(f"folder:{tmp_path}", ["data.corrupt=refuse"]).inspect(notes.append)


def test_a_folder_of_other_files_says_what_it_holds(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.nii").write_bytes(b"DICM")
    with pytest.raises(DataError, match=r"3 .nii"):
        SiteImages.parse(f"folder:{tmp_path}")


def test_the_servers_evaluation_images_are_not_at_the_sites() -> None:
    """Of a set that both have, sites take the training part."""
    plan, dataset = planned(Recipe.of("fedavg", "data=digits"), 3)
    assert dataset is not None
    _, here = SiteImages.parse("digits").load(8, 1)
    trained = {image.tobytes() for image in here.pixels}
    held = [*dataset.test.pixels, *dataset.validation.pixels]
    assert sum(image.tobytes() in trained for image in held) <= 2  # digits that were drawn twice


def test_labels_stay_unless_the_method_reads_them(tmp_path: Path) -> None:
    words = archive(tmp_path / "a.npz", labels=np.array([0, 1, 0, 1, 0, 1]))
    host = open_runtime(SiteImages.parse(words), plan_of(), tmp_path, 1)
    assert not host.images.labelled and list(host.indices) == [1]


def test_sites_number_classes_as_the_plan_does(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("dog", "newt"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 9).save(tmp_path / "images" / name / "a.png")
    images = SiteImages.parse(f"folder:{tmp_path / 'images'}")
    plan = plan_of("data.classes=[cat,dog,newt]", method="supervised")
    assert open_runtime(images, plan, tmp_path, 0).images.labels.tolist() == [1, 2]
    with pytest.raises(DataError, match="no class 'newt'"):
        other = plan_of("data.classes=[cat,dog]", method="supervised")
        open_runtime(images, other, tmp_path, 0)


def test_what_was_spent_counts_before_a_plan_runs() -> None:
    noisy = (
        *("objective=spectral", "objective.form=fedsc", "objective.out=16"),
        *("method.epsilon=3", "privacy.noise=system"),
    )
    plan = plan_of(*noisy, method="fedsc")
    past = [{"mechanism": "gaussian", "sensitivity": 1.0, "scale": 2.0, "count": 1}]
    policy = Policy(epsilon=5.0)
    assert describe_budget(policy, plan_of(), past, 100) == ""  # nothing that is guarded
    assert "--images N" in describe_budget(policy, plan, past, None)
    fresh = describe_budget(policy, plan, [], 100)
    assert fresh.startswith("epsilon 0 at delta 1e-05 is spent; after 2 rounds it is at most 4.463")
    assert "allows at least 1 of 2 rounds" in describe_budget(Policy(epsilon=3.5), plan, [], 100)
    with pytest.raises(PolicyRefusal, match=r"epsilon \d[\d.]* at delta 1e-05 is spent") as told:
        describe_budget(Policy(epsilon=1.0), plan, past, 100)
    assert "\n" not in str(told.value)


# ---- what is kept --------------------------------------------------------------------------------


def test_the_digest_of_a_state_says_nothing_of_it(tmp_path: Path) -> None:
    """Else a server could try states until one fits."""
    import hashlib

    from harmonium.core import codec

    host = open_runtime(
        SiteImages.parse("digits", ["data.limit=40"]), plan_of(), tmp_path, 0, b"secret"
    )
    model = host.method.blueprint.shared()
    control = {
        k: v * 0 for k, v in model.items() if k in host.method.blueprint.layouts()["parameters"]
    }
    down = codec.encode({"model": model, "control": control})
    result = host.perform(Task("train", 0, 1, 0, {}, None), down)
    told = StateRef(**result["state"])
    content = (host.folder / told.file).read_bytes()
    assert told.digest != hashlib.sha256(content).hexdigest()
    assert set(host.read_state(told)) == {"control"}
    (host.folder / told.file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match="safetensors is missing"):
        host.read_state(told)
    (host.folder / told.file).unlink()
    with pytest.raises(StoreError, match="missing or damaged"):
        host.read_state(told)


def test_a_site_reads_its_images_as_the_plan_says_and_as_it_says_where_the_plan_does_not(
    tmp_path: Path,
) -> None:
    import harmonium

    scans = np.arange(4096, dtype=np.uint16).reshape(4, 32, 32)
    for number, scan in enumerate(scans):
        Image.fromarray(scan[:, :16]).save(tmp_path / f"{number}.png")
    words = [f"folder:{tmp_path}", ["data.depth=12"]]
    plan = plan_of("data.window=[2048,1024]", "data.fit=pad", method="fedavg")
    site = SiteImages.parse(*words)
    host = open_runtime(site, plan, tmp_path / "kept", 0)
    levels = sorted(host.images.pixels[..., 3, 0].mean(1))
    assert levels[0] == 0 and levels[3] == 255 and (host.images.pixels[..., 0, :] == 0).all()
    theirs = open_runtime(site, plan_of(method="fedavg"), tmp_path / "own", 0).images.pixels
    own = sorted(theirs.mean((1, 2, 3)))  # by its own 12 bits
    assert 0 < own[0] < 60 and 190 < own[3] < 255
    model, no = host.method.blueprint.shared(), {"statistics": {}}
    reading = site.for_plan(plan.data)
    path = save_final_encoder(plan, host, tmp_path, {"model": model, **no}, {}, {}, reading)
    about = harmonium.load_encoder(path).about
    assert (about["window"], about["fit"], about["depth"]) == ([2048, 1024], "pad", 12)


def test_the_encoder_that_is_taken_home_is_the_federations(tmp_path: Path) -> None:
    import harmonium

    plan = plan_of(method="fedavg")
    host = open_runtime(SiteImages.parse("digits"), plan, tmp_path, 0)
    model = host.method.blueprint.shared()
    path = save_final_encoder(plan, host, tmp_path, {"model": model, "statistics": {}}, {}, {})
    found = harmonium.load_encoder(path).state_dict()
    assert found and all(
        (model[f"encoder.{key.partition('.')[2]}"] == value).all() for key, value in found.items()
    )


def test_a_fault_of_the_sites_files_does_not_reach_the_server() -> None:
    """The messenger sends the text of an error to the server."""

    def fail(error: Exception) -> Any:
        def answer(*_: Any) -> Any:
            raise error

        return answer

    notes: list[Any] = []
    site: Any = SimpleNamespace(note=notes.append)
    site.answer = fail(StoreError("cannot write /data/doe-jane/log.jsonl"))
    with pytest.raises(EngineError) as told:
        _discreet(site)(b"", [])
    assert "doe-jane" not in str(told.value) and "StoreError" in str(told.value)
    assert "doe-jane" in notes[0] and "doe-jane" not in notes[0].brief
    site.answer = fail(WireError("the ask is for another site"))
    with pytest.raises(WireError, match="another site"):
        _discreet(site)(b"", [])


# ---- labels to evaluate with -------------------------------------------------------------------


def counting(*changes: str) -> Recipe:
    return plan_of("evaluate.sites=ridge", *changes, method="fedavg")


def test_sites_that_count_agree_on_their_classes() -> None:
    assert counting("data.classes=[cat,dog]").evaluate.sites_classes == ("cat", "dog")
    named = counting("evaluate.sites_classes=[dog,cat]")
    assert named.evaluate.sites_classes == ("dog", "cat")
    assert method_of(named).site_evaluation.classes == 2
    assert len(counting("data=digits").evaluate.sites_classes) == 10
    with pytest.raises(ConfigError, match=r"evaluate\.sites_classes"):
        counting()
    assert not plan_of(method="fedavg").evaluate.sites_classes


def test_labels_are_numbered_by_the_plans_names(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog", "fox"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            shade = Image.new("L", (8, 8), number)
            shade.save(tmp_path / "images" / name / f"{number}.png")
    site, notes = SiteImages.parse(f"folder:{tmp_path / 'images'}"), list[str]()
    plan = counting("evaluate.sites_classes=[dog,owl,cat]")
    runtime = open_runtime(site, plan, tmp_path, 0, note=notes.append)
    assert not runtime.images.labelled and runtime.labels.test is None
    assert np.bincount(runtime.labels.labels + 1).tolist() == [4, 4, 0, 4]  # fox, dog, owl, cat
    assert any("fox" in note for note in notes)
    other = counting("evaluate.sites_classes=[owl,hen]")
    assert open_runtime(site, other, tmp_path, 0).labels is None
    assert open_runtime(site, plan_of(method="fedavg"), tmp_path, 0).labels is None
    held = SiteImages.parse(f"folder:{tmp_path / 'images'}", ["data.test=0.5"])
    tested = open_runtime(held, plan, tmp_path, 0).labels.test
    assert tested.labelled and tested.shape == (8, 8, 1)


def test_groups_of_a_site_come_with_its_labels(tmp_path: Path) -> None:
    words = archive(tmp_path / "a.npz", labels=np.arange(6) % 2, group=np.arange(6) // 2)
    names = "evaluate.sites_classes=['0','1']"
    runtime = open_runtime(SiteImages.parse(words), counting(names), tmp_path, 0)
    shades = runtime.images.pixels[:, 0, 0, 0]
    assert runtime.labels.groups.tolist() == (shades // 2).tolist()


def test_each_part_of_a_published_set_has_its_part_of_the_test_images(tmp_path: Path) -> None:
    plan = counting("data=digits")
    tests = []
    for number in range(1, 4):
        site = SiteImages.parse("digits", part=f"{number}/3")
        tests.append(len(open_runtime(site, plan, tmp_path, 0).labels.test))
    whole = SiteImages.parse("digits").load(8, 1)[0].test
    assert sum(tests) == len(whole) and max(tests) - min(tests) <= 1
