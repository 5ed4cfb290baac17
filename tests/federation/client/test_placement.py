"""Workers are spread over the visible GPUs, here a fake number of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from flsuite import FederatedTrainer
from flsuite.aggregators import FedAvg
from flsuite.common.errors import FlsuiteError
from flsuite.federation import InProcess
from flsuite.federation.client.devices import gpus, on_one_gpu, require_one_gpu
from flsuite.federation.client.runner import ClientRunner
from flsuite.federation.client.setup import WorkerSetup
from tests.conftest import classifier


@pytest.mark.parametrize(
    ("arguments", "visible", "expected"),
    [
        ({}, 3, [0, 1, 2]),
        ({"accelerator": "gpu"}, 2, [0, 1]),
        ({"devices": -1}, 2, [0, 1]),
        ({"devices": "1"}, 3, [0]),
        ({"devices": 2}, 3, [0, 1]),
        ({"devices": [2]}, 3, [2]),
        ({"devices": "2,0"}, 3, [2, 0]),
        ({"accelerator": "cpu", "devices": 1}, 3, []),
        ({"accelerator": "gpu", "devices": 1}, 0, []),
    ],
)
def test_the_argument_devices_keeps_its_meaning(
    arguments: dict[str, Any], visible: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert gpus(arguments) == expected


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (4, r"got 4 \(.*machine only has: \[0, 1, 2\]"),
        ([0, 0], "must be unique"),
        ([-1], "machine only has"),
        ("all", "got 'all'"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    devices: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(FlsuiteError, match=f"devices must be a number of GPUs or a list.*{reason}"):
        gpus({"devices": devices})


def test_worker_i_has_gpu_i_and_the_first_ones_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    arguments = {"accelerator": "gpu", "max_epochs": 2}
    placed = [on_one_gpu(arguments, worker) for worker in range(7)]
    assert [one["devices"] for one in placed] == [[0], [1], [2], [0], [1], [2], [0]]
    assert all(one["max_epochs"] == 2 for one in placed)
    assert on_one_gpu({"accelerator": "cpu"}, 1) == {"accelerator": "cpu"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [on_one_gpu({"devices": [5, 3]}, w)["devices"] for w in range(3)] == [[5], [3], [5]]


def test_a_worker_and_the_server_take_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    model = classifier()
    uplink: Any = SimpleNamespace(aggregator=FedAvg())
    setup = WorkerSetup(model, None, uplink, 0, {}, {"accelerator": "gpu"})  # type: ignore[arg-type]
    devices = [ClientRunner(setup, worker).trainer_kwargs["devices"] for worker in range(5)]
    assert devices == [[0], [1], [2], [3], [0]]

    asked: list[Any] = []

    def init(self: Trainer, **kwargs: Any) -> None:
        asked.append(kwargs.get("devices"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "__init__", init)
    with pytest.raises(KeyboardInterrupt):
        FederatedTrainer(accelerator="gpu")
    assert asked == [[0]]


def test_several_gpus_need_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = r"devices 2 names several GPUs"
    with pytest.raises(FlsuiteError, match=message):
        require_one_gpu({"devices": 2})
    for devices in (None, "auto", -1, 1, [1]):
        require_one_gpu({"devices": devices})
    with pytest.raises(FlsuiteError, match=message):
        InProcess().start(WorkerSetup(None, None, None, 0, {}, {"devices": 2}))  # type: ignore[arg-type]
