"""The Ray cluster that workers run in: joining, capacity, and leaving."""

import os
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.pool import cores

_token_settings: list[str] = []  # names of the variables that _require_token has set


@dataclass(frozen=True)
class Needs:
    """The resources that the cluster reserves per worker.

    Attributes:
        cpus: Cores. It may be a fraction.
        gpus: Fraction of a GPU, or number of GPUs.
    """

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs each"

    def room(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of workers that fit into the nodes, each on a single node.

        Args:
            nodes: The nodes, as returned by ``ray.nodes()``.
        """
        return sum(self._room_on(node["Resources"]) for node in nodes if node["Alive"])

    def _room_on(self, resources: Mapping[str, float]) -> int:
        rooms = [int(resources.get("CPU", 0.0) / self.cpus + 1e-9)]
        gpus = resources.get("GPU", 0.0)
        if 0 < self.gpus < 1:  # a fraction is of a single GPU
            rooms.append(int(gpus) * int(1 / self.gpus + 1e-9))
        elif self.gpus:
            rooms.append(int(gpus / self.gpus + 1e-9))
        return min(rooms)


def join(address: str | None, runtime_env: dict[str, Any] | None) -> bool:
    """Join a cluster, unless already done. Return whether this process must leave it again.

    Args:
        address: The cluster. ``None`` starts a local one.
        runtime_env: Ray's runtime environment of the workers.

    Raises:
        FlsuiteError: If there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"runtime_env": runtime_env, "logging_level": "WARNING"}
    settings["address"] = address or "local"
    if address is None:
        _require_token()
        # By default, Ray would use all cores of the machine, not those of this process.
        settings |= {"num_cpus": cores(), "include_dashboard": False}

    with _signal_handlers_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
        try:
            ray.init(**settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            _drop_token()
            raise FlsuiteError(
                f"Ray: cannot join {address or 'a cluster of this machine'} "
                f"({one_line(error, 200)}); start a cluster with 'ray start --head', or leave "
                "out engine.address"
            ) from error
    return True


def leave() -> None:
    """Leave the cluster that :func:`join` joined."""
    import ray

    with _signal_handlers_kept():
        ray.shutdown()
    _drop_token()


def _require_token() -> None:
    """Let a local cluster serve only processes that know a token, unless the user has decided.

    Ray's ports listen on all interfaces, and whoever reaches them can run code.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    own = {"RAY_AUTH_MODE": "token"}
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        own["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(own)
    _token_settings.extend(own)
    _read_token_again()


def _drop_token() -> None:
    """Remove the settings of :func:`_require_token`, which would not fit another cluster."""
    if _token_settings:
        for name in _token_settings:
            os.environ.pop(name, None)
        _token_settings.clear()
        _read_token_again()


def _read_token_again() -> None:
    """Let Ray read the settings of its token, which it does once."""
    with suppress(ImportError, AttributeError):  # a version of Ray without tokens
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def number_of_workers(wanted: int | None, needs: Needs) -> int:
    """Return how many workers to start: the requested number, or as many as fit.

    Raises:
        FlsuiteError: If they do not fit into the cluster. Ray itself would wait forever.
    """
    import ray

    nodes = ray.nodes()
    room = needs.room(nodes)
    if room < (wanted or 1):
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        cpus, gpus = (sum(there.get(name, 0.0) for there in alive) for name in ("CPU", "GPU"))
        raise FlsuiteError(
            f"Ray: {wanted or 1} workers of {needs} do not fit into the cluster, which has "
            f"{cpus:g} CPUs and {gpus:g} GPUs on {len(alive)} node(s) and room for {room}; change "
            "engine.workers, cpus_per_worker or gpus_per_worker"
        )
    return wanted or room


def refuse_hidden_gpus(setup: WorkerSetup, gpus: float) -> None:
    accelerator = setup.trainer_kwargs.get("accelerator")
    if accelerator in ("gpu", "cuda") and not gpus:
        raise FlsuiteError(
            f"trainer: accelerator {accelerator} needs engine.gpus_per_worker above 0; workers of "
            "Ray see only the GPUs that are reserved for them"
        )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces.

    Users rely on their handler if jobs are pre-empted.
    """
    if threading.current_thread() is not threading.main_thread():  # only it sets handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
