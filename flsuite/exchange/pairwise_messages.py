"""The messages between the clients and the server of :class:`~flsuite.exchange.PairwiseMasks`.

They are plain data. Nothing else passes between the two sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

__all__ = [
    "MaskedVector",
    "Maxima",
    "Message",
    "PublicKeys",
    "RevealedShares",
    "SealedShares",
    "size_of",
]


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a client in a round.

    Attributes:
        client: The client's number.
        sealing: For the keys that seal shares.
        masking: For the keys of pairwise masks.
    """

    client: int
    sealing: bytes
    masking: bytes


@dataclass(frozen=True)
class SealedShares:
    """A client's shares for the other clients, each of which alone can open its own.

    Attributes:
        client: The client whose secrets were shared.
        sealed: By the client that they are for.
    """

    client: int
    sealed: Mapping[int, bytes]


@dataclass(frozen=True)
class Maxima:
    """The largest absolute value of each entry of a client's contribution, in the clear.

    Attributes:
        client: The client's number.
        values: In the order of the template.
    """

    client: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class MaskedVector:
    """A client's contribution as integers, under its masks.

    Attributes:
        client: The client's number.
        vector: One uint32 per number, in the order of the template.
    """

    client: int
    vector: np.ndarray


@dataclass(frozen=True)
class RevealedShares:
    """The shares that a client holds and tells the server, one per client of the cohort.

    Attributes:
        client: The client that held them.
        seeds: Shares of the own-mask seeds of the clients that came back.
        keys: Shares of the private masking keys of the clients that did not.
    """

    client: int
    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


Message = PublicKeys | SealedShares | Maxima | MaskedVector | RevealedShares


def size_of(message: Any) -> int:
    """Return the bytes of a message, or of nested dicts and tuples of them.

    A number counts eight.
    """
    if isinstance(message, bytes):
        return len(message)
    if isinstance(message, np.ndarray):
        return message.nbytes
    if is_dataclass(message):
        return sum(size_of(getattr(message, f.name)) for f in fields(message))
    if isinstance(message, Mapping):
        return sum(size_of(key) + size_of(value) for key, value in message.items())
    if isinstance(message, (list, tuple)):
        return sum(map(size_of, message))
    return 8
