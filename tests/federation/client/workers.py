"""Shared helpers for tests of single fits: the setup of a worker, and its requests."""

from typing import Any

import torch
from lightning.pytorch import Callback

from flsuite.aggregators import Aggregator, Server
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.uplink import Uplink
from flsuite.common.messages import Broadcast, FitRequest, Outcome
from flsuite.common.state import StateLayout, clone
from flsuite.federation.client.runner import ClientRunner
from flsuite.federation.client.setup import WorkerSetup
from flsuite.models.base import ClientModel
from tests.conftest import digits


def runner(model: ClientModel, aggregator: Aggregator, lean: bool, **kwargs: Any) -> ClientRunner:
    """Return a runner of three clients, in the short loop if it is lean."""
    module = digits(clients=3)
    module.setup()
    torch.manual_seed(0)
    model.ensure_built(module.federated.spec)
    state = clone(model.state_dict())
    layout = StateLayout(tuple(name for name, _ in model.named_parameters()), 3)
    uplink, settings = Uplink(aggregator, layout, state), {"accelerator": "cpu", **kwargs}
    data = module.federated
    made = ClientRunner(WorkerSetup(model, data, uplink, 0, state, settings))
    made._needs_lightning = None if lean else "the test asks for it"
    return made


def outcome(made: ClientRunner, client: int, *callbacks: Callback) -> Outcome:
    """Return the outcome of a fit in the first round."""
    setup = made.setup
    server = Server(setup.initial, setup.uplink.layout, ServerTools())
    extras = setup.uplink.aggregator.broadcast(server)
    broadcast = Broadcast(1, setup.initial, extras, callbacks)
    return made.run(FitRequest(client, client, broadcast, {}))
