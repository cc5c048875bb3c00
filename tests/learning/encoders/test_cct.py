import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.encoders.cct import CCT, Attention, Layer, SequencePool, drop_images


@pytest.mark.parametrize(
    ("side", "tokens", "parameters"),
    [(32, 64, 480_833), (64, 256, 505_409), (28, 49, None), (12, 9, None), (8, 4, None)]
    + [(5, 4, None), (1, 1, None)],
)
def test_tokens_and_sizes(side: int, tokens: int, parameters: int | None) -> None:
    network = CCT().build(3, side)
    assert network[0](torch.zeros(2, 3, side, side)).shape == (2, tokens, 128)
    assert network[1].table.shape == (tokens, 128)
    if parameters:
        assert sum(p.numel() for p in network.parameters()) == parameters
    assert network.eval()(torch.randn(2, 3, side, side)).shape == (2, CCT().features)


def test_tokens_by_hand() -> None:
    tokenizer = CCT().build(3, 6)[0]
    x = torch.randn(2, 3, 6, 6)
    maps = x
    for number in (0, 3):
        maps = functional.conv2d(maps, tokenizer[number].weight, padding=1).relu()
        maps = functional.max_pool2d(maps, 3, stride=2, padding=1)
    found = tokenizer(x)
    assert maps.shape == (2, 128, 2, 2)
    for row in range(2):
        for column in range(2):
            assert torch.allclose(found[:, 2 * row + column], maps[:, :, row, column], atol=1e-6)


def test_a_layer_by_hand() -> None:
    layer = Layer(8, 2, dropout=0.1, skip=0.1).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    stream = x + attention(norm(x, layer.norm1), layer.attention)
    stream = norm(stream, layer.norm2)  # on the stream itself
    first, _, second = layer.mlp
    inner = functional.gelu(stream @ first.weight.T + first.bias)
    expected = stream + inner @ second.weight.T + second.bias
    assert torch.allclose(layer(x), expected, atol=1e-10)


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    spread = x.var(2, correction=0, keepdim=True)
    return (x - x.mean(2, keepdim=True)) / (spread + 1e-5).sqrt() * layer.weight + layer.bias


def attention(x: Tensor, layer: Attention) -> Tensor:
    query, key, value = (x @ w.T for w in layer.query_key_value.weight.chunk(3))
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = torch.einsum("nid,njd->nij", query[..., head], key[..., head]) / 4**0.5
        heads.append(scores.softmax(2) @ value[..., head])
    return torch.cat(heads, dim=2) @ layer.project.weight.T + layer.project.bias


def test_layers_that_add_nothing_still_normalise_the_stream() -> None:
    layer, x = Layer(8, 2, 0.0, 0.0), torch.randn(2, 5, 8)
    for last in (layer.attention.project, layer.mlp[2]):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    assert torch.allclose(layer(x), functional.layer_norm(x, (8,)), atol=1e-6)


def test_the_pool_is_a_weighted_mean() -> None:
    pool, x = SequencePool(8), torch.randn(3, 5, 8)
    weights = pool.weights(x)
    assert weights.shape == (3, 5) and torch.allclose(weights.sum(1), torch.ones(3))
    scores = (x @ pool.score.weight[0] + pool.score.bias).exp()
    expected = torch.stack(
        [sum(scores[n, t] / scores[n].sum() * x[n, t] for t in range(5)) for n in range(3)]
    )
    assert torch.allclose(pool(x), expected, atol=1e-6)


def test_layers_are_skipped_ever_more_often() -> None:
    network = CCT().build(3, 8)
    layers = [module for module in network if isinstance(module, Layer)]
    assert [layer.skip for layer in layers] == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1])
    assert [layer.attention.dropout for layer in layers] == [0.1] * 4


def test_skipped_images_are_whole_and_made_up_for() -> None:
    torch.manual_seed(0)
    found = drop_images(torch.ones(4000, 3, 2), 0.2)
    assert (found == found[:, :1, :1]).all()
    assert set(found.unique().tolist()) == {0.0, 1.25}
    assert found.mean() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("chance", ["attention_dropout", "stochastic_depth"])
def test_chance_is_for_training_only(chance: str) -> None:
    off = {"attention_dropout": 0.0, "stochastic_depth": 0.0}
    network = CCT(**{**off, chance: 0.5}).build(3, 8)
    x = torch.randn(8, 3, 8, 8)
    assert not torch.allclose(network(x), network(x))
    torch.manual_seed(3)
    once = network(x)
    torch.manual_seed(3)
    assert torch.equal(network(x), once)
    before = torch.get_rng_state()
    assert torch.equal(network.eval()(x), network(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_start_as_the_authors_draw_them() -> None:
    torch.manual_seed(0)
    network = CCT().build(3, 32)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            assert module.bias is None or not module.bias.any()
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.2)
        if isinstance(module, nn.Conv2d):
            kaiming = (2 / (9 * module.in_channels)) ** 0.5
            assert module.weight.std().item() == pytest.approx(kaiming, rel=0.05)
    assert network[1].table.std().item() == pytest.approx(0.2, rel=0.05)
