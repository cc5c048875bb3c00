"""The contract on every registered method, and planted violations that show it bites."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from harmonium.federation.method import Method
from harmonium.federation.wire import Ask, exchange, scalar, weights
from harmonium.methods import methods
from harmonium.testing import CHECKS, ContractError, check_method, first_trial

# Settings that make a method quick where its defaults are made for real runs.
QUICK: dict[str, dict[str, Any]] = {
    "fedca": {"method": {"name": "fedca", "align_epochs": 2}},
    "fedstyle": {"method": {"name": "fedstyle", "style_epochs": 1}},
    "fedsc": {"objective": {"name": "spectral", "form": "fedsc", "out": 16, "norm": "none"}},
    "fedsc-control": {
        "objective": {"name": "spectral", "form": "fedsc", "out": 16, "norm": "none"}
    },
    "orchestra": {"method": {"name": "orchestra", "clusters": 8, "global_steps": 5}},
}


@pytest.mark.parametrize("name", methods.table())
def test_every_method_passes_the_contract(name: str) -> None:
    assert len(check_method(name, **QUICK.get(name, {}))) == len(CHECKS)


@pytest.mark.parametrize("name", methods.table())
def test_every_method_takes_terms_and_partial_participation(name: str) -> None:
    """Checks that have passed once may fail where clients are absent and a term has its say."""
    some = {"terms": "proximal", "participation": {"number": 2}}
    plain = first_trial(name, **some, **QUICK.get(name, {}))
    for check in CHECKS:
        if not check.__name__.endswith(("same_bits", "irrelevant", "out")):  # these cost a run each
            check(plain)


FLOATS = {"name": "simclr", "norm": "none"}  # planted handlers do arithmetic on all tensors


def planted(**attributes: object) -> type[Method]:
    """A method with a fault, found in this module."""
    attributes = {"__module__": __name__, "__annotations__": {}, **attributes}
    return dataclass(frozen=True)(type("Planted", (Method,), attributes))


def training(handler):  # type: ignore[no-untyped-def]
    marked = exchange(down={"model": weights()}, up={"model": weights(), "loss": scalar()})(handler)
    marked.exchange = replace(marked.exchange, name="train")
    return marked


@training
def unseeded(self, client, got):  # type: ignore[no-untyped-def]
    model = {key: value + random.random() for key, value in got.model.items()}
    return {"model": model, "loss": 0.0}


@training
def diverging(self, client, got):  # type: ignore[no-untyped-def]
    return {"model": {key: value * 1e30 for key, value in got.model.items()}, "loss": 0.0}


SEEN: list[int] = []


@training
def remembering(self, client, got):  # type: ignore[no-untyped-def]
    SEEN.append(client.id)
    model = {key: value + len(SEEN) for key, value in got.model.items()}
    return {"model": model, "loss": 0.0}


def silent(self, server, cohort):  # type: ignore[no-untyped-def]
    return server
    yield


def careless(self, server, cohort):  # type: ignore[no-untyped-def]
    """Counts on every client's answer: NaN when one is missing."""
    got = yield Ask("train", cohort, {"model": server.model})
    scale = 1.0 if len(got.ids) == len(cohort) else float("nan")
    return self.merge(server, {key: value * scale for key, value in got.model.items()})


def forgetful(self, server, cohort):  # type: ignore[no-untyped-def]
    """Keeps something outside the checkpoint."""
    got = yield Ask("train", cohort, {"model": server.model})
    object.__setattr__(self, "hidden", getattr(self, "hidden", 0) + 1)
    return self.merge(server, {key: value * self.hidden for key, value in got.model.items()})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"train": unseeded}, "two runs of one seed differ"),
        ({"train": remembering}, "two runs of one seed differ"),
        ({"round": silent}, "ask no client"),
        ({"round": careless}, "dropouts are survived: .*not finite"),
        ({"round": forgetful}, "stopped and resumed ends differently"),
        ({"keeps": {"ghost": "scalar"}}, "declares what no client ever keeps"),
        ({"__module__": __name__}, "must name the paper"),
    ],
)
def test_a_planted_fault_is_found(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_method(planted(**attributes), objective=FLOATS)


def test_numbers_that_blow_up_are_found() -> None:
    with pytest.raises(Exception, match="not finite"):
        check_method(planted(train=diverging), objective=FLOATS)


def test_a_method_that_can_change_is_found() -> None:
    melted = planted()
    melted.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="frozen=True"):
        check_method(melted, objective=FLOATS)


def test_global_randomness_inside_a_handler_is_seeded() -> None:
    """Dropout and weight initialisation use torch's own generator: it is keyed too."""

    @training
    def drawn(self, client, got):  # type: ignore[no-untyped-def]
        model = {key: value + torch.rand(()) for key, value in got.model.items()}
        return {"model": model, "loss": 0.0}

    with pytest.raises(ContractError, match="must name the paper"):  # the last check of all
        check_method(planted(train=drawn), objective=FLOATS)
