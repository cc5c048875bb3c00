"""EMA twins by themselves; how an objective uses them is in test_byol.py."""

import pytest
import torch
from torch import nn

from harmonium.federation.method import Method
from harmonium.learning.client import Client
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.twin import follow, restart, twin
from harmonium.learning.parts import Part, Parts
from harmonium.learning.training import frozen


def parts(owner: str = "mean") -> Parts:
    torch.manual_seed(0)
    made = {
        "encoder": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        "projector": nn.Linear(4, 2),
        "predictor": nn.Linear(2, 2),
    }
    online = {name: Part(module) for name, module in made.items()}
    slow = twin(made, ("encoder", "projector"), owner)  # type: ignore[arg-type]
    return Parts({**online, "target": slow}, {})


def shift(model: nn.Module, by: float) -> None:
    """Move every number of a module, so that two equal ones are equal no more."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(by)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_twin_starts_equal_shares_nothing_and_takes_no_gradient() -> None:
    model = parts()
    assert set(model["target"]) == {"encoder", "projector"}
    for name in ("encoder", "projector"):
        assert equal(values(model[name]), values(model["target"][name]))
        assert all(p.requires_grad for p in model[name].parameters())
    assert not any(p.requires_grad for p in model["target"].parameters())
    before = values(model["target"])
    shift(model["encoder"], 1.0)
    assert equal(values(model["target"]), before)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.99, 1.0])
def test_following_is_an_exponential_moving_average_of_parameters(momentum: float) -> None:
    model = parts()
    expected = {key: p.clone() for key, p in model["target"].named_parameters()}
    for _ in range(3):
        shift(model["encoder"], 1.0)
        shift(model["projector"], -2.0)
        online = {
            f"{name}.{key}": p
            for name in ("encoder", "projector")
            for key, p in model[name].named_parameters()
        }
        for key in expected:
            expected[key] = momentum * expected[key] + (1 - momentum) * online[key]
        follow(model, momentum)
    for key, value in model["target"].named_parameters():
        assert torch.allclose(value, expected[key], atol=1e-5), key
        if momentum == 0:
            assert torch.equal(value, online[key])


def test_a_momentum_of_one_keeps_every_bit() -> None:
    model = parts()
    before = values(model["target"])
    shift(model["encoder"], 1.0)
    follow(model, 1.0)
    assert equal(values(model["target"]), before)


def test_statistics_are_the_twins_own_or_copies() -> None:
    model = parts()
    shift(model["encoder"], 1.0)
    online, own = model["encoder"][1], model["target"]["encoder"][1]
    model["encoder"](torch.randn(5, 3))
    follow(model, 0.5)
    assert torch.equal(own.running_mean, torch.zeros(4)) and own.num_batches_tracked == 0
    follow(model, 0.5, buffers="copy")
    assert torch.equal(own.running_mean, online.running_mean) and own.num_batches_tracked == 1
    assert torch.equal(own.running_var, online.running_var)


def test_following_leaves_the_model_alone() -> None:
    model = parts()
    before = values(model["encoder"])
    shift(model["target"], 1.0)
    follow(model, 0.5)
    assert equal(values(model["encoder"]), before)


def test_a_twin_that_is_held_still_does_not_follow() -> None:
    model = parts().train()
    shift(model["encoder"], 1.0)
    before = values(model["target"])
    with frozen([model["target"]]):
        follow(model, 0.5, "copy")
    assert equal(values(model["target"]), before)
    follow(model, 0.5, "copy")
    assert not equal(values(model["target"]), before)


@pytest.mark.parametrize("owner", ["mean", "local", "fresh"])
def test_only_a_fresh_twin_restarts(owner: str) -> None:
    model = parts(owner)
    shift(model["encoder"], 1.0)
    before = values(model["target"])
    restart(model)
    if owner == "fresh":
        assert equal(values(model["target"]["encoder"]), values(model["encoder"]))
        assert equal(values(model["target"]["projector"]), values(model["projector"]))
        shift(model["encoder"], 1.0)
        assert not equal(values(model["target"]["encoder"]), values(model["encoder"]))
    else:
        assert equal(values(model["target"]), before)


@pytest.mark.parametrize("owner", ["mean", "local", "fresh"])
def test_a_local_twin_begins_as_the_model_that_its_client_first_received(owner: str) -> None:
    """However late that is; an averaged one is received itself."""
    method = Method(objective=BYOL(target=owner))  # type: ignore[arg-type]
    sent = {key: value + 1 for key, value in method.blueprint.shared().items()}
    client = Client(0, 5, 9, None, None, None, None)  # type: ignore[arg-type]
    parts = method.pull(client, sent)
    same = equal(values(parts["target"]["encoder"]), values(parts["encoder"]))  # type: ignore[index]
    assert same  # an averaged one, too: both were moved by one
    method.push(client, parts)
    later = method.pull(client, {key: value + 1 for key, value in sent.items()})
    moved = equal(values(later["target"]["encoder"]), values(later["encoder"]))  # type: ignore[index]
    assert moved == (owner != "local")


@pytest.mark.parametrize(
    ("owner", "sent", "kept"), [("mean", 1, 0), ("local", 0, 1), ("fresh", 0, 0)]
)
def test_the_owner_says_whether_it_is_sent_or_kept(owner: str, sent: int, kept: int) -> None:
    model = parts(owner)
    names = {key for key in model.state_dict() if key.startswith("target.")}
    assert names <= set(model.shared()) if sent else not names & set(model.shared())
    assert names <= set(model.kept()) if kept else not names & set(model.kept())
    assert model.reveals["target"] == "weights"


def test_a_copy_of_the_model_has_a_twin_of_its_own() -> None:
    model = parts()
    again = model.copy_from()
    shift(again["encoder"], 1.0)
    follow(again, 0.0)
    assert equal(values(model["target"]["encoder"]), values(model["encoder"]))
    assert not any(p.requires_grad for p in again["target"].parameters())
