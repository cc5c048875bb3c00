"""FedU and FedEMA: where a client begins, how far it drifts, and what the two must agree on."""

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.learning.client import Client, Examples
from harmonium.methods.fedu import ONLINE, distance
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import Trial, first_trial

BYOL = {"name": "byol", "target": "local"}
VIEWS = "easyfl"
SOURCES = ("train", "received")


def trial(name: str = "fedema", rounds: int = 3, **changes: Any) -> Trial:
    """Some rounds of a method; what is not a recipe's section is a setting of the method."""
    sections = {"participation", "objective", "local", "encoder", "batch_norm", "terms"}
    outside = {key: changes.pop(key) for key in sections & changes.keys()}
    tree = {"method": {"name": name, **changes}, "rounds": rounds, **outside}
    return made(name, json.dumps(tree, sort_keys=True))


@functools.cache
def made(name: str, tree: str) -> Trial:
    """Trials are only looked at, so that tests share them."""
    return first_trial(name, **json.loads(tree))


def averaged() -> Trial:
    """FedAvg of BYOL with targets that stay."""
    return made("fedavg", json.dumps({"objective": BYOL, "views": VIEWS, "rounds": 3}))


def client_of(found: Trial, number: int = 0, round: int = 4) -> Client:
    rng = seeds.torch_rng(0, "test", number)
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[number])
    state = dict(found.states[number])
    noise = Noise("simulated", rng)
    return Client(number, round, 9, examples, found.method.views, rng, noise, state=state)


def online(found: Trial) -> list[str]:
    """Names of the parameters of encoder, projector and predictor."""
    named = found.method.blueprint.named_parameters()
    return [key for key, _ in named if key.partition(".")[0] in ONLINE]


def equal(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def ends_alike(first: Trial, second: Trial) -> bool:
    """The same model at the server and the same targets at all clients, bit for bit."""
    targets = ([one.states[c]["parts"] for c in sorted(one.states)] for one in (first, second))
    same = all(equal(one, other) for one, other in zip(*targets, strict=True))
    return same and equal(first.server.model, second.server.model)


# ---- what the two must agree on ------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_without_memory_both_are_fedavg_of_byol_with_targets_that_stay(source: str) -> None:
    """X8, bit for bit."""
    plain = averaged()
    assert ends_alike(plain, trial("fedema", scaler=0.0, divergence=source))
    assert ends_alike(plain, trial("fedu", threshold=math.inf, divergence=source))
    if source == "train":
        assert not ends_alike(plain, trial("fedema"))
        assert not ends_alike(plain, trial("fedu", threshold=0.0))


@pytest.mark.parametrize("source", SOURCES)
def test_with_endless_lambda_every_client_is_alone(source: str) -> None:
    """X9, bit for bit; BatchNorm's statistics play no part in training."""
    kept = trial("fedema", scaler=math.inf, divergence=source)
    alone = first_trial("alone", objective=BYOL, views=VIEWS, rounds=3)
    for client, state in alone.states.items():
        own = kept.states[client]
        for key in online(kept):
            assert torch.equal(own["online"][key], state["parts"][key]), key
        parameters = [k for k, _ in kept.method.blueprint["target"].named_parameters()]
        for key in (f"target.{k}" for k in parameters):
            assert torch.equal(own["parts"][key], state["parts"][key]), key


def test_whose_target_the_recipe_names_does_not_matter() -> None:
    for target in ("mean", "fresh"):
        found = trial("fedu", 2, objective={"name": "byol", "target": target})
        assert found.digest == trial("fedu", 2).digest


def test_a_target_starts_as_the_first_model_received_and_depends_on_no_later_message() -> None:
    found = trial("fedu")
    method, client = found.method, client_of(found)
    noisy = {k: v + 0.5 if v.is_floating_point() else v for k, v in found.server.model.items()}
    slow = replace(method, objective=replace(method.objective, momentum=1.0))  # type: ignore[call-arg]
    held = dict(client.state["parts"])
    slow.train(client, SimpleNamespace(model=noisy))
    for key, _ in method.blueprint["target"].named_parameters():
        assert torch.equal(client.state["parts"][f"target.{key}"], held[f"target.{key}"])
    client.state = {}
    slow.train(client, SimpleNamespace(model=noisy))
    for key, _ in method.blueprint["target"].named_parameters():
        assert torch.equal(client.state["parts"][f"target.{key}"], noisy[key])


# ---- divergence ----------------------------------------------------------------------------------


def test_the_divergence_is_a_mean_of_lengths_over_convolutions() -> None:
    first = {
        "encoder.stem.0.weight": torch.zeros(2, 1, 3, 3),
        "encoder.stage1.0.branch.0.weight": torch.zeros(1, 1, 2, 2),
        "encoder.stage1.0.shortcut.0.weight": torch.zeros(4, 1, 1, 1),
        "encoder.stage1.0.branch.1.weight": torch.zeros(7),
        "encoder.pool.weight": torch.zeros(2, 2),
        "projector.0.weight": torch.zeros(2, 2),
    }
    second = {key: value + 2.0 for key, value in first.items()}
    assert distance(first, second) == pytest.approx((2 * math.sqrt(18) + 2 * math.sqrt(4)) / 2)
    assert distance(second, first) == distance(first, second) and distance(first, first) == 0
    flat = {key: value for key, value in first.items() if value.ndim < 4}
    assert distance(flat, second) == pytest.approx(4.0)  # no convolutions: all matrices
    assert distance({"encoder.0.bias": torch.zeros(2)}, {}) == 0


@pytest.mark.parametrize("name", ["fedu", "fedema"])
def test_the_divergence_is_that_of_the_last_training(name: str) -> None:
    found = trial(name, rounds=1)
    start = found.method.blueprint.shared()
    client = client_of(found, round=1)
    client.state = {}
    sent: Any = found.method.train(client, SimpleNamespace(model=start))["model"]
    assert client.state["divergence"] == distance(start, sent) > 0
    before = {**sent, **client.state["online"]}
    second: Any = found.method.train(client, SimpleNamespace(model=start))["model"]
    begun = (
        start
        if name == "fedu"
        else {
            k: torch.lerp(start[k], before[k], 0.7) for k in start if before[k].is_floating_point()
        }
    )
    assert client.state["divergence"] == pytest.approx(distance(begun, second), rel=1e-6)


def test_a_learning_rate_of_zero_makes_no_divergence() -> None:
    still = {"epochs": 1, "batch": 6, "lr": 0.0}
    for name in ("fedu", "fedema"):
        found = trial(name, 2, local=still)
        assert {state["divergence"] for state in found.states.values()} == {0.0}
        start = found.method.blueprint.shared()
        for key in online(found):
            torch.testing.assert_close(found.server.model[key], start[key])
        assert all("scaler" not in state for state in found.states.values())


def test_the_source_of_the_divergence() -> None:
    found = trial("fedema", divergence="received")
    client, model = client_of(found), found.server.model
    method: Any = found.method
    client.state["divergence"] = 123.0
    assert method.drift(client, model) == distance(client.state["online"], model)
    assert replace(method, divergence="train").drift(client, model) == 123.0


# ---- FedU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_a_predictor_stays_from_the_threshold_on(source: str) -> None:
    found = trial("fedu", divergence=source)
    client, model = client_of(found), found.server.model
    method: Any = found.method
    own = client.state["online"]
    assert set(own) == {k for k in online(found) if k.startswith(method.remembered())}
    far = method.drift(client, model)
    assert far > 0
    below = replace(method, threshold=math.nextafter(far, math.inf)).sync(client, model)
    assert equal(below, model)
    above = replace(method, threshold=far).sync(client, model)
    for key, value in above.items():
        stays = key in own and key.startswith("predictor.")
        assert torch.equal(value, own[key] if stays else model[key])
    assert any(not torch.equal(above[key], model[key]) for key in own)


def test_with_a_threshold_of_zero_the_average_of_predictors_is_never_taken() -> None:
    """After round 1 every client goes on with its own predictor, also when it has not moved."""
    found = trial("fedu", threshold=0.0)
    client, method = client_of(found), found.method
    for moved in (0.0, 5.0):
        client.state["divergence"] = moved
        begun: Any = method.sync(client, found.server.model)  # type: ignore[attr-defined]
        for key in client.state["online"]:
            assert torch.equal(begun[key], client.state["online"][key])
    new = client_of(found)
    new.state = {}
    assert method.begins_anew(new)  # type: ignore[attr-defined]


def test_fedu_keeps_no_more_than_its_rule_needs() -> None:
    for source, parts in (("train", {"predictor"}), ("received", {"encoder", "predictor"})):
        for state in trial("fedu", 1, divergence=source).states.values():
            assert {key.partition(".")[0] for key in state["online"]} == parts


# ---- FedEMA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_the_first_mix_has_tau_and_later_ones_go_with_the_divergence(source: str) -> None:
    found = trial("fedema", rounds=1, divergence=source)
    method: Any = found.method
    client, model = client_of(found, round=2), found.server.model
    assert "scaler" not in client.state
    assert method.own_share(client, model) == pytest.approx(0.7)
    scaler = client.state["scaler"]
    assert scaler == pytest.approx(0.7 / method.drift(client, model))
    if source == "train":
        client.state["divergence"] *= 0.5
        assert method.own_share(client, model) == pytest.approx(0.35)
        client.state["divergence"] *= 20
    else:
        client.state["online"] = {k: v + 9 for k, v in client.state["online"].items()}
    assert method.own_share(client, model) == 1.0
    assert client.state["scaler"] == scaler


def test_a_mix_is_of_parameters_alone() -> None:
    found = trial("fedema", encoder={"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"})
    method: Any = replace(found.method, scaler=0.1)  # type: ignore[call-arg]
    client, model = client_of(found), found.server.model
    client.state["divergence"] = 2.5
    begun = method.sync(client, model)
    own = client.state["online"]
    trained = {key for key, p in method.blueprint.named_parameters() if p.requires_grad}
    assert set(own) == trained and {key.partition(".")[0] for key in own} == set(ONLINE)
    for key, value in begun.items():
        wanted = 0.25 * own[key] + 0.75 * model[key] if key in own else model[key]
        torch.testing.assert_close(value, wanted)
    assert any(key.endswith("running_mean") and key.startswith("encoder") for key in model)
    assert equal(model, found.server.model)  # not changed in place


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_mixing_a_model_with_itself_changes_nothing(share: float) -> None:
    found = trial("fedema", rounds=1)
    client, model = client_of(found), found.server.model
    client.state |= {"online": {key: model[key] for key in client.state["online"]}}
    client.state |= {"divergence": share, "scaler": 1.0}
    assert equal(found.method.sync(client, model), model)  # type: ignore[attr-defined]


def test_a_client_that_has_not_moved_takes_the_average_and_finds_its_lambda_later() -> None:
    found = trial("fedema", rounds=1)
    client, method = client_of(found), found.method
    client.state["divergence"] = 0.0
    assert method.own_share(client, {}) == 0.0  # type: ignore[attr-defined]
    assert "scaler" not in client.state
    client.state["divergence"] = 0.5
    assert method.own_share(client, {}) == pytest.approx(0.7)  # type: ignore[attr-defined]


def test_a_fixed_lambda_is_everybodys_and_is_not_kept() -> None:
    found = trial("fedema", scaler=2.0)
    client, method = client_of(found), found.method
    assert all("scaler" not in state for state in found.states.values())
    for far, share in ((0.0, 0.0), (0.1, 0.2), (0.5, 1.0), (7.0, 1.0)):
        client.state["divergence"] = far
        assert method.own_share(client, {}) == pytest.approx(share)  # type: ignore[attr-defined]


def took_part(found: Trial) -> dict[int, list[int]]:
    rounds: dict[int, list[int]] = {}
    for line in found.lines:
        entry = json.loads(line)
        rounds.setdefault(entry["client"], []).append(entry["round"])
    return rounds


def test_absence_keeps_the_state_and_selective_forgets_it() -> None:
    found = trial("fedema", 4, participation={"number": 2})
    rounds = took_part(found)
    for client, state in found.states.items():
        assert state.get("round") == (rounds[client][-1] if client in rounds else None)
    other = trial("fedema", 4, participation={"number": 2}, selective=True)
    assert any(
        b - a > 1 for asked in rounds.values() for a, b in zip(asked, asked[1:], strict=False)
    )
    assert not equal(found.server.model, other.server.model)
    assert trial("fedema", 3, selective=True).digest == trial("fedema", 3).digest  # nobody is away
    for one in (found, other):
        assert one.again(reload=True).digest == one.digest


def test_selective_begins_anew_with_the_target_too() -> None:
    found = trial("fedema", selective=True)
    method = replace(found.method, objective=replace(found.method.objective, momentum=1.0))  # type: ignore[call-arg]
    got = SimpleNamespace(model=found.server.model)

    def target_is_received(round: int) -> bool:
        client = client_of(found, round=round)
        method.train(client, got)
        begun = client.state["parts"]
        names = [key for key, _ in method.blueprint["target"].named_parameters()]
        return all(torch.equal(begun[f"target.{key}"], got.model[key]) for key in names)

    assert not target_is_received(4)  # trained in round 3
    assert target_is_received(5)
    late = client_of(found, round=5)
    scaler = late.state["scaler"]
    method.train(late, got)
    assert late.state["scaler"] == scaler and late.state["round"] == 5


# ---- with other pieces ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "batch_norm"), [("fedu", "local"), ("fedema", "fedbn")])
def test_batch_norms_that_stay_do(name: str, batch_norm: str) -> None:
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    found = trial(name, 2, encoder=encoder, batch_norm=batch_norm, divergence="received")
    assert found.again(reload=True).digest == found.digest
    for state in found.states.values():
        assert "encoder.1.running_mean" in state["parts"]
        assert ("encoder.1.weight" in state["online"]) == (batch_norm == "local")


def test_parts_of_terms_are_the_averages() -> None:
    found = trial("fedema", 2, terms={"uv": {}})
    for state in found.states.values():
        assert {key.partition(".")[0] for key in state["online"]} == set(ONLINE)


def test_bytes_are_those_of_the_published_sizes() -> None:
    """Online network and predictor, 38,460,480 parameters, and BatchNorm's statistics."""
    method = Recipe.of("fedema/c10-noniid").method_for((32, 32, 3), 10)
    names = ("running_mean", "running_var", "num_batches_tracked")
    shared = method.blueprint.shared().items()
    buffers = sum(value.nbytes for key, value in shared if key.endswith(names))
    made = card(method)
    assert made.bytes["train"]["down"] == 153_841_920 + buffers
    assert made.bytes["train"]["up"] == 153_841_920 + buffers + 8
    assert made.parts["target"] == "local"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedu", {"objective": "simclr"}, "method=fedu needs BYOL.*set objective=byol"),
        ("fedema", {"objective": "simsiam"}, "method=fedema needs BYOL.*set objective=byol"),
        ("fedu", {"threshold": -1.0}, "method.threshold is -1.0"),
        ("fedu", {"threshold": math.nan}, "method.threshold is nan"),
        ("fedema", {"tau": 1.5}, "method.tau is 1.5"),
        ("fedema", {"scaler": -0.1}, "method.scaler is -0.1.*none"),
        ("fedema", {"scaler": math.nan}, "method.scaler is nan"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trial(name, **settings)


def test_endless_numbers_can_be_typed_and_stored() -> None:
    recipe = Recipe.of("fedema", "method.scaler=inf")
    assert recipe.method.options["scaler"] == math.inf
    assert Recipe.of("fedu", "method.threshold=.inf").method.options["threshold"] == math.inf


def test_what_fedsc_compares_with_can_be_stated() -> None:
    """Its targets begin anew, its rates and clips are its own; spectral contrast is in its form."""
    common = ["data=cifar10", "views=fedsc", "encoder=fixup-resnet20", "local.weight_decay=0.0005"]
    byol = Recipe.of("fedbyol", *common, "objective.target=fresh", "local.lr=0.1", "local.clip=1")
    assert (byol.objective.target, byol.local.lr, byol.local.clip) == ("fresh", 0.1, 1.0)  # type: ignore[attr-defined]
    form = ["objective.form=fedsc", "objective.mu=4", "objective.norm=none", "local.clip=3"]
    for words in (["fedspectral"], ["centralised", "objective=spectral"]):
        found = Recipe.of(*words, *common, *form, "local.lr=0.03")
        assert (found.objective.form, found.objective.mu, found.local.clip) == ("fedsc", 4.0, 3.0)  # type: ignore[attr-defined]
    for name in ("fedu", "fedema", "fedx"):
        found = Recipe.of(name, *common, "local.lr=0.03", "local.clip=1", "objective.norm=none")
        assert found.method.cls.name == name
