"""Secret sharing: any `threshold` shares recover the secret, fewer reveal nothing about it.

Shamir, How to Share a Secret, 1979: the secret is a polynomial's value at 0, a share its value at a
point, in the field of whole numbers modulo a prime. Points are 1, 2, 3 and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1  # Mersenne; any 64 bytes are below it
WIDTH = 66  # bytes of a share


def split(secret: bytes, count: int, threshold: int, chance: bytes) -> list[bytes]:
    """One share for each of the points 1 to `count`.

    Args:
        secret: at most 64 bytes.
        count: how many shares.
        threshold: how many of them recover the secret.
        chance: at least WIDTH * (threshold - 1) random bytes that nobody else knows.
    """
    if len(chance) < WIDTH * (threshold - 1):
        raise ValueError(f"{len(chance)} random bytes are too few for a threshold of {threshold}")
    pieces = [chance[WIDTH * k : WIDTH * (k + 1)] for k in range(threshold - 1)]
    factors = [int.from_bytes(secret, "big"), *(int.from_bytes(one, "big") >> 7 for one in pieces)]
    return [_value(factors, point).to_bytes(WIDTH, "big") for point in range(1, count + 1)]


def _value(factors: Sequence[int], point: int) -> int:
    value = 0
    for factor in reversed(factors):
        value = (value * point + factor) % PRIME
    return value


def pulls(points: Sequence[int]) -> dict[int, int]:
    """How much the share at each of some distinct points counts in the secret (Lagrange at 0)."""
    weights = {}
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights[point] = above * pow(below, -1, PRIME) % PRIME
    return weights


def join(shares: Mapping[int, bytes], counts: Mapping[int, int], size: int) -> bytes:
    """The secret of `size` bytes from shares by point, as many as the threshold.

    Shares that do not belong together give an OverflowError, or else a wrong secret.

    >>> dealt = split(b"abc", 3, 2, bytes(range(66)))
    >>> join({1: dealt[0], 3: dealt[2]}, pulls([1, 3]), 3)
    b'abc'
    """
    secret = sum(counts[point] * int.from_bytes(shares[point], "big") for point in counts) % PRIME
    return secret.to_bytes(size, "big")
