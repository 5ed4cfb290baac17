"""The way of an update from the client to the server."""

from dataclasses import replace
from typing import Any

import torch

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError
from flsuite.exchange.base import Compression
from flsuite.exchange.secure import SecureSum
from flsuite.messages import ClientUpdate
from flsuite.state import State, nbytes

__all__ = ["Exchange"]


class Exchange:
    """Packs an update where a client trains, and unpacks it on the server.

    Args:
        compression: How updates are packed. Default: not at all.
        secure_sum: How they are masked. The clients' devices then keep their summands, see
            :meth:`~flsuite.aggregators.Aggregator.summands`, until all of them are masked.
    """

    def __init__(
        self, compression: Compression | None = None, secure_sum: SecureSum | None = None
    ) -> None:
        self.compression = compression
        self._clear_extras: tuple[str, ...] = ()
        self.secure_sum = secure_sum
        if compression is not None and secure_sum is not None:
            raise FlsuiteError(
                f"{type(secure_sum).__name__} adds up integers of 32 bits, and "
                f"{type(compression).__name__} would send fewer; leave out trainer.compression or "
                "trainer.secure_sum"
            )

    def configure(
        self, aggregator: Aggregator, state: State, extras: dict[str, Any], cohort: int
    ) -> None:
        """Prepare for an algorithm and a model.

        Args:
            aggregator: The algorithm, which has been configured.
            state: The shared state, as a template.
            extras: A template of the extras.
            cohort: Clients per round.

        Raises:
            FlsuiteError: If the algorithm does not go together with the compression, or needs every
                client's own update.
        """
        if self.compression is not None:
            self.compression.configure(aggregator, state, extras)
        if self.secure_sum is None:
            return
        if not aggregator.works_from_sums:
            raise FlsuiteError(
                f"{type(self.secure_sum).__name__} shows the server a sum alone, and "
                f"{type(aggregator).__name__} needs every client's own update; choose FedAvg, "
                "FedProx or FedFisher, or leave out trainer.secure_sum"
            )
        example = ClientUpdate(0, 1, 1, 1, torch.zeros(0, dtype=torch.int64), state, extras)
        summands = aggregator.summands(example)
        if not summands:
            raise FlsuiteError(
                f"{type(self.secure_sum).__name__}: clients of {type(aggregator).__name__} send "
                "nothing to sum; leave out trainer.secure_sum"
            )
        self.secure_sum.configure(summands, cohort)
        self._clear_extras = tuple(aggregator.clear_extras)

    def templates(
        self, aggregator: Aggregator, state: State, extras: dict[str, Any]
    ) -> tuple[State, dict[str, Any]]:
        """Return what an unpacked update looks like to the server: its state and its extras."""
        if self.secure_sum is None:
            return state, extras
        return {}, {name: extras[name] for name in aggregator.clear_extras}

    def pack(
        self, update: ClientUpdate, aggregator: Aggregator, base: State, memory: dict[str, Any]
    ) -> tuple[ClientUpdate, State]:
        """Return a client's update as it is sent, and the summands that stay on its device.

        Args:
            update: The update, whole.
            aggregator: The client half of the algorithm.
            base: The global state that the client started from.
            memory: The client's notes for the compression, which may be changed.
        """
        summands: State = {}
        if self.secure_sum is not None:
            summands = aggregator.summands(update)
            clear = {name: update.extras[name] for name in aggregator.clear_extras}
            # No algorithm that works from sums needs the counts, which say what a client's data is.
            unknown = update.class_counts.new_zeros(0)
            update = replace(update, state={}, extras=clear, class_counts=unknown)
        if self.compression is not None:
            message, numbers = self.compression.encode(update.state, update.extras, base, memory)
            metrics = {**update.metrics, **numbers}
            update = replace(update, state={}, extras=message, metrics=metrics)

        # The size of what is sent, as if the client were on another machine.
        update.bytes_up = nbytes(update.state) + nbytes(update.extras)
        return update, summands

    def unpack(self, update: ClientUpdate, base: State) -> ClientUpdate:
        """Return an update as the server reads it.

        Raises:
            ValueError: If it cannot be read. The text says why.
        """
        if self.compression is None:
            return update
        state, extras = self.compression.decode(update.extras, base)
        return replace(update, state=state, extras=extras)

    def bytes_up(self, state: State, extras: dict[str, Any]) -> int:
        """Return the largest number of bytes of an update of this kind, for the virtual clock.

        Args:
            state: The shared state, as a template.
            extras: A template of the extras.
        """
        if self.secure_sum is not None:
            return nbytes({n: extras[n] for n in self._clear_extras}) + self.secure_sum.size()
        if self.compression is None:
            return nbytes(state) + nbytes(extras)
        return self.compression.size()
