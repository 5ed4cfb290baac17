"""Storage of a run outside its checkpoints: client memories, and versions in flight.

Both are kept in memory and in the files of a folder. A file is deleted once no checkpoint needs it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors, replace_tensors
from flsuite.common.messages import Broadcast
from flsuite.common.state import State, nbytes, plain

Memory = dict[str, Any]

CopyCallbacks = Callable[[], tuple[Callback, ...]]
"""Returns copies of the user's Lightning callbacks in their current state."""

_REMEDY = "restore the folder clients of the run, or start a new run"


class ClientStore:
    """The memories of all clients that have ever trained.

    Memories stay in RAM up to a budget. Each round writes one file with the memories of its cohort,
    so the cost of a checkpoint depends on the cohort. Memories beyond the budget are read back from
    these files.

    Args:
        folder: Folder of the files. ``None`` keeps everything in RAM.
        budget: Bytes in RAM, above which the least recently used memories are dropped and read
            from the files. Default: 2 GiB.

    Attributes:
        versions: The round in which each client's memory was last written.
        is_local: Whether the memories can be read here. ``False`` if the clients hold them.
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
        """Return a client's memory. It is empty if the client never trained or keeps nothing."""
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
        """Return a client's private entries. They are empty if the client never trained."""
        entries: State = self[client].get("model", {})
        return entries

    def __setitem__(self, client: int, memory: Memory) -> None:
        """Set a client's memory, effective from the next :meth:`commit`.

        Raises:
            FlsuiteError: If the memory contains anything that a checkpoint cannot hold.
        """
        if memory or client in self:  # an emptied memory must be stored too
            self._fresh[client] = plain(memory, f"the memory of client {client}")

    def __contains__(self, client: int) -> bool:
        return client in self._fresh or client in self.versions

    def commit(self, round: int) -> list[Path]:
        """Write the changes of this round, and evict memories beyond the budget.

        Returns:
            The written file and its folder, which the caller must flush to disk.
        """
        written: list[Path] = []
        # One file per round, not per client, so a round costs one write.
        if self._fresh and self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            replace_tensors(self._fresh, self._path(round))
            written = [self._path(round), self.folder]
        for client, memory in self._fresh.items():
            self.versions[client] = round
            self._make_resident(client, memory)
        # Last, so that an exception above leaves the memories uncommitted.
        self._fresh = {}
        return written

    def rollback(self) -> None:
        """Discard the changes since the last commit."""
        self._fresh = {}

    def restore(self, versions: dict[int, int]) -> None:
        """Go back to these versions. They are read from the files on demand."""
        if self.folder is not None:
            for round in sorted(set(versions.values())):
                load_tensors(self._path(round), _REMEDY)  # verifies checksums, unlike mmap
        self.versions = dict(versions)
        self._resident.clear()
        self._fresh = {}
        self._bytes = 0

    def remove_unused(self, *needed: dict[int, int]) -> None:
        """Delete the files that none of these versions refers to."""
        if self.folder is not None:
            used = {self._path(round) for versions in needed for round in versions.values()}
            _remove_unused(self.folder.glob("round-*.pt"), used)

    def _make_resident(self, client: int, memory: Memory) -> None:
        if client in self._resident:
            self._bytes -= nbytes(self._resident.pop(client))
        self._resident[client] = memory
        self._bytes += nbytes(memory)

        # Without a folder, an evicted memory could not be read back.
        while self.folder is not None and self._bytes > self.budget and len(self._resident) > 1:
            _, oldest = self._resident.popitem(last=False)
            self._bytes -= nbytes(oldest)

    def _read(self, round: int) -> dict[int, Memory]:
        # mmap reads only one client's part of the file, not the whole cohort's.
        return torch.load(self._path(round), weights_only=True, mmap=True, map_location="cpu")

    def _path(self, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round-{round:06d}.pt"


class VersionStore:
    """Keeps each version of the global model while a client that started from it is in flight.

    Memory and disk use are bounded by the clients in flight, not by the length of the run. Each
    version is written once, to its own file, so checkpoints do not contain all of them.

    Args:
        folder: Folder of the files. ``None`` keeps versions in RAM only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[int, Broadcast] = {}
        self._written: set[int] = set()

    def add(self, broadcast: Broadcast) -> None:
        """Keep a version until a commit no longer needs it."""
        self._kept[broadcast.round - 1] = broadcast

    def get(self, version: int, callbacks: CopyCallbacks) -> Broadcast | None:
        """Return a version as it was sent, or ``None`` if it is not kept.

        Args:
            version: The number of the version.
            callbacks: Returns the callbacks for a version that is read from disk. Their state is
                set to the version's.
        """
        if version not in self._kept and version in self._written:
            self._kept[version] = self._read(version, callbacks())
        return self._kept.get(version)

    def commit(self, needed: Collection[int]) -> list[Path]:
        """Forget versions that are not needed, and write needed ones that are not yet on disk.

        Returns:
            The written files and their folder, which the caller must flush to disk.
        """
        self._kept = {version: kept for version, kept in self._kept.items() if version in needed}
        new = sorted(self._kept.keys() - self._written)
        if self.folder is None or not new:
            return []
        self.folder.mkdir(exist_ok=True)
        for version in new:
            self._write(self._kept[version])
        return [*(self._path(version) for version in new), self.folder]

    def restore(self, needed: Collection[int]) -> None:
        """Go back to these versions. They are read on demand.

        Raises:
            FlsuiteError: If one of them is missing.
        """
        self._kept = {}
        self._written = set()
        for version in needed:
            if self.folder is None or not self._path(version).is_file():
                raise FlsuiteError(
                    f"version {version} of the global model, which clients in flight started from, "
                    f"is not in {self.folder}; resume with --ckpt_path last (best suffices for "
                    "scores), or start a new run"
                )
            self._written.add(version)

    def remove_unused(self, needed: Collection[int]) -> None:
        """Delete the files of versions that are not needed."""
        self._written &= set(needed)
        if self.folder is not None:
            used = {self._path(version) for version in needed}
            _remove_unused(self.folder.glob("version-*.pt"), used)

    def _write(self, broadcast: Broadcast) -> None:
        content = {
            "state": broadcast.state,
            "extras": broadcast.extras,
            "callbacks": [callback.state_dict() for callback in broadcast.callbacks],
        }
        version = broadcast.round - 1
        readable = plain(content, f"version {version} of the global model")
        replace_tensors(readable, self._path(version))
        self._written.add(version)

    def _read(self, version: int, callbacks: tuple[Callback, ...]) -> Broadcast:
        content = load_tensors(self._path(version), "go on from best.ckpt, or start a new run")
        for callback, state in zip(callbacks, content["callbacks"], strict=True):
            if state:
                callback.load_state_dict(state)
        return Broadcast(version + 1, content["state"], content["extras"], callbacks)

    def _path(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"version-{version:06d}.pt"


def _remove_unused(files: Iterable[Path], used: Collection[Path]) -> None:
    for path in files:
        if path not in used:
            path.unlink(missing_ok=True)
