"""Both sides of secure aggregation by pairwise masks, in one process."""

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from flsuite.exchange.pairwise_client import PairwiseClient
from flsuite.exchange.pairwise_messages import Message, size_of
from flsuite.exchange.pairwise_server import PairwiseServer
from flsuite.exchange.secure import Parties, PartyCost, SumReport
from flsuite.state import State

__all__ = ["PairwiseParties"]


class PairwiseParties(Parties):
    """The devices of a round, and the server that they send their messages to.

    Args:
        devices: The clients' sides, by client.
        server: The server's side. It receives messages and nothing else.
    """

    def __init__(self, devices: dict[int, PairwiseClient], server: PairwiseServer) -> None:
        self.clients = tuple(devices)
        self.server = server
        self._devices = devices
        self._costs = {client: PartyCost() for client in devices}
        self._server_seconds = 0.0

    def hold(self, client: int, contribution: State) -> None:
        self._devices[client].hold(contribution)

    def ask(
        self, phase: str, client: int, method: Callable[..., Message | None], *given: Any
    ) -> None:
        """Let a device carry out one of its methods, and pass its message to the server.

        Args:
            phase: The name that the bytes are counted under.
            client: The client.
            method: A method of :class:`PairwiseClient`.
            given: What the server sends to the device: the method's arguments.
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

    def total(self) -> np.ndarray:
        """Return the sum of the integers."""
        started = time.perf_counter()
        total = self.server.total()
        self._server_seconds += time.perf_counter() - started
        return total

    def report(self, survivors: Collection[int]) -> SumReport:
        """Return what the sum has cost."""
        dropped = tuple(client for client in self.clients if client not in survivors)
        return SumReport(tuple(survivors), dropped, self._costs, self._server_seconds)
