"""The memories that clients keep from one of their rounds to the next."""

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from flsuite.errors import FlsuiteError
from flsuite.files import load_tensors, replace_file, save_tensors
from flsuite.state import State, nbytes, plain

__all__ = ["ClientStore", "Memory"]

Memory = dict[str, Any]

_REMEDY = "restore the folder clients of the run, or start a new run"


class ClientStore:
    """The memories of all clients that have ever trained.

    They are kept in memory up to a budget. Each round writes one file with the memories of its
    cohort, so that a checkpoint costs what the cohort costs. What does not fit into the budget is
    read back from these files.

    Args:
        folder: Folder of the files. ``None`` keeps everything in memory.
        budget: Bytes in memory, above which the least recently used memories are read from the
            files. Default: 2 GiB.

    Attributes:
        versions: The round in which each client's memory was last written.
        is_local: Whether the memories can be read here. It is ``False`` where the clients hold
            them.
    """

    is_local = True

    def __init__(self, folder: Path | None, budget: int = 2 << 30) -> None:
        self.folder = folder
        self.budget = budget
        self.versions: dict[int, int] = {}
        self._resident: OrderedDict[int, Memory] = OrderedDict()
        self._bytes = 0
        self._fresh: dict[int, Memory] = {}

    def __getitem__(self, client: int) -> Memory:
        """Return a client's memory, empty if it never trained or keeps nothing."""
        if client in self._fresh:
            return self._fresh[client]
        if client in self._resident:
            self._resident.move_to_end(client)
            return self._resident[client]
        if client not in self.versions:
            return {}
        memory = self._read(self.versions[client])[client]
        self._make_resident(client, memory)
        return memory

    def private(self, client: int) -> State:
        """Return a client's private entries, none if it never trained."""
        entries: State = self[client].get("model", {})
        return entries

    def request_memory(self, client: int) -> Memory:
        """Return what a fit of this client needs to be sent."""
        return self[client]

    def __setitem__(self, client: int, memory: Memory) -> None:
        """Set a client's memory.

        It counts from the next :meth:`commit` on.

        Raises:
            FlsuiteError: If it holds anything that a checkpoint cannot hold.
        """
        if memory or client in self:  # a memory that becomes empty must not come back
            self._fresh[client] = plain(memory, f"the memory of client {client}")

    def __contains__(self, client: int) -> bool:
        return client in self._fresh or client in self.versions

    def commit(self, round: int) -> list[Path]:
        """Write what has changed in this round, and make room.

        Returns:
            The file and the folder that were written, which have yet to be flushed to disk.
        """
        written: list[Path] = []
        # One file per round and not per client, so that a round costs one write.
        if self._fresh and self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            fresh = self._fresh
            replace_file(lambda path: save_tensors(fresh, path), self._path(round))
            written = [self._path(round), self.folder]
        for client, memory in self._fresh.items():
            self.versions[client] = round
            self._make_resident(client, memory)
        # Only now: an exception above leaves the memories uncommitted.
        self._fresh = {}
        return written

    def rollback(self) -> None:
        """Drop what was set since the last commit."""
        self._fresh = {}

    def restore(self, versions: dict[int, int]) -> None:
        """Go back to these versions, which are read from the files when they are needed."""
        rounds = set(versions.values())
        needed = {self._path(round) for round in rounds} if self.folder else set()
        for path in sorted(needed):
            if not path.is_file():
                raise FlsuiteError(f"{path} is missing, which holds what clients keep; {_REMEDY}")
            load_tensors(path, _REMEDY)  # later, it is mapped, and nothing would see a wrong number
        self.versions = dict(versions)
        self._resident.clear()
        self._fresh = {}
        self._bytes = 0

    def remove_unused(self, *needed: dict[int, int]) -> None:
        """Delete the files that none of these versions refers to."""
        if self.folder is None or not self.folder.exists():
            return
        rounds = {round for versions in needed for round in versions.values()}
        used = {self._path(round) for round in rounds}
        for path in self.folder.glob("round-*.pt"):
            if path not in used:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _make_resident(self, client: int, memory: Memory) -> None:
        if client in self._resident:
            self._bytes -= nbytes(self._resident.pop(client))
        self._resident[client] = memory
        self._bytes += nbytes(memory)

        # Without a folder there is nowhere to read a memory back from.
        while self.folder is not None and self._bytes > self.budget and len(self._resident) > 1:
            _, oldest = self._resident.popitem(last=False)
            self._bytes -= nbytes(oldest)

    def _read(self, round: int) -> dict[int, Memory]:
        # Mapped: one client's part of the file is read, not that of the whole cohort.
        return torch.load(self._path(round), weights_only=True, mmap=True, map_location="cpu")

    def _path(self, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round-{round:06d}.pt"
