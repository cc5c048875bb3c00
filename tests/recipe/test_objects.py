"""Arrays as data, networks and functions as encoders: what a Python program has in its hands."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import harmonium
from harmonium.core.errors import CallbackError, ConfigError, DataError, HarmoniumError, StoreError
from harmonium.data.sets.arrays import Arrays, keep_arrays
from harmonium.data.sets.digits import Digits
from harmonium.learning.encoders import given
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import open_runtime, read_recipe

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")
FAST: dict[str, Any] = {
    "rounds": 2,
    "clients": 2,
    "local.batch": 16,
    "views": "digits",
    "evaluate": {"k": 2, "health": 16, "labels_per_class": []},
    "engine": {"workers": 0},
}
SMALL = {**FAST, "encoder": {"name": "cnn-small", "width": 4, "out": 8}}
BITS = ("metrics.jsonl", "ledger.jsonl", "result.json", "encoder.safetensors")


def images(*shape: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


LABELS = np.arange(60) % 3


def test_arrays_train_resume_and_are_found_by_digest(tmp_path: Path, home: Path) -> None:
    pixels = images(60, 10, 10, 3)
    done = harmonium.run("fedavg", data=(pixels, LABELS), out=tmp_path / "a", **SMALL)
    spec = done.recipe.data
    assert isinstance(spec, Arrays) and "knn" in done.figures
    assert (home / "data" / "arrays" / spec.digest[:16] / "meta.json").exists()
    words = ["data=arrays", f"data.digest={spec.digest}"]  # as a command line has it
    again = harmonium.run("fedavg", *words, out=tmp_path / "b", **SMALL)
    workers = {**SMALL, "engine": {"workers": 1}}
    tensors = (torch.tensor(pixels), LABELS.tolist())
    other = harmonium.run("fedavg", data=tensors, out=tmp_path / "c", **workers)
    for name in BITS:
        wanted = (done.folder / name).read_bytes()
        assert (again.folder / name).read_bytes() == (other.folder / name).read_bytes() == wanted


def test_a_run_on_arrays_goes_on_without_them_and_refuses_others(
    tmp_path: Path, home: Path
) -> None:
    class Stop(harmonium.Callback):
        def round(self, row: Any, seconds: float) -> None:
            raise RuntimeError

    pixels, folder = images(60, 10, 10), tmp_path / "run"
    with pytest.raises(CallbackError):
        harmonium.run("fedavg", data=pixels, out=folder, callbacks=Stop(), **SMALL)
    stored = next((home / "data" / "arrays").iterdir())
    with pytest.raises(ConfigError, match="keeps its recipe"):
        harmonium.resume(folder, data=pixels[:50])
    stored.rename(tmp_path / "away")
    with pytest.raises(DataError, match="data=images"):
        harmonium.resume(folder)
    assert harmonium.resume(folder, data=pixels).rounds[-1]["round"] == 2


def test_settings_beside_arrays_are_kept() -> None:
    recipe = Recipe.of("fedavg", "data.validation=0.3", data=images(40, 8, 8), **{"data.size": 6})
    assert recipe.data.name == "arrays" and recipe.data.validation == 0.3
    assert recipe.data.load().train.shape == (6, 6, 1)
    assert Recipe.from_tree(recipe.tree()).digest == recipe.digest
    public = Recipe.of("fedavg", data="digits", public=images(40, 8, 8))
    assert public.data.name == "digits" and isinstance(public.public, Arrays)
    assert Recipe.of("fedavg", data=Digits(limit=50)).data == Digits(limit=50)


def test_parts_classes_and_columns_of_a_dict(tmp_path: Path) -> None:
    data = {
        "train": (images(60, 8, 8, 1), [["cat", "dog", "owl"][k] for k in LABELS]),
        "validation": {"images": images(9, 8, 8), "labels": ["dog"] * 9},
        "test": (images(12, 8, 8), ["owl"] * 12),
        "clients": np.repeat(["north", "south", "west"], 20),
        "domains": np.arange(60) // 30,
    }
    found = Arrays(digest=keep_arrays(data)["digest"]).load()
    assert (len(found.train), len(found.validation), len(found.test)) == (60, 9, 12)
    assert found.classes == ("cat", "dog", "owl") and set(found.test.labels) == {2}
    assert np.bincount(found.train.factors["domain"]).tolist() == [30, 30]
    assert found.names["client"] == ("north", "south", "west")
    settings = {**SMALL, "clients": 3, "rounds": 1}
    done = harmonium.run("fedavg", data=data, split="column", out=tmp_path / "run", **settings)
    about = json.loads((done.folder / "about.json").read_text())
    assert about["clients"] == ["north", "south", "west"]
    texts = np.array(["cat", "dog"] * 2, object)
    kept = Arrays(digest=keep_arrays((images(4, 8, 8), texts))["digest"], validation=0).load()
    assert kept.classes == ("cat", "dog")
    named = keep_arrays({"images": images(4, 8, 8), "labels": [0, 1, 1, 0], "classes": ["a", "b"]})
    assert Arrays(digest=named["digest"], validation=0, test=0.25).load().classes == ("a", "b")


def test_the_callers_arrays_stay_as_they_are_and_the_digest_is_of_their_content() -> None:
    pixels, labels = images(12, 8, 8, 3), np.array([5, 9] * 6)
    first = keep_arrays((pixels, labels))["digest"]
    assert labels.tolist() == [5, 9] * 6
    strided = np.asfortranarray(pixels)
    assert keep_arrays([strided, torch.from_numpy(labels)])["digest"] == first
    assert keep_arrays((pixels, labels[::-1].copy()))["digest"] != first
    pixels[0, 0, 0, 0] ^= 1
    assert keep_arrays((pixels, labels))["digest"] != first


def test_labels_do_not_reach_tasks_that_do_not_declare_them(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 1}
    data = (images(60, 8, 8), LABELS)
    harmonium.run("fedavg", data=data, out=tmp_path / "a", **settings)
    assert not open_runtime(tmp_path / "a").images.labelled
    harmonium.run("fedavg", data=data, objective="supervised", out=tmp_path / "b", **settings)
    assert open_runtime(tmp_path / "b").images.labelled


def test_a_split_by_column_says_how_arrays_are_given_clients(tmp_path: Path) -> None:
    pixels, settings = images(60, 8, 8), {**SMALL, "rounds": 1, "split": "column", "clients": 3}
    with pytest.raises(DataError, match='no such column: give .*"clients": clients}') as no:
        harmonium.run("fedavg", data=(pixels, LABELS), **settings)
    assert "\n" not in str(no.value) and str(no.value).endswith("split=iid")
    with pytest.raises(DataError, match='"site": site}, or choose split.column from: client'):
        data = {"images": pixels, "labels": LABELS, "clients": np.arange(60) % 3}
        harmonium.run("fedavg", data=data, **{**settings, "split.column": "site"})
    named = {"images": pixels, "labels": LABELS, "clients": ["north", "south", "west"] * 20}
    result = harmonium.run("fedavg", data=named, out=tmp_path / "run", **settings)
    assert result.recipe.split.name == "column"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (images(9, 8, 8, 3) / 255, "float64"),
        (torch.zeros(9, 8, 8, 3), "float32"),
        (images(9, 8, 8).astype(np.int64), "int64"),
        (images(9, 3, 8, 8), "channels first"),
        (images(9, 8, 8, 5), r"\(9, 8, 8, 5\)"),
        (images(8, 8, 3), r"\(8, 8, 3\)"),
        (images(8, 8), r"\(8, 8\)"),
        (images(0, 8, 8), "no images"),
        ((images(9, 8, 8), [0, 1]), "9 images"),
        ((images(9, 8, 8), np.zeros(9)), "float64"),
        ((images(9, 8, 8), np.array([object()] * 9)), "object"),
        ((images(9, 8, 8), [0] * 9, [1] * 9), "tuple of 3"),
        ([images(8, 8), images(9, 9)], "list of 2|8, 8"),
        (np.array([object()] * 3), "object"),
        ({"train": images(9, 8, 8), "tset": images(9, 8, 8)}, "tset"),
        ({"test": images(9, 8, 8)}, "test"),
        ({"train": images(9, 8, 8), "images": images(9, 8, 8)}, "leave one out"),
        ({"train": images(9, 8, 8), "test": images(9, 9, 9)}, "shapes"),
        ({"train": images(9, 8, 8), "clients": [1, 2]}, "clients"),
        (object(), "object"),
        (nn.Linear(2, 2), "Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_as_data_is_one_line_without_its_content(data: Any, words: str) -> None:
    with pytest.raises(HarmoniumError, match=words) as refused:
        Recipe.of("fedavg", data=data)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


# ---- encoders ------------------------------------------------------------------------------------


def network(wide: int = 4, norm: bool = False) -> nn.Module:
    norms: list[nn.Module] = [nn.BatchNorm2d(wide)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, wide, 3, 2, 1), *norms, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


OWN = """
    import dataclasses
    from torch import nn

    def build(channels: int, side: int, width: int = 4, act=nn.ReLU) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3), act(), nn.Flatten(), nn.LazyLinear(6))

    def small(channels: int, side: int, width: int = 4) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def unmarked(channels, side):
        return small(channels, side)

    def keyed(*, channels: int, side: int) -> nn.Module:
        return small(channels, side)

    def needy(channels: int, side: int, width: int) -> nn.Module:
        return small(channels, side, width)

    def wrong(channels: int, side: int) -> nn.Module:
        return 7

    def maps(channels: int, side: int) -> nn.Module:
        return nn.Conv2d(channels, 4, 3)

    class Wide:
        def __init__(self, width: int = 4) -> None:
            self.width = width

        def build(self, channels: int, side: int) -> nn.Module:
            return small(channels, side, self.width)

    class Net(nn.Module):
        pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_nets.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    import own_nets  # type: ignore[import-not-found]

    yield own_nets
    sys.modules.pop("own_nets", None)


def test_a_function_is_an_encoder_in_every_process(own: Any, tmp_path: Path) -> None:
    data = {"name": "shapes", "size": 10, "limit": 60, "channels": 1}
    words = {**FAST, "data": data, "batch_norm": "recalibrate"}
    done = harmonium.run("fedavg", encoder=own.small, out=tmp_path / "a", **words)
    assert done.recipe.tree()["encoder"] == {"name": "own_nets:small", "width": 4}
    processes = {**words, "engine": {"workers": 1}}
    named = {"name": "own_nets:small"}
    other = harmonium.run("fedavg", encoder=named, out=tmp_path / "b", **processes)
    for name in BITS:
        assert (done.folder / name).read_bytes() == (other.folder / name).read_bytes()
    loaded = harmonium.load_encoder(done.folder)
    assert loaded.features == 4 and loaded.embed(images(5, 10, 10)).shape == (5, 4)
    del sys.modules["own_nets"]
    with pytest.raises(StoreError, match="import that module"):
        harmonium.load_encoder(done.folder)
    again = harmonium.load_encoder(done.folder, network=own.small)
    assert torch.equal(again(images(5, 10, 10)), loaded(images(5, 10, 10)))


def test_settings_of_a_function_and_of_a_class_with_build(own: Any) -> None:
    for name in ("small", "Wide"):
        recipe = Recipe.of("fedavg", f"encoder=own_nets:{name}", "encoder.width=7")
        assert recipe.encoder.features_for(1, 8) == 7
        assert Recipe.from_tree(recipe.tree()).digest == recipe.digest
        assert Recipe.of("fedavg", encoder=getattr(own, name), **{"encoder.width": 7}) == recipe
    assert [f.name for f in dataclasses.fields(Recipe.of("fedavg", encoder=own.build).encoder)] == [
        "width"
    ]
    lazy = Recipe.of("fedavg", encoder=own.build).encoder
    torch.manual_seed(1)
    first = lazy.build(1, 8).state_dict()
    torch.manual_seed(1)
    second = lazy.build(1, 8).state_dict()
    assert lazy.features_for(1, 8) == 6 and first["3.weight"].shape == (6, 144)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    with pytest.raises(ConfigError, match=r"encoder\.depth"):
        Recipe.of("fedavg", "encoder=own_nets:small", "encoder.depth=3")
    with pytest.raises(ConfigError, match=r"encoder\.width"):
        Recipe.of("fedavg", "encoder=own_nets:small", "encoder.width=wide")


@pytest.mark.parametrize(
    "name", ["unmarked", "keyed", "needy", "Net", "os:system", "subprocess:Popen", "own_nets:none"]
)
def test_a_recipe_calls_nothing_but_what_makes_networks(own: Any, name: str) -> None:
    path = name if ":" in name else f"own_nets:{name}"
    with pytest.raises(ConfigError, match=path.partition(":")[2]):
        Recipe.of("fedavg", f"encoder={path}")
    if ":" not in name:
        with pytest.raises(ConfigError):
            Recipe.of("fedavg", encoder=getattr(own, name))


@pytest.mark.parametrize(("name", "words"), [("wrong", "int"), ("maps", "Flatten")])
def test_what_is_no_encoder_is_refused_before_anything_runs(
    own: Any, name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        harmonium.run("fedavg", encoder=getattr(own, name), out=tmp_path / "run", **FAST)
    assert not (tmp_path / "run").exists()


def test_a_function_that_no_process_can_find_is_refused() -> None:
    def inside(channels: int, side: int) -> nn.Module:
        return network()

    for value in (inside, lambda channels, side: network()):
        with pytest.raises(ConfigError, match="module:build"):
            Recipe.of("fedavg", encoder=value)


@pytest.mark.parametrize("policy", ["average", "local", "fedbn", "recalibrate"])
def test_a_network_trains_under_every_treatment_of_batch_norm(policy: str, tmp_path: Path) -> None:
    words = {**FAST, "data": "digits", "data.limit": 60, "batch_norm": policy}
    first = network(norm=True)
    weights = {key: value.clone() for key, value in first.state_dict().items()}
    done = harmonium.run("fedavg", encoder=first, out=tmp_path / "run", **words)
    assert done.figures["knn"] > 0
    assert all(torch.equal(value, weights[key]) for key, value in first.state_dict().items())


def test_a_network_begins_with_its_own_weights_and_is_handed_over(tmp_path: Path) -> None:
    first = network()
    words = {**FAST, "data": "digits", "data.limit": 60, "engine": {}}  # workers: left to choose
    done = harmonium.run("fedavg", "local.lr=0", encoder=first, out=tmp_path / "run", **words)
    with pytest.raises(StoreError, match="network="):
        harmonium.load_encoder(done.folder)
    for given_again in (network(), lambda channels, side: network()):
        loaded = harmonium.load_encoder(done.folder, network=given_again)
        state = loaded.network.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in first.state_dict().items())
        assert loaded.features == 16
    with pytest.raises(StoreError):
        harmonium.load_encoder(done.folder, network=network(5))
    with pytest.raises(ConfigError, match="network"):
        harmonium.load_encoder(done.folder, network=7)  # type: ignore[arg-type]


def test_a_network_needs_this_process_and_is_given_again_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(harmonium.Callback):
        def round(self, row: Any, seconds: float) -> None:
            raise RuntimeError

    words = {**FAST, "data": "digits", "data.limit": 60}
    for engine in ({"workers": 2}, {"kind": "flower"}):
        with pytest.raises(ConfigError, match="module:build"):
            Recipe.of("fedavg", encoder=network(), engine=engine)
    first = network()
    calm = harmonium.run("fedavg", encoder=first, out=tmp_path / "calm", **words)
    with pytest.raises(CallbackError):
        harmonium.run("fedavg", encoder=first, out=tmp_path / "a", callbacks=Stop(), **words)
    monkeypatch.setattr(given, "_NETWORKS", {})  # another process
    given._features.cache_clear()
    with pytest.raises(ConfigError, match="module:build") as refused:
        harmonium.resume(tmp_path / "a")
    assert "encoder=module" in str(refused.value)
    with pytest.raises(ConfigError, match="other layers"):
        harmonium.resume(tmp_path / "a", encoder=network(5))
    harmonium.resume(tmp_path / "a", encoder=network())  # other weights: those of the run count
    for name in BITS:
        assert (tmp_path / "a" / name).read_bytes() == (calm.folder / name).read_bytes()
    harmonium.run("fedavg", out=tmp_path / "b", **SMALL | {"data": "digits", "rounds": 1})
    with pytest.raises(ConfigError, match="cnn-small"):
        harmonium.resume(tmp_path / "b", encoder=network())
    assert read_recipe(tmp_path / "a").digest == calm.recipe.digest


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("divergence-aware", ["objective=byol"]),
        ("fedper", []),
        ("fedavg", ["objective=byol", "local.dp_clip=1", "objective.norm=none"]),
        ("fedavg", ["privacy.secure_aggregation=true"]),
    ],
)
def test_checks_of_a_recipe_look_at_images_that_the_network_takes(
    method: str, words: list[str]
) -> None:
    only = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))  # of 8 x 8 grey ones
    recipe = Recipe.of(method, *words, encoder=only, data="digits", clients=3)
    assert recipe.any_method().blueprint["encoder"] is not None


def test_methods_with_a_network_can_be_compared(tmp_path: Path) -> None:
    words = {**FAST, "data": "digits", "data.limit": 60, "rounds": 1}
    found = harmonium.compare(
        "fedavg", "fedbyol", "compare.references=none", encoder=network(norm=True),
        out=tmp_path / "both", **words,
    )  # fmt: skip
    assert not found.failed and "fedbyol" in repr(found)


def test_networks_that_cannot_be_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without weights"):
        Recipe.of("fedavg", encoder=nn.Flatten())
    with pytest.raises(ConfigError, match="lazy"):
        Recipe.of("fedavg", encoder=nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))
    for wrong in (nn.Conv2d(1, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(8, 2)):
        with pytest.raises(ConfigError, match=type(wrong).__name__):
            harmonium.run("fedavg", encoder=wrong, data="digits", out=tmp_path / "a", **FAST)
    assert not (tmp_path / "a").exists()


def test_a_notebooks_function_works_in_its_own_process(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(
        "import harmonium\nfrom torch import nn\n"
        "def build(channels: int, side: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 4))\n"
        "words = dict(data='digits', clients=2, rounds=1)\n"
        "small = {'evaluate.labels_per_class': [], 'data.limit': 60, 'engine.workers': 0}\n"
        "print(harmonium.run('fedavg', encoder=build, out='run', **words, **small))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "<Result fedavg on digits" in done.stdout, done.stderr
    with pytest.raises(ConfigError, match="__main__:build"):
        harmonium.resume(tmp_path / "run")
