"""The Ray engine, as far as no cluster is needed."""

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

import flsuite.engines.ray as ray_engine
from flsuite.engines import Ray
from flsuite.engines.ray_cluster import Needs
from flsuite.engines.ray_worker import RayWorker, pack, unpack
from flsuite.engines.wire import dump_without_data
from flsuite.engines.worker import Fatal
from flsuite.errors import FlsuiteError
from flsuite.messages import (
    Broadcast,
    FitRequest,
)
from tests.engines.test_processes import worker_setup
from tests.engines.test_wire import TENSORS, same

ray: Any = pytest.importorskip("ray", reason="needs the extra: pip install 'flsuite[ray]'")


class Writes(Callback):
    """Writes to the training data."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        loader.data.train.x[0].zero_()


def test_an_engine_whose_connection_is_gone_looks_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Ray()
    engine._actors = [ray_engine._Actor(handle=None)]
    monkeypatch.setattr(ray, "kill", lambda handle: pytest.fail("it would connect"))
    engine.stop()
    assert engine.pending == [] and engine._actors == []


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive_the_store(name: str) -> None:
    before = TENSORS[name].clone()
    parts = pack({"w": TENSORS[name], "rest": [1, None]})
    copied, shared = unpack(parts), unpack(parts, share=True)
    assert same(copied["w"], before) and same(shared["w"], before) and copied["rest"] == [1, None]
    copied["w"].zero_()
    assert same(shared["w"], before) and same(TENSORS[name], before)


def test_a_fit_that_writes_to_the_dataset_ends_the_run() -> None:
    made, state = worker_setup()
    worker = RayWorker(threads=1, path=[], sees_gpus=True)
    assert unpack(worker.prepare(pack((made.data, dump_without_data(made))))) is None
    for callbacks, is_refused in (((), False), ((Writes(),), True)):
        broadcast = Broadcast(1, state, {}, callbacks)
        orders = [FitRequest(0, 2, broadcast, {})]
        answer = unpack(worker.work(int(is_refused), pack(broadcast), pack([orders])))
        assert isinstance(answer, Fatal) == is_refused
    assert answer.is_user_error and "client(s) 2 wrote to the dataset in place" in answer.message


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "room"),
    [
        ([node(CPU=4), node(CPU=3)], 1, 0, 7),
        ([node(CPU=4), node(CPU=3)], 2, 0, 3),
        ([node(CPU=4), node(False, CPU=4)], 1, 0, 4),
        ([node(CPU=16, GPU=2)], 1, 0.25, 8),
        ([node(CPU=16, GPU=2)], 1, 0.4, 4),
        ([node(CPU=3, GPU=2)], 1, 0.25, 3),
        ([node(CPU=16, GPU=4), node(CPU=16)], 1, 2, 2),
        ([node(CPU=2)], 0.5, 0, 4),
        ([node(CPU=1, GPU=1)], 0.1, 0.1, 10),
        ([node()], 1, 0, 0),
    ],
)
def test_the_room_of_a_cluster(nodes: Any, cpus: float, gpus: float, room: int) -> None:
    assert Needs(cpus, gpus).room(nodes) == room


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
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
def test_impossible_engines_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=f"Ray: .*{message}"):
        Ray(**arguments)


def test_gpus_that_workers_would_not_see_are_refused() -> None:
    made, _ = worker_setup()
    made.trainer_kwargs["accelerator"] = "gpu"
    with pytest.raises(FlsuiteError, match=r"needs engine\.gpus_per_worker above 0"):
        Ray().start(made)
