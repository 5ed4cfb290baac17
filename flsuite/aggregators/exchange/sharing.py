"""What masks are made of: keys, shares of secrets, and numbers as integers.

X25519 (RFC 7748) agrees on a secret, HKDF with SHA-256 (RFC 5869) derives a key from it, ChaCha20
(RFC 8439) expands a key into a mask, and ChaCha20-Poly1305 seals a message. Every key is used once,
so a nonce of zeros never repeats for a key.

Shamir 1979, How to Share a Secret, Communications of the ACM 22(11). A secret is the constant term
of a polynomial of degree t - 1 over a prime field, with random other coefficients. A share is its
value at a point.

Masks hide numbers in a fixed-point encoding modulo 2^32, in which sums are exact. With M clients
and a public range R, ``u = round(x / s) mod 2^32``, ``s = 2R / (2^B - 1)`` and
``B = 32 - ceil(log2 M)``. The sum of M such integers fits into 32 bits, and decodes as a signed
number. Its error is at most ``M s / 2``.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEY_BYTES = 32
SEAL_BYTES = 16  # the overhead of a sealed message

_CHUNK = 2**18  # numbers per chunk, so the keystream stays in the cache
_ZEROS = bytes(4 * _CHUNK)


def new_private_key() -> bytes:
    """Return a new X25519 private key, from the operating system's randomness."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return _private(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """Return the key that both owners of a key pair can compute.

    Args:
        private: One's own private key.
        public: The other's public key.
        purpose: The purpose of the key. Keys for different purposes are unrelated.

    Raises:
        ValueError: If the public key is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = _private(private).exchange(X25519PublicKey.from_public_bytes(public))
    info = f"flsuite secure aggregation: {purpose}".encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def add_keystream(vector: np.ndarray, key: bytes, sign: int) -> None:
    """Add the mask of a key to a uint32 vector, or subtract it, modulo 2^32 and in place."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
    operation = np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), _CHUNK):
        part = vector[start : start + _CHUNK]
        # Little-endian on every machine.
        mask = np.frombuffer(stream.update(_ZEROS[: 4 * len(part)]), "<u4")
        operation(part, mask, out=part)


def add_pair_mask(
    vector: np.ndarray, private: bytes, public: bytes, client: int, other: int, sign: int = 1
) -> None:
    """Add the mask that a client shares with another one, or remove it with a sign of -1.

    Args:
        vector: The uint32 vector, changed in place.
        private: The private masking key of one of the two.
        public: The public masking key of the other.
        client: Number of the client whose vector is masked.
        other: Number of the other client. The one with the smaller number adds the mask of a pair,
            and the other one subtracts it.
        sign: 1 or -1.
    """
    key = agree(private, public, f"mask of {min(client, other)} and {max(client, other)}")
    add_keystream(vector, key, sign if client < other else -sign)


def seal(key: bytes, content: bytes) -> bytes:
    """Return an encrypted and authenticated message. A key seals one message only."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), content, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Return the content of a sealed message.

    Raises:
        ValueError: If it was sealed with another key, or changed.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise ValueError("a sealed message was changed, or is for another client") from error


def _private(private: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private)


PRIME = 2**256 + 297
"""The smallest prime above all secrets of :data:`KEY_BYTES`."""

SHARE_BYTES = 33  # the prime has 257 bits


def point_of(client: int) -> int:
    """Return the point of a client's shares. The secret is at 0."""
    return client + 1


def split_secret(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Return the shares of a secret at points other than 0.

    Args:
        secret: :data:`KEY_BYTES` bytes.
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
    if secret >= 2 ** (8 * KEY_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return secret.to_bytes(KEY_BYTES, "big")


def bits_per_number(clients: int) -> int:
    """Return B, the bits per number."""
    return 32 - (clients - 1).bit_length()


def step(largest: float, clients: int) -> float:
    """Return s, the step of numbers within ``[-largest, largest]``."""
    # Computed as largest / half, because 2 * largest can overflow.
    return largest / ((2 ** bits_per_number(clients) - 1) / 2)


def encode_values(values: Tensor, largest: float, clients: int) -> np.ndarray:
    """Return a client's numbers encoded as a uint32 vector.

    Raises:
        ValueError: If a number is outside the range.
    """
    flat = values.detach().double().reshape(-1).numpy()
    peak = float(np.abs(flat).max(initial=0.0))
    if not peak <= largest:
        raise ValueError(f"it has a value of size {peak:.6g}, outside its range of {largest:.6g}")

    size = step(largest, clients)
    if size == 0.0:
        return np.zeros(flat.shape, np.uint32)
    # x = R is halfway between two integers. M times the upper one would overflow 32 bits.
    top = 2 ** (bits_per_number(clients) - 1) - 1
    return np.clip(np.rint(flat / size), -top, top).astype(np.int32).view(np.uint32)


def decode_sum(total: np.ndarray, largest: float, clients: int) -> Tensor:
    """Return the sum of the clients' numbers in float64, from the sum of their integers."""
    return torch.from_numpy(total.view(np.int32).astype(np.float64) * step(largest, clients))
