"""``flsuite pack``: one file that holds what is needed to verify a run."""

import errno
import hashlib
import json
import re
import shutil
import stat
import sys
import zipfile
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

from rich.filesize import decimal

from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import link_or_copy, load_tensors, locked, make_folder, replace_file
from flsuite.runs.record import checkpoints_of, is_finished, last_round, memories_of, table_fault

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
_NAME = re.compile(r"(\w+/)?[\w.-]{1,100}", re.ASCII)
_PIECE = 1 << 20  # bytes in memory
_SMALL = 1 << 26  # bytes that any pack may have
_RATIO = 100  # tables shrink to a tenth, and weights hardly
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError),
    RuntimeError,  # an encrypted member, a compression of later versions, or endless brackets
)


def pack(args: list[str]) -> None:
    """Write the file, and print its size."""
    request = parser_of("pack").parse_args(args)
    run = require_run("pack", Path(request.run))
    file = Path(request.output or f"{run.resolve().name}.zip")

    last = last_round(run)  # before a file is written: it refuses a run without rounds
    if fault := table_fault(run):
        raise FlsuiteError(f"pack: {fault}; restore it")
    is_whole = is_finished(run)

    size = write_pack(run, file)
    if not is_whole:
        how = f"flsuite resume {run} goes on, and flsuite pack {run} packs it again"
        print(f"{run} was interrupted after round {last}: {how}", file=sys.stderr)
    print(f"{file}: {decimal(size)}; verify it with flsuite verify {file}")


def write_pack(run: Path, file: Path) -> int:
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
    from flsuite.runs.checkpoint import load_checkpoint  # imported late: they need torch
    from flsuite.runs.folder import RunFolder

    if not (run / "checkpoints" / "last.ckpt").is_file():
        raise FlsuiteError(f"pack: {run} has no checkpoints/last.ckpt; restore it")
    memories: set[str] = set()
    for checkpoint in checkpoints_of(run):
        memories.update(memories_of(load_checkpoint(checkpoint)["federation"]))
    RunFolder(run).require_tables()
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

    The file may be of a stranger: only names of a run are written, at most as many bytes as
    :data:`_RATIO` allows and the disk has room for, and never more than a piece is in memory.

    Raises:
        FlsuiteError: If the file is not a packed run, was changed, or is too large.
        OSError: If the disk is full.
    """
    try:
        with zipfile.ZipFile(file) as source:
            members = {info.filename: info for info in source.infolist()}
            digests = _manifest(source, members)
            _require_room(file, [members[f"content/{c}"] for c in {*digests.values()}], folder)
            first: dict[str, Path] = {}
            for name, content in digests.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if content in first:
                    link_or_copy(first[content], path)
                    continue
                first[content] = path
                with source.open(members[f"content/{content}"]) as packed, path.open("xb") as to:
                    shutil.copyfileobj(packed, to, _PIECE)
                if digest(path) != content:
                    raise FlsuiteError(f"{file} was changed: {name} is not what was packed")
    except _DAMAGE as error:
        raise FlsuiteError(
            f"{file} is not a run packed by flsuite pack, or it is damaged ({one_line(error, 80)})"
        ) from error
    return folder


def _manifest(source: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> dict[str, str]:
    """Return the digest of each file of a packed run.

    Raises:
        KeyError, ValueError: If it is not that of a run, or a member is not an ordinary file.
    """
    for info in members.values():
        is_link = stat.S_ISLNK(info.external_attr >> 16)
        if is_link or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename} is a link, or compressed in another way")
    if members[_MANIFEST].file_size > _SMALL:
        raise ValueError(f"{_MANIFEST} is too large")
    digests = json.loads(source.read(_MANIFEST))
    if not isinstance(digests, dict):
        raise ValueError(f"{_MANIFEST} is not a list of files")
    for name, content in digests.items():
        if not isinstance(content, str) or not _is_part(name):
            raise ValueError(f"{name!r} is not a file of a run")
    return digests


def _is_part(name: str) -> bool:
    """Return whether :func:`pack` writes a file of this name."""
    return _NAME.fullmatch(name) is not None and any(
        name.count("/") == part.count("/") and fnmatchcase(name, part) for part in _PARTS
    )


def _require_room(file: Path, members: list[zipfile.ZipInfo], folder: Path) -> None:
    """Refuse a pack whose files are too large for their compressed size, or for the disk."""
    size = sum(info.file_size for info in members)  # never more is read than is declared
    if size > max(_SMALL, _RATIO * file.stat().st_size):
        raise FlsuiteError(
            f"{file} would unpack to {size} bytes, {_RATIO} times its size; it is not unpacked"
        )
    if size > (free := shutil.disk_usage(folder.parent).free):
        raise OSError(errno.ENOSPC, f"{size} bytes are needed, and {free} are free", str(folder))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()
