"""FedSC with control variates: the gradient identity, the bound, and what FedSC is in it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.federation.method import Server
from harmonium.learning.objectives import Seen
from harmonium.learning.objectives.spectral import correlation, correlation_contrast, shortened
from harmonium.learning.symmetric import pack
from harmonium.methods.fedsc import InterClientContrast
from harmonium.methods.fedsc_control import ControlledFedSC
from harmonium.testing import Trial, check_method, first_trial

OBJECTIVE = {
    "name": "spectral", "form": "fedsc", "mu": 4.0, "hidden": 16, "out": 8, "norm": "none",
}  # fmt: skip
STEPS = {"epochs": 3, "batch": 6, "lr": 0.03, "momentum": 0.0, "clip": None}


def trial(name: str = "fedsc-control", method: dict[str, Any] | None = None, **more: Any) -> Trial:
    chosen = {"name": name, "passes": 1, **(method or {})}
    return first_trial(name, **{"method": chosen, "objective": OBJECTIVE, **more})


def furthest(one: Trial, other: Trial) -> float:
    theirs = other.server.model
    return max(float((v - theirs[k]).abs().max()) for k, v in one.server.model.items())


# ---- what the server sends and the client makes of it, with exact matrices -----------------------
SIZES = (3, 8, 5)


class Federation:
    """Three clients of unequal size with a linear encoder: images x, projections x w^T."""

    def __init__(self, curvature: float) -> None:
        torch.manual_seed(0)
        self.method = trial(method={"curvature": curvature}, rounds=1).method
        assert isinstance(self.method, ControlledFedSC)
        self.images = [torch.randn(2, n, 7, dtype=torch.float64) for n in SIZES]
        self.start = 0.7 * torch.randn(8, 7, dtype=torch.float64)
        self.server = Server(dict(enumerate(SIZES)), {}, round=1)
        self.q = [n / sum(SIZES) for n in SIZES]

    def project(self, weight: Tensor, *clients: int) -> list[Tensor]:
        return [
            torch.cat([self.images[j][view] @ weight.T for j in clients or range(3)])
            for view in range(2)
        ]

    def objective(self, weight: Tensor) -> Tensor:
        """Twice the global objective, of all images together."""
        return correlation_contrast(self.project(weight), 4.0)

    def local(self, client: int, weight: Tensor) -> Tensor:
        """The loss of one client, from the message that it gets; exact but for single precision."""
        matrices = {
            str(j): pack(correlation(shortened(torch.cat(self.project(self.start, j)), 4.0)))
            for j in range(3)
        }
        sent = self.method.contrast_for(self.server, client, matrices)
        seen: list[Tensor] = []

        def fit(parts: Any, client: Any, context: InterClientContrast) -> SimpleNamespace:
            here = replace(context, others=context.others.double())  # type: ignore[union-attr]
            views = Seen(None, [], self.project(weight, client.id))  # type: ignore[arg-type]
            seen.append(self.method.score(parts, views, here))
            return SimpleNamespace(loss=0.0)

        handler: Any = SimpleNamespace(
            pull=lambda client, model: None, push=lambda client, parts: {}, fit=fit,
            spectral=self.method.spectral,
        )  # fmt: skip
        got = SimpleNamespace(model={}, **sent)
        ControlledFedSC.train(handler, SimpleNamespace(id=client), got)  # type: ignore[arg-type]
        return seen[0]

    def surrogate(self, weight: Tensor) -> Tensor:
        """The losses of all clients at one model, weighted by their images."""
        return torch.stack([q * self.local(j, weight) for j, q in enumerate(self.q)]).sum()


@pytest.mark.parametrize("curvature", [0.0, 0.5, 1.0])
def test_gradients_at_the_start_add_up_to_that_of_all_images(curvature: float) -> None:
    found = Federation(curvature)
    weight = found.start.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(found.objective(weight), weight)
    (got,) = torch.autograd.grad(found.surrogate(weight), weight)
    assert wanted.abs().max() > 0.1 and (wanted - got).abs().max() < 1e-6


def excesses(curvature: float) -> list[float]:
    """How much more the clients' losses rise than the global one, on ways off the start."""
    found = Federation(curvature)
    ways = torch.randn(20, *found.start.shape, dtype=torch.float64)
    base = (found.surrogate(found.start) - found.objective(found.start)).item()
    there = [found.start + step * way for way in ways for step in (0.1, 0.5)]
    return [(found.surrogate(w) - found.objective(w)).item() - base for w in there]


def test_full_curvature_bounds_the_global_objective_and_that_of_fedsc_does_not() -> None:
    assert min(excesses(1.0)) > 1e-4
    assert max(excesses(0.0)) < -1e-4


def test_the_message_by_hand() -> None:
    """Shares 0.25 and 0.75, kappa 0.5: c = 0.625, S = 0.75 * 8 - 0.375 * 4 = 4.5."""
    method = trial(rounds=1).method
    assert isinstance(method, ControlledFedSC) and method.curvature == 0.5
    server = Server({0: 10, 1: 30}, {}, round=1)
    held = {"0": torch.full((36,), 4.0), "1": torch.full((36,), 8.0)}
    sent = method.contrast_for(server, 0, held)
    assert sent["weight"] == pytest.approx(0.625)
    torch.testing.assert_close(sent["correction"], torch.full((36,), 4.5))
    # Without a matrix of its own a client's c is its share: S = 0.75 * 8.
    lost = method.contrast_for(server, 0, {"1": held["1"]})
    assert lost["weight"] == pytest.approx(0.25)
    torch.testing.assert_close(lost["correction"], torch.full((36,), 6.0))
    # Without matrices of others nothing is corrected.
    for known in ({}, {"0": held["0"]}):
        alone = method.contrast_for(server, 0, known)
        assert alone["weight"] == 1.0 and not alone["correction"].any()  # type: ignore[union-attr]


# ---- the method itself ---------------------------------------------------------------------------
def test_without_added_curvature_it_is_fedsc_by_shares() -> None:
    plain = trial("fedsc", {"coefficient": "share"}, local=STEPS)
    assert furthest(trial(method={"curvature": 0.0}, local=STEPS), plain) < 1e-6
    assert furthest(trial(method={"curvature": 1.0}, local=STEPS), plain) > 1e-4


@pytest.mark.parametrize("curvature", [0.5, 1.0])
def test_one_step_of_all_clients_is_one_step_on_all_images(curvature: float) -> None:
    local = {"epochs": 1, "batch": 60, "lr": 5.0, "momentum": 0.0, "clip": None}
    still = {"name": "fedsc", "crop_min": 1.0, "flip": 0, "jitter": 0, "gray": 0}
    one = {"local": local, "rounds": 1, "views": still}
    found = trial(method={"curvature": curvature}, **one)
    plain = first_trial("fedsc", method="centralised", objective=OBJECTIVE, **one)
    assert furthest(found, plain) < 2e-6


WAYS = ("down", "up")


def test_messages_are_as_large_as_those_of_fedsc() -> None:
    ours, theirs = trial(), trial("fedsc", {"coefficient": "share"})

    def sizes(found: Trial) -> list[tuple[Any, ...]]:
        entries = [json.loads(line) for line in found.lines]
        return [
            (e["round"], e["step"], e["client"], *(sorted(e.get(way, {}).values()) for way in WAYS))
            for e in entries
        ]

    assert sizes(ours) == sizes(theirs) and len(sizes(ours)) >= 16


def test_the_card_shows_its_own_settings_only() -> None:
    text = card(trial(rounds=1).method).text()
    assert "correction" in text and "curvature=0.5" in text and "coefficient" not in text


def test_absent_clients_keep_their_matrices_and_age() -> None:
    found = trial(participation={"number": 2}, rounds=4)
    memory = found.server.memory
    assert set(memory["corr"]) == set("0123") and max(memory["since"].values()) == 4
    assert min(memory["since"].values()) < 4 and found.method.noted(found.server)["age"] > 0


def test_noise_costs_what_it_costs_under_fedsc() -> None:
    noisy = {"epsilon": 3.0, "delta": 1e-4}
    ours, theirs = trial(method=noisy), trial("fedsc", {**noisy, "coefficient": "share"})
    assert ours.method.costs("correlate", 40) == theirs.method.costs("correlate", 40) != ()
    check_method("fedsc-control", method={"name": "fedsc-control", **noisy}, objective=OBJECTIVE)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="curvature is"):
            trial(method={"curvature": wrong})
    for gone in ({"coefficient": "share"}, {"final": 0.2}):
        with pytest.raises(ConfigError, match=next(iter(gone))):
            trial(method=gone)
