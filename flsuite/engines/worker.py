"""What a worker process does: receive work, train, send what came of it."""

import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection

import torch

from flsuite.client.runner import ClientRunner, WorkerSetup
from flsuite.engines.wire import load_shared, receive, send
from flsuite.errors import FlsuiteError
from flsuite.messages import Broadcast, FitRequest

__all__ = ["serve"]


def serve(
    connection: Connection,
    descriptor: int,
    head: bytes,
    places: list[tuple[int, int]],
    threads: int,
) -> None:
    """Answer until the other side closes the connection.

    Args:
        connection: Brings a :class:`Broadcast` or ``(task, memory)``; every task is answered with its outcome, or with
            ``("fatal", message, is_user_error)`` where no client can be trained at all.
        descriptor, head, places: The job, as :func:`~flsuite.engines.wire.dump_shared` left it.
        threads: Of torch in this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(threads)
    try:
        data, private = load_shared(descriptor, head, places)
        os.close(descriptor)
        model, rest = pickle.loads(
            private
        )  # inside the message: the model's tensors are this worker's own
        runner = ClientRunner(WorkerSetup(model=model, data=data, **rest))
        _answer(connection, runner)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except FlsuiteError as error:
        send(connection, ("fatal", str(error), True))
    except Exception:
        send(connection, ("fatal", traceback.format_exc(), False))


def _answer(connection: Connection, runner: ClientRunner) -> None:
    broadcast: Broadcast | None = None
    while True:
        message = receive(connection)
        if isinstance(message, Broadcast):
            broadcast = message
            continue
        task, memory = message
        assert broadcast is not None, "work came before its broadcast"
        send(connection, runner.run(FitRequest(task, broadcast, memory)))
