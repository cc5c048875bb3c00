"""Views made for several batches at a time are those that each batch would make alone."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from harmonium.core.errors import WireError
from harmonium.data.augment.views import PRESETS, Views, preset
from harmonium.data.images import Images
from harmonium.learning.client import Batch, Client, Examples, abridged, counted_reading
from harmonium.privacy.mechanisms import Noise


def client(count: int = 50, side: int = 16, views: Views | None = None) -> Client:
    pixels = np.random.default_rng(0).integers(0, 255, (count, side, side, 3), dtype=np.uint8)
    examples = Examples(Images(pixels, np.zeros(count, int)), np.arange(count))
    rng = torch.Generator().manual_seed(3)
    return Client(0, 1, 4, examples, views or preset("simclr"), rng, Noise("simulated", rng))


def alone(someone: Client, epochs: int, size: int, draws: bool = False) -> Iterator[torch.Tensor]:
    """Views of each batch, made when it is its turn."""
    count = len(someone.examples)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(count, generator=someone.rng), size):
            pixels = someone.examples.pixels(index)
            yield torch.cat(someone.views(pixels, someone.rng))
            if draws:
                torch.rand(1, generator=someone.rng)


def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of batches of every call that made views, as it grows."""
    calls, original = list[int](), Views.of_batches

    def noted(self, batches, chances):
        calls.append(len(batches))
        return original(self, batches, chances)

    monkeypatch.setattr(Views, "of_batches", noted)
    return calls


def test_views_and_generator_are_as_if_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(alone(someone := client(), 2, 8))
    after = someone.rng.get_state()
    calls = rendered(monkeypatch)
    ahead = client()
    found = [torch.cat(batch.views) for batch in ahead.batches(2, 8)]
    assert len(found) == len(expected) == 14
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ahead.rng.get_state(), after)
    assert calls == [7, 7]


def test_a_loss_that_draws_gets_every_batch_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(alone(client(), 2, 8, draws=True))
    calls, found, someone = rendered(monkeypatch), [], client()
    for batch in someone.batches(2, 8):
        found.append(torch.cat(batch.views))
        torch.rand(1, generator=someone.rng)
    assert all(map(torch.equal, found, expected))
    assert calls == [7] + [1] * 13  # at the second batch it is known


def test_a_draw_between_two_batches_discards_what_was_made_ahead() -> None:
    someone, twin, found, expected = client(), client(), [], []
    for place, batch in enumerate(someone.batches(1, 8)):
        found.append(torch.cat(batch.views))
        if place == 3:
            torch.rand(5, generator=someone.rng)
    for place, views in enumerate(alone(twin, 1, 8)):
        expected.append(views)
        if place == 3:
            torch.rand(5, generator=twin.rng)
    assert all(map(torch.equal, found, expected))


def test_another_generator_makes_views_of_its_own() -> None:
    """As APFL's second model has it: the same batch, with a copy of the generator."""
    for batch in client().batches(1, 8):
        copy = torch.Generator()
        copy.set_state(batch.rng.get_state())
        same = replace(batch, rng=copy)
        assert torch.equal(torch.cat(batch.views), torch.cat(same.views))


def test_batches_without_views_draw_nothing() -> None:
    someone, twin = client(), client()
    for place, batch in enumerate(someone.batches(1, 8)):
        if place % 2:
            _ = batch.views
    torch.randperm(50, generator=twin.rng)
    for size in (8, 8, 8):
        twin.views(torch.zeros(size, 16, 16, 3, dtype=torch.uint8), twin.rng)
    assert torch.equal(someone.rng.get_state(), twin.rng.get_state())


def test_images_are_counted_when_their_batch_uses_them() -> None:
    someone = client(48)
    with counted_reading() as reading:
        passes = []
        for batch in someone.batches(1, 8):
            _ = batch.views, batch.pixels
            passes.append(round(reading.passes * 6))
    assert passes == [1, 2, 3, 4, 5, 6]
    with counted_reading() as reading, pytest.raises(WireError, match="too often"):
        reading.most = 0.5
        for place, batch in enumerate(client(48).batches(1, 8)):
            _ = batch.views
            assert place < 3


def test_nothing_is_made_beyond_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = rendered(monkeypatch)
    assert len([batch.views for batch in client().batches(2, 8, steps=4)]) == 4
    assert calls == [4]


def test_estimates_make_every_batch_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = rendered(monkeypatch)
    with abridged(lambda batches: batches == 3):
        assert len([batch.views for batch in client().batches(1, 8)]) == 3
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("side", [8, 12, 16, 28])
def test_bits_do_not_depend_on_the_batches_made_together(name: str, side: int) -> None:
    views, rng = preset(name, size=None), torch.Generator().manual_seed(side)
    assert views.at_once(side, side) > 1
    batches = [torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8) for n in (7, 16, 16, 3)]
    chances = [views.chances(pixels, rng) for pixels in batches]
    together = views.of_batches(batches, chances)
    for pixels, chance, found in zip(batches, chances, together, strict=True):
        (expected,) = views.of_batches([pixels], [chance])
        assert all(map(torch.equal, found, expected))


def test_images_of_odd_sizes_are_made_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last pixels fall between the vector instructions of others."""
    calls = rendered(monkeypatch)
    assert [preset("simclr").at_once(side, side) for side in (7, 9, 30)] == [1, 1, 1]
    assert len([batch.views for batch in client(side=7).batches(1, 8)]) == 7
    assert calls == [1] * 7


def test_batches_are_their_own_when_made_by_hand() -> None:
    someone = client()
    batch = Batch(torch.arange(4), someone.examples, someone.views, someone.rng)
    assert batch.views[0].shape == (4, 3, 16, 16)
