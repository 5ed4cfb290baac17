"""Secret sharing against all subsets of shares, and its field."""

import secrets
from contextlib import suppress
from itertools import combinations

import pytest

from flsuite.exchange.shamir import (
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    combine,
    split_secret,
    weights_at_zero,
)

SECRETS = (bytes(32), b"\xff" * 32, secrets.token_bytes(32))


def is_prime(number: int) -> bool:
    """Return whether a number passes the test of Miller and Rabin for the first 25 primes."""
    bases = [n for n in range(2, 98) if all(n % k for k in range(2, n))]
    power = ((number - 1) & -(number - 1)).bit_length() - 1
    for base in bases:
        if number % base == 0:
            return number == base
        x = pow(base, (number - 1) >> power, number)
        if x not in (1, number - 1) and number - 1 not in (
            x := x * x % number for _ in range(power - 1)
        ):
            return False
    return True


def test_the_field_is_the_smallest_that_holds_every_secret() -> None:
    assert [n for n in range(2**256, PRIME + 1) if is_prime(n)] == [PRIME]
    assert PRIME.bit_length() <= 8 * SHARE_BYTES
    assert 2 ** (8 * SECRET_BYTES) < PRIME


@pytest.mark.parametrize("secret", SECRETS, ids=("zeros", "ones", "random"))
@pytest.mark.parametrize("threshold", range(1, 6))
def test_any_subset_as_large_as_the_threshold_gives_the_secret(
    secret: bytes, threshold: int
) -> None:
    shares = split_secret(secret, threshold, (1, 2, 5, 100, 10**6))
    assert all(len(value) == SHARE_BYTES for value in shares.values())
    for size in range(threshold, 6):
        for points in combinations(shares, size):
            assert combine(shares, weights_at_zero(points)) == secret


@pytest.mark.parametrize("threshold", range(2, 6))
def test_fewer_shares_do_not_give_the_secret(threshold: int) -> None:
    secret = SECRETS[-1]
    shares = split_secret(secret, threshold, range(1, 6))
    for size in range(1, threshold):
        for points in combinations(shares, size):
            # The result may also be outside the range of secrets.
            with suppress(ValueError):
                assert combine(shares, weights_at_zero(points)) != secret


def test_two_sharings_of_a_secret_have_nothing_in_common() -> None:
    first, second = (split_secret(SECRETS[0], 2, range(1, 5)) for _ in range(2))
    assert not set(first.values()) & set(second.values())
