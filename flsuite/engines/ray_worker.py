"""An actor of a Ray cluster that trains clients, and the form in which objects reach it.

Ray reads NumPy arrays from its object store without a copy, and torch's tensors much more slowly.
So every tensor travels as an array of bytes.
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

from flsuite.client.runner import ClientRunner
from flsuite.engines.wire import CANNOT_PICKLE, dumps
from flsuite.engines.worker import Fatal, sendable
from flsuite.errors import FlsuiteError
from flsuite.messages import Broadcast, FitRequest, ScoreRequest
from flsuite.state import nbytes

SMALL = 2**18
"""Bytes of a model up to which it travels whole."""

Parts = list[Any]
"""An object on its way: the serialized rest as bytes, and an array of bytes for each tensor."""


def pack(obj: Any, whole: bool = False) -> Parts:
    """Return an object in parts.

    Args:
        obj: Anything that :func:`~flsuite.engines.wire.dumps` can serialize.
        whole: Whether it is one part. That is faster for small tensors. Otherwise their memory is
            not copied.
    """
    if whole:
        return [bytes(dumps(obj))]
    buffers: list[pickle.PickleBuffer] = []
    head = bytes(dumps(obj, buffers))
    return [head, *(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)]


def unpack(parts: Parts, share: bool = False) -> Any:
    """Return the object that :func:`pack` took apart.

    Args:
        parts: What came out of the store.
        share: Whether tensors stay in the store. Nobody may write to them: NumPy would refuse it,
            torch would change them for all processes of the node.
    """
    head, *arrays = parts
    if not share:
        return pickle.loads(head, buffers=[array.copy() for array in arrays])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return pickle.loads(head, buffers=arrays)


class RayWorker:
    """Trains clients, one after another, on the same model and Trainer.

    Every answer is in parts. It may be :class:`Fatal`.

    Args:
        threads: Threads of torch.
        path: The folders in which the driver finds its modules.
        sees_gpus: Whether it may use the GPUs that the cluster has reserved for it.
    """

    def __init__(self, threads: int, path: Sequence[str], sees_gpus: bool) -> None:
        # A user's own package may lie in the folder where the run was started.
        sys.path.extend(folder for folder in path if folder not in sys.path)
        torch.set_num_threads(threads)
        if not sees_gpus:  # versions of Ray differ in what an actor without GPUs sees
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._broadcast: tuple[int, Broadcast] | None = None

    def prepare(self, setup: Parts) -> Parts:
        """Set the worker up, and return ``None``.

        Args:
            setup: The data, which all workers of the node share, and the rest of the setup as
                bytes.
        """
        try:
            data, rest = unpack(setup, share=True)
            self._shared = list(_tensors(data))
            self._writes = [tensor._version for tensor in self._shared]
            self._runner = ClientRunner(replace(pickle.loads(rest), data=data))
        except Exception as error:
            return pack(Fatal.of(error))
        return pack(None)

    def alive(self) -> None:
        """Show that the worker has come to the call that follows."""

    def work(self, version: int, broadcast: Parts, orders: Parts) -> Parts:
        """Return the outcomes of several jobs that start from one broadcast.

        Args:
            version: Number of the broadcast. It is unpacked once.
            broadcast: The broadcast.
            orders: A list of jobs, lists of requests without their broadcast.
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
        except Exception as error:
            return pack(Fatal.of(error))

    def _refuse_writes(self, requests: Sequence[FitRequest | ScoreRequest]) -> None:
        """Raise an error if a fit wrote to the data, which all workers of the node share."""
        if [tensor._version for tensor in self._shared] != self._writes:
            clients = ", ".join(str(request.client) for request in requests)
            raise FlsuiteError(
                f"a fit of client(s) {clients} wrote to the dataset in place, which other clients "
                "share; clone the tensor first"
            )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Return the tensors in the attributes of dataclasses, however deep."""
    if isinstance(tree, Tensor):
        yield tree
    elif is_dataclass(tree):
        for value in vars(tree).values():
            yield from _tensors(value)
