"""One client's side of secure aggregation by pairwise masks."""

import secrets
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from flsuite.aggregators.exchange.pairwise_server import (
    MaskedVector,
    Maxima,
    PublicKeys,
    RevealedShares,
    SealedShares,
)
from flsuite.aggregators.exchange.sharing import (
    KEY_BYTES,
    SHARE_BYTES,
    add_keystream,
    add_pair_mask,
    agree,
    encode_values,
    new_private_key,
    point_of,
    public_key,
    seal,
    split_secret,
    unseal,
)
from flsuite.common.errors import FederationError
from flsuite.common.state import State, mismatch_of_keys, non_finite


class PairwiseClient:
    """The secrets of one client in one round, and its messages to the server.

    The methods follow the rounds of Bonawitz et al. 2017, figure 4. A client refuses requests that
    would reveal its contribution, or another client's.

    Args:
        client: The client's number.
        template: Names and shapes of a contribution.
        limits: The range of each entry, from the settings. Default: the server announces the
            ranges, after a round of maxima.
    """

    def __init__(
        self, client: int, template: State, limits: Mapping[str, float] | None = None
    ) -> None:
        self.client = client
        self._template = template
        self._limits = limits
        self._sealing_key, self._masking_key = new_private_key(), new_private_key()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self._public: dict[int, PublicKeys] = {}
        self._threshold = 0
        self._own_shares = b""
        self._inbox: dict[int, bytes] = {}
        self._contribution: State | None = None
        self._has_revealed = False

    def public_keys(self) -> PublicKeys:
        """Return the keys for the other clients (round 0)."""
        sealing, masking = public_key(self._sealing_key), public_key(self._masking_key)
        return PublicKeys(self.client, sealing, masking)

    def share(self, public: Mapping[int, PublicKeys], threshold: int) -> SealedShares:
        """Return shares of the own-mask seed and of the private masking key (round 1).

        Args:
            public: The keys of the cohort, by client.
            threshold: Number of shares that reconstruct a secret.
        """
        keys = [key for sent in public.values() for key in (sent.sealing, sent.masking)]
        if public.get(self.client) != self.public_keys() or len(set(keys)) < len(keys):
            raise self._refusal("its own keys are missing, or two keys are the same")
        # Otherwise, two halves of the cohort could be told of different dropouts. One half would
        # reveal a client's seed, the other its key.
        if not len(public) / 2 < threshold <= len(public):
            raise self._refusal(f"a threshold of {threshold} of {len(public)} is not a majority")
        self._public, self._threshold = dict(public), threshold

        points = [point_of(client) for client in public]
        seeds = split_secret(self._seed, threshold, points)
        keys_shares = split_secret(self._masking_key, threshold, points)
        sealed = {}
        for other in public:
            point = point_of(other)
            both = seeds[point] + keys_shares[point]
            if other == self.client:
                self._own_shares = both
            else:
                sealed[other] = seal(self._seal_key(self.client, other), both)
        return SealedShares(self.client, sealed)

    def collect(self, inbox: Mapping[int, bytes]) -> None:
        """Keep the sealed shares of the other clients. Clients that sent shares take part.

        Args:
            inbox: The sealed shares for this client, by sender.
        """
        if not inbox.keys() < self._public.keys() or len(inbox) + 1 < self._threshold:
            raise self._refusal(f"it has the shares of {len(inbox)} others, too few")
        self._inbox = dict(inbox)

    def hold(self, contribution: State) -> None:
        """Keep the contribution of the trained model.

        Raises:
            ValueError: If it cannot be summed.
        """
        if fault := mismatch_of_keys(contribution, self._template):
            raise ValueError(f"the contribution differs from the other clients': {fault}")
        for name, value in contribution.items():
            if value.shape != self._template[name].shape or not value.is_floating_point():
                raise ValueError(
                    f"entry {name} is {value.dtype} of shape {tuple(value.shape)}; floats of "
                    f"shape {tuple(self._template[name].shape)} are summed"
                )
        if bad := non_finite(contribution):
            raise ValueError(f"entry {bad} is not finite; lower the learning rate")

        for name, largest in zip(self._template, self._maxima_of(contribution), strict=True):
            if self._limits is not None and largest > self._limits[name]:
                raise ValueError(
                    f"entry {name} has a value of size {largest:.6g}, outside its range of "
                    f"{self._limits[name]:.6g}; raise it in trainer.secure_sum.ranges"
                )
        self._contribution = contribution

    def maxima(self) -> Maxima:
        """Return the largest absolute values, for the public ranges."""
        return Maxima(self.client, self._maxima_of(self._held()))

    def masked(self, ranges: Sequence[float]) -> MaskedVector:
        """Return the contribution under all masks (round 2), and forget it.

        Args:
            ranges: The public range of each entry, in the order of the template.

        Raises:
            ValueError: If an entry has a value outside its range.
        """
        if not self._inbox:
            raise self._refusal("it has no shares of the others, and so no masks")
        cohort, held = len(self._public), self._held()
        encoded = []
        for name, largest in zip(self._template, ranges, strict=True):
            try:
                encoded.append(encode_values(held[name], largest, cohort))
            except ValueError as error:
                raise ValueError(f"entry {name}: {error}") from error
        vector = np.concatenate(encoded)
        add_keystream(vector, self._seed, sign=1)
        for other in self._inbox:
            public = self._public[other].masking
            add_pair_mask(vector, self._masking_key, public, self.client, other)
        self._contribution = None
        return MaskedVector(self.client, vector)

    def reveal(self, survivors: Collection[int]) -> RevealedShares:
        """Return one share per client: of its seed if it came back, else of its key (round 4).

        Args:
            survivors: The clients whose masked vectors the server received.
        """
        if self._has_revealed:
            raise self._refusal("it has revealed its shares already")
        known = {*self._inbox, self.client}
        if self.client not in survivors or not known.issuperset(survivors):
            raise self._refusal("the clients that came back are not in the cohort")
        if len(survivors) < self._threshold:
            raise self._refusal(f"{len(survivors)} clients came back, fewer than are needed")
        self._has_revealed = True

        seeds, keys = {}, {}
        for other in sorted(known):
            both = self._shares_of(other)
            if other in survivors:
                seeds[other] = both[:SHARE_BYTES]
            else:
                keys[other] = both[SHARE_BYTES:]
        return RevealedShares(self.client, seeds, keys)

    def _shares_of(self, other: int) -> bytes:
        if other == self.client:
            return self._own_shares
        return unseal(self._seal_key(other, self.client), self._inbox[other])

    def _seal_key(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self.client else sender
        # One key per direction: each seals one message.
        purpose = f"shares from {sender} to {receiver}"
        return agree(self._sealing_key, self._public[other].sealing, purpose)

    def _maxima_of(self, contribution: State) -> tuple[float, ...]:
        sizes = (contribution[name].abs() for name in self._template)
        return tuple(float(size.max()) if size.numel() else 0.0 for size in sizes)

    def _held(self) -> State:
        if self._contribution is None:
            raise self._refusal("it holds no contribution")
        return self._contribution

    def _refusal(self, why: str) -> FederationError:
        return FederationError(f"secure aggregation: client {self.client} refuses to go on: {why}")
