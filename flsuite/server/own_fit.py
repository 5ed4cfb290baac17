"""The server's own training, on the samples that it holds for itself."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng

from flsuite.aggregators import Aggregator
from flsuite.aggregators.uplink import Uplink
from flsuite.client.entries import BatchNorm
from flsuite.client.lr_decay import LRDecay
from flsuite.client.runner import ClientRunner
from flsuite.client.setup import WorkerSetup
from flsuite.data.federated import FederatedData, RaggedIndex
from flsuite.errors import FederationError
from flsuite.lightning_internals import detached
from flsuite.messages import Broadcast, ClientFailure, FitRequest
from flsuite.random import seed_for
from flsuite.server.evaluation import Evaluator
from flsuite.state import State, StateLayout

__all__ = ["OwnFit"]


class OwnFit:
    """Trains the model on the server's samples, as a client with these samples would.

    It has a copy of the model, and randomness of its own, so that no client's fit changes by it.

    Args:
        evaluator: It has the model, the data and the arguments of every fit's Trainer.
        aggregator: The algorithm, whose client half takes part.
        batchnorm: What happens to buffers, see :class:`~flsuite.client.setup.WorkerSetup`.
        lr_decay: How learning rates change from round to round.

    Attributes:
        layout: Names of the entries that travel, once they are known.
        initial: Entries for which a fit has no other value, such as frozen ones. A resume completes
            them, so that they are those of the federation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        aggregator: Aggregator,
        batchnorm: BatchNorm,
        lr_decay: LRDecay | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.aggregator = aggregator
        self.batchnorm = batchnorm
        self.lr_decay = lr_decay
        self.initial: State = {}
        self.layout: StateLayout | None = None
        self._data = evaluator.data
        self._model: LightningModule | None = None

    def missing(self, private: Sequence[str]) -> str | None:
        """Return why the server cannot train, or ``None``.

        Args:
            private: Patterns of the entries that stay with the clients.
        """
        if self._data.server is None:
            return "the server has no samples of its own; set data.server_samples, such as 100"
        if private:
            kind = type(self.evaluator.model).__name__
            return f"the server has no whole {kind}, because clients keep {private[0]}"
        return None

    def train(self, state: State, round: int) -> State:
        """Return the shared state after a fit that starts from a shared state.

        Raises:
            FederationError: If the fit fails.
        """
        # As every client trains, and nothing happens to its change on the way.
        algorithm = Aggregator(objective=self.aggregator.objective)
        assert self.layout is not None
        setup = WorkerSetup(
            model=self._own_model(),
            data=_of_one(self._data.at(round)),
            aggregator=algorithm,
            uplink=Uplink(algorithm, self.layout, state),
            layout=self.layout,
            seed=seed_for(self.evaluator.seed, "server"),
            initial=self.initial,
            trainer_kwargs=self.evaluator.trainer_kwargs,
            batchnorm=self.batchnorm,
            channels_last=False,  # the model is a copy of one that is made ready
            lr_decay=self.lr_decay,
        )
        with isolate_rng():
            request = FitRequest(0, 0, Broadcast(round, state, {}), {})
            outcome = ClientRunner(setup).run(request)
        if isinstance(outcome, ClientFailure):
            raise FederationError(
                f"round {round}: the server's own training failed: {outcome.reason}; the state of "
                f"round {round - 1} is kept"
            )
        return outcome.update.state

    def _own_model(self) -> LightningModule:
        if self._model is None:
            # The copy must not take the Trainer along.
            with detached(self.evaluator.model):
                self._model = copy.deepcopy(self.evaluator.model)
        return self._model


def _of_one(data: FederatedData) -> FederatedData:
    """Return data whose only client has the server's samples."""
    assert data.server is not None
    rows = RaggedIndex.of([np.arange(len(data.server))])
    none = RaggedIndex.of([np.arange(0)])
    return replace(data, train=data.server, train_index=rows, val_index=none, test_index=none)
