import math

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views, preset
from harmonium.data.images import Images
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.rotation import Rotation
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

ROTPRED = Rotation(turns="one", head="projector")
PLAIN = CnnSmall(width=4, out=16, norm="none")


def batch_of(practice, count: int = 24, views: Views | None = None) -> Batch:  # type: ignore[no-untyped-def]
    client, rng = practice.client, torch.Generator().manual_seed(3)
    return Batch(torch.arange(count), client.examples, views or client.views, rng)


@pytest.mark.parametrize("turns", ["all", "one"])
@pytest.mark.parametrize("head", ["encoder", "projector"])
def test_guessing_costs_log_four(practise, turns, head) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Rotation(turns=turns, head=head))
    nn.init.zeros_(practice.parts["rotation"].weight)
    nn.init.zeros_(practice.parts["rotation"].bias)
    loss = practice.method.objective.score(practice.parts, practice.see(), Context(me=0))
    assert loss.item() == pytest.approx(1.3863, abs=1e-4)


def test_all_turns_are_four_views_of_every_image(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Rotation())
    batch, encoder = batch_of(practice, 5), practice.parts["encoder"]
    seen = practice.method.objective.see(practice.parts, batch)
    assert seen.z == [] and seen.turns.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    for turn, h in enumerate(seen.h):
        turned = torch.stack([torch.rot90(x, turn, (1, 2)) for x in batch.plain])
        assert torch.allclose(h, encoder(turned), atol=1e-5)


@pytest.mark.parametrize("augment", [False, True])
def test_one_turn_is_drawn_for_every_image(practise, augment: bool) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Rotation(turns="one", augment=augment), encoder=PLAIN)
    batch, encoder = batch_of(practice), practice.parts["encoder"]
    seen = practice.method.objective.see(practice.parts, batch)
    assert set(seen.turns.tolist()) == {0, 1, 2, 3} and len(seen.h) == 1
    pictures = batch.views[-1] if augment else batch.plain
    for x, turn, h in zip(pictures, seen.turns.tolist(), seen.h[0], strict=True):
        assert torch.allclose(h, encoder(torch.rot90(x, turn, (1, 2))[None])[0], atol=1e-5)
    again = practice.method.objective.see(practice.parts, batch_of(practice))
    assert torch.equal(again.turns, seen.turns)
    other = practice.method.objective.see(practice.parts, batch)
    assert not torch.equal(other.turns, seen.turns)


def test_views_that_are_not_used_are_not_made(practise) -> None:  # type: ignore[no-untyped-def]
    for augment in (False, True):
        practice = practise(Rotation(augment=augment))
        batch = batch_of(practice, 4)
        practice.method.objective.see(practice.parts, batch)
        assert ("views" in vars(batch)) == augment


def test_the_projectors_output_is_classified_as_it_is(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(ROTPRED)
    parts, seen = practice.parts, practice.see()
    logits = parts["rotation"](parts["projector"](seen.h[0]))
    wanted = -sum(
        row.log_softmax(0)[turn] for row, turn in zip(logits, seen.turns, strict=True)
    ) / len(logits)
    loss = practice.method.objective.score(parts, seen, Context(me=0))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_heads_have_the_published_sizes() -> None:
    """Orchestra: 525,312 parameters and, unlike its own projector, a second bias; head 2,052."""
    built = ROTPRED.build({}, 512, World())
    sizes = {name: sum(p.numel() for p in part.module.parameters()) for name, part in built.items()}
    assert sizes == {"projector": 525_312 + 512, "rotation": 2_052}
    assert [type(layer).__name__ for layer in built["projector"].module.children()] == [
        "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d",
    ]  # fmt: skip
    assert set(Rotation().build({}, 512, World())) == {"rotation"}


@pytest.mark.parametrize("objective", [Rotation(), ROTPRED, Rotation(augment=True)])
def test_training_moves_everything_and_learns_to_tell_turns(practise, objective) -> None:  # type: ignore[no-untyped-def]
    settings = {"optimiser": "adam", "lr": 0.01, "schedule": "constant", "encoder": PLAIN}
    practice = practise(objective, epochs=25, **settings)
    first = practise(objective, epochs=1, **settings).learn()
    assert math.isfinite(first)
    late = practice.learn()
    assert practice.moved() == set(practice.parts)
    assert set(practice.parts.rules.values()) == {"mean"}
    assert late < 0.8 * first and late < math.log(4) - 0.2


def test_collapsed_features_cannot_beat_a_guess() -> None:
    """All equal features with all four turns: the best head costs log 4."""

    class Blind(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(x), 4)

    objective = Rotation()
    images = Images(
        np.random.default_rng(0).integers(0, 255, (6, 8, 8, 1), np.uint8), np.zeros(6, int)
    )
    batch = Batch(
        torch.arange(6), Examples(images, np.arange(6)), preset("none"), torch.Generator()
    )
    parts = Parts({"encoder": Part(Blind()), **objective.build({}, 4, World())}, {})
    optimiser = torch.optim.SGD(parts["rotation"].parameters(), lr=0.5)
    for _ in range(200):
        optimiser.zero_grad()
        loss = objective.score(parts, objective.see(parts, batch), Context(me=0))
        loss.backward()
        optimiser.step()
    assert loss.item() == pytest.approx(math.log(4), abs=1e-4)


def test_a_preset_with_one_view_will_do_but_not_turned_twice(practise) -> None:  # type: ignore[no-untyped-def]
    practice, turned = practise(Rotation(turns="one")), preset("orch_rot")
    seen = practice.method.objective.see(practice.parts, batch_of(practice, 3, turned))
    assert seen.h[0].shape == (3, 16)
    Rotation().check_views(turned)
    with pytest.raises(ConfigError, match=r"views.quarter_turn has turned them already"):
        Rotation(augment=True).check_views(turned)


def test_images_that_are_not_square_are_refused(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Rotation())
    wide = Examples(Images(np.zeros((3, 8, 12, 1), np.uint8), np.zeros(3, int)), np.arange(3))
    batch = Batch(torch.arange(3), wide, preset("none"), torch.Generator())
    with pytest.raises(ConfigError, match="these are 8 x 12: set views.size"):
        practice.method.objective.see(practice.parts, batch)


def test_a_projector_of_no_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective.out is 0"):
        Rotation(out=0)
