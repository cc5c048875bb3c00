from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError, WireError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.learning.client import Batch, Client, Decline, Examples
from harmonium.learning.training import Local, fit, frozen
from harmonium.privacy.mechanisms import Noise, Release


def client(count: int = 10, uses_labels: bool = False, seed: int = 0) -> Client:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 6, 6, 1), dtype=np.uint8)
    images = Images(pixels, np.arange(20) % 3)
    rng = torch.Generator().manual_seed(seed)
    examples = Examples(images, np.arange(5, 5 + count), uses_labels=uses_labels)
    return Client(0, 1, 4, examples, preset("digits"), rng, Noise("simulated", rng))


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(10, 4, [4, 4, 2]), (9, 4, [4, 4]), (3, 128, [3]), (1, 4, []), (0, 4, [])],
)
def test_batches_follow_the_edge_rules(count: int, size: int, sizes: list[int]) -> None:
    """A client smaller than a batch is one batch; a last batch of one is dropped."""
    assert [len(batch.index) for batch in client(count).batches(1, size)] == sizes


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(10, 4, [4, 4]), (8, 4, [4, 4]), (4, 4, [4]), (3, 128, [3]), (2, 4, [2]), (1, 4, [])],
)
def test_short_last_batches_are_left_out_if_told(count: int, size: int, sizes: list[int]) -> None:
    """Unless it is the only one: a client smaller than a batch trains on what it has."""
    someone, local = client(count), Local(epochs=2, batch=size, drop_last=True)
    found = [len(batch.index) for batch in someone.batches(2, size, drop_last=True)]
    assert found == sizes * 2
    among = torch.arange(count)
    assert [len(b.index) for b in someone.batches(1, size, drop_last=True, among=among)] == sizes
    model = nn.ModuleDict({"w": nn.Linear(1, 1)})
    if sizes:
        seen = list[int]()
        done = fit(
            model,
            someone,
            lambda batch: model["w"](torch.ones(1, 1)).sum(),
            local,
            beside=lambda batch: seen.append(len(batch.index)),
        )
        assert seen == sizes * 2 and done.steps == len(seen)


@pytest.mark.parametrize(
    ("most", "count", "epochs", "steps"),
    [(1, 10, 2, 1), (4, 10, 2, 4), (9, 10, 2, 6), (None, 10, 2, 6), (2, 3, 3, 2)],
)
def test_steps_are_cut_without_changing_those_before(
    most: int | None, count: int, epochs: int, steps: int
) -> None:
    local = Local(epochs=epochs, batch=4, max_steps=most)
    model, seen = nn.ModuleDict({"w": nn.Linear(1, 1)}), list[torch.Tensor]()
    done = fit(
        model,
        client(count),
        lambda batch: model["w"](torch.ones(1, 1)).sum(),
        local,
        beside=lambda batch: seen.append(batch.index),
    )
    assert done.steps == len(seen) == local.steps(count) == steps
    whole = [batch.index for batch in client(count).batches(epochs, 4)][:steps]
    assert all(torch.equal(one, other) for one, other in zip(seen, whole, strict=True))


def test_an_epoch_shows_every_example_once_in_a_new_order() -> None:
    first, second = (torch.cat([b.index for b in client(seed=s).batches(1, 4)]) for s in (0, 1))
    assert sorted(first.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_a_batch_shows_its_clients_images_and_no_others() -> None:
    someone = client()
    batch = next(iter(someone.batches(1, 4)))
    assert torch.equal(batch.pixels, someone.examples.pixels()[batch.index])
    assert [tuple(view.shape) for view in batch.views] == [(4, 1, 6, 6)] * 2
    assert batch.plain.shape == (4, 1, 6, 6)


def test_labels_need_permission() -> None:
    with pytest.raises(WireError, match="uses_labels = True"):
        _ = next(iter(client().batches(1, 4))).labels
    allowed = client(uses_labels=True)
    batch = next(iter(allowed.batches(1, 4)))
    assert torch.equal(batch.labels, (batch.index + 5) % 3)


def parts() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Flatten(), nn.Linear(36, 4)),
                          "head": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))})  # fmt: skip


def square(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    return model["head"](model["encoder"](batch.plain)).square().mean() + 0 * len(batch.index)


def test_fit_is_plain_sgd() -> None:
    """One full batch, no momentum: exactly one gradient step."""
    model, someone = parts(), client()
    twin = parts()
    fit(
        model,
        someone,
        lambda b: square(model, b),
        Local(epochs=1, batch=10, lr=0.1, momentum=0.0, clip=None),
    )
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    whole = Batch(order, someone.examples, someone.views, someone.rng)
    square(twin, whole).backward()
    for new, old in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(new, old - 0.1 * old.grad, atol=1e-7)


@pytest.mark.parametrize("train", [["encoder"], ["head"]])
def test_parts_that_are_not_trained_keep_their_bits(train: list[str]) -> None:
    model = parts()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fit(model, client(), lambda b: square(model, b), Local(batch=4), train=train)
    for key, value in model.state_dict().items():
        changed = not torch.equal(value, before[key])
        assert changed == (key.partition(".")[0] in train), key
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_gives_everything_back() -> None:
    model = parts()
    model["head"].eval()
    model["encoder"][1].bias.requires_grad_(False)
    with frozen(model.values()):
        assert not any(p.requires_grad for p in model.parameters())
        assert not model["encoder"].training
    assert model["encoder"].training and not model["head"].training
    assert [p.requires_grad for p in model["encoder"].parameters()] == [True, False]


def test_a_client_without_a_step_declines() -> None:
    model = parts()
    with pytest.raises(Decline, match="1 example"):
        fit(model, client(1), lambda b: square(model, b), Local())


def test_after_runs_after_every_step() -> None:
    model, calls = parts(), []
    done = fit(model, client(), lambda b: square(model, b), Local(epochs=2, batch=4),
               after=lambda: calls.append(1))  # fmt: skip
    assert done.steps == len(calls) == 6


def test_gradients_are_clipped() -> None:
    model = parts()
    before = [p.clone() for p in model.parameters()]
    local = Local(epochs=1, batch=10, lr=1.0, momentum=0.0, clip=1e-3)
    fit(model, client(), lambda b: 1e4 * square(model, b), local)
    moved = sum((a - b).square().sum() for a, b in zip(model.parameters(), before, strict=True))
    assert moved.item() ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_follows_its_schedule_over_rounds() -> None:
    cosine = Local(lr=1.0, schedule="cosine")
    assert [round(cosine.rate(r, 4), 4) for r in (1, 2, 3, 4)] == [1.0, 0.8536, 0.5, 0.1464]
    assert Local(lr=0.3, schedule="constant").rate(9, 10) == 0.3
    assert cosine.rate(0, 4) == 1.0  # before the first round


def test_impossible_settings_are_refused() -> None:
    for settings in ({"epochs": 0}, {"batch": 0}, {"lr": float("nan")}):
        with pytest.raises(ConfigError, match="local"):
            Local(**settings)  # type: ignore[arg-type]


def test_releases_are_noisy_and_noted() -> None:
    someone = client()
    value = torch.zeros(200, 200)
    sent = someone.release("corr", value, sensitivity=0.5, sigma=2.0, then=lambda v: v.triu())
    assert sent[sent != 0].std() == pytest.approx(2.0, rel=0.02)
    assert someone.was_released("corr", sent)
    assert not someone.was_released("corr", sent.clone())
    assert not someone.was_released("other", sent)
    (release,) = someone.releases
    assert (release.sensitivity, release.scale, release.noise) == (0.5, 2.0, "simulated")


def test_system_noise_is_normal_and_not_repeatable() -> None:
    noise = Noise("system", torch.Generator())
    first, second = noise.gaussian(torch.zeros(100_001), 3.0), noise.gaussian(torch.zeros(9), 3.0)
    assert first.mean().abs() < 0.05 and first.std() == pytest.approx(3.0, rel=0.02)
    assert (first.abs() < 3.0).float().mean() == pytest.approx(0.6827, abs=0.01)
    assert not torch.equal(first[:9], second)
    with pytest.raises(ConfigError):
        noise.gaussian(torch.zeros(2), float("nan"))


def test_a_released_value_must_stay_as_it_was() -> None:
    someone, raw = client(), torch.ones(4)
    released = someone.release("corr", raw, sensitivity=1.0, sigma=10.0)
    assert someone.was_released("corr", released)
    assert not someone.was_released("corr", released.clone())
    released.copy_(raw)
    assert not someone.was_released("corr", released)


def test_whole_numbers_are_not_released() -> None:
    with pytest.raises(WireError, match=r"value.double\(\)"):
        client().release("counts", torch.zeros(4, dtype=torch.int64), sensitivity=1.0, sigma=0.5)


def test_a_value_made_by_several_mechanisms_is_released_with_all_of_them() -> None:
    someone = client()
    by = [
        Release("", "gaussian", 1.0, 3.0, "simulated", neighbours="add-remove"),
        Release("", "discrete-laplace", 1, 60.0, "simulated", 21, "add-remove"),
    ]
    value = torch.ones(3, 2)
    assert someone.released("centroids", value, by) is value
    assert someone.was_released("centroids", value)
    assert someone.releases == [replace(one, field="centroids") for one in by]
    value[0] = 2
    assert not someone.was_released("centroids", value)
    with pytest.raises(WireError, match="`centroids` is released"):
        someone.released("centroids", torch.ones(2), [])
