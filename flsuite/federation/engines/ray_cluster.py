"""The Ray cluster that workers run in: joining, capacity, leaving, and the workers."""

import os
import pickle
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import Broadcast
from flsuite.federation.engines.pool import cores
from flsuite.federation.engines.wire import Fatal, answered, dumps, load_runner

_LEAST = 2**14  # bytes of a tensor from which on it is an array in the object store


@contextmanager
def joined(address: str | None, runtime_env: dict[str, Any] | None) -> Iterator[None]:
    """Join a cluster, unless this process has, and leave it at the end.

    Args:
        address: The cluster. ``None`` starts a local one.
        runtime_env: Ray's runtime environment of the workers.

    Raises:
        FlsuiteError: If there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {"runtime_env": runtime_env, "logging_level": "WARNING"}
    settings["address"] = address or "local"
    if address is None:
        # By default, Ray would use all cores of the machine, not those of this process.
        settings |= {"num_cpus": cores(), "include_dashboard": False}

    with _token() if address is None else nullcontext():
        with _signal_handlers_kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
            try:
                ray.init(**settings)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise FlsuiteError(
                    f"Ray: cannot join {address or 'a cluster of this machine'} "
                    f"({one_line(error, 200)}); start a cluster with 'ray start --head', or leave "
                    "out engine.address"
                ) from error
        try:
            yield
        finally:
            with _signal_handlers_kept():
                ray.shutdown()


@contextmanager
def _token() -> Iterator[None]:
    """Let a local cluster serve only processes that know a token, unless the user has decided.

    Ray's ports listen on all interfaces, and whoever reaches them can run code.
    """
    if "RAY_AUTH_MODE" in os.environ:
        yield
        return
    own = {"RAY_AUTH_MODE": "token"}
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        own["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.update(own)
    _read_token_again()
    try:
        yield
    finally:  # it would not fit another cluster
        for name in own:
            os.environ.pop(name, None)
        _read_token_again()


def _read_token_again() -> None:
    """Let Ray read the settings of its token, which it does once."""
    with suppress(ImportError, AttributeError):  # a version of Ray without tokens
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


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


def room(nodes: Sequence[Mapping[str, Any]], cpus: float, gpus: float) -> int:
    """Return the number of workers that fit into the nodes, each on a single node.

    Args:
        nodes: The nodes, as returned by ``ray.nodes()``.
        cpus: Cores per worker. It may be a fraction.
        gpus: Fraction of a GPU, or number of GPUs, per worker.
    """
    total = 0
    for there in (node["Resources"] for node in nodes if node["Alive"]):
        by_cpus = int(there.get("CPU", 0.0) / cpus + 1e-9)
        of_gpus = there.get("GPU", 0.0)
        if 0 < gpus < 1:  # a fraction is of a single GPU
            total += min(by_cpus, int(of_gpus) * int(1 / gpus + 1e-9))
        else:
            total += min(by_cpus, int(of_gpus / gpus + 1e-9)) if gpus else by_cpus
    return total


def number_of_workers(wanted: int | None, cpus: float, gpus: float) -> int:
    """Return how many workers to start: the requested number, or as many as fit.

    Raises:
        FlsuiteError: If they do not fit into the cluster. Ray itself would wait forever.
    """
    import ray

    nodes = ray.nodes()
    fitting = room(nodes, cpus, gpus)
    if fitting < (wanted or 1):
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        of_cpus, of_gpus = (sum(there.get(name, 0.0) for there in alive) for name in ("CPU", "GPU"))
        raise FlsuiteError(
            f"Ray: {wanted or 1} workers of {cpus:g} CPUs and {gpus:g} GPUs each do not fit into "
            f"the cluster, which has {of_cpus:g} CPUs and {of_gpus:g} GPUs on {len(alive)} node(s) "
            f"and room for {fitting}; change engine.workers, cpus_per_worker or gpus_per_worker"
        )
    return wanted or fitting


Packed = list[Any]
"""A serialized object: an array of bytes per tensor, and the rest as bytes."""


def pack(obj: Any) -> Packed:
    """Return an object serialized in parts for Ray's object store.

    Ray reads NumPy arrays from its store without a copy, but torch tensors much more slowly. Every
    large tensor is therefore an array of bytes. Small ones are faster as a part of the rest.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = bytes(dumps(obj, buffers, _LEAST))
    return [head, *(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)]


def unpack(packed: Packed, share: bool = False) -> Any:
    """Return the object that :func:`pack` serialized.

    Args:
        packed: The packed object, as read from the object store.
        share: Whether tensors stay in the store. They must not be written to: NumPy would refuse
            it, but torch would change them for all processes of the node.
    """
    head, *arrays = packed
    if not share:
        return pickle.loads(head, buffers=[array.copy() for array in arrays])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return pickle.loads(head, buffers=arrays)


class RayWorker:
    """Is a Ray actor that trains clients, one after another, on the same model and Trainer.

    Every answer is in parts. It may be :class:`Fatal`.

    Args:
        threads: torch threads.
        path: The driver's import path.
        sees_gpus: Whether it may use the GPUs that the cluster has reserved for it.
    """

    def __init__(self, threads: int, path: Sequence[str], sees_gpus: bool) -> None:
        # The user's package may be in the folder where the run was started.
        sys.path.extend(folder for folder in path if folder not in sys.path)
        torch.set_num_threads(threads)
        if not sees_gpus:  # Ray versions differ in what an actor without GPUs sees
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._broadcast: tuple[int, Broadcast] | None = None

    def prepare(self, setup: Packed) -> Packed:
        """Set the worker up, and return ``None``.

        Args:
            setup: The split setup, whose data all workers of the node share.
        """
        try:
            data, rest = unpack(setup, share=True)
            self._shared = list(_tensors(data))
            self._writes = [tensor._version for tensor in self._shared]
            self._runner = load_runner((data, rest))
        except (Exception, SystemExit) as error:  # Ray takes an exit for the wish of the actor
            return pack(Fatal.of(error))
        return pack(None)

    def alive(self) -> None:
        """Return when the worker reaches the next call."""

    def work(self, version: int, broadcast: Packed, jobs: Packed) -> Packed:
        """Return the outcomes of jobs that start from one broadcast, see :func:`answered`.

        Args:
            version: Number of the broadcast, which is unpacked once.
            broadcast: The broadcast.
            jobs: Lists of requests without their broadcast.
        """
        try:
            if self._broadcast is None or self._broadcast[0] != version:
                self._broadcast = (version, unpack(broadcast))
            orders = unpack(jobs)
            outcomes = answered(self._runner, orders, self._broadcast[1], pack)
            self._refuse_writes([request.client for job in orders for request in job])
            return outcomes
        except (Exception, SystemExit) as error:  # Ray takes an exit for the wish of the actor
            return pack(Fatal.of(error))

    def _refuse_writes(self, clients: Sequence[int]) -> None:
        """Raise an error if a fit wrote to the data, which is shared by all workers of the node."""
        if [tensor._version for tensor in self._shared] != self._writes:
            raise FlsuiteError(
                f"a fit of client(s) {', '.join(map(str, clients))} wrote to the dataset in place, "
                "which other clients share; clone the tensor first"
            )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in the attributes of nested dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif is_dataclass(tree):
        for value in vars(tree).values():
            yield from _tensors(value)
