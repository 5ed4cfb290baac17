"""The server's side of secure aggregation by pairwise masks, and the clients' messages to it.

The messages are plain data. Nothing else is exchanged between the two sides. A message says whether
the server may accept it now, and what is expected otherwise.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from flsuite.aggregators.exchange.sharing import (
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    add_keystream,
    add_pair_mask,
    combine,
    point_of,
    public_key,
    weights_at_zero,
)
from flsuite.common.errors import FederationError, one_line


@dataclass(frozen=True)
class Message(ABC):
    """A message of a client to the server.

    Attributes:
        client: The client's number.
    """

    client: int

    @abstractmethod
    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        """Check this message against what the server expects now.

        Returns:
            Where the server keeps messages of this kind, whether it may accept this one, and a
            description of what it expects.
        """


@dataclass(frozen=True)
class PublicKeys(Message):
    """The public keys of a client in a round.

    Attributes:
        sealing: The public key for sealing shares.
        masking: The public key for pairwise masks.
    """

    sealing: bytes
    masking: bytes

    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        is_good = _have(KEY_BYTES, (self.sealing, self.masking)) and not server.sealed
        return server.public, is_good, f"two keys of {KEY_BYTES} bytes"


@dataclass(frozen=True)
class SealedShares(Message):
    """A client's shares for the other clients. Each client can open only its own share.

    Attributes:
        sealed: The sealed shares, by recipient.
    """

    sealed: Mapping[int, bytes]

    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        is_good = self.sealed.keys() == server.public.keys() - {self.client}
        is_good &= _have(2 * SHARE_BYTES + SEAL_BYTES, self.sealed.values())
        is_good &= self.client in server.public and not server.survivors
        return server.sealed, is_good, "one sealed share per other client"


@dataclass(frozen=True)
class Maxima(Message):
    """The largest absolute value of each entry of a client's contribution, in the clear.

    Attributes:
        values: The values, in the order of the template.
    """

    values: tuple[float, ...]

    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        is_good = len(self.values) == len(server.sizes)
        is_good &= all(0 <= value < math.inf for value in self.values)
        return server.maxima, is_good, "one finite number per entry"


@dataclass(frozen=True)
class MaskedVector(Message):
    """A client's contribution as integers, under its masks.

    Attributes:
        vector: One uint32 per number, in the order of the template.
    """

    vector: np.ndarray

    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        size = sum(server.sizes)
        is_good = self.vector.dtype == np.uint32 and self.vector.shape == (size,)
        is_good &= not server.revealed
        return server.survivors, is_good, f"{size} numbers of type uint32"


@dataclass(frozen=True)
class RevealedShares(Message):
    """The shares that a client reveals to the server, one per client of the cohort.

    Attributes:
        seeds: Shares of the own-mask seeds of the clients that came back.
        keys: Shares of the private masking keys of the other clients.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]

    def expected(self, server: "PairwiseServer") -> tuple[dict[int, Any], bool, str]:
        is_good = (
            self.seeds.keys() == server.survivors.keys() and self.keys.keys() == server.dropped
        )
        is_good &= _have(SHARE_BYTES, [*self.seeds.values(), *self.keys.values()])
        is_good &= self.client in server.survivors
        return server.revealed, is_good, "one share per client that took part"


def size_of(message: Any) -> int:
    """Return the bytes of a message, or of nested dicts and tuples of them.

    A number counts as eight bytes.
    """
    if is_dataclass(message):
        return size_of(tuple(vars(message).values()))
    if isinstance(message, Mapping):
        return size_of(tuple(message.items()))
    if isinstance(message, (list, tuple)):
        return sum(map(size_of, message))
    return len(message) if isinstance(message, bytes) else getattr(message, "nbytes", 8)


class PairwiseServer:
    """The server's view of one round of secure aggregation.

    Every client message arrives through :meth:`receive`. The server forwards public keys and sealed
    shares, sums masked vectors, and removes the masks from the sum.

    Args:
        clients: The cohort.
        threshold: Clients that must come back.
        sizes: Numbers per entry.

    Attributes:
        public: The public keys of the clients.
        sealed: Their sealed shares.
        maxima: Their largest values.
        survivors: The clients whose masked vectors are in the sum.
        revealed: The shares that clients have revealed.
    """

    def __init__(self, clients: Sequence[int], threshold: int, sizes: Sequence[int]) -> None:
        self.clients = tuple(clients)
        self.threshold = threshold
        self.sizes = tuple(sizes)
        self.public: dict[int, PublicKeys] = {}
        self.sealed: dict[int, SealedShares] = {}
        self.maxima: dict[int, Maxima] = {}
        self.survivors: dict[int, None] = {}
        self.revealed: dict[int, RevealedShares] = {}
        self._total = np.zeros(sum(sizes), np.uint32)

    @property
    def dropped(self) -> set[int]:
        """Return the clients that have shared their secrets, but sent no vector."""
        return self.sealed.keys() - self.survivors.keys()

    def receive(self, message: Message) -> None:
        """Receive a client's message.

        Raises:
            ValueError: If the client may not send this message now.
        """
        kind, client = type(message), message.client
        if type(client) is not int or client not in self.clients:
            raise ValueError(f"client {client} is not in the cohort")
        try:
            like, is_good, expected = message.expected(self)
            fault = None if is_good else f"{expected} are expected now"
        except (AttributeError, TypeError, RuntimeError) as error:
            like, fault = {}, f"a part of it is of another type ({one_line(error, 200)})"
        if kind not in (PublicKeys, SealedShares) and client not in self.sealed:
            fault = "it has not shared its keys"
        elif client in like:
            fault = "it has already sent one"
        if fault is not None:
            raise ValueError(f"{kind.__name__} of client {client} is refused: {fault}")

        like[client] = message
        if isinstance(message, MaskedVector):
            # Keep only the sum, which stays masked until enough shares are revealed.
            self._total += message.vector
            like[client] = None

    def inbox(self, client: int) -> dict[int, bytes]:
        """Return the sealed shares for a client, by sender."""
        return {sender: s.sealed[client] for sender, s in self.sealed.items() if sender != client}

    def ranges(self) -> tuple[float, ...]:
        """Return the public range of each entry: the largest of the maxima."""
        values = (message.values for message in self.maxima.values())
        return tuple(map(max, zip(*values, strict=True)))

    def total(self) -> np.ndarray:
        """Return the sum of the survivors' integers, with all masks removed.

        Raises:
            FederationError: If too few clients came back, or revealed their shares.
        """
        self.require_enough(len(self.survivors), "came back")
        self.require_enough(len(self.revealed), "revealed their shares")
        # All secrets are shared at the same points, so the weights are computed once.
        repliers = sorted(self.revealed)[: self.threshold]
        weights = weights_at_zero([point_of(client) for client in repliers])

        total = self._total.copy()
        for client in sorted(self.survivors):
            shares = {point_of(c): self.revealed[c].seeds[client] for c in repliers}
            add_keystream(total, _secret(client, shares, weights), sign=-1)
        for dropped in sorted(self.dropped):
            shares = {point_of(c): self.revealed[c].keys[dropped] for c in repliers}
            self._remove_pairs(total, dropped, _secret(dropped, shares, weights))
        return total

    def require_enough(self, count: int, have: str) -> None:
        """Refuse to go on with too few clients.

        Raises:
            FederationError: If the threshold is not reached.
        """
        if count < self.threshold:
            raise FederationError(
                f"secure aggregation: {count} of {len(self.clients)} clients {have}, but "
                f"{self.threshold} are needed; let more clients take part, or lower "
                "trainer.secure_sum.threshold"
            )

    def _remove_pairs(self, total: np.ndarray, dropped: int, private: bytes) -> None:
        """Remove the masks that the survivors share with a dropped client."""
        if public_key(private) != self.public[dropped].masking:
            raise _wrong_shares(dropped)
        for client in sorted(self.survivors):
            add_pair_mask(total, private, self.public[client].masking, client, dropped, sign=-1)


def _secret(owner: int, shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    try:
        return combine(shares, weights)
    except ValueError as error:
        raise _wrong_shares(owner) from error


def _wrong_shares(owner: int) -> FederationError:
    return FederationError(f"secure aggregation: the shares of client {owner} are wrong")


def _have(size: int, values: Iterable[bytes]) -> bool:
    """Return whether all values are bytes of this size."""
    return all(isinstance(value, bytes) and len(value) == size for value in values)
