"""The main loop of a worker process: receive requests, train, and send the outcomes."""

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from flsuite.common.errors import FlsuiteError, is_out_of_memory, one_line
from flsuite.common.messages import Broadcast
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.engines.wire import CANNOT_PICKLE, dumps, load_shared, receive, send


class Ready:
    """The first message of a worker: its setup is complete."""


@dataclass
class Fatal:
    """The answer of a worker that cannot train any client.

    Attributes:
        message: One line for a user's error, else a traceback.
        is_user_error: Whether the user's settings are to blame.
    """

    message: str
    is_user_error: bool

    @classmethod
    def of(cls, error: BaseException) -> "Fatal":
        """Return the answer for an error that is being handled."""
        if is_out_of_memory(error):
            reason = f"a worker ran out of memory ({one_line(error, 200)})"
            return cls(f"{reason}; use fewer workers, or a smaller model", True)
        is_user_error = isinstance(error, FlsuiteError)
        return cls(one_line(error) if is_user_error else traceback.format_exc(), is_user_error)

    def error(self) -> Exception:
        """Return the error to raise in the process that started the worker."""
        if self.is_user_error:
            return FlsuiteError(self.message)
        return RuntimeError(f"a worker failed:\n{self.message}")


def serve(
    connection: Connection,
    descriptor: int,
    head: bytes,
    places: list[tuple[int, int]],
    threads: int,
    worker: int,
) -> None:
    """Answer requests until the other side closes the connection.

    Args:
        connection: Delivers a :class:`Broadcast`, or a list of requests without it, to train one
            after another. The first answer is :class:`Ready`. Every list is answered by the list of
            its outcomes, or by :class:`Fatal`.
        descriptor, head, places: The setup, as written by
            :func:`~flsuite.federation.engines.wire.dump_shared`.
        threads: torch threads.
        worker: Number of the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    torch.set_num_threads(threads)
    gc.freeze()  # garbage collection would write to shared pages, and so copy them

    try:
        data, rest = load_shared(descriptor, head, places)
        os.close(descriptor)
        runner = JobRunner(replace(pickle.loads(rest), data=data), worker)
        send(connection, Ready())
        _answer_requests(connection, runner)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The other side closed the connection, which stops the worker.
        return
    except (Exception, SystemExit) as error:
        with suppress(OSError):  # another worker reported the same, and the run has ended
            send(connection, Fatal.of(error))


def _answer_requests(connection: Connection, runner: JobRunner) -> None:
    broadcast: Broadcast | None = None
    while True:
        message = receive(connection)
        if isinstance(message, Broadcast):
            broadcast = message
            # It applies to all later requests, until the next broadcast.
            continue

        assert broadcast is not None, "a request came before its broadcast"
        job = [replace(request, broadcast=broadcast) for request in message]
        outcomes = runner.answer(job)
        try:
            send(connection, outcomes)
        except CANNOT_PICKLE:
            send(connection, sendable(runner, job))


def sendable(runner: JobRunner, job: Sequence[Any]) -> list[Any]:
    """Return the outcomes of a job, with failures for those that cannot be sent.

    If a summed model cannot be sent, the clients are trained again one by one.
    """
    outcomes = []
    for request in job:
        (outcome,) = runner.answer([request])
        try:
            dumps(outcome, [])
        except CANNOT_PICKLE as error:
            outcome = request.failure(f"its update cannot be sent: {one_line(error, 300)}")
        outcomes.append(outcome)
    return outcomes
