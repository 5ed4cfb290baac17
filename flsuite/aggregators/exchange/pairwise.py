"""Secure aggregation by pairwise masks that survive dropouts.

Bonawitz et al. 2017, Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS,
doi:10.1145/3133956.3133982, figure 4, without the signatures of its active model.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from flsuite.aggregators.exchange.pairwise_client import PairwiseClient
from flsuite.aggregators.exchange.pairwise_server import Message, PairwiseServer, size_of
from flsuite.aggregators.exchange.secure import Parties, PartyCost, SecureAggregation, SumReport
from flsuite.aggregators.exchange.sharing import KEY_BYTES, SEAL_BYTES, SHARE_BYTES, decode_sum
from flsuite.common.arguments import PositiveFloat, Range, Settings, at_least, require
from flsuite.common.errors import FederationError, FlsuiteError, require_extra
from flsuite.common.state import State, matches, template_of

_Majority = Annotated[float, Range("a share from 0.5 to below 1", lambda x: 0.5 <= x < 1)]


@dataclass(eq=False)
class PairwiseMasks(SecureAggregation, Settings):
    """Every pair of clients agrees on a mask that one adds and the other subtracts.

    Take it if the server must not see single models.

    Under its masks, a client's contribution is a vector of integers modulo 2^32 that looks
    uniformly random to anyone without the keys. In the sum, the pairwise masks cancel. The result
    does not depend on the keys. Its error is at most ``M s / 2`` for M clients, where ``s = 2R /
    (2^B - 1)`` and ``B = 32 - ceil(log2 M)`` for numbers within ``[-R, R]``. A number takes four
    bytes.

    Clients may drop out after agreeing on keys. Each also adds its own mask, and shares the seed of
    that mask and its private key with the cohort, see
    :mod:`flsuite.aggregators.exchange.sharing`. If a client came back, the others reveal its seed.
    Otherwise they reveal its key, which removes its pairwise masks from the sum. They
    never reveal both, so a vector that arrives too late stays hidden. A client may also be lost
    after sending its masked vector, which then counts. At least the threshold number of clients
    must remain.

    This protects against an honest-but-curious server. A server that impersonates clients is not
    detected, because the keys are not signed.

    The server still sees the following of every single client in the clear:

    - its participation, number of training samples, optimizer steps and seconds;
    - its metrics: the mean training loss, and everything that the model, the callbacks or the
      algorithm log during its fit;
    - its integers, such as counters, of which the server takes the maximum;
    - statistics of the algorithm that are not sums, such as the factors of FedFisher's ``kfac``;
    - with ``ranges: maxima``, the largest absolute value of each entry of its contribution.

    It sees neither the client's model, nor its samples per class, nor any other statistic.

    Args:
        threshold: Clients that must come back. An integer is their number, which must be a majority
            of the cohort. A fraction, at least 0.5, means more than this fraction of the cohort.
        ranges: The public range R of each entry. ``maxima``: every client sends the largest
            absolute value of each of its entries in the clear, and R is the largest of them. A
            mapping of name patterns to numbers reveals nothing. The first matching pattern counts,
            and a client with a value outside its range is excluded.
    """

    threshold: Annotated[int, at_least(2)] | _Majority = 0.5
    ranges: dict[str, float] | Literal["maxima"] = "maxima"

    needs = frozenset({"clients", "a cohort of known size", "current models", "shared parameters"})
    withholds = {
        "each update": "shows the server only a sum",
        "plain updates": "shows the server only a sum",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {f"ranges[{k!r}]": v for k, v in self._named.items()}
        require("PairwiseMasks", PositiveFloat, **named)
        require_extra("PairwiseMasks", ("cryptography",), "secure")

    @property
    def _named(self) -> Mapping[str, float]:
        return {} if isinstance(self.ranges, str) else self.ranges

    def configure(self, template: State, clients: int) -> None:
        try:
            self._needed(clients)
        except FederationError as error:
            raise FlsuiteError(f"PairwiseMasks: {error}") from error
        self._template: State = template_of(template)
        self._clients = clients
        self._limits = None if self.ranges == "maxima" else self._limits_of(self._named)

    def size(self) -> int:
        clients, number = self._clients, size_of(0)
        values = sum(value.numel() for value in self._template.values())
        sizes = [
            2 * KEY_BYTES,
            (clients - 1) * (number + 2 * SHARE_BYTES + SEAL_BYTES),
            4 * values,
            clients * (number + SHARE_BYTES),  # one of the two secrets of each client
        ]
        if self._limits is None:
            sizes.append(len(self._template) * number)
        return sum(number + size for size in sizes)  # each message names its sender

    def begin(self, clients: Sequence[int]) -> "_PairwiseParties":
        threshold = self._needed(len(clients))
        devices = {c: PairwiseClient(c, self._template, self._limits) for c in sorted(clients)}
        sizes = [value.numel() for value in self._template.values()]
        server = PairwiseServer(list(devices), threshold, sizes)
        parties = _PairwiseParties(devices, server, self._template, self._limits)

        # Rounds 0 and 1 of the paper: keys, and sealed shares of the secrets.
        for client in parties.clients:
            parties.ask("keys", client, PairwiseClient.public_keys)
        for client in parties.clients:
            keys = dict(parties.server.public)
            parties.ask("shares", client, PairwiseClient.share, keys, threshold)
        for client in parties.clients:
            parties.ask("shares", client, PairwiseClient.collect, parties.server.inbox(client))
        return parties

    def _needed(self, clients: int) -> int:
        """Return how many of the clients of a round must come back.

        Raises:
            FlsuiteError: If the threshold is not a majority of them.
            FederationError: If there are too few clients.
        """
        if clients < 2:
            raise FederationError(
                f"secure aggregation: {clients} client takes part, and its sum would be its own "
                "contribution; let at least 2 take part"
            )
        # A fraction such as 0.29 of 100 can be slightly less than 29 in floating point.
        least = math.floor(self.threshold * clients + 1e-9) + 1
        needed = self.threshold if isinstance(self.threshold, int) else least
        if needed > clients:
            raise FederationError(
                f"secure aggregation: {clients} clients take part, but {needed} are needed; let "
                "more take part, or lower trainer.secure_sum.threshold"
            )
        if 2 * needed <= clients:
            raise FlsuiteError(
                f"PairwiseMasks: threshold {needed} is not a majority of {clients} clients: two "
                "halves could be told of different dropouts and give a client's masks away; set "
                f"it to at least {clients // 2 + 1}"
            )
        return needed

    def _limits_of(self, ranges: Mapping[str, float]) -> dict[str, float]:
        """Return the range of each entry."""
        limits = {}
        for name in self._template:
            fitting = [pattern for pattern in ranges if matches(name, (pattern,))]
            if not fitting:
                raise FlsuiteError(
                    f"PairwiseMasks: no pattern of ranges matches {name}; add one, or set "
                    "trainer.secure_sum.ranges to maxima"
                )
            limits[name] = ranges[fitting[0]]

        for pattern in ranges:
            if not any(matches(name, (pattern,)) for name in self._template):
                names = ", ".join(self._template)
                raise FlsuiteError(
                    f"PairwiseMasks: {pattern!r} of ranges matches no entry; there are "
                    f"{names[:300]}"
                )
        return limits


class _PairwiseParties(Parties):
    """The devices of a round, and the server that receives their messages.

    Args:
        devices: The clients' sides, by client.
        server: The server's side. It receives only messages.
        template: The names and shapes of a contribution.
        limits: The public range of each entry. ``None`` if clients send their maxima.
    """

    def __init__(
        self,
        devices: dict[int, PairwiseClient],
        server: PairwiseServer,
        template: State,
        limits: Mapping[str, float] | None,
    ) -> None:
        self.clients = tuple(devices)
        self.server = server
        self._devices = devices
        self._template = template
        self._limits = limits
        self._costs = {client: PartyCost() for client in devices}
        self._server_seconds = 0.0

    def hold(self, client: int, contribution: State) -> None:
        self._devices[client].hold(contribution)

    def ask(
        self, phase: str, client: int, method: Callable[..., Message | None], *given: Any
    ) -> None:
        """Call a method of a device, and pass its message to the server.

        Args:
            phase: The name under which the bytes are counted.
            client: The client.
            method: A method of :class:`PairwiseClient`.
            given: The server's message to the device: the method's arguments.
        """
        cost, started = self._costs[client], time.perf_counter()
        message = method(self._devices[client], *given)
        cost.seconds += time.perf_counter() - started
        cost.received[phase] += size_of(given)

        if message is not None:
            cost.sent[phase] += size_of(message)
            started = time.perf_counter()
            self.server.receive(message)
            self._server_seconds += time.perf_counter() - started

    def finish(
        self, arrived: Collection[int], gone: Collection[int] = ()
    ) -> tuple[State, SumReport]:
        survivors = tuple(sorted(arrived))
        self.server.require_enough(len(survivors), "came back")

        if self._limits is None:
            for client in survivors:
                self.ask("maxima", client, PairwiseClient.maxima)
            ranges = self.server.ranges()
        else:
            ranges = tuple(self._limits.values())
        # Round 2, one client at a time: only the sum and one masked vector are in memory.
        for client in survivors:
            self.ask("masked", client, PairwiseClient.masked, ranges)
        # Round 4. Round 3 belongs to the active model.
        for client in survivors:
            if client not in gone:
                self.ask("unmasking", client, PairwiseClient.reveal, survivors)

        started = time.perf_counter()
        total = self.server.total()
        self._server_seconds += time.perf_counter() - started
        dropped = tuple(client for client in self.clients if client not in survivors)
        report = SumReport(survivors, dropped, self._costs, self._server_seconds)
        return self._decoded(total, ranges), report

    def _decoded(self, total: np.ndarray, ranges: Sequence[float]) -> State:
        """Return the sum of all integers decoded as named float64 tensors."""
        pieces = np.split(total, np.cumsum(self.server.sizes)[:-1])
        entries = zip(self._template.items(), pieces, ranges, strict=True)
        return {
            name: decode_sum(piece, largest, len(self.clients)).reshape(value.shape)
            for (name, value), piece, largest in entries
        }
