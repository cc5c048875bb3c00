"""FedX: its four losses against NumPy, their gradients, and what is left without weights."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.objectives.simclr import nt_xent
from harmonium.methods.fedx import WEIGHTS, Distilled, FedX, Related, projected, relational
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import Trial, first_trial

Rows = NDArray[np.float64]
VIEWS = {"name": "fedx", "mean": [0.5], "std": [0.5]}
OBJECTIVE = {"name": "simclr", "temperature": 0.1, "hidden": 24, "out": 12, "norm": "none"}


def trial(**changes: Any) -> Trial:
    """Two rounds; what is not a recipe's section is a setting of the method."""
    sections = {"participation", "objective", "encoder", "batch_norm", "local", "terms"}
    outside = {key: changes.pop(key) for key in sections & changes.keys()}
    settings = {"method": {"name": "fedx", **changes}, "objective": OBJECTIVE, **outside}
    return first_trial("fedx", **settings)


def only(*names: str) -> dict[str, float]:
    return {name: float(name in names) for name in WEIGHTS}


def unit(rows: Rows) -> Rows:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def softmax(rows: Rows) -> Rows:
    raised = np.exp(rows - rows.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def contrast(first: Rows, second: Rows, temperature: float) -> float:
    """NT-Xent, row by row."""
    rows, n, total = unit(np.concatenate([first, second])), len(first), 0.0
    for i in range(2 * n):
        similar = np.exp(rows @ rows[i] / temperature)
        total -= np.log(similar[(i + n) % (2 * n)] / (similar.sum() - similar[i]))
    return total / (2 * n)


def relation(first: Rows, second: Rows, others: Rows, own: float, mixture: float) -> float:
    """The mean over views and images of KL(mixture || view)."""
    similar = [unit(rows) @ unit(others).T for rows in (first, second)]
    mixed = sum(softmax(rows / mixture) for rows in similar) / 2
    apart = [(mixed * np.log(mixed / softmax(rows / own))).sum(1).mean() for rows in similar]
    return float(np.mean(apart))


def rows(seed: int, count: int = 5, dim: int = 4) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=made, dtype=torch.float64)


# ---- the relation --------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "mixture"), [(0.1, 0.1), (0.1, 0.04), (0.5, 2.0)])
def test_a_relation_is_the_mixtures_divergence(own: float, mixture: float) -> None:
    a, b, r = rows(0), rows(1), rows(2, 7)
    found = relational(a, b, r, own, mixture).item()
    assert found == pytest.approx(relation(a.numpy(), b.numpy(), r.numpy(), own, mixture))
    assert found > 0
    swapped = relational(b, a, r, own, mixture).item()
    assert swapped == pytest.approx(found)
    assert relational(a, a, r, own, own).item() == pytest.approx(0, abs=1e-12)
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    assert relational(a, b, 3 * r[order], own, mixture).item() == pytest.approx(found)


def test_a_gradient_flows_through_the_mixture_unless_it_is_detached() -> None:
    a, b, r = rows(0).requires_grad_(), rows(1), rows(2, 7)

    def slope(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, a)[0]

    open_, shut = (slope(relational(a, b, r, 0.3, 0.2, detach=flag)) for flag in (False, True))
    assert not torch.allclose(open_, shut)
    step = 1e-6
    moved = a.detach().clone()
    moved[1, 2] += step
    values = [relational(one, b, r, 0.3, 0.2).item() for one in (a, moved)]
    assert open_[1, 2].item() == pytest.approx((values[1] - values[0]) / step, rel=1e-4)
    held = unit(a.detach().numpy()) @ unit(r.numpy()).T, unit(b.numpy()) @ unit(r.numpy()).T
    mixed = sum(softmax(one / 0.2) for one in held) / 2
    similar = nn.functional.normalize(a) @ nn.functional.normalize(r).T
    wanted = -(torch.from_numpy(mixed) * (similar / 0.3).log_softmax(1)).sum(1).mean() / 2
    torch.testing.assert_close(shut, slope(wanted))


def test_a_sharp_mixture_has_a_finite_gradient() -> None:
    a, b = rows(0).float().requires_grad_(), rows(1).float()
    loss = relational(a, b, rows(2, 7).float(), 0.1, 0.001)
    loss.backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None and torch.isfinite(a.grad).all() and torch.isfinite(loss)


# ---- the whole loss ------------------------------------------------------------------------------


def seen_by(found: Trial, method: Any = None) -> tuple[Any, Any, Any]:
    """A batch of a client as a model sees it, and another model as the received one."""
    method = method or found.method
    parts = method.blueprint.copy_from()
    received = method.blueprint.copy_from(found.server.model).eval()
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[0])
    rng = seeds.torch_rng(0, "test")
    return parts, method.see(parts, Batch(torch.arange(6), examples, method.views, rng)), received


def test_the_loss_is_the_sum_of_four() -> None:
    found = trial(local_temperature=0.2, global_temperature=0.3)
    parts, seen, received = seen_by(found)
    context = Distilled(me=0, received=received)
    loss = found.method.score(parts, seen, context)
    z1, z2 = (z.detach() for z in seen.pair())
    p1, p2 = (parts["predictor"](z).detach().double().numpy() for z in (z1, z2))
    g2, gr = (projected(received, x).double().numpy() for x in (seen.batch.views[1], seen.others))
    a, b, r = (z.detach().double().numpy() for z in (z1, z2, seen.z_others))
    wanted = {
        "local_contrast": contrast(a, b, 0.1),
        "global_contrast": contrast(p1, g2, 0.1),
        "local_relation": relation(a, b, r, 0.1, 0.2),
        "global_relation": relation(p1, p2, gr, 0.1, 0.3),
    }
    assert loss.item() == pytest.approx(sum(wanted.values()), rel=1e-4)
    for name, value in wanted.items():
        alone = replace(found.method, **only(name)).score(parts, seen, context)  # type: ignore[arg-type]
        assert alone.item() == pytest.approx(value, rel=1e-4, abs=1e-6)
        twice = replace(found.method, **{**only(name), name: 2.0})  # type: ignore[arg-type]
        assert twice.score(parts, seen, context).item() == pytest.approx(2 * alone.item())
    assert len(set(wanted.values())) == 4


def test_gradients_reach_the_clients_model_and_not_the_received_one() -> None:
    found = trial()
    parts, seen, received = seen_by(found)
    found.method.score(parts, seen, Distilled(me=0, received=received)).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts.parameters())
    assert all(p.grad is None for p in received.parameters())


def test_the_mixture_is_detached_where_the_recipe_says_so() -> None:
    found = trial()
    slopes = []
    for flag in (False, True):
        parts, seen, received = seen_by(found)
        method = replace(found.method, detach_target=flag)  # type: ignore[call-arg]
        loss = method.score(parts, seen, Distilled(me=0, received=received))
        slopes.append(torch.autograd.grad(loss, parts["projector"][0].weight)[0])
    assert not torch.allclose(*slopes)


def test_a_model_contrasted_with_itself_is_contrasted_as_usual() -> None:
    found = trial(**only("global_contrast"))
    parts, seen, _ = seen_by(found)
    parts["predictor"] = nn.Identity()
    received = found.method.blueprint.copy_from().eval()
    loss = found.method.score(parts, seen, Distilled(me=0, received=received))
    torch.testing.assert_close(loss, nt_xent(*seen.pair(), 0.1))


def test_other_images_are_the_clients_drawn_without_regard_to_the_batch() -> None:
    found = trial()
    method = replace(found.method, views=Recipe.of("fedx", "views=none").views.build())
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[0])
    every = {picture.numpy().tobytes() for picture in method.views.plain(examples.pixels())}
    rng, drawn = seeds.torch_rng(0, "test"), list[bytes]()
    parts = method.blueprint.copy_from()
    for _ in range(6):
        batch = Batch(torch.arange(3), examples, method.views, rng)
        seen = method.see(parts, batch)
        assert isinstance(seen, Related) and len(seen.others) == 3
        torch.testing.assert_close(seen.z_others, projected(parts, seen.others))
        torch.testing.assert_close(seen.h[0], parts["encoder"](batch.views[0]))
        one = [picture.numpy().tobytes() for picture in seen.others]
        assert len(set(one)) == 3
        drawn += one
    assert set(drawn) <= every and len(set(drawn)) > 3


# ---- without weights, and the rest ---------------------------------------------------------------


def test_the_contrast_alone_is_fedavg_of_simclr() -> None:
    """X10, bit for bit, also with some clients away."""
    few = {"participation": {"number": 2}}
    plain = first_trial("fedavg", objective=OBJECTIVE, views=VIEWS, **few)
    off = trial(**only("local_contrast"), **few)
    assert off.server.model.keys() == plain.server.model.keys()
    assert all(torch.equal(v, plain.server.model[k]) for k, v in off.server.model.items())
    for name in WEIGHTS[1:]:
        other = trial(**only("local_contrast", name), **few).server.model
        assert not all(torch.equal(other[key], value) for key, value in plain.server.model.items())
        assert any(key.startswith("predictor") for key in other) == name.startswith("global")


def test_the_received_model_stays_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fit = trial(), FedX.fit

    def watched(self: FedX, parts: Any, client: Client, *, context: Distilled) -> Any:
        done, received = fit(self, parts, client, context=context), context.received
        assert received is not None
        values = received.state_dict()
        assert all(torch.equal(values[key], value) for key, value in context.received_model.items())
        assert not received.training and not any(p.requires_grad for p in received.parameters())
        assert any(not torch.equal(values[key], value) for key, value in parts.state_dict().items())
        return done

    monkeypatch.setattr(Method, "fit", watched)
    rng = seeds.torch_rng(0, "test")
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[0])
    client = Client(0, 1, 2, examples, found.method.views, rng, Noise("simulated", rng))
    found.method.train(client, SimpleNamespace(model=found.server.model))
    assert client.state == {}


@pytest.mark.parametrize("batch_norm", ["local", "recalibrate"])
def test_it_runs_with_statistics_that_are_not_sent(batch_norm: str) -> None:
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    found = trial(encoder=encoder, batch_norm=batch_norm)
    assert all(torch.isfinite(value.float()).all() for value in found.server.model.values())


def test_bytes_are_those_of_the_published_sizes() -> None:
    """11,497,536 parameters, and BatchNorm's statistics."""
    method = Recipe.of("fedx/c10").method_for((32, 32, 3), 10)
    names = ("running_mean", "running_var", "num_batches_tracked")
    shared = method.blueprint.shared().items()
    buffers = sum(value.nbytes for key, value in shared if key.endswith(names))
    made = card(method)
    assert made.bytes["train"]["down"] == 45_990_144 + buffers
    assert made.bytes["train"]["up"] == 45_990_144 + buffers + 8
    assert not made.keeps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "byol"}, "fedx contrasts by NT-Xent: objective is byol; set objective="),
        ({"objective": "infonce"}, "objective is infonce; set objective=simclr"),
        ({"global_relation": -1.0}, "method.global_relation is -1.0"),
        ({"local_contrast": math.inf}, "method.local_contrast is inf"),
        ({"local_temperature": 0.0}, "method.local_temperature is 0.0"),
        ({"global_temperature": math.nan}, "method.global_temperature is nan"),
        (only(), "are all 0: nothing is learned"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trial(**settings)
