"""Atomic file writes, tensor files with checksums, YAML, cells of CSV, locks."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsuite.common.errors import FlsuiteError, one_line

if TYPE_CHECKING:
    import pandas as pd

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FAILED = "failed.txt"
"""The file in the folder of a sweep's run that says why it failed."""

LAMBDA = re.compile(r"\blambda( \w[^:\n]*)?:")
NO_LAMBDA = (
    "a config cannot hold a lambda; name a function, as my_module.function, or a class with "
    "class_path"
)

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP)  # some network disks cannot flush folders
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a text begins that a spreadsheet would compute


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        FlsuiteError: If it is not plain YAML.
    """
    import yaml  # imported late: most commands that only print do not need it

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return parse_yaml(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        remedy = "correct it (indent with spaces), or restore it"
        remedy = NO_LAMBDA if LAMBDA.search(text) else remedy
        raise FlsuiteError(f"{path} is not valid YAML ({one_line(error)}); {remedy}") from error


def parse_yaml(text: str) -> Any:
    """Return the content of plain YAML.

    Raises:
        YAMLError: If it is not plain YAML, or a key appears twice. YAML itself keeps the last one.
    """
    import yaml

    # The loader of C is ten times as fast.
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        loader = loader_class(text)
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise yaml.YAMLError(f"{where}{error.problem}") from error
    except ValueError as error:  # an impossible date, or a character that no YAML can hold
        raise yaml.YAMLError(one_line(error)) from error


def _refuse_repeated_keys(root: Any) -> None:
    import yaml

    waiting, known = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))  # an alias may refer to the node that it is in
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        names = set()
        for key, value in node.value:
            name = key.tag, str(key.value)
            if name in names and key.tag != "tag:yaml.org,2002:merge":
                where = f"line {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"{where}: {key.value!r} appears twice; rename one of them")
            names.add(name)
            waiting.append(value)


def escaped(text: str) -> str:
    """Return a cell of a CSV file that a spreadsheet shows, and does not compute as a formula.

    A quote is put before a text that begins like a formula and is not a number.
    """
    is_formula = _FORMULA.match(text) and number_in(text) is None
    return f"'{text}" if is_formula else text


def unescaped(cell: str) -> str:
    """Return the text of :func:`escaped`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def number_in(text: str) -> float | None:
    """Return a text as a number, or ``None`` if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def short_hash(content: Any) -> str:
    """Return eight hexadecimal digits for plain data, the same for any order of its keys."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def csv_of(table: "pd.DataFrame") -> str:
    """Return a table as CSV with :func:`escaped` texts, without its index."""

    def cell(value: Any) -> Any:
        return escaped(value) if isinstance(value, str) else value

    return table.map(cell).rename(columns=cell).to_csv(index=False)


def plain_rows(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a table for JSON. Missing and infinite numbers are ``None``."""
    text = table.to_json(orient="records", date_format="iso", double_precision=15)
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def make_folder(path: Path) -> Path:
    """Make a folder and its missing parents.

    Raises:
        FlsuiteError: If the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        named = (path, *path.parents)
        link = next((place for place in named if place.is_symlink() and not place.exists()), None)
        reason = f"{link} is a link to a missing place" if link else error.strerror
        name = str(path) if len(str(path)) <= 200 else f"{str(path)[:60]}..."
        raise FlsuiteError(f"cannot write to {name}: {reason}; name another folder") from error
    return path


def failure_reason(folder: Path) -> str:
    """Return why a sweep's run failed, from its :data:`FAILED`, or an empty text if it did not."""
    try:
        return (folder / FAILED).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # there is none, or another process tries the run again
        return ""


def save_tensors(content: Any, path: Path) -> None:
    """Write plain data with tensors to one file in torch's format."""
    import torch  # imported late: commands without torch use this module

    # torch would open the file without saying that the disk is full. torch 2.6 would not notice it.
    with naming(path), path.open("wb") as file:
        torch.save(content, file)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to system errors. Errors of writing lack it, unlike errors of opening."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def replace_tensors(content: Any, path: Path, flush: bool = False) -> None:
    """Write plain data with tensors by :func:`replace_file`."""
    replace_file(lambda temporary: save_tensors(content, temporary), path, flush)


def replace_text(text: str, path: Path, flush: bool = False) -> None:
    """Write a text as UTF-8 by :func:`replace_file`."""
    replace_file(lambda temporary: temporary.write_text(text, encoding="utf-8"), path, flush)


def load_tensors(path: Path, remedy: str) -> Any:
    """Read a file of :func:`save_tensors` as plain data on the CPU.

    Checksums are verified, so a corrupted weight is never loaded. Nothing in the file is executed.

    Args:
        path: The file.
        remedy: What to do if the file is missing or damaged, for the message.

    Raises:
        FlsuiteError: If the file is missing, damaged, or of another kind.
        OSError: If the file cannot be opened.
    """
    import torch  # imported late: commands without torch use this module

    if not path.is_file():
        raise FlsuiteError(f"{path} is missing; {remedy}")
    try:
        require_whole(path)
        return torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # torch, zip and pickle each raise their own errors
        raise FlsuiteError(
            f"{path} cannot be read: it is damaged ({one_line(error, 80)}); {remedy}"
        ) from error


def require_whole(path: Path) -> None:
    """Verify the checksums of an archive, which torch itself does not do.

    Raises:
        ValueError, zipfile.BadZipFile: If a checksum is wrong, or the file is not an archive.
    """
    with zipfile.ZipFile(path) as archive:
        if wrong := archive.testzip():
            raise ValueError(f"the checksum of {wrong} is wrong")


def replace_file(write: Callable[[Path], object], path: Path, flush: bool = False) -> None:
    """Write a file under a temporary name and rename it into place.

    A reader sees either the old file or the new one.

    Args:
        write: Writes the content to the path that it receives.
        path: The file to replace.
        flush: Flush the file before the rename and its folder after it, so the file survives a
            power loss. Without it, a power loss can leave an empty file until
            :func:`flush_to_disk` is called.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    # A killed process may have left a link here. Do not write through it to another file.
    temporary.unlink(missing_ok=True)
    try:
        with naming(path):
            write(temporary)
        if flush:
            flush_to_disk([temporary])
        os.replace(temporary, path)
        if flush:
            flush_to_disk([path.parent])  # the rename itself is an entry of the folder
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Flush files and folder entries to disk, and wait for it."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:  # some systems cannot open folders
            continue
        try:
            with naming(path):
                os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_FLUSH:
                raise
        finally:
            os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where links are not possible."""
    try:
        # A hard link takes no time and no space, whatever the size of the file.
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


@contextmanager
def locked(path: Path, wait: float = 0.0, shared: bool = False) -> Iterator[bool | None]:
    """Lock a file or a folder, and yield whether this process got the lock.

    ``None`` means that the system or the disk has no locks. The kernel releases a lock when the
    process dies. It belongs to the open file, so forks of this process hold it too.

    Args:
        path: A folder, or a file. A missing file is created, and never removed.
        wait: Maximum seconds to wait until no other process holds the lock.
        shared: Let others have the lock at the same time, if they share it too. The path exists.
    """
    if fcntl is None:
        yield None
        return
    flags = os.O_RDONLY if shared or path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    is_ours: bool | None = True
    try:
        try:
            end = time.monotonic() + wait
            while not (is_ours := _has_locked(descriptor, kind)) and time.monotonic() < end:
                time.sleep(0.05)
        except OSError:
            is_ours = None
        yield is_ours
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int, kind: int) -> bool:
    """Take a lock if it is free, and return whether it was."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a folder or a file."""
    if not path.exists():
        return False
    with locked(path, shared=True) as is_ours:
        return is_ours is False
