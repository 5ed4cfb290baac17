"""Secret sharing against all subsets of shares, and its field."""

import secrets
from contextlib import suppress
from itertools import combinations

import pytest
from sympy import nextprime

from flsuite.aggregators.exchange.sharing import (
    KEY_BYTES,
    PRIME,
    SHARE_BYTES,
    combine,
    split_secret,
    weights_at_zero,
)

SECRETS = (bytes(32), b"\xff" * 32, secrets.token_bytes(32))


def test_the_field_is_the_smallest_that_holds_every_secret() -> None:
    assert nextprime(2**256 - 1) == PRIME
    assert PRIME.bit_length() <= 8 * SHARE_BYTES
    assert 2 ** (8 * KEY_BYTES) < PRIME


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
