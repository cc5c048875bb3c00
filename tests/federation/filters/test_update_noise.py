"""Whole clients protected: changes are shortened, get their noise where it is said, and count."""

import json
import math
from typing import Any

import pytest
import torch
from scipy import stats

from harmonium.core.errors import ConfigError
from harmonium.core.types import Weights
from harmonium.data.augment.views import preset
from harmonium.federation.card import card
from harmonium.federation.filters.update_noise import Updates
from harmonium.learning.client import Client
from harmonium.privacy.budget import epsilon
from harmonium.privacy.mechanisms import Noise, Randomness
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, first_trial

PLAIN: dict[str, Any] = {"objective": {"name": "simclr", "norm": "none"}, "split": "iid"}


def client_of(key: int = 0, source: Randomness = "simulated") -> Client:
    rng = torch.Generator().manual_seed(key)
    return Client(0, 1, 1, None, preset("digits"), rng, Noise(source, rng))  # type: ignore[arg-type]


def weights(seed: int, size: float = 1.0) -> Weights:
    rng = torch.Generator().manual_seed(seed)
    return {
        "a": size * torch.randn(20, 30, generator=rng),
        "b": size * torch.randn(7, generator=rng),
    }


def apart(one: Weights, other: Weights) -> float:
    return math.sqrt(sum(float((one[k].double() - other[k]).square().sum()) for k in one))


def trial(rounds: int = 2, **privacy: Any) -> Trial:
    return first_trial("fedavg", **PLAIN, rounds=rounds, privacy=privacy)


def entries(found: Trial) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.lines]


def test_a_large_change_is_shortened_and_keeps_its_direction() -> None:
    before, after = weights(0), weights(1)
    sent = Updates(0.5).at_client(client_of(), before, after)
    assert apart(before, sent) == pytest.approx(0.5, rel=1e-5)
    ratio = (sent["a"] - before["a"]) / (after["a"] - before["a"])
    assert ratio.std() < 1e-5
    # Whatever two trainings end with, what is sent lies at most twice the clip apart.
    far = {key: 2 * before[key] - part for key, part in after.items()}
    assert apart(sent, Updates(0.5).at_client(client_of(), before, far)) == pytest.approx(
        1, rel=1e-5
    )


@pytest.mark.parametrize("norm", [0.501, 0.75, 1.5, 100.0])
def test_no_change_is_longer_than_the_clip(norm: float) -> None:
    before, way = weights(0), weights(1)
    size = apart(way, {key: torch.zeros_like(part) for key, part in way.items()})
    after = {key: before[key] + norm / size * part for key, part in way.items()}
    sent = Updates(0.5).at_client(client_of(), before, after)
    assert apart(before, sent) == pytest.approx(0.5, rel=1e-4)


def test_a_small_change_without_noise_is_left_alone() -> None:
    before = weights(0)
    after = {key: part + 1e-4 for key, part in before.items()}
    assert Updates(0.5).at_client(client_of(), before, after) is after


def test_noise_at_the_client_is_of_its_size_and_noted() -> None:
    """Around the shortened change, in every number: 1.5 times twice the clip."""
    before, after = weights(0), weights(1)
    clean = Updates(0.5).at_client(client_of(), before, after)
    client = client_of()
    sent = Updates(0.5, noise=1.5).at_client(client, before, after)
    noise = torch.cat([(sent[key] - clean[key]).flatten() for key in sent]).double().numpy()
    assert stats.kstest(noise, "norm", args=(0, 1.5)).pvalue > 1e-3
    assert noise.std() == pytest.approx(1.5, rel=0.1)
    (told,) = client.releases
    assert (told.field, told.sensitivity, told.scale, told.neighbours) == (
        "model",
        1.0,
        1.5,
        "client",
    )
    assert client.was_released("model", sent)
    sent["b"] += 1e-3
    assert not client.was_released("model", sent)


def test_a_broken_training_sends_noise_and_tells_nothing() -> None:
    before = weights(0)
    after = {**weights(1), "b": torch.full((7,), math.nan)}
    sent = Updates(0.5, noise=0.1).at_client(client_of(), before, after)
    assert all(part.isfinite().all() for part in sent.values())
    assert apart(before, sent) < 0.1 * 1.2 * math.sqrt(607)
    bare = Updates(0.5).at_client(client_of(), before, after)
    assert bare["b"].isnan().any()  # the server refuses it by name


def test_noise_of_the_server_follows_the_largest_share() -> None:
    mean = {"a": torch.zeros(100, 100)}
    made = Updates(0.5, noise=2.0, place="server", source="simulated")
    for shares, most in (({0: 1.0, 1: 1.0}, 0.5), ({0: 30.0, 1: 10.0}, 0.75)):
        noisy = made.at_server(mean, shares, (0, 1, 0))["a"]
        assert noisy.std().item() == pytest.approx(2.0 * 1.0 * most, rel=0.03)
        assert torch.equal(noisy, made.at_server(mean, shares, (0, 1, 0))["a"])
        assert not torch.equal(noisy, made.at_server(mean, shares, (0, 2, 0))["a"])


@pytest.mark.parametrize("place", ["client", "server"])
def test_a_round_protects_and_counts_every_client(place: str) -> None:
    """Two rounds cost what two releases do, lost or not, and repeat and resume to the bit."""
    found = trial(update_clip=0.1, update_noise=3.0, update_place=place)
    one = {"sensitivity": 1.0, "sigma": 3.0}
    assert found.server.account.spent(0) == pytest.approx(epsilon([one] * 2, 1e-5))
    for entry in entries(found):
        (told,) = entry["releases"]
        assert (told["neighbours"], told["noise"]) == ("client", "simulated")
        assert told["scale"] / told["sensitivity"] == pytest.approx(3.0)
    declared = found.method.exchanges()["train"].up["model"]
    assert declared.guarded is (place == "client")
    assert found.again(reload=True).digest == found.digest
    assert "shortened to 0.1 and gets noise by the" in card(found.method).text()


def test_the_average_moves_by_no_more_than_the_clip() -> None:
    still = first_trial(
        "fedavg", **PLAIN, rounds=1, local={**TINY["local"], "lr": 0.0}
    ).server.model
    moved = {clip: trial(1, update_clip=clip).server.model for clip in (1e-3, 1e6)}
    assert apart(still, moved[1e-3]) <= 1.01e-3 < apart(still, moved[1e6])
    free = first_trial("fedavg", **PLAIN, rounds=1).server.model
    assert all(torch.equal(moved[1e6][key], free[key]) for key in free)


def test_noise_of_the_server_is_in_the_model_and_less_than_of_clients() -> None:
    quiet = trial(1, update_clip=0.1).server.model
    noisy = {
        place: trial(1, update_clip=0.1, update_noise=1.0, update_place=place).server.model
        for place in ("client", "server")
    }
    count = sum(part.numel() for part in quiet.values())
    size = {place: apart(quiet, model) / math.sqrt(count) for place, model in noisy.items()}
    assert size["server"] == pytest.approx(0.2 / 4, rel=0.05)  # four clients of one size
    assert size["client"] == pytest.approx(0.2 / 2, rel=0.05)  # the mean of four noises


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"privacy": {"update_noise": 1.0}}, "privacy.update_noise needs privacy.update_clip"),
        ({"privacy": {"update_clip": 0.0}}, "privacy.update_clip is 0.0"),
        ({"privacy": {"update_clip": 1.0}, "method": "alone"}, "alone sends no model"),
        (
            {"privacy": {"update_clip": 1.0}, "method": "scaffold"},
            "privacy.update_clip .*`control`",
        ),
        (
            {"privacy": {"update_clip": 1.0}, "objective": {"name": "simclr", "norm": "batch"}},
            "cannot protect BatchNorm's .*batch_norm=local",
        ),
        (
            {
                "privacy": {"update_clip": 1.0, "update_noise": 1.0, "update_place": "server"},
                "aggregation": "median",
            },
            "update_place=server .*aggregation=median",
        ),
        ({"privacy": {"update_clip": 1.0}, "terms": {"uv": {}}}, "update_clip cannot protect uv"),
    ],
)
def test_what_it_cannot_protect_is_refused(tree: dict[str, Any], message: str) -> None:
    if "scaffold" in str(tree):
        tree = {**tree, "local": {**TINY["local"], "momentum": 0.0}}
    with pytest.raises(ConfigError, match=message):
        Recipe.from_tree({**TINY, **PLAIN, **tree})
