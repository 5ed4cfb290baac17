"""The parts of a client's fit that are the same alone and in a stack."""

import copy
from dataclasses import dataclass, replace

from lightning.pytorch import Callback

from flsuite.client.entries import Entries
from flsuite.client.setup import WorkerSetup
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.messages import ClientContext, FitRequest, TrainedFit
from flsuite.state import State


@dataclass
class StackedFit:
    """A fit that has been trained in a stack of clients.

    Attributes:
        client: The client's view of the round, as its algorithm has left it.
        trained: The outcome of the training, with all entries of the model.
        measures: Whether the algorithm measures the trained model.
    """

    client: ClientContext
    trained: TrainedFit
    measures: bool

    def own_client(self) -> ClientContext:
        """Return the view for one run of the fit's end, which adds to it and may be repeated."""
        client = self.client
        return replace(
            client,
            memory=dict(client.memory),
            extras=dict(client.extras),
            metrics=dict(client.metrics),
        )


def context_of(setup: WorkerSetup, request: FitRequest) -> ClientContext:
    """Return a client's view of the round at the start of its fit."""
    broadcast = request.broadcast
    view = setup.data.at(broadcast.round)
    return ClientContext(
        id=request.client,
        round=broadcast.round,
        samples=view.samples(request.client),
        class_counts=view.class_counts(request.client),
        global_state=broadcast.state,
        received=broadcast.extras.get("objective", {}),
        memory=copy.deepcopy(request.memory.get("objective", {})),
        layout=setup.layout,
    )


def callbacks_of_algorithm(setup: WorkerSetup, client: ClientContext) -> list[Callback]:
    """Return what the attack and the algorithm do in a client's fit."""
    attacks = setup.attack.callbacks(client) if setup.attack else []
    return [*attacks, *setup.aggregator.callbacks(client)]


def loader_of(view: FederatedData, seed: int, request: FitRequest) -> TrainLoader:
    """Return the batches of a client's fit, from a view of the data in its round."""
    round = request.broadcast.round
    return TrainLoader(view, request.client, seed, round, request.batches, request.repeat)


def start_of(setup: WorkerSetup, entries: Entries, request: FitRequest) -> State:
    """Return the entries that a client's fit starts from.

    A client without private entries starts from the initial ones.
    """
    private = request.memory.get("model", {})
    # Last, the initial ones again, because the shared state includes these buffers.
    reset = {name: setup.initial[name] for name in entries.reset}
    return {**setup.initial, **request.broadcast.state, **private, **reset}
