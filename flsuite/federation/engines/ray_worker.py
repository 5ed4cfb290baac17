"""A Ray actor that trains clients, and the serialization of objects sent to it.

Ray reads NumPy arrays from its object store without a copy, but torch tensors much more slowly.
Every tensor is therefore sent as an array of bytes.
"""

import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Broadcast, FitRequest, ScoreRequest
from flsuite.common.state import nbytes
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.engines.wire import CANNOT_PICKLE, Fatal, dumps, sendable

SMALL = 2**18
"""Bytes of a model up to which it is sent as a whole."""

Packed = list[Any]
"""A serialized object: an array of bytes per tensor, and the rest as bytes."""


def pack(obj: Any, whole: bool = False) -> Packed:
    """Return an object serialized in parts.

    Args:
        obj: Any object that :func:`~flsuite.federation.engines.wire.dumps` can serialize.
        whole: Whether to use a single part, which is faster for small tensors. Otherwise, the
            memory of tensors is not copied.
    """
    if whole:
        return [bytes(dumps(obj))]
    buffers: list[pickle.PickleBuffer] = []
    head = bytes(dumps(obj, buffers))
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
    """Trains clients, one after another, on the same model and Trainer.

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
            setup: The data, shared by all workers of the node, and the rest of the setup as bytes.
        """
        try:
            data, rest = unpack(setup, share=True)
            self._shared = list(_tensors(data))
            self._writes = [tensor._version for tensor in self._shared]
            self._runner = JobRunner(replace(pickle.loads(rest), data=data))
        except (Exception, SystemExit) as error:  # Ray takes an exit for the wish of the actor
            return pack(Fatal.of(error))
        return pack(None)

    def alive(self) -> None:
        """Return when the worker reaches the next call."""

    def work(self, version: int, broadcast: Packed, orders: Packed) -> Packed:
        """Return the outcomes of several jobs that start from one broadcast.

        Args:
            version: Number of the broadcast, which is unpacked once.
            broadcast: The broadcast.
            orders: A list of jobs. Each is a list of requests without their broadcast.
        """
        try:
            if self._broadcast is None or self._broadcast[0] != version:
                self._broadcast = (version, unpack(broadcast))
            here = self._broadcast[1]
            jobs = [[replace(order, broadcast=here) for order in job] for job in unpack(orders)]
            outcomes = [self._runner.answer(job) for job in jobs]
            self._refuse_writes([request for job in jobs for request in job])
            whole = nbytes(here.state) < SMALL
            try:
                return pack(outcomes, whole)
            except CANNOT_PICKLE:
                return pack([sendable(self._runner, job) for job in jobs], whole)
        except (Exception, SystemExit) as error:  # Ray takes an exit for the wish of the actor
            return pack(Fatal.of(error))

    def _refuse_writes(self, requests: Sequence[FitRequest | ScoreRequest]) -> None:
        """Raise an error if a fit wrote to the data, which is shared by all workers of the node."""
        if [tensor._version for tensor in self._shared] != self._writes:
            clients = ", ".join(str(request.client) for request in requests)
            raise FlsuiteError(
                f"a fit of client(s) {clients} wrote to the dataset in place, which other clients "
                "share; clone the tensor first"
            )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in the attributes of nested dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif is_dataclass(tree):
        for value in vars(tree).values():
            yield from _tensors(value)
