"""The server's side of secure aggregation by pairwise masks."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from flsuite.aggregators.exchange.pairwise_client import (
    MaskedVector,
    Maxima,
    Message,
    PublicKeys,
    RevealedShares,
    SealedShares,
    mask_purpose,
    mask_sign,
    point_of,
)
from flsuite.aggregators.exchange.sharing import (
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    add_keystream,
    agree,
    combine,
    public_key,
    weights_at_zero,
)
from flsuite.common.errors import FederationError, one_line


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
        survivors: The clients whose masked vectors are in the sum.
    """

    def __init__(self, clients: Sequence[int], threshold: int, sizes: Sequence[int]) -> None:
        self.clients = tuple(clients)
        self.threshold = threshold
        self.sizes = tuple(sizes)
        self.public: dict[int, PublicKeys] = {}
        self.survivors: set[int] = set()
        self._sealed: dict[int, Mapping[int, bytes]] = {}
        self._maxima: dict[int, tuple[float, ...]] = {}
        self._total = np.zeros(sum(sizes), np.uint32)
        self._revealed: dict[int, RevealedShares] = {}

    def receive(self, message: Message) -> None:
        """Receive a client's message.

        Raises:
            ValueError: If the client may not send this message now.
        """
        if type(message.client) is not int or message.client not in self.clients:
            raise ValueError(f"client {message.client} is not in the cohort")
        try:
            fault = self._fault(message)
        except (AttributeError, TypeError, RuntimeError) as error:
            fault = f"a part of it is of another type ({one_line(error, 200)})"
        if fault is not None:
            kind = type(message).__name__
            raise ValueError(f"{kind} of client {message.client} is refused: {fault}")

        if isinstance(message, PublicKeys):
            self.public[message.client] = message
        elif isinstance(message, SealedShares):
            self._sealed[message.client] = message.sealed
        elif isinstance(message, Maxima):
            self._maxima[message.client] = message.values
        elif isinstance(message, MaskedVector):
            # Keep only the sum, which stays masked until enough shares are revealed.
            self._total += message.vector
            self.survivors.add(message.client)
        else:
            self._revealed[message.client] = message

    def inbox(self, client: int) -> dict[int, bytes]:
        """Return the sealed shares for a client, by sender."""
        return {sender: s[client] for sender, s in self._sealed.items() if sender != client}

    def ranges(self) -> tuple[float, ...]:
        """Return the public range of each entry: the largest of the maxima."""
        return tuple(map(max, zip(*self._maxima.values(), strict=True)))

    def total(self) -> np.ndarray:
        """Return the sum of the survivors' integers, with all masks removed.

        Raises:
            FederationError: If too few clients came back, or revealed their shares.
        """
        self.require_enough(len(self.survivors), "came back")
        self.require_enough(len(self._revealed), "revealed their shares")
        # All secrets are shared at the same points, so the weights are computed once.
        repliers = sorted(self._revealed)[: self.threshold]
        weights = weights_at_zero([point_of(client) for client in repliers])

        total = self._total.copy()
        for client in sorted(self.survivors):
            shares = {point_of(c): self._revealed[c].seeds[client] for c in repliers}
            add_keystream(total, _secret(client, shares, weights), sign=-1)
        for dropped in sorted(self._sealed.keys() - self.survivors):
            shares = {point_of(c): self._revealed[c].keys[dropped] for c in repliers}
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
            key = agree(private, self.public[client].masking, mask_purpose(client, dropped))
            add_keystream(total, key, -mask_sign(client, dropped))

    def _fault(self, message: Message) -> str | None:
        """Return why a message cannot be accepted, or ``None``."""
        client = message.client
        if isinstance(message, PublicKeys):
            is_good = _have(KEY_BYTES, (message.sealing, message.masking)) and not self._sealed
            return _first(client, self.public, is_good, f"two keys of {KEY_BYTES} bytes")
        if isinstance(message, SealedShares):
            others = self.public.keys() - {client}
            is_good = message.sealed.keys() == others
            is_good &= _have(2 * SHARE_BYTES + SEAL_BYTES, message.sealed.values())
            is_good &= client in self.public and not self.survivors
            return _first(client, self._sealed, is_good, "one sealed share per other client")
        if client not in self._sealed:
            return "it has not shared its keys"

        if isinstance(message, Maxima):
            is_good = len(message.values) == len(self.sizes)
            is_good &= all(0 <= value < math.inf for value in message.values)
            return _first(client, self._maxima, is_good, "one finite number per entry")
        if isinstance(message, MaskedVector):
            vector, shape = message.vector, self._total.shape
            is_good = vector.dtype == np.uint32 and vector.shape == shape and not self._revealed
            return _first(client, self.survivors, is_good, f"{shape[0]} numbers of type uint32")
        dropped = self._sealed.keys() - self.survivors
        is_good = message.seeds.keys() == self.survivors and message.keys.keys() == dropped
        shares = [*message.seeds.values(), *message.keys.values()]
        is_good &= _have(SHARE_BYTES, shares) and client in self.survivors
        return _first(client, self._revealed, is_good, "one share per client that took part")


def _secret(owner: int, shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    try:
        return combine(shares, weights)
    except ValueError as error:
        raise _wrong_shares(owner) from error


def _wrong_shares(owner: int) -> FederationError:
    return FederationError(f"secure aggregation: the shares of client {owner} are wrong")


def _first(client: int, known: Container[int], is_good: bool, expected: str) -> str | None:
    """Return the fault of a message that is wrong, or a repetition."""
    if client in known:
        return "it has already sent one"
    return None if is_good else f"{expected} are expected now"


def _have(size: int, values: Iterable[bytes]) -> bool:
    """Return whether all values are bytes of this size."""
    return all(isinstance(value, bytes) and len(value) == size for value in values)
