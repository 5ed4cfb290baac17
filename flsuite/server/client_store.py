"""What clients keep from one of their rounds to the next, held on their behalf."""

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from flsuite.runs.folder import atomic_save
from flsuite.state import nbytes

__all__ = ["ClientStore"]

Memory = dict[str, Any]


class ClientStore:
    """The private states of all clients that ever trained.

    They lie in memory up to a budget. Each round writes one file with the memories of its cohort, so that a checkpoint costs
    what the cohort costs; what the budget pushes out is read back from there.

    Args:
        folder: Of the files; ``None`` keeps everything in memory.
        budget: Bytes.

    Attributes:
        at_hand: Whether what clients keep can be read here; ``False`` where it lies with them.
    """

    at_hand = True

    def __init__(self, folder: Path | None, budget: int = 2 << 30) -> None:
        self.folder = folder
        self.budget = budget
        self.versions: dict[int, int] = {}
        self._resident: OrderedDict[int, Memory] = OrderedDict()
        self._bytes = 0
        self._fresh: dict[int, Memory] = {}

    def __getitem__(self, client: int) -> Memory:
        """A client's memory; empty if it never trained or has nothing to keep."""
        if client in self._fresh:
            return self._fresh[client]
        if client in self._resident:
            self._resident.move_to_end(client)
            return self._resident[client]
        if client not in self.versions:
            return {}
        memory = self._read(self.versions[client])[client]
        self._keep(client, memory)
        return memory

    def __setitem__(self, client: int, memory: Memory) -> None:
        if memory:
            self._fresh[client] = memory

    def __contains__(self, client: int) -> bool:
        return client in self._fresh or client in self.versions

    def commit(self, round: int) -> None:
        """Write what changed in this round, and make room."""
        if self._fresh and self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            fresh = self._fresh
            atomic_save(lambda path: torch.save(fresh, path), self._path(round))
        for client, memory in self._fresh.items():
            self.versions[client] = round
            self._keep(client, memory)
        self._fresh = {}

    def forget(self) -> None:
        """Drop what was set since the last commit."""
        self._fresh = {}

    def restore(self, versions: dict[int, int]) -> None:
        self.versions = dict(versions)
        self._resident.clear()
        self._fresh = {}
        self._bytes = 0

    def collect(self, *needed: dict[int, int]) -> None:
        """Delete the files that none of these versions refers to."""
        if self.folder is None or not self.folder.exists():
            return
        alive = {self._path(round) for versions in needed for round in versions.values()}
        for path in self.folder.glob("round-*.pt"):
            if path not in alive:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _keep(self, client: int, memory: Memory) -> None:
        if client in self._resident:
            self._bytes -= nbytes(self._resident.pop(client))
        self._resident[client] = memory
        self._bytes += nbytes(memory)
        while self.folder is not None and self._bytes > self.budget and len(self._resident) > 1:
            _, oldest = self._resident.popitem(last=False)
            self._bytes -= nbytes(oldest)

    def _read(self, round: int) -> dict[int, Memory]:
        return torch.load(self._path(round), weights_only=True, mmap=True, map_location="cpu")

    def _path(self, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round-{round:06d}.pt"
