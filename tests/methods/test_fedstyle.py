"""FedStyle: its two losses by hand, style that is learned once and stays, and what is sent."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.data.augment.sobel import sobel
from harmonium.federation.card import card
from harmonium.learning.client import Batch, Client, Decline, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives.simclr import nt_xent
from harmonium.learning.objectives.simsiam import SimSiam, negative_cosine
from harmonium.learning.terms import Term
from harmonium.methods import fedstyle
from harmonium.methods.fedstyle import FedStyle, StyleContext
from harmonium.methods.fedstyle.contrast import style_contrast
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, first_trial

Rows = NDArray[np.float64]
SIMCLR = {"name": "simclr", "hidden": 16, "out": 8}
SIMSIAM = {"name": "simsiam", "hidden": 16, "out": 8}
BATCH_NORM = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
SENT = {"encoder", "projector", "predictor"}


def trial(**changes: Any) -> Trial:
    """Two rounds; what is not a recipe's section is a setting of the method."""
    sections = {"objective", "encoder", "batch_norm", "local", "terms", "views", "rounds"}
    sections |= {"participation", "privacy", "data", "split"}
    outside = {key: changes.pop(key) for key in sections & changes.keys()}
    method = {"name": "fedstyle", "style_epochs": 1, "hidden": 12, **changes}
    return first_trial("fedstyle", method=method, **{"objective": SIMCLR, **outside})


@pytest.fixture(scope="module")
def plain() -> Trial:
    """BatchNorm in the encoder, so that a style that is not held still would drift."""
    return trial(encoder=BATCH_NORM)


def client_of(found: Trial, client: int = 0, *, round: int = 1) -> Client:
    rng = seeds.torch_rng(0, "test", client, round)
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[client])
    return Client(client, round, 2, examples, found.method.views, rng, Noise("simulated", rng))


def style_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state["parts"].items() if key.startswith("style.")}


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def rows(seed: int, count: int = 5, dim: int = 4) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=made, dtype=torch.float64)


# ---- the style's loss ----------------------------------------------------------------------------


def equation_2(pictures: Rows, copies: Rows, temperature: float) -> float:
    """As printed, anchor by anchor: a sum, and a divisor of 2B - 1."""
    z = np.concatenate([pictures, copies])
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    batch, total = len(pictures), 0.0
    for i in range(2 * batch):
        others = [n for n in range(2 * batch) if n != i]
        below = sum(np.exp(z[i] @ z[n] / temperature) for n in others)
        for j in others:
            if (i < batch) == (j < batch):
                total -= np.log(np.exp(z[i] @ z[j] / temperature) / below) / (2 * batch - 1)
    return total


@pytest.mark.parametrize(("batch", "temperature"), [(5, 0.07), (2, 0.5), (8, 1.0)])
def test_the_styles_loss_is_equation_2_and_its_mean(batch: int, temperature: float) -> None:
    a, b = rows(0, batch), rows(1, batch)
    literal = style_contrast(a, b, temperature, "sum").item()
    assert literal == pytest.approx(equation_2(a.numpy().copy(), b.numpy().copy(), temperature))
    mean = style_contrast(a, b, temperature).item()
    assert literal == pytest.approx(mean * 2 * batch * (batch - 1) / (2 * batch - 1))
    assert style_contrast(b, 3 * a, temperature).item() == pytest.approx(mean)


def test_styles_that_are_apart_cost_the_logarithm_of_the_other_partners() -> None:
    """With temperature to 0 each row's mass is shared by B - 1 partners, so that it is not 0."""
    for batch in (2, 6, 64):
        one, other = (torch.eye(3)[[k]].repeat(batch, 1).double() for k in (0, 2))
        loss = style_contrast(one, other, 0.01).item()
        assert loss == pytest.approx(math.log(batch - 1), abs=1e-9)
        mixed = style_contrast(one, one, 0.01).item()
        assert mixed == pytest.approx(math.log(2 * batch - 1), abs=1e-9)


def test_the_styles_gradient_is_finite_and_is_the_slope() -> None:
    a, b = rows(0).requires_grad_(), rows(1)
    (slope,) = torch.autograd.grad(style_contrast(a, b, 0.07), a)
    assert torch.isfinite(slope).all()
    step, moved = 1e-6, a.detach().clone()
    moved[1, 2] += step
    lift = style_contrast(moved, b, 0.07).item() - style_contrast(a, b, 0.07).item()
    assert slope[1, 2].item() == pytest.approx(lift / step, rel=1e-4)


def test_learning_a_style_parts_images_from_their_sobel_copies(plain: Trial) -> None:
    """The loss that is minimised is that of the head's rows of all images and copies."""
    method = replace(plain.method, style_epochs=15, style_lr=0.1)  # type: ignore[call-arg]
    client = client_of(plain)
    start = method.blueprint.copy_from()
    learned = method.blueprint.copy_from()
    assert isinstance(method, FedStyle)
    before = torch.get_rng_state(), client.rng.get_state()
    method.learn_style(learned, client)
    assert torch.equal(before[0], torch.get_rng_state())  # content draws as if there were no style
    assert torch.equal(before[1], client.rng.get_state())
    pixels, losses = client.examples.pixels(), []
    for parts in (start, learned):
        pair = [method.views.plain(pixels), method.views.plain(sobel(pixels))]
        z = parts["style_head"](parts["style"](torch.cat(pair))).chunk(2)
        losses.append(style_contrast(*z, 0.07).item())  # type: ignore[call-arg]
    assert losses[1] < losses[0] - 0.3
    moved = {k.partition(".")[0] for k, v in learned.state_dict().items()
             if not torch.equal(v, start.state_dict()[k])}  # fmt: skip
    assert moved == {"style", "style_head"}
    shorter = method.blueprint.copy_from()
    replace(method, style_epochs=14).learn_style(shorter, client)
    assert not torch.equal(shorter["style"][0].weight, learned["style"][0].weight)


# ---- a style is learned once and stays -----------------------------------------------------------


def test_a_style_is_the_same_after_every_round_and_after_resuming(plain: Trial) -> None:
    """Buffers too; only the generator goes on, and the head is nowhere."""
    once = plain.again(recipe=plain.recipe.changed(rounds=1))
    back = plain.again(reload=True)
    for client, state in plain.states.items():
        kept = {key.partition(".")[0] for key in state["parts"]}
        assert kept == {"style", "generator"}
        assert any(key.endswith("running_var") for key in style_of(state))
        for other in (once, back):
            assert same(style_of(state), style_of(other.states[client]))
        g, before = (t.states[client]["parts"]["generator.0.weight"] for t in (plain, once))
        assert not torch.equal(g, before)
    styles = [style_of(state)["style.0.weight"] for state in plain.states.values()]
    assert all(not torch.equal(styles[0], other) for other in styles[1:])


def test_a_newcomer_has_the_style_that_it_would_have_had(plain: Trial) -> None:
    """Whoever comes in whichever round; the cosine schedule of the rate does not reach it."""
    few = {"participation": {"number": 1}, "rounds": 4}
    late = trial(encoder=BATCH_NORM, **few)
    came = {client: state for client, state in late.states.items() if state}
    assert len(came) >= 2
    assert all(same(style_of(state), style_of(plain.states[c])) for c, state in came.items())


def test_a_lost_answer_changes_no_style(plain: Trial) -> None:
    first, again = client_of(plain, 1), client_of(plain, 1, round=2)
    for client in (first, again):
        plain.method.train(client, SimpleNamespace(model=plain.server.model))
    assert same(style_of(first.state), style_of(again.state))
    assert same(style_of(first.state), style_of(plain.states[1]))
    other = replace(client_of(plain, 1), id=2)  # the same images, but draws of its own
    plain.method.train(other, SimpleNamespace(model=plain.server.model))
    assert not same(style_of(other.state), style_of(first.state))


def test_without_epochs_a_style_stays_as_first_drawn() -> None:
    found = trial(encoder=BATCH_NORM, style_epochs=0)
    drawn = {k: v for k, v in found.method.blueprint.state_dict().items() if "style." in k}
    assert all(same(style_of(state), drawn) for state in found.states.values())
    other = replace(found.method, objective=SimSiam()).blueprint["style"].state_dict()
    assert same({f"style.{key}": value for key, value in other.items()}, drawn)
    content = found.method.blueprint.copy_from()["encoder"].state_dict()
    assert not torch.equal(content["0.weight"], drawn["style.0.weight"])


def test_the_styles_rate_is_its_own(plain: Trial) -> None:
    def learned(**changes: Any) -> dict[str, Tensor]:
        method = replace(plain.method, **changes)
        parts = method.blueprint.copy_from()
        method.learn_style(parts, client_of(plain))  # type: ignore[attr-defined]
        return {f"style.{key}": value for key, value in parts["style"].state_dict().items()}

    wanted = style_of(plain.states[0])
    slower = replace(plain.method.local, lr=plain.method.local.lr / 2)
    assert same(learned(), wanted)
    assert same(learned(local=slower, style_lr=plain.method.local.lr), wanted)
    for change in ({"local": slower}, {"reduction": "sum"}, {"edges": "channels"}):
        assert not same(learned(**change), wanted)


# ---- content, infused ----------------------------------------------------------------------------


def seen_by(found: Trial) -> tuple[Any, Any, Any]:
    """A batch of a client as a model sees it, with the client's style features."""
    method, client = found.method, client_of(found)
    assert isinstance(method, FedStyle)
    parts = method.blueprint.copy_from(found.server.model, found.states[0]["parts"])
    batch = Batch(torch.tensor([4, 0, 2, 5]), client.examples, method.views, client.rng)
    context = StyleContext(
        me=0, style_features=method.style_features(parts["style"].eval(), client)
    )
    return parts, method.see(parts, batch), context


def by_hand(parts: Any, seen: Any) -> list[Tensor]:
    """Projections of the two infused views, layer by layer."""
    first, _, last = parts["generator"]
    pixels, make = seen.batch.pixels, seen.batch.make
    infused = []
    for h, picture in zip(seen.h, (pixels, sobel(pixels)), strict=True):
        with torch.no_grad():
            style = parts["style"](make.plain(picture))
        wide = torch.cat([h, style], 1)
        inner = torch.clamp(wide @ first.weight.T + first.bias, min=0)
        infused.append(inner @ last.weight.T + last.bias)
    if parts.joint_views:
        return list(parts["projector"](torch.cat(infused)).chunk(2))
    return [parts["projector"](view) for view in infused]


@pytest.mark.parametrize("objective", [SIMCLR, SIMSIAM])
def test_the_loss_is_the_objectives_twice(objective: dict[str, Any]) -> None:
    """Own style in the first view, Sobel's in the second; the predictor serves both terms."""
    found = trial(objective=objective, strength=0.7, encoder=BATCH_NORM, rounds=1)
    parts, seen, context = seen_by(found)
    loss = found.method.score(parts, seen, context)

    def contrast(z: list[Tensor]) -> Tensor:
        if objective is SIMCLR:
            return nt_xent(z[0], z[1], 0.5)
        return negative_cosine(*(parts["predictor"](view) for view in z), *z)

    infused = by_hand(parts, seen)
    wanted = contrast(seen.z) + 0.7 * contrast(infused)
    torch.testing.assert_close(loss, wanted)
    twice = replace(found.method, strength=1.4)  # type: ignore[call-arg]
    more = twice.score(parts, seen, context) - loss
    torch.testing.assert_close(more, 0.7 * contrast(infused))


def test_each_view_has_the_style_of_its_own_kind(plain: Trial) -> None:
    parts, seen, context = seen_by(plain)
    pixels, make = seen.batch.pixels, seen.batch.make
    pictures, copies = context.style_features(seen.batch).chunk(2)
    torch.testing.assert_close(pictures, parts["style"](make.plain(pixels)))
    torch.testing.assert_close(copies, parts["style"](make.plain(sobel(pixels))))
    assert not pictures.requires_grad and not torch.allclose(pictures, copies)


def test_gradients_reach_content_and_generator_and_not_the_style(plain: Trial) -> None:
    """Of the infused loss alone: what is between generator and encoder is not detached."""
    parts, seen, context = seen_by(plain)
    alone = plain.method.score(parts, seen, context) - plain.method.objective.score(
        parts, seen, Context(me=0)
    )
    alone.backward()  # type: ignore[no-untyped-call]
    for name in ("encoder", "projector", "generator"):
        slopes = [p.grad for p in parts[name].parameters() if p.ndim > 1]
        assert slopes and all(g is not None and g.abs().sum() > 0 for g in slopes)
    assert all(p.grad is None for p in parts["style"].parameters())
    parts, seen, context = seen_by(plain)
    before = parts["encoder"][0].weight.detach().clone()
    z = by_hand(parts, seen)
    (wanted,) = torch.autograd.grad(0.5 * nt_xent(z[0], z[1], 0.5), parts["encoder"][0].weight)
    parts, seen, context = seen_by(plain)
    assert torch.equal(before, parts["encoder"][0].weight)
    alone = plain.method.score(parts, seen, context) - plain.method.objective.score(
        parts, seen, Context(me=0)
    )
    (slope,) = torch.autograd.grad(alone, parts["encoder"][0].weight)
    torch.testing.assert_close(slope, wanted, rtol=1e-3, atol=1e-6)


def test_style_features_by_table_and_by_batch_give_the_same_bits(
    plain: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedstyle, "MEMORY", 0)
    assert plain.again().digest == plain.digest


def test_terms_see_the_plain_views_once(plain: Trial) -> None:
    looked: list[Any] = []

    class Watching(Term):
        name = "watching"

        def score(self, parts: Any, seen: Any, context: Any) -> Tensor:
            looked.append(seen)
            return torch.tensor(3.0)

    parts, seen, context = seen_by(plain)
    method = replace(plain.method, terms=(Watching(),))
    total = method.total(parts, seen, context)
    torch.testing.assert_close(total, plain.method.score(parts, seen, context) + 3)
    assert looked == [seen]


# ---- without strength, it is FedAvg --------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"participation": {"number": 2}, "encoder": BATCH_NORM},
        {"objective": SIMSIAM, "local": {**TINY["local"], "weight_decay": 0.1}},
        {"objective": {"name": "swav", "prototypes": 8, "queue": 8}, "terms": {"uv": {}}},
    ],
)
def test_without_strength_it_is_fedavg(settings: dict[str, Any]) -> None:
    """X5, bit for bit; the generator stays as drawn, the style is learned all the same."""
    settings = {"objective": SIMCLR, "views": "fedstyle", **settings}
    avg = first_trial("fedavg", **settings)
    off = trial(strength=0.0, **settings)
    assert same(off.server.model, avg.server.model)
    drawn = off.method.blueprint.state_dict()
    for state in filter(None, off.states.values()):
        generator = {k: v for k, v in state["parts"].items() if k.startswith("generator.")}
        assert generator and all(torch.equal(v, drawn[k]) for k, v in generator.items())
        assert not torch.equal(state["parts"]["style.0.weight"], drawn["style.0.weight"])
    on = trial(strength=0.5, **settings)
    assert not same(on.server.model, avg.server.model)


# ---- a client's own features ---------------------------------------------------------------------


def test_own_features_are_equation_4(plain: Trial) -> None:
    client = client_of(plain)
    sent = plain.method.train(client, SimpleNamespace(model=plain.server.model))["model"]
    own = plain.method.own(sent, client.state)  # type: ignore[arg-type]
    assert own.adapter is not None
    x = plain.method.views.plain(client.examples.pixels())
    parts = plain.method.blueprint.copy_from(sent, client.state["parts"]).eval()  # type: ignore[arg-type]
    h, style = parts["encoder"](x), parts["style"](x)
    both = own.encoder(x)
    assert both.shape == (len(x), 32) and not own.encoder.training
    torch.testing.assert_close(both, torch.cat([h, style], 1))
    made = own.adapter(both)
    assert made.shape == h.shape
    torch.testing.assert_close(made, h + parts["generator"](torch.cat([h, style], 1)))
    trained = [p for p in own.adapter.parameters() if p.requires_grad]
    assert len(trained) == 4
    with torch.no_grad():
        trained[0].zero_()  # a copy: what the client keeps is not touched
    assert client.state["parts"]["generator.0.weight"].abs().sum() > 0


# ---- what leaves, and what goes with what --------------------------------------------------------


@pytest.mark.parametrize("objective", [SIMCLR, SIMSIAM])
def test_only_content_leaves(objective: dict[str, Any]) -> None:
    found = trial(objective=objective, rounds=1)
    client = client_of(found)
    up = found.method.train(client, SimpleNamespace(model=found.server.model))
    for sent in (up["model"], found.server.model):
        assert {key.partition(".")[0] for key in sent} <= SENT  # type: ignore[union-attr]
    assert set(up) == {"model", "loss"}
    made = card(found.method)
    assert made.keeps == {"style": "weights", "generator": "weights"}
    assert "stay with their clients" in made.text()


def test_bytes_are_those_of_the_published_sizes() -> None:
    """11,340,736 parameters each way, and 9,620 numbers of BatchNorm."""
    words = ("encoder=resnet18", "encoder.stem=large", "encoder.norm=batch")
    method = Recipe.of("fedstyle", *words).method_for((224, 224, 3), 65)
    counters = [v for k, v in method.blueprint.shared().items() if k.endswith("batches_tracked")]
    sent = 45_362_944 + 4 * (9_620 - len(counters)) + 8 * len(counters)
    made = card(method)
    assert made.bytes["train"] == {"down": sent, "up": sent + 8}


@pytest.mark.parametrize("batch_norm", ["local", "fedbn", "recalibrate"])
def test_it_runs_with_batch_norms_that_are_not_averaged(plain: Trial, batch_norm: str) -> None:
    found = trial(encoder=BATCH_NORM, batch_norm=batch_norm)
    assert all(torch.isfinite(value.float()).all() for value in found.server.model.values())
    assert same(style_of(found.states[0]), style_of(plain.states[0]))
    own = found.method.own(found.server.model, found.states[0])
    assert torch.isfinite(own.encoder(torch.zeros(2, 3, 12, 12))).all()


def test_it_can_be_hidden_in_a_sum_and_under_noise(plain: Trial) -> None:
    masked = trial(encoder=BATCH_NORM, privacy={"secure_aggregation": True})
    for key, value in masked.server.model.items():
        torch.testing.assert_close(value, plain.server.model[key], rtol=1e-3, atol=1e-4)
    noise = {"update_clip": 1.0, "update_noise": 0.1}
    noisy = trial(encoder=BATCH_NORM, batch_norm="local", privacy=noise)
    for found in (masked, noisy):
        assert same(style_of(found.states[0]), style_of(plain.states[0]))


@pytest.mark.parametrize("name", ["infonce", "spectral", "barlow", "vicreg", "swav"])
def test_other_objectives_of_projections_are_infused(name: str) -> None:
    found = trial(objective={"name": name, "hidden": 16, "out": 8}, rounds=1)
    assert {key.partition(".")[0] for key in found.server.model} <= {*SENT, "prototypes"}
    moved = found.states[0]["parts"]["generator.0.weight"]
    assert not torch.equal(moved, found.method.blueprint["generator"][0].weight)


@pytest.mark.parametrize(
    "name", ["byol", "moco", "rotation", "autoencoder", "supervised", "semi-simsiam"]
)
def test_objectives_with_targets_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*objective=simclr"):
        trial(objective=name)


def test_a_client_with_one_image_declines(plain: Trial) -> None:
    client = client_of(plain)
    client.examples = Examples(plain.dataset.train.without_labels(), np.array([0]))
    with pytest.raises(Decline, match="too few"):
        plain.method.train(client, SimpleNamespace(model=plain.server.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "swav", "views": "orchestra_three"}, "swav with 3 views; set objective="),
        ({"strength": -0.1}, "method.strength is -0.1"),
        ({"strength": math.inf}, "method.strength is inf"),
        ({"style_epochs": -1}, "method.style_epochs is -1"),
        ({"style_lr": 0.0}, "method.style_lr is 0.0"),
        ({"style_temperature": 0.0}, "method.style_temperature is 0.0"),
        ({"hidden": 0}, "method.hidden is 0"),
        ({"reduction": "max"}, "method.reduction"),
        ({"edges": "all"}, "method.edges"),
        (
            {"objective": {**SIMSIAM, "norm": "none", "out_norm": False},
             "local": {**TINY["local"], "dp_clip": 1.0, "dp_noise": 1.0}},
            "fedstyle overrides local training",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trial(**settings)
