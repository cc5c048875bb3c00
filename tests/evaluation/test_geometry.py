import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import hyp0f1
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from harmonium.core.errors import DataError
from harmonium.evaluation.geometry import (
    alignment,
    directions,
    effective_rank,
    health,
    spread,
    tuning_parts,
    tuning_score,
    uniformity,
)


def gaussian(n=200, dim=16, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def test_alignment_anchors():
    z = gaussian()
    assert alignment(z, z) == pytest.approx(0, abs=1e-12)
    assert alignment(z, 3 * z) == pytest.approx(0, abs=1e-12)
    assert alignment(z, -z) == pytest.approx(4)
    eye = torch.eye(4)
    assert alignment(eye, eye.roll(1, 0)) == pytest.approx(2)


def test_uniformity_anchors():
    assert uniformity(torch.ones(10, 3)) == pytest.approx(0, abs=1e-12)
    # Orthonormal rows: every distinct pair is at squared distance 2.
    assert uniformity(torch.eye(8)) == pytest.approx(-4)
    assert uniformity(torch.eye(8), t=3.0) == pytest.approx(-6)


@pytest.mark.parametrize("dim", [3, 16])
def test_uniformity_of_the_sphere(dim):
    # E exp(4 cos) over the uniform sphere is 0F1(dim/2; 4); see any text on von Mises-Fisher.
    expected = math.log(float(hyp0f1(dim / 2, 4.0))) - 4
    assert uniformity(gaussian(2000, dim)) == pytest.approx(expected, abs=0.02)


def test_uniformity_by_pairs_and_in_chunks():
    z = gaussian(30, 5)
    unit = z / z.norm(dim=1, keepdim=True)
    kernel = [
        math.exp(-2 * float((unit[i] - unit[j]).square().sum()))
        for i in range(30)
        for j in range(30)
        if i != j
    ]
    expected = math.log(sum(kernel) / len(kernel))
    for chunk in (1, 7, 30, 1000):
        assert uniformity(z, chunk=chunk) == pytest.approx(expected, abs=1e-6)


def test_effective_rank_anchors():
    eye = torch.eye(6)
    assert effective_rank(eye, centre=False) == pytest.approx(6)
    assert effective_rank(eye) == pytest.approx(5)  # centring takes one direction away
    assert effective_rank(torch.cat([eye, -eye])) == pytest.approx(6)
    line = torch.linspace(-1, 1, 50)[:, None] * torch.ones(1, 6)
    assert effective_rank(line) == pytest.approx(1)
    assert effective_rank(torch.full((20, 6), 0.1)) == 0
    assert effective_rank(torch.zeros(20, 6)) == 0
    # Singular values 3 and 1: shares 3/4 and 1/4.
    two = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(two, centre=False) == pytest.approx(math.exp(entropy))


def test_directions_anchors():
    eye = torch.eye(6)
    assert directions(torch.cat([eye, -eye])) == pytest.approx(6)
    assert directions(torch.ones(9, 6)) == 0
    # Four rows along the first axis and two along the second: shares of the variance 2/3 and 1/3.
    rows = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert directions(rows) == pytest.approx(math.exp(entropy))


def test_directions_are_steady_under_noise_where_the_rank_is_not():
    base = torch.rand(512, generator=torch.Generator().manual_seed(0))
    line = base + 0.15 * gaussian(400, 1) * gaussian(1, 512, seed=2)
    noisy = line + 0.015 * gaussian(400, 512, seed=1)
    assert effective_rank(noisy) > 50
    assert directions(noisy) < 1.5


def test_spread_anchors():
    assert spread(torch.ones(10, 4)) == pytest.approx(0, abs=1e-9)
    eye = torch.eye(5)
    assert spread(torch.cat([eye, -eye])) == pytest.approx(1)
    assert spread(gaussian(2000, 32)) == pytest.approx(1, abs=0.02)


def test_tuning_score_is_equation_five():
    first, second = gaussian(12, 4), gaussian(12, 4, seed=1)
    cosine = functional.cosine_similarity
    align = float(cosine(first, second).mean())
    crowd = cosine(first[:, None], first[None], dim=2)
    uniform = -float((crowd / 0.2).exp().mean(dim=1).log().mean())
    for chunk in (5, 1000):
        parts = tuning_parts(first, second, chunk=chunk)
        assert parts == pytest.approx((align, uniform), abs=1e-5)
        assert tuning_score(*parts) == pytest.approx(align + 0.2 * uniform, abs=1e-5)
    assert parts[0] == pytest.approx(1 - alignment(first, second) / 2)


def test_the_ends_of_the_tuning_score():
    same, apart = torch.ones(50, 8), torch.eye(50)
    assert tuning_parts(same, same) == pytest.approx((1, -5))
    assert tuning_score(*tuning_parts(same, same)) == pytest.approx(0)
    _, unif = tuning_parts(apart, apart)
    assert unif == pytest.approx(math.log(50) - math.log(math.exp(5) + 49))


@settings(max_examples=25)
@given(
    scale=st.floats(1e-6, 1e6), seed=st.integers(0, 1000), n=st.integers(3, 20), d=st.integers(2, 9)
)
def test_size_and_order_do_not_matter(scale, seed, n, d):
    first, second = gaussian(n, d, seed), gaussian(n, d, seed + 1)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    plain = health(first, second)
    other = health(first[order] * scale, second[order] * scale)
    for name in ("alignment", "uniformity", "effective_rank", "directions", "spread", "dead"):
        assert getattr(other, name) == pytest.approx(getattr(plain, name), rel=1e-4, abs=1e-5)
    assert 0 <= plain.alignment <= 4
    assert plain.uniformity <= 1e-9
    assert 1 - 1e-9 <= plain.effective_rank <= min(n - 1, d) + 1e-9
    assert 0 <= plain.spread <= 1 + 1e-9


# ---- alarms -------------------------------------------------------------------------------------


def cnn(norm: str, layers: int = 3, dim: int = 64) -> nn.Sequential:
    parts: list[nn.Module] = []
    width = 1
    for layer in range(layers):
        out = dim if layer == layers - 1 else 32
        parts.append(nn.Conv2d(width, out, 3, padding=1, stride=2 if layer else 1))
        if norm == "batch":
            parts.append(nn.BatchNorm2d(out))
        elif norm == "group":
            parts.append(nn.GroupNorm(8, out))
        parts.append(nn.ReLU())
        width = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def digits() -> torch.Tensor:
    raw = load_digits().images
    order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(0))
    return torch.tensor(raw / 16, dtype=torch.float32)[order, None]


def view(pictures: torch.Tensor) -> torch.Tensor:
    """A small random turn, shift and change of brightness."""
    n = len(pictures)
    turn, size = (torch.rand(n) - 0.5) * 0.7, torch.rand(n) * 0.4 + 0.8
    warp = torch.zeros(n, 2, 3)
    warp[:, 0, 0] = warp[:, 1, 1] = turn.cos() * size
    warp[:, 1, 0] = turn.sin() * size
    warp[:, 0, 1] = -warp[:, 1, 0]
    warp[:, :, 2] = (torch.rand(n, 2) - 0.5) * 0.4
    grid = functional.affine_grid(warp, list(pictures.shape), align_corners=False)
    moved = functional.grid_sample(pictures, grid, align_corners=False)
    return moved * (torch.rand(n, 1, 1, 1) * 0.4 + 0.8) + 0.05 * torch.randn_like(moved)


def train(encoder: nn.Module, head: nn.Module, loss, epochs: int, rate: float) -> None:
    pictures = digits()[:1400]
    parameters = [*encoder.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, rate, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(pictures)).split(128):
            one, two = (head(encoder(view(pictures[batch]))) for _ in range(2))
            optimiser.zero_grad()
            loss(one, two).backward()
            optimiser.step()


def look(encoder: nn.Module):
    held = digits()[1400:]
    with torch.no_grad():
        encoder.eval()
        return health(encoder(view(held)), encoder(view(held)))


def contrast(one, two):
    both = functional.normalize(torch.cat([one, two]), dim=1)
    scores = both @ both.T / 0.5
    scores.fill_diagonal_(-1e9)
    return functional.cross_entropy(scores, torch.arange(len(both)).roll(len(one)))


def pull(one, two):  # SimSiam without its stop-gradient and predictor
    return -functional.cosine_similarity(one, two).mean()


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_untrained_encoder_raises_no_alarm(norm, layers, seed):
    torch.manual_seed(seed)
    assert look(cnn(norm, layers)).warnings() == ()


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_a_contrastive_encoder_raises_no_alarm(norm):
    torch.manual_seed(0)
    encoder = cnn(norm)
    head = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    train(encoder, head, contrast, epochs=2, rate=0.05)
    assert look(encoder).warnings() == ()
    assert look(nn.Sequential(encoder, head)).warnings(projections=True) == ()


@pytest.mark.parametrize("norm", ["group", "none"])
def test_a_collapsed_encoder_is_noticed(norm):
    torch.manual_seed(0)
    encoder = cnn(norm)
    start = look(encoder)
    train(encoder, nn.Identity(), pull, epochs=4, rate=0.2)
    found = look(encoder)
    assert found.spread < 0.1 * start.spread
    for warnings in (found.warnings(), found.warnings(start)):
        assert len(warnings) == 1
        assert "nearly the same feature" in warnings[0]


def test_a_collapsed_projector_is_noticed_although_its_encoder_is_spread():
    torch.manual_seed(0)
    encoder = cnn("batch")
    head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    train(encoder, head, pull, epochs=3, rate=0.05)
    assert look(encoder).warnings() == ()
    (warning,) = look(nn.Sequential(encoder, head)).warnings(projections=True)
    assert "nearly the same projection" in warning


def test_constant_features_are_a_complete_collapse():
    for constant in (torch.full((100, 32), 0.3), torch.zeros(100, 32)):
        found = health(constant, constant)
        assert found.dead == 1
        assert "nearly the same feature" in found.warnings()[0]
        assert found.warnings(found) == found.warnings()


def test_a_line_is_a_dimensional_collapse():
    base = torch.rand(64, generator=torch.Generator().manual_seed(0))
    line = (base + 0.15 * gaussian(300, 1) * gaussian(1, 64, seed=3)).relu()
    for noise in (0.0, 0.01):
        noisy = line + noise * gaussian(300, 64, seed=4)
        (warning,) = health(noisy, noisy).warnings()
        assert "few directions" in warning
        assert "of 64 dimensions" in warning


def test_narrowing_is_judged_by_the_start():
    wide = gaussian(300, 32)
    axes = torch.zeros(2, 32)
    axes[0, 0] = axes[1, 1] = 1
    plane = health(gaussian(300, 2) @ axes, gaussian(300, 2) @ axes)
    assert plane.directions == pytest.approx(2, abs=0.1)
    assert plane.warnings() == ()  # images may simply differ in two ways
    (warning,) = plane.warnings(start=health(wide, wide))
    assert "few directions" in warning
    assert plane.warnings(start=plane) == ()


def test_numbers_that_are_not_finite():
    for bad in (math.nan, math.inf):
        broken = gaussian()
        broken[5, 3] = bad
        found = health(gaussian(), broken)
        assert not found.finite
        assert math.isnan(found.spread)
        assert "not finite" in found.warnings()[0]


def test_an_encoder_born_with_near_features_is_not_called_collapsed_when_its_start_is_known():
    near = 1 + 0.005 * gaussian(300, 32)
    found = health(near, near)
    assert "collapsed" in found.warnings()[0]
    assert found.warnings(start=found) == ()
    worse = 1 + 0.002 * gaussian(300, 32)
    assert "collapsed" in health(worse, worse).warnings(start=found)[0]


def test_dead_dimensions_are_counted():
    z = gaussian(100, 8)
    z[:, :2] = 0
    assert health(z, z).dead == pytest.approx(0.25)


def test_few_dimensions_or_images_raise_no_alarm():
    for n, dim in ((5, 64), (300, 2), (300, 4)):
        assert health(gaussian(n, dim), gaussian(n, dim, 1)).warnings() == ()


def test_refusals():
    with pytest.raises(DataError, match="two views"):
        health(gaussian(5), gaussian(6))
    with pytest.raises(DataError, match="at least 2 images"):
        health(gaussian(1), gaussian(1))


def test_features_that_are_all_zero_are_not_uniform() -> None:
    assert uniformity(torch.zeros(5, 3)) == pytest.approx(0.0)
    some = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0]])
    wanted = math.log((1 + 2 * math.exp(-2)) / 3)  # distances 0, 1 and 1
    assert uniformity(some) == pytest.approx(wanted)
