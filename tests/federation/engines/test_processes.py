"""An engine decides where clients train, and never affects the results."""

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators import FedAvg
from flsuite.aggregators.uplink import Uplink
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import Broadcast, ClientFailure, ClientResult, FitRequest, Outcome
from flsuite.common.state import StateLayout, clone
from flsuite.data import DataSpec, DataSplit, FederatedDataModule, Natural, PublishedSplits
from flsuite.federation import Engine, InProcess, Processes, Vectorized
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines import processes
from flsuite.federation.engines.forkserver import prepare_workers
from flsuite.federation.engines.wire import dumps
from flsuite.models import MLP, Backbone, Classifier
from tests.conftest import equal_states, trainer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SIZES = (20, 3, 9, 13, 8, 16)


class Images(FederatedDataModule):
    """Colored noise, six clients of very different sizes."""

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (sum(SIZES), 6, 6, 3), generator=generator, dtype=torch.uint8)
        owners = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
        y = torch.arange(sum(SIZES)) % 3
        return PublishedSplits(
            DataSpec((3, 6, 6), 3), DataSplit(x, y, owners), DataSplit(x[:20], y[:20])
        )


class TinyConv(Backbone):
    """A convolution and dropout, which draws from the global generator."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        return nn.Sequential(
            conv,
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(4 * shape[1] * shape[2], outputs),
        )


def images() -> Images:
    return Images(clients=len(SIZES), partition=Natural(), batch_size=8, val_fraction=0.0)


def model() -> Classifier:
    return Classifier(TinyConv(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def worker_setup() -> tuple[WorkerSetup, dict[str, Tensor]]:
    """Return what an engine needs, and the state that a round starts from."""
    module, net = images(), model()
    module.setup()
    torch.manual_seed(0)
    net.ensure_built(module.federated.spec)
    state, settings = clone(net.state_dict()), {"max_epochs": 2, "accelerator": "cpu"}
    layout = StateLayout(tuple(name for name, _ in net.named_parameters()), 6)
    uplink = Uplink(FedAvg(), layout, state)
    setup = WorkerSetup(net, module.federated, uplink, 3, state, settings)
    return setup, state


def requests(
    state: dict[str, Tensor],
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5),
    round: int = 1,
    callbacks: tuple[Callback, ...] = (),
) -> list[FitRequest]:
    broadcast = Broadcast(round, state, {}, callbacks)
    return [FitRequest(n, c, broadcast, {}) for n, c in enumerate(order)]


def outcomes(engine: Engine, submitted: list[FitRequest]) -> list[Outcome]:
    """Return the outcomes of the requests, collected as they were submitted."""
    engine.submit(submitted)
    return [engine.collect(number) for number in list(engine.pending)]


Start = Callable[..., dict[str, Tensor]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts an engine and returns the state that a round starts from.

    It adds ``extra`` to the ``model`` or the ``data`` that workers receive.
    """
    engines: list[Engine] = []

    def started(engine: Engine, **extra: Any) -> dict[str, Tensor]:
        made, state = worker_setup()
        for part, value in extra.items():
            setattr(getattr(made, part), "extra", value)  # noqa: B010
        engines.append(engine)
        engine.start(made)
        return state

    yield started
    for engine in engines:
        engine.stop()


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Call ``function`` and return its result. Fail if it hangs."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result(timeout=seconds)
    finally:
        pool.shutdown(wait=False)


# The same results everywhere


@pytest.fixture(scope="module")
def reference() -> dict[int, dict[str, Tensor]]:
    """Return the state of each client after a fit, one after another in this process."""
    torch.set_num_threads(1)
    engine = InProcess(threads=1)
    made, state = worker_setup()
    engine.start(made)
    states = {}
    for outcome in outcomes(engine, requests(state)):
        assert isinstance(outcome, ClientResult)
        states[outcome.update.client] = outcome.update.state
    return states


@pytest.mark.parametrize(
    "engine",
    [InProcess(threads=1), *(Processes(workers=n) for n in (1, 4))],
    ids=["in_process", "one", "four"],
)
def test_outcomes_are_the_same_bit_for_bit_and_in_order(
    engine: Engine, reference: dict[int, dict[str, Tensor]], start: Start
) -> None:
    state = start(engine)
    for order in ((5, 0, 3, 1, 4, 2), (2, 2, 0)):
        results = outcomes(engine, requests(state, order))
        updates = [outcome.update for outcome in results if isinstance(outcome, ClientResult)]
        assert [update.client for update in updates] == list(order)
        assert all(equal_states(update.state, reference[update.client]) for update in updates)
        assert [update.samples for update in updates] == [SIZES[client] for client in order]


class Maps(Callback):
    """Fails unless the training tensors lie in the anonymous file that all workers map."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        train = loader.data.train
        if not all(_mapped(tensor.data_ptr()) for tensor in (train.x, train.y)):
            raise RuntimeError("a copy")


def _mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= address < high:
            return "memfd:flsuite" in line
    return False


@LINUX
def test_workers_share_the_dataset(start: Start) -> None:
    engine = Processes(workers=2)
    results = outcomes(engine, requests(start(engine), callbacks=(Maps(),)))
    assert {type(outcome) for outcome in results} == {ClientResult}


# What goes wrong


class Unreadable:
    """Cannot be unpickled in another process."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(home: int) -> None:
    if os.getpid() != home:
        raise ValueError("made of glass")


@pytest.mark.parametrize(("part", "workers"), [("model", 3), ("data", 1)])
def test_a_worker_that_cannot_start_ends_the_run(part: str, workers: int, start: Start) -> None:
    engine = Processes(workers=workers)
    state = start(engine, **{part: Unreadable()})
    with pytest.raises(RuntimeError, match=r"a worker failed:(.|\n)*made of glass"):
        within(60, lambda: outcomes(engine, requests(state)))


class Waits:
    """Waits in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return time.sleep, (600,)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_worker_that_hangs_in_its_setup_ends_the_run(
    timeout: float | None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SETUP", 0.2)
    engine = Processes(workers=1, timeout=timeout)
    state = start(engine, model=Waits())
    state["large"] = torch.zeros(2**20)  # more than a pipe takes before the worker reads
    with pytest.raises(FederationError, match=r"setup .* did not end within 0\.2 seconds"):
        within(20, lambda: outcomes(engine, requests(state)))


class Exits(Callback):
    """Calls ``exit()`` in the fit of one client."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        loader: Any = trainer.train_dataloader
        if loader.client == 1:
            sys.exit(3)


@pytest.mark.parametrize("engine", [InProcess(), Processes(workers=1)])
@pytest.mark.parametrize("order", [(1, 0), (0, 1)])  # in the first fit of a Trainer, and later
def test_a_client_that_calls_exit_has_failed(
    engine: Engine, order: tuple[int, ...], start: Start
) -> None:
    asked = requests(start(engine), order, callbacks=(Exits(),))
    results = within(60, lambda: outcomes(engine, asked))
    (failure,) = (outcome for outcome in results if isinstance(outcome, ClientFailure))
    assert failure.client == 1
    assert failure.reason.startswith("SystemExit: 3 (test_processes.py, line ")


def test_a_model_that_calls_exit_fails_in_a_stack_too() -> None:
    class Leaves(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sys.exit("no license")

    made = trainer(rounds=1, engine=Vectorized(clients=3))
    net = Leaves(MLP(hidden=(4,)), lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(FlsuiteError, match="first step with SystemExit: no license"):
        made.fit(net, images())


class Refuses(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise FlsuiteError("this optimizer has momentum; set it to 0")


@pytest.mark.parametrize(
    "engine", [InProcess(), Processes(workers=2)], ids=["in_process", "processes"]
)
def test_a_setting_that_nobody_can_train_with_is_the_users_error(engine: Engine) -> None:
    made = trainer(rounds=1, engine=engine, callbacks=[Refuses()])
    with pytest.raises(FlsuiteError, match=r"^this optimizer has momentum; set it to 0$"):
        within(60, lambda: made.fit(model(), images()))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Processes, {"workers": 0}, "Processes: workers must be at least 1"),
        (Processes, {"threads": 0}, "Processes: threads must be at least 1"),
        (InProcess, {"threads": 0}, "InProcess: threads must be at least 1"),
        *((Processes, {"timeout": bad}, "timeout must be positive") for bad in (0, -1.0, math.nan)),
    ],
)
def test_impossible_engines_are_refused(make: Any, arguments: Any, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        make(**arguments)


# What is left behind


def _alive() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {p.pid for p in children if p.status() != psutil.STATUS_ZOMBIE}


def _descriptors() -> int:
    gc.collect()
    return psutil.Process().num_fds()


@LINUX
def test_stop_leaves_no_process_and_no_descriptor() -> None:
    made, state = worker_setup()
    engine = Processes(workers=3)
    prepare_workers()
    engine.start(made)  # the first use of a forkserver opens what stays open
    outcomes(engine, requests(state, (0,)))
    engine.stop()
    before, open_before = _alive(), _descriptors()
    engine.start(made)
    outcomes(engine, requests(state, (0, 1, 2)))
    assert len(_alive() - before) == 3
    engine.stop()
    engine.stop()
    deadline = time.monotonic() + 5
    while _alive() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _alive() <= before
    assert _descriptors() <= open_before
    assert len(dumps(engine)) < 1000, "an engine that has stopped is plain data"


def test_an_abandoned_round_can_be_followed_by_another_run(start: Start) -> None:
    engine = Processes(workers=2)
    engine.submit(requests(start(engine)))
    engine.collect(0)
    assert len(outcomes(engine, requests(start(engine), (1, 2)))) == 2
