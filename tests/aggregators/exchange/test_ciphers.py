"""Keys, keystreams and sealed messages, against the vectors of their standards."""

import sys

import numpy as np
import pytest

from flsuite.aggregators import PairwiseMasks
from flsuite.aggregators.exchange.sharing import (
    SEAL_BYTES,
    add_keystream,
    agree,
    new_private_key,
    public_key,
    seal,
    unseal,
)
from flsuite.common.errors import FlsuiteError


def test_public_keys_are_those_of_rfc_7748() -> None:
    """Section 5.2, after one iteration: the private key and the base point are both 9."""
    nine = bytes([9]) + bytes(31)
    expected = "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert public_key(nine).hex() == expected


def test_the_keystream_is_that_of_rfc_8439() -> None:
    """Appendix A.1, vector 1: a key and a nonce of zeros."""
    vector = np.zeros(16, np.uint32)
    add_keystream(vector, bytes(32), sign=1)
    first_block = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert vector.tobytes()[:32] == first_block


@pytest.mark.parametrize("size", [0, 1, 100, 2**18, 2**18 + 1, 600_001])
def test_a_mask_is_taken_off_again_and_does_not_depend_on_the_length(size: int) -> None:
    vector = np.arange(size, dtype=np.uint32) * 7919
    masked = vector.copy()
    add_keystream(masked, b"k" * 32, sign=1)
    longer = np.zeros(size + 5, np.uint32)
    add_keystream(longer, b"k" * 32, sign=1)
    assert np.array_equal(masked - vector, longer[:size])
    add_keystream(masked, b"k" * 32, sign=-1)
    assert np.array_equal(masked, vector)


def test_both_owners_agree_and_every_purpose_has_its_own_key() -> None:
    a, b, c = (new_private_key() for _ in range(3))
    key = agree(a, public_key(b), "x")
    assert key == agree(b, public_key(a), "x")
    assert len({key, agree(a, public_key(b), "y"), agree(a, public_key(c), "x")}) == 3
    with pytest.raises(ValueError, match=r"\w"):
        agree(a, bytes(32), "x")  # the point that makes every shared secret zero


def test_a_sealed_message_that_was_changed_is_refused() -> None:
    sealed = seal(b"k" * 32, b"share")
    assert unseal(b"k" * 32, sealed) == b"share"
    assert len(sealed) == len(b"share") + SEAL_BYTES
    for bad_key, bad in ((b"k" * 32, b"\0" + sealed[1:]), (b"j" * 32, sealed)):
        with pytest.raises(ValueError, match="changed, or is for another client"):
            unseal(bad_key, bad)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[secure\]'"):
        PairwiseMasks()
