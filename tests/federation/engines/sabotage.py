"""Ways in which a worker fails. Workers import this module, so it imports little."""

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import flsuite.federation.engines.wire as worker_module
from flsuite.federation.engines.wire import dumps, send as _send


def _send_half(connection: Any, obj: Any) -> None:
    """Write the head and half of the body of a message."""
    body = bytes(dumps(obj))
    os.write(connection.fileno(), struct.pack("!i", len(body)) + body[: len(body) // 2])


def _send_half_and_die(connection: Any, obj: Any) -> None:
    _send_half(connection, obj)
    os.kill(os.getpid(), signal.SIGKILL)


def _send_half_and_hang(connection: Any, obj: Any) -> None:
    _send_half(connection, obj)
    time.sleep(600)


def _send_garbage(connection: Any, obj: Any) -> None:
    connection.send_bytes(b"\x80\x05garbage" * 9)


def _send_a_stranger(connection: Any, obj: Any) -> None:
    _send(connection, [["no outcome"] * len(outcomes) for outcomes in obj])


def _send_cut(connection: Any, obj: Any) -> None:
    connection.send_bytes(bytes(dumps(obj))[:-40])


_SENDS = {
    "dies": _send_half_and_die,
    "hangs while it sends": _send_half_and_hang,
    "garbage": _send_garbage,
    "a stranger": _send_a_stranger,
    "cut": _send_cut,
}


class Sabotage(Callback):
    """Replaces how the worker of one client sends, or makes it hang, up to ``times`` times."""

    def __init__(self, how: str, folder: Path, times: int = 1) -> None:
        self.how, self.folder, self.times = how, folder, times

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        done = len(list(self.folder.iterdir()))
        if loader.client != 1 or loader.round != 2 or done >= self.times:
            return
        (self.folder / str(done)).touch()
        if self.how in _SENDS:
            worker_module.send = _SENDS[self.how]
        else:
            time.sleep(600)
