"""What every encoder must keep, whichever it is."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.learning.encoders import Encoder, encoders, groups_of, normalise
from harmonium.learning.parts import Part, Parts
from harmonium.recipe.schema import Recipe

NAMES = list(encoders.table())
NORMED = [name for name in NAMES if "norm" in {f.name for f in fields(encoders[name])}]
KINDS = [(name, {}) for name in NAMES] + [
    (name, {"norm": norm}) for name in NORMED for norm in ("batch", "none")
]


def narrow(name: str, **settings: Any) -> Encoder:
    """A quick one of its kind."""
    if name in NORMED:
        settings.setdefault("width", 4)
    return encoders[name](**settings)


def seeded(encoder: Encoder, channels: int = 3, side: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return encoder.build(channels, side)


def make_images(count: int = 4, channels: int = 3, side: int = 8) -> torch.Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def test_all_convolutional_encoders_choose_their_norm() -> None:
    assert set(NAMES) - set(NORMED) == {"cct-4-3x2", "fixup-resnet20"}
    assert all(encoders[name]().norm == "group" for name in NORMED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 11, 12, 28, 32, 64])
def test_images_become_features(name: str, channels: int, side: int) -> None:
    encoder = narrow(name)
    found = seeded(encoder, channels, side)(make_images(2, channels, side))
    assert found.shape == (2, encoder.features) and found.isfinite().all()


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_an_image_is_judged_on_its_own(name: str, settings: dict[str, Any]) -> None:
    network, x = seeded(narrow(name, **settings)).double().eval(), make_images().double()
    alone = torch.cat([network(x[i : i + 1]) for i in range(len(x))])
    assert torch.allclose(network(x), alone, atol=1e-8)
    assert (alone[0] - alone[1]).abs().max() > 1e-4


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_only_batch_norm_has_buffers_and_modes(name: str, settings: dict[str, Any]) -> None:
    if name.startswith("cct"):
        settings = {"attention_dropout": 0, "stochastic_depth": 0}
    network, x = seeded(narrow(name, **settings)), make_images()
    batch = settings.get("norm") == "batch"
    assert bool(list(network.buffers())) == batch
    assert torch.equal(network.train()(x), network.eval()(x)) != batch


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_gradients_reach_every_parameter(name: str, settings: dict[str, Any]) -> None:
    network, x = seeded(narrow(name, **settings), side=16), make_images(8, side=16)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(2):  # what starts at zero hides what stands before it, until a step is made
        optimiser.step()
        optimiser.zero_grad()
        (network(x) - 1).square().sum().backward()
    still = {key for key, p in network.named_parameters() if p.grad.abs().max() < 1e-6}
    # A softmax does not see what is added to all its scores.
    assert still == ({key for key in still if key.endswith("score.bias")})


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_a_copy_gives_the_same_features_and_a_life_of_its_own(
    name: str, settings: dict[str, Any]
) -> None:
    x = make_images()
    parts = Parts({"encoder": Part(seeded(narrow(name, **settings)))}, {})
    twin = parts.copy_from()
    outs = []
    for each in (parts, twin):
        torch.manual_seed(7)  # dropout
        outs.append((each["encoder"].train()(x), each["encoder"].eval()(x)))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.rand_like(parameter))
    assert torch.equal(parts["encoder"](x), outs[0][1])
    assert not torch.equal(twin["encoder"](x), outs[0][1])


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_gives_the_same_features(name: str) -> None:
    network, x = seeded(narrow(name), side=32).eval(), make_images(side=32)
    single = network(x)
    double = network.double()(x.double())
    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_layout_in_memory_changes_nothing(name: str, channels: int) -> None:
    network = seeded(narrow(name), channels).double().eval()
    x = make_images(channels=channels).double()
    first = network(x)
    last = network.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert torch.allclose(first, last, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_fixes_all_weights(name: str) -> None:
    one, two = (seeded(narrow(name)).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", NORMED)
def test_norms_are_what_their_name_says(name: str) -> None:
    kinds = {"group": nn.GroupNorm, "batch": nn.BatchNorm2d, "none": nn.Identity}
    for norm, kind in kinds.items():
        modules = list(narrow(name, norm=norm).build(3, 8).modules())
        filters = [m for m in modules if isinstance(m, nn.Conv2d)]
        assert sum(isinstance(m, kind) for m in modules) == len(filters)
        assert not any(isinstance(m, k) for m in modules for k in kinds.values() if k is not kind)
        assert all((m.bias is not None) == (norm == "none") for m in filters)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8, 48, 64, 100, 1024])
def test_groups_follow_the_rule(channels: int) -> None:
    groups = groups_of(channels)
    assert channels % groups == 0 and groups <= 32
    assert channels // groups >= 2 or groups == 1
    larger = [g for g in range(groups + 1, 33) if channels % g == 0 and channels // g >= 2]
    assert not larger and normalise("group", channels).num_groups == groups


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("side", [8, 32])
def test_a_group_holds_enough_to_be_normalised(name: str, side: int) -> None:
    """However few pixels are left; where there are many, the published rule is kept."""
    network = narrow(name, width=32).build(1, side).eval()
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm)]
    inputs: dict[nn.Module, torch.Tensor] = {}
    for norm in norms:
        norm.register_forward_pre_hook(lambda m, given: inputs.update({m: given[0]}))
    network(torch.zeros(1, 1, side, side))
    for norm in norms:
        pixels = inputs[norm].shape[2:].numel()
        each = norm.num_channels // norm.num_groups
        assert each * pixels >= 16 and each >= 2
        if pixels >= 8:
            assert norm.num_groups == groups_of(norm.num_channels)


@pytest.mark.parametrize("name", NORMED)
def test_groups_can_be_chosen(name: str) -> None:
    modules = narrow(name, width=6, groups=3).build(3, 8).modules()
    assert {m.num_groups for m in modules if isinstance(m, nn.GroupNorm)} == {3}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "encoder.width is 0"),
        ({"out": 0}, "encoder.out is 0"),
        ({"width": 6, "groups": 4}, "encoder.groups is 4.*encoder.width, 6"),
        ({"groups": 0}, "encoder.groups is 0.*encoder.width"),
        ({"groups": 2, "norm": "batch"}, "encoder.groups is 2; it needs encoder.norm=group"),
        ({"attention_dropout": 1.0}, "encoder.attention_dropout is 1.0"),
        ({"stochastic_depth": -0.1}, "encoder.stochastic_depth is -0.1"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: Any, message: str) -> None:
    if set(settings) <= {field.name for field in fields(encoders[name])}:
        with pytest.raises(ConfigError, match=message):
            encoders[name](**settings)


def test_a_recipe_without_normalisation_reads_itself_back() -> None:
    recipe = Recipe.of("fedavg", "encoder=resnet8", "encoder.norm=none")
    assert recipe.encoder == encoders["resnet8"](norm="none")
    assert Recipe.from_tree(recipe.tree()).tree() == recipe.tree()
    with pytest.raises(ConfigError, match=r"encoder.norm=layer.*'group', 'batch' or 'none'"):
        Recipe.of("fedavg", "encoder=resnet8", "encoder.norm=layer")
