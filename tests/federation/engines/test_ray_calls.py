"""How the Ray engine hands out clients, and what it does about dead workers, without a cluster."""

import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import flsuite.federation.engines.ray as ray_engine
from flsuite.common import errors
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientFailure, ClientResult, Outcome, OwnScores, ScoreRequest
from flsuite.federation import InProcess, Ray
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.engines.ray_cluster import pack, room, unpack
from tests.conftest import equal_states
from tests.federation.engines.small_ray import Fate, Plan, SmallRay
from tests.federation.engines.test_processes import outcomes, requests, worker_setup
from tests.federation.engines.test_wire import TENSORS, same as same_tensors


class Writes(Callback):
    """Writes to the training data."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        loader.data.train.x[0].zero_()


Start = Callable[..., tuple[Ray, SmallRay]]


def works(worker: int, method: str, before: int) -> Fate:
    return "works"


def first_worker(fate: Fate, on: str, before: int = 0) -> Plan:
    """Return the plan of a cluster where only a call of the first worker goes wrong."""
    return lambda *call: fate if call == (0, on, before) else "works"


def every_worker(fate: Fate, on: str) -> Plan:
    return lambda worker, method, before: fate if method == on else "works"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: "found")


@pytest.fixture
def start(installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts an engine on a cluster with this plan."""
    engines = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(1)

    def started(plan: Plan = works, cpus: float = 2, **arguments: Any) -> tuple[Ray, SmallRay]:
        cluster = SmallRay(plan, cpus)
        monkeypatch.setitem(sys.modules, "ray", cluster)
        engines.append(Ray(**arguments))
        engines[-1].start(worker_setup()[0])
        return engines[-1], cluster

    yield started
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def reference() -> dict[int, Any]:
    torch.set_num_threads(1)
    engine = InProcess()
    made, state = worker_setup()
    engine.start(made)
    return states(outcomes(engine, requests(state)))


def states(results: list[Outcome]) -> dict[int, Any]:
    return {o.update.client: o.update.state for o in results if isinstance(o, ClientResult)}


def same(results: list[Outcome], reference: dict[int, Any], but: Collection[int] = ()) -> bool:
    got = states(results)
    return got.keys() == reference.keys() - set(but) and all(
        equal_states(got[client], reference[client]) for client in got
    )


@pytest.mark.parametrize("seconds", [0.1, 1e-9])
def test_the_outcomes_are_those_of_one_process(
    start: Start, reference: dict[int, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "_SECONDS", seconds)  # one client per call, or several
    engine, cluster = start()
    _, state = worker_setup()
    zero = {name: torch.zeros_like(value) for name, value in state.items()}
    for order in ((5, 0, 3, 1, 4, 2), (2, 2, 0)):
        others = {*range(6)} - {*order}
        assert same(outcomes(engine, requests(state, order)), reference, others)
    engine.submit(requests(state)[:3] + requests(zero, round=2)[3:])
    results = [engine.collect(number) for number in reversed(engine.pending)]
    assert same(results[3:], reference, (3, 4, 5)) and not same(results[:3], reference, (0, 1, 2))
    assert sum(handle.counts["work"] for handle in cluster.handles) <= 3 * len(reference)


def test_scores_are_those_of_one_process(start: Start) -> None:
    engine, _ = start()
    made, state = worker_setup()
    here = JobRunner(made)
    broadcast = requests(state)[0].broadcast
    asked = [ScoreRequest(n, n % 6, broadcast, {}, "test", True) for n in range(24)]
    scores = engine.score(asked)
    assert scores == [answer for request in asked for answer in here.answer([request])]
    assert {type(one) for one in scores} == {OwnScores}


@pytest.mark.parametrize("on", ["work", "prepare"])
def test_a_dead_worker_is_replaced_and_its_clients_go_to_another(
    on: str, start: Start, reference: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine, cluster = start(first_worker("dies", on))
    assert same(outcomes(engine, requests(worker_setup()[1])), reference)
    assert len(cluster.handles) == 3
    assert ("died (It was killed) and is replaced" in caplog.text) == (on == "work")


@pytest.mark.parametrize(("fate", "deaths"), [("dies", 2), ("dies unseen", 3)])
def test_a_client_whose_worker_dies_twice_has_failed(start: Start, fate: Fate, deaths: int) -> None:
    """A death before the call was read is the client's fault only from the second on."""
    engine, cluster = start(every_worker(fate, on="work"), cpus=1)
    (failure,) = outcomes(engine, requests(worker_setup()[1], (3,)))
    assert isinstance(failure, ClientFailure) and failure.reason == "its worker died twice"
    assert len(cluster.handles) == deaths + 1


def test_a_client_that_takes_too_long_has_failed_and_no_other(
    start: Start, reference: dict[int, Any]
) -> None:
    engine, cluster = start(first_worker("hangs", on="work", before=1), timeout=0.3)
    results = outcomes(engine, requests(worker_setup()[1]))
    (failure,) = [outcome for outcome in results if isinstance(outcome, ClientFailure)]
    assert failure.reason == "it did not finish within 0.3 seconds (engine.timeout)"
    assert same(results, reference, (failure.client,)) and len(cluster.handles) == 3


def test_three_workers_that_die_at_the_start_end_the_run(start: Start) -> None:
    engine, _ = start(every_worker("dies", on="prepare"))
    with pytest.raises(FederationError, match="3 workers in a row died while they started"):
        outcomes(engine, requests(worker_setup()[1]))
    with pytest.raises(FederationError, match="no worker is left"):
        engine.collect(engine.pending[0])


def test_a_cluster_without_room_is_noticed_while_nobody_starts(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_engine, "_GLANCE", 0.01)
    engine, cluster = start(every_worker("hangs", on="prepare"))
    for _ in range(8):
        engine._wait()
    assert caplog.text.count("no worker of Ray has started yet") == 1
    cluster.cpus = 0.5
    with pytest.raises(FederationError, match="no node of the cluster has room"):
        engine._wait()


def test_an_error_of_a_worker_ends_the_run(start: Start) -> None:
    engine, _ = start(every_worker("fails", on="work"))
    with pytest.raises(RuntimeError, match="a worker failed:\na bug"):
        outcomes(engine, requests(worker_setup()[1]))


def test_what_a_worker_refuses_is_raised_here(start: Start) -> None:
    engine, _ = start()
    with pytest.raises(FlsuiteError, match="wrote to the dataset in place"):
        outcomes(engine, requests(worker_setup()[1], callbacks=(Writes(),)))


def test_a_cluster_is_left_by_whoever_joined_it(start: Start) -> None:
    engine, cluster = start(address="somewhere:1")
    assert cluster.settings is not None and cluster.settings["address"] == "somewhere:1"
    engine.stop()
    assert cluster.settings is None

    cluster.settings = {}  # the user's own connection
    engine.start(worker_setup()[0])
    engine.stop()
    assert cluster.settings == {}


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_local_cluster_has_a_token_unless_the_user_decides(
    mode: str | None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
    for name, value in zip(names, (mode, None), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    before = [os.environ.get(name) for name in names]
    tokens = set()
    for _ in range(2):
        engine, _ = start()
        if mode is None:
            assert os.environ["RAY_AUTH_MODE"] == "token"
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
        else:
            assert [os.environ.get(name) for name in names] == before
        engine.stop()
        assert [os.environ.get(name) for name in names] == before, "for another cluster"
    assert len(tokens) == (2 if mode is None else 0) and all(len(token) == 64 for token in tokens)


def test_workers_that_do_not_fit_and_clusters_that_are_not_there_are_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FlsuiteError, match="3 workers of 1 CPUs and 0 GPUs each do not fit"):
        start(workers=3)
    monkeypatch.setitem(sys.modules, "ray", SmallRay(works, joins=False))
    with pytest.raises(FlsuiteError, match="cannot join a cluster of this machine"):
        Ray().start(worker_setup()[0])


# Without a cluster


def test_an_engine_whose_connection_is_gone_looks_for_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cluster = start()
    cluster.shutdown()
    monkeypatch.setattr(cluster, "kill", lambda handle: pytest.fail("it would connect"))
    engine.stop()
    assert engine.pending == [] and engine._pool == []


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive_the_store(name: str) -> None:
    before = TENSORS[name].clone()
    parts = pack({"w": TENSORS[name], "rest": [1, None]})
    copied, shared = unpack(parts), unpack(parts, share=True)
    assert all(same_tensors(one["w"], before) for one in (copied, shared))
    assert copied["rest"] == [1, None]
    copied["w"].zero_()
    assert all(same_tensors(one, before) for one in (shared["w"], TENSORS[name]))


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "fitting"),
    [
        ([node(CPU=4), node(CPU=3)], 2, 0, 3),
        ([node(CPU=4), node(False, CPU=4)], 1, 0, 4),
        ([node(CPU=16, GPU=2)], 1, 0.4, 4),
        ([node(CPU=3, GPU=2)], 1, 0.25, 3),
        ([node(CPU=16, GPU=4), node(CPU=16)], 1, 2, 2),
        ([node(CPU=1, GPU=1)], 0.1, 0.1, 10),
        ([node()], 1, 0, 0),
    ],
)
def test_the_room_of_a_cluster(nodes: Any, cpus: float, gpus: float, fitting: int) -> None:
    assert room(nodes, cpus, gpus) == fitting


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[ray\]'"):
        Ray()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be positive"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be at least 0"),
        ({"gpus_per_worker": 1.5}, "a share of one GPU or a whole number, got 1.5"),
    ],
)
def test_impossible_engines_are_refused(
    installed: None, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=f"Ray: .*{message}"):
        Ray(**arguments)


def test_gpus_that_workers_would_not_see_are_refused(installed: None) -> None:
    made, _ = worker_setup()
    made.trainer_kwargs["accelerator"] = "gpu"
    with pytest.raises(FlsuiteError, match=r"needs engine\.gpus_per_worker above 0"):
        Ray().start(made)
