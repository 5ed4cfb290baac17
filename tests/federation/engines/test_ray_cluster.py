"""Clients in actors of Ray, on one cluster of two nodes for the module."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.aggregators import IFCA, Aggregator, Ditto
from flsuite.commands.main import main
from flsuite.common.messages import ClientResult
from flsuite.federation import InProcess, Ray
from tests.conftest import equal_states, trainer
from tests.federation.engines.test_parts import Dies
from tests.federation.engines.test_processes import images, model, outcomes, requests, worker_setup
from tests.federation.engines.test_ray_calls import reference, same  # noqa: F401

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # a cluster starts slowly

ray: Any = pytest.importorskip("ray", reason="needs the extra: pip install 'flsuite[ray]'")
ROOT = Path(__file__).parents[3]
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


class Machines:
    """A cluster of two nodes with one core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.second = self.cluster.add_node(**NODE)

    def engine(self, **kwargs: Any) -> Ray:
        return Ray(address=self.cluster.address, **kwargs)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray gives its workers the lowest priority: next to other tests, they would hardly run.
        patch.setenv("RAY_worker_niceness", "0")
        made = Machines()
        yield made
        ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture(scope="module")
def engine(machines: Machines) -> Iterator[Ray]:
    """Return an engine with a worker on each node."""
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    made = machines.engine()
    made.start(worker_setup()[0])
    assert signal.getsignal(signal.SIGTERM) is before, "Ray replaces it"
    yield made
    made.stop()
    assert not ray.is_initialized()


@pytest.fixture
def both_ready(engine: Ray) -> Ray:
    """Return the engine once both of its workers have started."""
    engine._glances = 0
    while [actor.is_ready for actor in engine._pool] != [True, True]:
        engine._wait()
    return engine


def node_of(handle: Any) -> str:
    """Return the node of an actor."""
    from ray._private.state import actors

    return actors(handle._actor_id.hex())["Address"]["NodeID"]


# On two nodes


def test_outcomes_are_the_same_bit_for_bit_and_in_order(
    both_ready: Ray,
    reference: dict[int, Any],  # noqa: F811
) -> None:
    assert len({node_of(actor.handle) for actor in both_ready._pool}) == 2
    _, state = worker_setup()
    for order in ((5, 0, 3, 1, 4, 2), (2, 2, 0)):
        results = outcomes(both_ready, requests(state, order))
        updates = [outcome.update for outcome in results if isinstance(outcome, ClientResult)]
        assert [update.client for update in updates] == list(order)
        assert all(equal_states(update.state, reference[update.client]) for update in updates)
        for update in updates:
            next(iter(update.state.values())).zero_()  # in the store it would be refused


# Deaths


def test_the_clients_of_a_worker_that_dies_go_to_another(
    both_ready: Ray,
    reference: dict[int, Any],  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, state = worker_setup()
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        results = outcomes(both_ready, requests(state, callbacks=(Dies(tmp_path, 1, (3,)),)))
    assert len(list(tmp_path.iterdir())) == 1, "it has happened"
    assert same(results, reference)
    (line,) = [r.getMessage() for r in caplog.records if "and is replaced" in r.getMessage()]
    assert line.startswith("round 1: the worker of client") and "3" in line


# Other drivers of the same cluster. From here on, the engine above is closed.


@pytest.mark.parametrize("make", [Ditto, IFCA])
def test_a_second_driver_ends_with_the_same_weights(
    machines: Machines, engine: Ray, make: type[Aggregator]
) -> None:
    engine.stop()
    weights, scores = [], []
    for each in (InProcess(), machines.engine(workers=1)):
        made = trainer(rounds=2, engine=each, aggregator=make(), adapt_epochs=1)
        made.fit(model(), images())
        assert made.federation is not None
        weights.append(made.federation.state)
        scores.append(made.callback_metrics)
    assert equal_states(*weights)
    assert scores[0] == scores[1] and "test/adapted/accuracy_client_mean" in scores[0]
    assert not ray.is_initialized()


# A cluster of this machine alone


def test_the_shipped_config_runs_on_a_local_cluster(
    engine: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    engine.stop()
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.rounds", "1", "--trainer.max_epochs", "1", "--run_dir"]
    config = str(ROOT / "configs" / "ray" / "quickstart.yaml")
    for name, more in (("ray", []), ("here", ["--trainer.engine", "InProcess"])):
        with pytest.raises(SystemExit) as exit:
            main(["fit", "--config", config, *more, *short, name])
        assert exit.value.code == 0
    exported = [
        torch.load(f"{name}/checkpoints/model.ckpt", weights_only=True)["state_dict"]
        for name in ("ray", "here")
    ]
    assert equal_states(*exported)
    assert not ray.is_initialized()
    assert "Tip:" not in capfd.readouterr().err
