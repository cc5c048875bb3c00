import pytest
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.learning.context import Context
from harmonium.learning.objectives.spectral import (
    Spectral,
    correlation,
    correlation_contrast,
    cosine_contrast,
    shortened,
    spectral_contrast,
)
from harmonium.learning.world import World


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(z: Tensor, mu: float) -> Tensor:
    return z * min(1.0, mu**0.5 / float(z.norm()))


def haochen(first: Tensor, second: Tensor, mu: float) -> float:
    """Pair by pair: partners attract, pairs of different images across views repel."""
    a, b = [cut(z, mu) for z in first], [cut(z, mu) for z in second]
    n = len(a)
    near = sum(float(a[i] @ b[i]) for i in range(n)) / n
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    far = sum(float(a[i] @ b[j]) ** 2 for i, j in pairs) / len(pairs) if pairs else 0.0
    return (-2 * near + far) / mu


def fedsc(views: list[Tensor], mu: float, alpha: float, others: Tensor) -> float:
    """Equation 80 from the empirical matrices of section 5.2, formed image by image."""
    half, n, dim = len(views) // 2, len(views[0]), views[0].shape[1]
    positive, plain = torch.zeros(2, dim, dim, dtype=torch.float64)
    for v, view in enumerate(views):
        for i in range(n):
            z = cut(view[i], mu)
            partner = cut(views[(v + half) % len(views)][i], mu)
            plain += torch.outer(z, z) / (2 * half * n)
            positive += torch.outer(z, partner) / (2 * half * n)
    contrast = 0.5 * alpha * plain.square().sum() + (1 - alpha) * torch.trace(plain @ others)
    return float(contrast - torch.trace(positive))


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("mu", [0.5, 1.0, 10.0])
def test_the_form_of_haochen_is_its_definition(n: int, mu: float) -> None:
    a, b = rows(2, n, 4, seed=n)
    assert spectral_contrast(a, b, mu).item() == pytest.approx(haochen(a, b, mu))


@pytest.mark.parametrize("views", [2, 4])
@pytest.mark.parametrize("dim", [3, 30])  # fewer and more dimensions than rows
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_the_form_of_fedsc_is_twice_its_equation(views: int, dim: int, alpha: float) -> None:
    z, others = list(rows(views, 5, dim)), rows(dim, dim, seed=1)
    loss = correlation_contrast(z, 2.0, alpha=alpha, others=others).item()
    assert loss == pytest.approx(2 * fedsc(z, 2.0, alpha, others))


@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_form_of_orchestra_is_its_definition(n: int) -> None:
    a, b = rows(2, n, 4, seed=n)
    unit = [[z / z.norm() for z in view] for view in (a, b)]
    assert cosine_contrast(a, b).item() == pytest.approx(haochen(*unit, 1.0))


def test_the_forms_differ_on_random_projections() -> None:
    """Self pairs and same-view pairs are in FedSC's; cosines are in Orchestra's."""
    a, b = 0.5 * rows(2, 8, 4)
    losses = spectral_contrast(a, b), correlation_contrast([a, b]), cosine_contrast(a, b)
    values = [loss.item() for loss in losses]
    assert min(abs(x - y) for x in values for y in values if x is not y) > 1e-3


def test_fedscs_extra_pairs_are_those_within_a_view_and_with_oneself() -> None:
    """All 4 n^2 ordered pairs of rows, of which HaoChen's are the 2 n (n - 1) across views."""
    n = 6
    a, b = (shortened(view, 1.0) for view in rows(2, n, 4))
    z = torch.cat([a, b])
    squares = (z @ z.T).square()
    across = squares[:n, n:].sum() - squares[:n, n:].diagonal().sum()
    rest = squares.sum() - 2 * across
    near = -2 * (a * b).sum(1).mean()
    assert spectral_contrast(a, b).item() == pytest.approx((near + across / (n * n - n)).item())
    expected = near + (2 * across + rest) / (2 * n) ** 2
    assert correlation_contrast([a, b]).item() == pytest.approx(expected.item())


def test_mu_bounds_norms_and_with_them_correlations() -> None:
    z = rows(20, 5)
    short = shortened(z, 0.5)
    assert short.norm(dim=1).max().item() == pytest.approx(0.5**0.5)
    inside = z.norm(dim=1) <= 1
    assert torch.equal(shortened(z, 1.0)[inside], z[inside])
    matrix = correlation(short)
    assert torch.allclose(matrix, matrix.T) and torch.linalg.eigvalsh(matrix).min() > -1e-12
    assert matrix.norm() <= matrix.trace() + 1e-12 and matrix.trace() <= 0.5 + 1e-12
    assert torch.allclose(matrix, sum(torch.outer(row, row) for row in short) / 20)


def test_zero_projections_have_finite_gradients() -> None:
    a, b = torch.zeros(2, 3, 4, requires_grad=True)
    for loss in (spectral_contrast(a, b), correlation_contrast([a, b]), cosine_contrast(a, b)):
        (gradient,) = torch.autograd.grad(loss, a, retain_graph=True)
        assert gradient.isfinite().all()


def test_clients_gradients_add_up_to_that_of_the_whole_federation() -> None:
    """Equation 6: with alpha the client's share and exact matrices of the others."""
    sizes, dim = (3, 5, 9), 4
    weights = rows(6, dim).requires_grad_()
    data = [[rows(n, 6, seed=10 * n + v) for v in range(2)] for n in sizes]
    total = sum(sizes)

    def project(views: list[Tensor]) -> list[Tensor]:
        return [x @ weights for x in views]

    pooled = [torch.cat([views[v] for views in data]) for v in range(2)]
    (whole,) = torch.autograd.grad(correlation_contrast(project(pooled), 2.0), weights)
    matrices = [correlation(shortened(torch.cat(project(views)), 2.0)) for views in data]
    summed = torch.zeros_like(whole)
    for j, n in enumerate(sizes):
        q = n / total
        rest = sum(sizes[i] / total * matrices[i] for i in range(len(sizes)) if i != j) / (1 - q)
        loss = correlation_contrast(project(data[j]), 2.0, alpha=q, others=rest)
        summed += q * torch.autograd.grad(loss, weights, retain_graph=True)[0]
    assert (summed - whole).abs().max() < 1e-10


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_among_equal_clients_alpha_changes_no_gradient(alpha: float) -> None:
    a, b = (rows(5, 4, seed=s).requires_grad_() for s in range(2))
    same = correlation(shortened(torch.cat([a, b]), 2.0))
    alone = torch.autograd.grad(correlation_contrast([a, b], 2.0), (a, b))
    among = torch.autograd.grad(correlation_contrast([a, b], 2.0, alpha=alpha, others=same), (a, b))
    assert all(torch.allclose(x, y) for x, y in zip(alone, among, strict=True))


def test_only_the_symmetric_part_of_others_matters_and_it_gets_no_gradient() -> None:
    a, b = rows(2, 5, 4)
    others, noise = rows(4, 4, seed=1).requires_grad_(), rows(4, 4, seed=2)
    a.requires_grad_()
    loss = correlation_contrast([a, b], 2.0, alpha=0.5, others=others)
    loss.backward()
    assert others.grad is None and a.grad is not None
    noisy = correlation_contrast([a, b], 2.0, alpha=0.5, others=others + noise - noise.T)
    assert noisy.item() == pytest.approx(loss.item())


def test_collapse_costs_more_than_spread_with_the_same_alignment() -> None:
    """Both align perfectly at length 1: only the spread rows do not repel."""
    same, apart = torch.ones(8, 8) / 8**0.5, torch.eye(8)
    for loss, best in ((spectral_contrast, -2.0), (cosine_contrast, -2.0)):
        assert loss(same, same).item() == pytest.approx(-1.0)
        assert loss(apart, apart).item() == pytest.approx(best)
    assert correlation_contrast([same, same]).item() == pytest.approx(-1.0)
    assert correlation_contrast([apart, apart]).item() == pytest.approx(-2 + 1 / 8)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_right(n: int) -> None:
    a, b = (rows(n, 4, seed=s).requires_grad_() for s in range(2))
    others = rows(4, 4, seed=5)
    for loss in (
        lambda x, y: spectral_contrast(x, y, 2.0),
        cosine_contrast,
        lambda x, y: correlation_contrast([x, y], 2.0, alpha=0.4, others=others),
    ):
        assert torch.autograd.gradcheck(loss, (a, b))


@pytest.mark.parametrize("form", ["haochen", "fedsc", "orchestra"])
def test_training_moves_every_part(form, practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Spectral(form=form, centroids=5))
    loss = practice.learn()
    extra = {"centroids"} if form == "orchestra" else set()
    assert practice.moved() == {"encoder", "projector"} | extra
    assert set(practice.parts.rules.values()) == {"mean"}
    assert -2 <= loss < 1


def test_the_objective_scores_what_its_functions_say(practise) -> None:  # type: ignore[no-untyped-def]
    for form in ("haochen", "fedsc", "orchestra"):
        practice = practise(Spectral(form=form, mu=0.25, centroids=5))
        seen = practice.see()
        loss = practice.method.objective.score(practice.parts, seen, Context(me=0))
        a, b = (z.detach().double() for z in seen.z)
        if form == "haochen":
            assert loss.item() == pytest.approx(haochen(a, b, 0.25), abs=1e-5)
        elif form == "fedsc":
            nothing = torch.zeros(128, 128, dtype=torch.float64)
            assert loss.item() == pytest.approx(2 * fedsc([a, b], 0.25, 1.0, nothing), abs=1e-5)
        else:
            layer = practice.parts["centroids"].double().requires_grad_(False)
            out = [[layer(z / z.norm()) for z in view] for view in (a, b)]
            unit = [[z / z.norm() for z in view] for view in out]
            assert loss.item() == pytest.approx(haochen(*unit, 1.0), abs=1e-5)


def test_heads_have_the_published_sizes() -> None:
    def count(objective: Spectral) -> dict[str, int]:
        made = objective.build({}, 512, World())
        return {n: sum(p.numel() for p in part.module.parameters()) for n, part in made.items()}

    assert count(Spectral(hidden=2048, norm="none")) == {"projector": 1_312_896}
    assert count(Spectral(form="fedsc", hidden=1024, out=512, norm="none")) == {
        "projector": 1_050_112
    }
    orchestra = Spectral(form="orchestra", out=512, out_norm=True, bias=False, centroids=64)
    assert count(orchestra) == {"projector": 525_312, "centroids": 64 * 513}


def test_odd_views_and_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="these views are 3"):
        correlation_contrast(list(rows(3, 2, 2)))
    with pytest.raises(ConfigError, match=r"objective.mu is 0.0"):
        Spectral(mu=0.0)
    with pytest.raises(ConfigError, match=r"objective.centroids is 0"):
        Spectral(centroids=0)
