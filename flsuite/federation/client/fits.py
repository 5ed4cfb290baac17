"""The parts of a client's fit that are the same alone and in a stack."""

import copy
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback

from flsuite.common.messages import Broadcast, ClientContext, FitRequest
from flsuite.common.state import State, moved
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.entries import Entries
from flsuite.federation.client.setup import WorkerSetup


def context_of(setup: WorkerSetup, request: FitRequest) -> ClientContext:
    """Return a client's view of the round, as it is when its training begins or has ended.

    Every call returns another view, because the end of a fit adds to it and may be repeated.
    """
    if request.trained and (client := request.trained.client):
        own: Any = {name: dict(getattr(client, name)) for name in ("memory", "extras", "metrics")}
        return replace(client, **own)
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
        layout=setup.uplink.layout,
    )


def callbacks_of_algorithm(setup: WorkerSetup, client: ClientContext) -> list[Callback]:
    """Return what the attack and the algorithm do in a client's fit."""
    attacks = setup.attack.callbacks(client) if setup.attack else []
    return [*attacks, *setup.uplink.aggregator.callbacks(client)]


def loader_of(view: FederatedData, seed: int, request: FitRequest) -> TrainLoader:
    """Return the batches of a client's fit, from a view of the data in its round."""
    round = request.broadcast.round
    return TrainLoader(view, request.client, seed, round, request.batches, request.repeat)


class Starts:
    """The entries that fits start from.

    Those that are the same for all clients of a round are moved to the device once per round.

    Args:
        setup: The setup of the worker.
        entries: The ownership of the model's entries.
    """

    def __init__(self, setup: WorkerSetup, entries: Entries) -> None:
        self._setup, self._entries = setup, entries
        self._shared: tuple[Broadcast, torch.device, State] | None = None

    def of(self, request: FitRequest, device: torch.device) -> State:
        """Return the entries that a client's fit starts from, the shared ones on a device.

        A client without private entries starts from the initial ones.
        """
        shared = self._of_round(request.broadcast, device)
        private = request.memory.get("model", {})
        # Last, the initial ones again, because the shared state includes these buffers.
        reset = {name: self._setup.initial[name] for name in self._entries.reset}
        return {**shared, **private, **reset}

    def _of_round(self, broadcast: Broadcast, device: torch.device) -> State:
        kept = self._shared
        if kept is None or kept[0] is not broadcast or kept[1] != device:
            whole = moved({**self._setup.initial, **broadcast.state}, device)
            kept = self._shared = broadcast, device, whole
        return kept[2]
