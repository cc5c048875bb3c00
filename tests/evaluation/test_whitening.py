import pytest
import torch
from sklearn.decomposition import PCA

from harmonium.core.errors import DataError
from harmonium.evaluation.whitening import Moments, moments_of, whitening


def rows(count: int = 200, dim: int = 6) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(count, dim, generator=rng) @ torch.randn(dim, dim, generator=rng)
    return mixed + 10.0


def test_whitened_features_are_those_of_principal_components() -> None:
    features = rows()
    made = whitening(moments_of(features), 3, shrinkage=0.0)(features)
    wanted = torch.from_numpy(PCA(3, whiten=True).fit_transform(features.double().numpy()))
    wanted *= (len(features) / (len(features) - 1)) ** 0.5  # it divides by n - 1
    for column in range(3):  # signs are free
        sign = torch.sign((made[:, column] * wanted[:, column]).sum())
        torch.testing.assert_close(
            made[:, column].double() * sign, wanted[:, column], atol=1e-4, rtol=0
        )


def test_moments_of_clients_add_up() -> None:
    features = rows()
    parts = [moments_of(some) for some in features.split([20, 80, 100])]
    total = sum(parts[1:], parts[0])
    torch.testing.assert_close(total.second, moments_of(features).second)
    torch.testing.assert_close(whitening(total).matrix, whitening(moments_of(features)).matrix)


def test_directions_that_do_not_vary_are_left_out() -> None:
    features = torch.cat([rows(dim=4), torch.full((200, 2), 1e3)], dim=1)
    assert whitening(moments_of(features)).matrix.shape == (6, 4)
    assert whitening(moments_of(features), 2).matrix.shape == (6, 2)
    assert whitening(moments_of(features), 99).matrix.shape == (6, 4)


def test_shrinkage_keeps_small_directions_small() -> None:
    features = rows(dim=3) * torch.tensor([1.0, 1.0, 1e-4])
    plain, shrunk = (whitening(moments_of(features), shrinkage=s)(features) for s in (0.0, 0.1))
    assert plain.std(dim=0)[2] > 0.9 and shrunk.std(dim=0)[2] < 0.1


def test_what_cannot_be_whitened_is_refused() -> None:
    for features in (torch.ones(1, 3), torch.ones(5, 3), torch.full((5, 3), float("nan"))):
        with pytest.raises(DataError):
            whitening(moments_of(features))
    with pytest.raises(DataError):
        whitening(Moments(0.0, torch.zeros(2), torch.zeros(2, 2)))
