"""Key agreement, keystreams and sealed messages, with the package ``cryptography``.

X25519 (RFC 7748) agrees on a secret, HKDF with SHA-256 (RFC 5869) derives a key from it, ChaCha20
(RFC 8439) expands a key into a mask, and ChaCha20-Poly1305 seals a message. Every key is used once,
so a nonce of zeros never repeats for a key.
"""

from typing import Any

import numpy as np

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
