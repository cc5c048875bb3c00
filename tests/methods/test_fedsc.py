"""FedSC: the gradient identity, matrices and their bookkeeping, noise and its budget."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, WireError
from harmonium.data.images import Images
from harmonium.federation.method import Server
from harmonium.federation.wire import Ask
from harmonium.learning.client import Client, Examples
from harmonium.learning.objectives.spectral import correlation, correlation_contrast, shortened
from harmonium.learning.symmetric import pack, positive, triangle, unpack
from harmonium.methods.fedsc import FedSC
from harmonium.privacy.budget import epsilon
from harmonium.privacy.calibration import sigma_for
from harmonium.privacy.mechanisms import Noise
from harmonium.testing import Trial, check_method, first_trial

OBJECTIVE = {
    "name": "spectral", "form": "fedsc", "mu": 4.0, "hidden": 16, "out": 8, "norm": "none",
}  # fmt: skip


def trial(method: dict[str, Any] | None = None, **changes: Any) -> Trial:
    chosen = {"name": "fedsc", "passes": 2, **(method or {})}
    return first_trial("fedsc", **{"method": chosen, "objective": OBJECTIVE, **changes})


def client_of(found: Trial, number: int = 0, images: Images | None = None, key: int = 0) -> Client:
    rng = seeds.torch_rng(0, "test", key)
    train = found.dataset.train.without_labels() if images is None else images
    examples = Examples(train, found.split.indices[number])
    return Client(number, 1, 2, examples, found.method.views, rng, Noise("simulated", rng))


def matrix_of(found: Trial, client: Client, model: Any = None) -> Tensor:
    got = type("Got", (), {"model": model or found.server.model})
    sent = found.method.correlate(client, got)["corr"]  # type: ignore[attr-defined]
    return unpack(sent, 8)


def same(one: Trial, other: Trial) -> bool:
    ours, theirs = one.server.model, other.server.model
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


# ---- the objective -------------------------------------------------------------------------------
def gradients(
    alphas: str | float, sizes: list[int], *, alike: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradient of all images, and that of clients with exact matrices of the others."""
    torch.manual_seed(0)
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    first = [torch.randn(2, n, 7, dtype=torch.float64) for n in sizes]
    images = [first[0]] * len(sizes) if alike else first
    mu = 2.0  # some projections are shortened, some not

    def project(x: Tensor) -> list[Tensor]:
        return [view @ weight.T for view in x]

    whole = project(torch.cat(images, dim=1))
    (wanted,) = torch.autograd.grad(correlation_contrast(whole, mu), weight)
    matrices = [correlation(shortened(torch.cat(project(x)), mu)).detach() for x in images]
    share = [x.shape[1] / sum(y.shape[1] for y in images) for x in images]
    total = torch.zeros_like(weight)
    for j, x in enumerate(images):
        rest = 1 - share[j]
        others = sum(share[i] * m / rest for i, m in enumerate(matrices) if i != j)
        alpha = share[j] if alphas == "share" else float(alphas)
        loss = correlation_contrast(project(x), mu, alpha=alpha, others=others)  # type: ignore[arg-type]
        total += share[j] * torch.autograd.grad(loss, weight)[0]
    return wanted, total


def test_gradients_of_unequal_clients_add_up_to_that_of_all_images() -> None:
    wanted, got = gradients("share", [3, 8, 5])
    assert (wanted - got).abs().max() < 1e-10
    assert (wanted - gradients(0.9, [3, 8, 5])[1]).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_clients_alike_follow_the_common_gradient_whatever_alpha_is(alpha: float) -> None:
    wanted, got = gradients(alpha, [6, 6, 6], alike=True)
    assert (wanted - got).abs().max() < 1e-10


def test_one_step_of_all_clients_is_one_step_on_all_images() -> None:
    """The method itself: full batches, plain SGD, everyone, matrices of the very same views."""
    local = {"epochs": 1, "batch": 60, "lr": 5.0, "momentum": 0.0, "clip": None}
    still = {"name": "fedsc", "crop_min": 1.0, "flip": 0, "jitter": 0, "gray": 0}
    one = {"local": local, "rounds": 1, "views": still}
    found = trial({"coefficient": "share", "passes": 1}, **one)
    plain = first_trial("fedsc", method="centralised", objective=OBJECTIVE, **one)
    for key, value in plain.server.model.items():
        torch.testing.assert_close(found.server.model[key], value, rtol=0, atol=2e-6)
    apart = trial({"final": 1.0}, **one).server.model
    assert any((apart[k] - v).abs().max() > 1e-3 for k, v in plain.server.model.items())


def test_without_an_exchange_it_is_fedavg_bit_for_bit() -> None:
    """X7: alpha 1 in all rounds, and likewise when the first exchange never comes."""
    plain = first_trial("fedsc", method="fedavg", objective=OBJECTIVE)
    for off in ({"final": 1.0}, {"first": 9}):
        never = trial(off)
        assert same(plain, never) and not never.server.memory.get("corr")
        assert not any("correlate" in line for line in never.lines)
    assert not same(plain, trial())
    # Matrices are there, but a line that ends at 1 has no use for them: none leaves a client.
    assert "correlate" not in trial({"final": 1.0}).method.exchanges()


def test_a_client_alone_trains_as_if_centralised() -> None:
    one = {"clients": 1, "split": "iid"}
    found = trial({"coefficient": "share"}, **one)
    asked = plan(found.method, found.server, [0], [{0: torch.ones(triangle(8))}])
    assert asked[-1].each[0]["alpha"] == 1.0 and not asked[-1].each[0]["others"].any()


# ---- matrices ------------------------------------------------------------------------------------
def test_a_matrix_is_the_mean_over_all_views_of_all_images() -> None:
    found = trial()
    client = client_of(found)
    parts = found.method.pull(client, found.server.model).eval()
    total, views = torch.zeros(8, 8, dtype=torch.float64), 0
    with torch.no_grad():
        for batch in client_of(found).batches(2, 6, least=1):
            for view in batch.views:
                for image in view:
                    z = parts["projector"](parts["encoder"](image[None]))[0].double()
                    z = z * min(1.0, 2.0 / float(z.norm()))
                    total += torch.outer(z, z)
                    views += 1
    assert views == 2 * 2 * len(client.examples)
    torch.testing.assert_close(matrix_of(found, client).double(), total / views, rtol=0, atol=1e-6)


def loud(found: Trial) -> dict[str, Tensor]:
    """A model whose projections are all longer than mu allows."""
    return {k: 30 * v if k.startswith("projector") else v for k, v in found.server.model.items()}


def test_matrices_are_positive_and_bounded() -> None:
    found = trial()
    for model in (found.server.model, loud(found)):
        matrix = matrix_of(found, client_of(found), model).double()
        assert torch.equal(matrix, matrix.T)
        assert torch.linalg.eigvalsh(matrix).min() > -1e-6
        assert matrix.norm() <= matrix.trace() + 1e-6 <= 4.0 + 1e-5
    assert matrix.trace().item() == pytest.approx(4.0, rel=1e-5)
    again = matrix_of(found, client_of(found), loud(found)).double()
    assert torch.equal(matrix, again)  # without noise it is a function of task and images


@pytest.mark.parametrize("seed", range(4))
def test_one_image_moves_a_matrix_by_no_more_than_is_said(seed: int) -> None:
    found = trial()
    index = found.split.indices[0]
    train = found.dataset.train.without_labels()
    pixels = np.array(train.batch(np.arange(len(train))))
    pixels[index[seed]] = np.random.default_rng(seed).integers(0, 256, pixels[0].shape)
    other = Images(pixels, np.full(len(train), -1))
    model = loud(found)
    here, there = (matrix_of(found, client_of(found, images=x), model) for x in (train, other))
    moved = (here - there).norm().item()
    assert 1e-4 < moved <= math.sqrt(2) * 4.0 / len(index) + 1e-6


def test_orthogonal_images_move_a_matrix_as_far_as_is_said() -> None:
    a, b = 2 * torch.eye(2, dtype=torch.float64)
    apart = torch.outer(a, a) - torch.outer(b, b)
    assert apart.norm().item() == pytest.approx(math.sqrt(2) * 4.0)


def test_packed_matrices_are_half_the_size_and_lose_nothing() -> None:
    noisy = torch.randn(9, 9, dtype=torch.float64)
    half = (noisy + noisy.T) / 2
    assert pack(noisy).shape == (45,) and triangle(512) * 4 == 525_312
    torch.testing.assert_close(unpack(pack(noisy), 9), half.float())
    with pytest.raises(WireError, match="45 numbers"):
        unpack(torch.zeros(44), 9)
    clean = positive(noisy)
    assert torch.linalg.eigvalsh(clean).min() > -1e-12
    values = torch.linalg.eigvalsh(half)
    assert (clean - half).norm().item() == pytest.approx(values.clamp_max(0).norm().item())


def test_noise_that_is_not_symmetric_has_no_effect() -> None:
    torch.manual_seed(1)
    views = [torch.randn(5, 4, dtype=torch.float64) for _ in range(2)]
    others, noise = torch.randn(2, 4, 4, dtype=torch.float64)
    turned = others + noise - noise.T
    losses = [correlation_contrast(views, 9.0, alpha=0.4, others=m) for m in (others, turned)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)


# ---- bookkeeping ---------------------------------------------------------------------------------
def plan(
    method: FedSC, server: Server, cohort: list[int], answers: list[dict[int, Tensor]]
) -> list[Ask]:
    """The asks of a round, whose matrices are answered as told; the last is the training."""
    asks, steps = [], method.round(server, cohort)
    ask = next(steps)
    for sent in [*answers, {}]:
        asks.append(ask)
        if ask.step == "train":
            break
        got = type("Got", (), {"corr": sent, "ids": list(sent)})
        ask = steps.send(got)  # type: ignore[arg-type]
    return asks


def test_everyone_takes_part_in_the_first_exchange_and_absent_matrices_stay() -> None:
    found = trial(participation={"number": 2}, rounds=4)
    sizes = found.server.examples
    lines = [json.loads(line) for line in found.lines]
    asked = {
        r: [x["client"] for x in lines if x["step"] == "correlate" and x["round"] == r]
        for r in range(1, 5)
    }
    assert asked[1] == [0, 1, 2, 3] and all(len(asked[r]) == 2 for r in (2, 3, 4))
    newest = {str(c): max(r for r in asked if c in asked[r]) for c in range(4)}
    assert found.server.memory["since"] == newest
    assert found.method.noted(found.server) == {"age": 4 - sum(newest.values()) / 4}
    held = found.server.memory["corr"]
    server = replace(found.server, round=2, memory={"corr": held})
    new = {c: torch.randn(36) for c in (1, 3)}
    first, last = plan(found.method, server, [1, 3], [new])
    assert (first.step, list(first.to), last.step) == ("correlate", [1, 3], "train")
    kept = {**{int(c): m for c, m in held.items()}, **new}
    for client in (1, 3):
        rest = [c for c in kept if c != client]
        total = sum(sizes[c] for c in rest)
        wanted = sum(sizes[c] / total * kept[c] for c in rest)
        torch.testing.assert_close(last.each[client]["others"], wanted, atol=1e-6, rtol=0)
        # The mean of all, which the paper has the server send, gives the same.
        q = sizes[client] / sum(sizes.values())
        whole = sum(sizes[c] / sum(sizes.values()) * m for c, m in kept.items())
        torch.testing.assert_close(
            last.each[client]["others"], (whole - q * kept[client]) / (1 - q), atol=1e-5, rtol=0
        )
        assert last.each[client]["alpha"] == pytest.approx(1 - 0.8 * 1 / 4)


def test_alpha_follows_its_line_or_the_share_of_images() -> None:
    method = trial(rounds=5).method
    held = {"corr": {str(c): torch.ones(36) for c in range(3)}}
    server = Server({0: 10, 1: 30, 2: 60}, {}, memory=held)
    alphas = [method.contrast_for(replace(server, round=r), 0, held["corr"])["alpha"]
              for r in range(1, 6)]  # fmt: skip
    assert alphas == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])
    shared = replace(method, coefficient="share")
    given = [shared.contrast_for(server, c, held["corr"])["alpha"] for c in range(3)]
    assert given == pytest.approx([0.1, 0.3, 0.6])
    del held["corr"]["1"]  # a client that is not known counts for nothing
    assert shared.contrast_for(server, 0, held["corr"])["alpha"] == pytest.approx(10 / 70)
    assert shared.contrast_for(server, 1, held["corr"])["alpha"] == pytest.approx(30 / 100)


def test_exchanges_may_begin_late_and_skip_rounds() -> None:
    found = trial({"first": 2, "every": 2}, rounds=5)
    rounds = {x["round"] for x in map(json.loads, found.lines) if x["step"] == "correlate"}
    assert rounds == {2, 4} and found.method.planned_releases == 2
    assert found.server.memory["asked"] == dict.fromkeys("0123", 2)


# ---- privacy -------------------------------------------------------------------------------------
def test_noise_on_sent_matrices_is_as_declared() -> None:
    """On the diagonal sigma, off it sigma over root two, both normal."""
    quiet = trial()
    clean = matrix_of(quiet, client_of(quiet))
    method = replace(quiet.method, sigma=0.5)
    draws = []
    for key in range(60):
        client = client_of(quiet)  # the same views every time
        client.noise = Noise("simulated", seeds.torch_rng(0, "noise", key))
        got = type("Got", (), {"model": quiet.server.model})
        draws.append(unpack(method.correlate(client, got)["corr"], 8) - clean)
    noise = torch.stack(draws).double()
    on = noise.diagonal(dim1=1, dim2=2).flatten().numpy()
    above = noise[:, *torch.triu_indices(8, 8, 1)].flatten().numpy()
    assert stats.kstest(on, "norm", args=(0, 0.5)).pvalue > 1e-3
    assert stats.kstest(above, "norm", args=(0, 0.5 / math.sqrt(2))).pvalue > 1e-3
    assert on.std() == pytest.approx(0.5, rel=0.1)
    assert above.std() == pytest.approx(0.5 / math.sqrt(2), rel=0.06)


def releases_of(found: Trial) -> dict[int, list[dict[str, Any]]]:
    made: dict[int, list[dict[str, Any]]] = {}
    for line in map(json.loads, found.lines):
        made.setdefault(line["client"], []).extend(line.get("releases", []))
    return made


def test_every_client_spends_its_budget_by_its_own_number_of_images() -> None:
    found = trial({"epsilon": 3.0, "delta": 1e-4}, rounds=3)
    for client, made in releases_of(found).items():
        assert len(made) == 2  # rounds 2 and 3: in round 1 alpha is 1
        n = found.server.examples[client]
        assert made[0]["sensitivity"] == pytest.approx(math.sqrt(2) * 4.0 / n)
        assert epsilon(made, 1e-4) == pytest.approx(3.0, rel=1e-6)
        assert epsilon(made, 1e-4, neighbours="replace") <= 3.0
    fixed = trial({"epsilon": 3.0, "neighbours": "add-remove"}, rounds=2)
    for client, made in releases_of(fixed).items():
        assert made[0]["sensitivity"] == pytest.approx(4.0 / found.server.examples[client])
        assert made[0]["neighbours"] == "add-remove"


def test_a_client_that_has_spent_its_budget_sends_no_more_and_still_trains() -> None:
    found = trial({"epsilon": 3.0, "delta": 1e-4, "releases": 2}, rounds=4)
    lines = [json.loads(line) for line in found.lines]
    assert {x["round"] for x in lines if x["step"] == "correlate"} == {2, 3}
    assert {x["round"] for x in lines if x["step"] == "train"} == {1, 2, 3, 4}
    assert all(epsilon(made, 1e-4) <= 3.0 for made in releases_of(found).values())
    assert found.server.memory["since"] == dict.fromkeys("0123", 3)


def test_no_budget_is_spent_on_a_round_that_uses_no_matrix() -> None:
    """Alpha of round 1 is 1 with decay, so the others' matrices have no weight in its loss."""
    noisy = {"epsilon": 3.0, "delta": 1e-4}
    found = trial(noisy, rounds=3)
    rounds = {x["round"] for x in map(json.loads, found.lines) if x["step"] == "correlate"}
    assert rounds == {2, 3} and found.method.planned_releases == 2  # type: ignore[attr-defined]
    (cost,) = found.method.costs("correlate", 40)
    far = math.sqrt(2) * 4.0 / 40
    wanted = sigma_for(3.0, 1e-4, sensitivity=far, releases=2)
    assert cost.scale == pytest.approx(wanted)
    assert wanted < sigma_for(3.0, 1e-4, sensitivity=far, releases=3)
    # Everyone takes part in the first exchange, whoever is asked to train.
    some = trial(noisy, rounds=2, participation={"number": 2})
    entries = [json.loads(line) for line in some.lines]
    sent = [x["client"] for x in entries if x["step"] == "correlate"]
    assert sorted(sent) == [0, 1, 2, 3]
    # What is free, or used, is exchanged in round 1, as in Algorithm 1.
    for settings in ({}, {**noisy, "coefficient": "share"}):
        entries = [json.loads(line) for line in trial(settings, rounds=2).lines]
        assert {x["round"] for x in entries if x["step"] == "correlate"} == {1, 2}
    once = trial(noisy, rounds=1)
    assert "correlate" not in once.method.exchanges() and not any(releases_of(once).values())


def test_a_lost_answer_counts_as_sent() -> None:
    found = trial({"epsilon": 3.0, "releases": 1})
    server = replace(found.server, round=2, memory={})
    steps = found.method.round(server, [0, 1])
    assert list(next(steps).to) == [0, 1, 2, 3]
    steps.send(type("Got", (), {"corr": {}, "ids": []}))  # type: ignore[arg-type]
    got = type("Got", (), {"model": found.server.model, "ids": [0]})
    with pytest.raises(StopIteration) as stop:
        steps.send(got)  # type: ignore[arg-type]
    after = stop.value.value
    assert after.memory["asked"] == dict.fromkeys("0123", 1)
    assert list(next(found.method.round(replace(after, round=3), [0, 1])).to) == []


def test_noise_grows_with_releases_and_shrinks_with_images() -> None:
    base = sigma_for(3.0, 1e-5, sensitivity=0.1, releases=10)
    assert sigma_for(3.0, 1e-5, sensitivity=0.1, releases=40) == pytest.approx(2 * base)
    assert sigma_for(3.0, 1e-5, sensitivity=0.05, releases=10) == pytest.approx(base / 2)
    assert sigma_for(4.0, 1e-5, sensitivity=0.1, releases=10) < base
    assert sigma_for(3.0, 1e-4, sensitivity=0.1, releases=10) < base


@pytest.mark.parametrize("budget", [1e-3, 0.5, 3.0, 50.0, 1e3])
@pytest.mark.parametrize("delta", [1e-2, 1e-9])
def test_calibrated_noise_spends_the_budget_and_no_more(budget: float, delta: float) -> None:
    sigma = sigma_for(budget, delta, sensitivity=0.3, releases=7)
    spent = epsilon([{"sensitivity": 0.3, "sigma": sigma}] * 7, delta)
    assert spent <= budget and spent == pytest.approx(budget, rel=1e-6)


def test_private_matrices_pass_the_contract() -> None:
    settings = {"name": "fedsc", "epsilon": 3.0, "passes": 1, "psd": True}
    check_method("fedsc", method=settings, objective=OBJECTIVE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": {"final": 1.5}}, "final is 1.5"),
        ({"method": {"first": 0}}, "first is 0"),
        ({"method": {"epsilon": 0.0}}, "method.epsilon is 0"),
        ({"method": {"epsilon": 3.0, "delta": 1.0}}, "method.delta is 1"),
        ({"method": {"epsilon": 3.0, "sigma": 1.0}}, "set one"),
        ({"method": {"sigma": -1.0}}, "sigma is -1"),
        ({"objective": "simclr"}, "objective.form=fedsc"),
        ({"objective": "spectral"}, "objective.form=fedsc"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trial(**wrong)
