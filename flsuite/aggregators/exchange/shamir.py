"""Shamir's secret sharing: any t of n shares reconstruct the secret, fewer reveal nothing.

Shamir 1979, How to Share a Secret, Communications of the ACM 22(11). A secret is the constant term
of a polynomial of degree t - 1 over a prime field, with random other coefficients. A share is its
value at a point.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above all 32-byte secrets."""

SECRET_BYTES = 32
SHARE_BYTES = 33  # the prime has 257 bits


def split_secret(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Return the shares of a secret at points other than 0.

    Args:
        secret: 32 bytes.
        threshold: Number of shares that reconstruct the secret.
        points: One number per share, all different.
    """
    # From the operating system, because the run's seed must not reveal them.
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    shares = {}
    for point in points:
        # Horner's rule, from the highest power to the constant term.
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def weights_at_zero(points: Sequence[int]) -> dict[int, int]:
    """Return Lagrange weights: the value at 0 is the weighted sum of the values at the points.

    Secrets that are shared at the same points have the same weights.
    """
    weights = {}
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        weights[point] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def combine(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """Return the secret.

    Args:
        shares: Shares by point, at least for the points with a weight.
        weights: The weights of ``threshold`` points.

    Raises:
        ValueError: If these are not shares of one secret.
    """
    values = (int.from_bytes(shares[point], "big") * weight for point, weight in weights.items())
    secret = sum(values) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
