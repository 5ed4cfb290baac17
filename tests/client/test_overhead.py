"""The overhead of a client on top of its training, measured against a bare loop.

Both sides take turns in one process, and the smallest time of each counts, so the load of the
machine does not decide. The bound is three times the measured overhead.
"""

import time
from collections.abc import Callable

import pytest

from flsuite.client.jobs import JobRunner
from flsuite.models import MLP, Classifier
from flsuite.runs.preparation import worker_setup
from tests.benchmarks.loop import HandWrittenLoop
from tests.conftest import digits, trainer

MEASURED = 2.3  # times the loop


@pytest.mark.long
def test_a_small_client_costs_little_more_than_its_step() -> None:
    clients = range(40)
    data = digits(clients=len(clients))
    made = trainer(rounds=1)
    run = made.prepare(Classifier(MLP(hidden=(256, 256))), data)
    runner = JobRunner(worker_setup(made, run))
    requests = run.requests(made.schedule.start(run.federation.clock))

    federated = data.federated
    scaling = federated.scaling
    loop = HandWrittenLoop(
        MLP(hidden=(256, 256)).build(federated.spec.shape, 10),
        federated.train.x,
        federated.train.y,
        [federated.train_rows(client) for client in clients],
        scaling.scale,
        scaling.shift,
    )

    ours, theirs = [], []
    for _ in range(4):
        theirs.append(seconds(lambda: loop.round(clients)))
        ours.append(seconds(lambda: runner.answer(requests)))
    assert min(ours) < 3 * MEASURED * min(theirs)


def seconds(work: Callable[[], object]) -> float:
    """Return the time of this process that the work takes."""
    started = time.process_time()
    work()
    return time.process_time() - started
