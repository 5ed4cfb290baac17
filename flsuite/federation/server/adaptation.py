"""Adaptation after training: each client trains its own model on its own samples, and is scored."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from flsuite.common.messages import Broadcast, ClientResult, FitRequest, OwnScores, Scores
from flsuite.federation.server.evaluation import Evaluator, of_own_models
from flsuite.federation.server.federation import Federation

log = logging.getLogger("flsuite")

_AT_ONCE = 64  # clients whose own models are in memory at the same time


def adapted_scores(
    evaluator: Evaluator, federation: Federation, clients: Sequence[int], epochs: int
) -> Scores:
    """Return the test scores of clients whose models have adapted to their own samples.

    A client starts from its own model, or from the global one if it has none, and trains without
    the algorithm. Its model is dropped after it is scored.

    Args:
        evaluator: Its engine trains the clients.
        federation: The federation in its current state.
        clients: The clients.
        epochs: Epochs of the adaptation.
    """
    if evaluator.engine is None:
        return {}
    round = max(federation.clock.round, 1)
    evaluator.data = federation.data.at(round)

    rows: dict[int, OwnScores] = {}
    version = Broadcast(round, federation.state, {})
    for first in range(0, len(clients), _AT_ONCE):
        requests = [
            _request(federation, version, client, epochs)
            for client in clients[first : first + _AT_ONCE]
        ]
        evaluator.engine.submit(requests)
        for request in requests:
            outcome = evaluator.engine.collect(request.number)
            if not isinstance(outcome, ClientResult):
                log.warning("client %d could not adapt: %s", outcome.client, outcome.reason)
                continue
            model = {**federation.initial, **outcome.update.state, **outcome.memory["model"]}
            scores = evaluator.own(request.client, model, "test")
            if scores is not None:
                rows[request.client] = scores
    return of_own_models(rows, evaluator.names)


def _request(federation: Federation, version: Broadcast, client: int, epochs: int) -> FitRequest:
    """Return the request of one client's adaptation, which starts from its own model."""
    own, state = federation.own_entries(client), version.state
    # One object for all clients without entries of their own, because a worker receives it once.
    if own.keys() & state.keys():
        version = replace(version, state={k: own.get(k, v) for k, v in state.items()})
    memory = {"model": {name: value for name, value in own.items() if name not in state}}
    # Below 0, to differ from the numbers and the repeats of fits.
    return FitRequest(-1 - client, client, version, memory, repeat=-1, adapts=epochs)
