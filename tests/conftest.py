"""Small federations, and the published data, for all tests.

With pytest-xdist, the process that hands out the tests reads this file, too. So what takes seconds
to import is imported where it is used.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.callbacks.wandb_server import WandbServer

if TYPE_CHECKING:
    import torch

    from flsuite.data import Digits, PublishedSplits
    from flsuite.federation.client.stack import Stack
    from flsuite.models import Classifier
    from flsuite.trainer import FederatedTrainer

# Otherwise each test, and each of its child processes, would start one thread per core, next to
# other tests.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

# Helper modules whose asserts pytest rewrites, as in tests.
pytest.register_assert_rewrite(
    "tests.aggregators.federations",
    "tests.aggregators.robust",
    "tests.aggregators.stale_updates",
    "tests.commands.command",
    "tests.composition.cells",
    "tests.data.readers",
    "tests.aggregators.exchange.compressions",
    "tests.flower.grid",
    "tests.flower.processes",
    "tests.runs.killing",
    "tests.commands.sweeps.sweeping",
)


def pytest_collection_finish() -> None:
    """Make each test cheaper, now that all is imported.

    Pytest adds its handlers, three times a test, to each logger that does not propagate: torch has
    sixty. Tests and code ask for garbage collections, which need not look at what was imported.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on a cluster of Ray first, and then the longest test.

    pytest-xdist then runs them in its first process, one after another: its processes take each
    other's work from the end. Spread over three processes, the former start three clusters. At the
    end, the latter would run for minutes alone.
    """
    first = ("test_ray_cluster.py", "test_a_shipped_sweep_can_be_built[trust]")
    place = {name: number for number, name in enumerate(first)}
    items.sort(key=lambda i: min(place.get(i.path.name, 9), place.get(i.name, 9)))


@pytest.fixture(autouse=True, scope="session")
def _machine_read_once() -> Iterator[None]:
    """Read the packages and count the GPUs once, as Lightning does for each of thousand fits."""
    import torch
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(entry_points))
        patch.setattr(torch.cuda, "device_count", cache(torch.cuda.device_count))
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_from_a_fork() -> None:
    """Fork the server of the workers before any test. A new one would import torch for seconds.

    Threads that exist so early, pytest-xdist's and pyarrow's, are no obstacle: workers use neither.
    A fork is not traced, so that a measurement of coverage needs a new process.
    """
    from flsuite.federation.engines import forkserver

    if "coverage" not in sys.modules:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "_has_only_own_threads", lambda: True)
            forkserver.prepare_workers()


@pytest.fixture(autouse=True, scope="session")
def _digits_read_once() -> Iterator[None]:
    """Read and split the digits once. Most small federations have them, and reading is slow."""
    from flsuite.data import Digits

    load = Digits.load
    once = cache(lambda: load(Digits()))

    @wraps(load)
    def load_once(self: Digits) -> PublishedSplits:
        return once()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Digits, "load", load_once)
        yield


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same threads, seed and loggers in any order, and no Weights & Biases account."""
    import torch

    from flsuite.common.random import seed_cpu

    torch.set_num_threads(THREADS)
    seed_cpu(0)
    logger = logging.getLogger("flsuite")  # which a command lets speak
    if logger.level:  # a change of the level costs a walk over all loggers
        logger.setLevel(logging.NOTSET)
    logger.handlers = []
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(autouse=True)
def _blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save pictures of their size, but blank, which is a tenth of the time of the command.

    A test that looks at a picture is marked ``draws``.
    """
    if "draws" in request.keywords:
        return

    from matplotlib.figure import Figure
    from PIL import Image

    def blank(figure: Figure, file: Any, **kwargs: Any) -> None:
        width, height = (figure.get_size_inches() * figure.dpi).astype(int)
        Image.new("L", (width, height)).save(file, format="png")

    monkeypatch.setattr(Figure, "savefig", blank)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the size of each stack that has trained."""
    from flsuite.federation.client.stack import Stack

    sizes: list[int] = []
    train = Stack.train

    def counted(self: Stack, requests: Sequence[Any], *args: Any) -> Any:
        fits = train(self, requests, *args)
        sizes.append(len(requests))
        return fits

    monkeypatch.setattr(Stack, "train", counted)
    return sizes


def mostly_long(choices: Mapping[str, Any], *fast: str) -> list[Any]:
    """Return the parameters of a test, named: these are fast tests, and all others long ones."""
    assert choices.keys() >= set(fast)
    return [
        pytest.param(choice, id=name, marks=[] if name in fast else pytest.mark.long)
        for name, choice in choices.items()
    ]


def long(*cases: Any) -> list[Any]:
    """Return these parameters of a test as long tests."""
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """Return a local W&B server that W&B in this process, and in processes it starts, uses."""
    server = WandbServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    # W&B reads the environment once for a process. Without these it would keep the settings of the
    # test before, and the test after would look for this server.
    _end_wandb()
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    try:
        yield server
        _end_wandb()
    finally:
        server.close()


def _end_wandb() -> None:
    """End W&B's own process. W&B waits for it without a limit, so kill it if it stays."""
    import wandb

    def kill() -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith("wandb-core"):
                    child.kill()

    alarm = threading.Timer(60, kill)
    alarm.start()
    try:
        wandb.teardown()
    except SystemExit as end:
        if end.code != -signal.SIGKILL:
            raise
    finally:
        alarm.cancel()


def published(*files: str) -> Path:
    """Return the root of the published data sets, with these files in it.

    Without them the test is skipped. In CI it fails.
    """
    root = os.environ.get("FLSUITE_DATA_ROOT")
    missing = [file for file in files if not root or not (Path(root).expanduser() / file).is_file()]
    if root and not missing:
        return Path(root).expanduser()

    reason = "needs the published data sets: set FLSUITE_DATA_ROOT"
    if root:
        reason = f"{missing[0]} is not under FLSUITE_DATA_ROOT"
    if os.environ.get("CI"):
        pytest.fail(f"in CI the published data sets must be there: {reason}")
    pytest.skip(reason)


@pytest.fixture
def real_data() -> Path:
    """Return the root of the published data sets."""
    return published()


def digits(clients: int = 5, **kwargs: Any) -> Digits:
    """Return the digits, a third of them if they are enough for so many clients."""
    from flsuite.data import Digits, Dirichlet

    few = {"train_samples": 500} if clients <= 12 else {}
    kwargs = {**few, **kwargs}
    return Digits(
        clients=clients, partition=kwargs.pop("partition", Dirichlet(0.5)), batch_size=64, **kwargs
    )


def classifier(lr: float = 0.1, **kwargs: Any) -> Classifier:
    import torch

    from flsuite.models import MLP, Classifier

    return Classifier(
        MLP(hidden=(16,)), optimizer=lambda params: torch.optim.SGD(params, lr=lr), **kwargs
    )


def trainer(**kwargs: Any) -> FederatedTrainer:
    """Return a silent trainer that writes nothing unless it has a folder."""
    from flsuite.trainer import FederatedTrainer

    quiet = {
        "enable_progress_bar": False,
        "enable_checkpointing": "run_dir" in kwargs,
        "seed": 3,
        "accelerator": "cpu",
    }
    return FederatedTrainer(**{**quiet, **kwargs})


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def state(made: FederatedTrainer) -> dict[str, torch.Tensor]:
    """Return the state of the global model."""
    assert made.federation is not None
    return made.federation.state


def table(made: FederatedTrainer) -> dict[tuple[Any, ...], float]:
    """Return all numbers of a run but times, by round, scope, split and metric."""
    timeless = (row for row in made.run.folder.table.rows if not row[7].endswith("seconds"))
    return {(row[0], *row[5:8]): row[8] for row in timeless}


@pytest.fixture
def run() -> Callable[..., FederatedTrainer]:
    """Return a function that fits the small federation with trainer arguments."""

    def fit(ckpt_path: str | None = None, **kwargs: Any) -> FederatedTrainer:
        made = trainer(**kwargs)
        made.fit(classifier(), digits(), ckpt_path=ckpt_path)
        return made

    return fit
