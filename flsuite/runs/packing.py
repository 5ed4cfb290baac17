"""One file that holds what is needed to verify a run."""

import hashlib
import json
import zipfile
from pathlib import Path

from flsuite.errors import FlsuiteError
from flsuite.files import load_tensors, locked, make_folder, replace_file
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import checkpoints_of, memories_of

_PARTS = (
    "*.yaml",
    "*.txt",
    "*.csv",
    "*.json",
    "checkpoints/*.ckpt",
    "checkpoints/frozen.pt",
    "clients/*.pt",
    "in_flight/*.pt",
)
_MANIFEST = "manifest.json"


def pack(run: Path, file: Path) -> int:
    """Write a run into one file, and return its size in bytes.

    Checkpoints with the same content are stored once.

    Args:
        run: The folder of the run.
        file: The file to write.

    Raises:
        FlsuiteError: If the file exists, the run goes on at this moment, or one of its checkpoints
            or tables is damaged. No file is left.
    """
    if file.exists():
        raise FlsuiteError(f"pack: {file} exists; name another file with --output")
    make_folder(file.parent)
    with locked(run, shared=True) as is_ours:
        if is_ours is False:
            raise FlsuiteError(f"pack: {run} is still running; pack it when it has ended")
        _require_readable(run)
        replace_file(lambda path: _write(run, path), file)
    return file.stat().st_size


def _require_readable(run: Path) -> None:
    """Refuse a run whose checkpoints, tables or clients' memories are missing or damaged."""
    if not (run / "checkpoints" / "last.ckpt").is_file():
        raise FlsuiteError(f"pack: {run} has no checkpoints/last.ckpt; restore it")
    memories: set[str] = set()
    for checkpoint in checkpoints_of(run):
        content = load_checkpoint(checkpoint)
        memories.update(memories_of(content["federation"]))
        if checkpoint.name == "last.ckpt":
            RunFolder(run).require_tables(content)
    for name in sorted(memories):
        load_tensors(run / name, "restore it")


def _write(run: Path, file: Path) -> None:
    paths = sorted({path for part in _PARTS for path in run.glob(part)})
    digests = {path.relative_to(run).as_posix(): digest(path) for path in paths}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        stored: set[str] = set()
        for path in paths:
            content = digests[path.relative_to(run).as_posix()]
            if content not in stored:
                stored.add(content)
                target.write(path, f"content/{content}")
        target.writestr(_MANIFEST, json.dumps(digests, indent=1))


def unpack(file: Path, folder: Path) -> Path:
    """Write a packed run into a folder, and return the folder.

    Raises:
        FlsuiteError: If the file is not a packed run, or was changed.
    """
    try:
        with zipfile.ZipFile(file) as source:
            digests = json.loads(source.read(_MANIFEST))
            for name, content in digests.items():
                path = (folder / name).resolve()
                if not path.is_relative_to(folder.resolve()):
                    raise FlsuiteError(f"{file} names a file outside of its folder: {name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read(f"content/{content}"))
                if digest(path) != content:
                    raise FlsuiteError(f"{file} was changed: {name} is not what was packed")
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise FlsuiteError(f"{file} is not a run packed by flsuite pack") from error
    return folder


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
