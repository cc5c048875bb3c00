"""Shamir's promise: any threshold of the shares give the secret back, one fewer says nothing."""

import secrets
from collections import Counter
from itertools import combinations, product

import pytest

from harmonium.federation.secure_aggregation.shamir import PRIME, WIDTH, join, pulls, split


def dealt(secret: bytes, count: int, threshold: int) -> list[bytes]:
    return split(secret, count, threshold, secrets.token_bytes(WIDTH * (threshold - 1)))


def joined(shares: list[bytes], points: tuple[int, ...], size: int) -> bytes:
    return join({point: shares[point - 1] for point in points}, pulls(points), size)


@pytest.mark.parametrize("secret", [bytes(32), b"\0" * 31 + b"\1", b"\xff" * 32, b"\xff" * 64])
def test_any_threshold_of_the_shares_give_the_secret_back(secret: bytes) -> None:
    shares = dealt(secret, 6, 4)
    assert {len(share) for share in shares} == {WIDTH}
    for points in combinations(range(1, 7), 4):
        assert joined(shares, points, len(secret)) == secret
        assert joined(shares, points[::-1], len(secret)) == secret  # in any order
    assert joined(shares, tuple(range(1, 7)), len(secret)) == secret  # more do no harm


def test_the_last_of_a_hundred_count_like_the_first() -> None:
    secret = secrets.token_bytes(32)
    shares = dealt(secret, 100, 66)
    assert joined(shares, tuple(range(35, 101)), 32) == secret


@pytest.mark.parametrize("points", [(1, 2), (2, 4), (3, 4)])
def test_one_share_too_few_says_nothing(
    monkeypatch: pytest.MonkeyPatch, points: tuple[int, int]
) -> None:
    """Over all chance, two of four shares at threshold 3 are spread alike whatever the secret is.

    In the field of 5 numbers all chance can be tried: every pair of shares comes once a secret.
    """
    monkeypatch.setattr("harmonium.federation.secure_aggregation.shamir.PRIME", 5)
    seen = {}
    for secret in range(5):
        found = Counter[tuple[bytes, ...]]()
        for factors in product(range(5), repeat=2):
            chance = b"".join((factor << 7).to_bytes(WIDTH, "big") for factor in factors)
            shares = split(bytes([secret]), 4, 3, chance)
            found[tuple(shares[point - 1] for point in points)] += 1
        seen[secret] = found
    assert all(found == seen[0] for found in seen.values())
    assert set(seen[0].values()) == {1} and len(seen[0]) == 25


def test_every_secret_fits_the_shares_that_a_few_hold() -> None:
    """At full size: for any other secret there is a last share that makes it the one."""
    secret, other = secrets.token_bytes(32), secrets.token_bytes(32)
    shares = dealt(secret, 3, 3)
    counts = pulls([1, 2, 3])
    known = sum(counts[point] * int.from_bytes(shares[point - 1], "big") for point in (1, 2))
    last = (int.from_bytes(other, "big") - known) * pow(counts[3], -1, PRIME) % PRIME
    assert joined([*shares[:2], last.to_bytes(WIDTH, "big")], (1, 2, 3), 32) == other


def test_chance_of_every_share_matters() -> None:
    """No byte of chance is left out, so no coefficient is 0 or known."""
    chance = bytes(WIDTH * 2)
    plain = split(b"secret", 3, 3, chance)
    for position in (0, WIDTH - 2, WIDTH, 2 * WIDTH - 2):
        changed = bytearray(chance)
        changed[position] = 1
        assert all(
            a != b for a, b in zip(plain, split(b"secret", 3, 3, bytes(changed)), strict=True)
        )
    with pytest.raises(ValueError, match="131 random bytes.*threshold of 3"):
        split(b"secret", 3, 3, chance[:-1])


def test_too_few_shares_or_a_changed_one_do_not_give_the_secret() -> None:
    shares = dealt(bytes(32), 5, 3)
    with pytest.raises(OverflowError):
        joined(shares, (1, 2), 32)
    changed = [bytes([shares[0][0] ^ 1]) + shares[0][1:], *shares[1:]]
    with pytest.raises(OverflowError):
        joined(changed, (1, 2, 3), 32)


def test_what_the_shares_count_sums_to_one() -> None:
    """A polynomial without chance is its secret everywhere."""
    for points in ([1, 2, 3], [2, 5, 9, 40]):
        assert sum(pulls(points).values()) % PRIME == 1
