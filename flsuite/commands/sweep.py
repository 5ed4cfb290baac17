"""``flsuite sweep``: methods x grid x seeds. It can be killed and resumed at any time."""

import json
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flsuite.commands.parsers import parser_of
from flsuite.commands.request import read_value
from flsuite.commands.sweeps.plan import samples_of
from flsuite.commands.sweeps.queue import Queue
from flsuite.commands.sweeps.reading import Overrides, Sweep, read_sweep
from flsuite.commands.sweeps.status import (
    SweepProgress,
    failures,
    print_cells,
    print_status,
    strangers,
)
from flsuite.commands.sweeps.until import grown, note_sweep
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.files import make_folder
from flsuite.federation.engines.forkserver import interrupts_ignored

_PATIENCE = 30.0  # seconds to wait for runs to end after Ctrl-C
_LOOK = 0.2  # seconds between updates of the progress
_MOST_LINES = 20
_CHECK, _CHECK_ONE = 3600.0, 60.0  # maximum seconds of the check, and more for each experiment


def sweep(args: list[str]) -> None:
    """Run the unfinished cells of a sweep, or print its status or plan.

    Raises:
        FlsuiteError: If the sweep's file has an error. Nothing has been run.
        FederationError: If cells have failed. All others are done.
    """
    request, rest = parser_of("sweep").parse_known_args(args)
    plan = read_sweep(request.config, _overrides(rest), request.workers, request.until)
    folder = Path(request.folder or Path("runs", plan.name))
    if folder.is_file():
        raise FlsuiteError(f"sweep: {folder} is a file; name another folder with --folder")

    content, decisions = grown(plan, folder)
    if request.status:
        print_status(Queue(content, folder, retries=False))
        print(*map(str, decisions), sep="\n", end="\n" if decisions else "")
        return
    queue = Queue(content, folder)
    if queue.is_complete():
        queue.note_tuning()  # the file may have fewer trials than before
        print(f"nothing to do: {queue.size} of {queue.size} cells are done")
    while not queue.is_complete():
        if not _run_all(queue, is_dry=request.dry_run):
            return
        content, decisions = grown(plan, folder)
        if content == queue.sweep:  # done, or cells have failed
            break
        print(f"undecided: seed {content.seeds[-1]} is added", file=sys.stderr)
        queue = Queue(content, folder)
    note_sweep(content, folder, decisions)
    print(*map(str, decisions), sep="\n", end="\n" if decisions else "")
    _print_end(queue)


def _run_all(queue: Queue, is_dry: bool) -> bool:
    """Check the cells of a queue and run them, or print them. Return whether they were run."""
    content, folder = queue.sweep, queue.folder
    if (number := len(samples_of(content))) > _MOST_LINES:
        print(f"checking that {number} experiments can start", file=sys.stderr)
    with _CellProcess(content, folder, is_dry) as process:
        _require_ready(content, process.check())
        if is_dry:
            print_cells(queue)
            return False
        make_folder(folder)
        note_sweep(content, folder, [])
        queue.note_tuning()
        _run(queue, process)
    return True


def _overrides(args: list[str]) -> Overrides:
    """Return the overrides for all cells, from ``--KEY VALUE`` and ``--KEY=VALUE``."""
    overrides: Overrides = {}
    rest = list(args)
    while rest:
        option, *rest = rest
        key, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or ("." not in key and key not in ("model", "data")):
            raise FlsuiteError(f"sweep: unknown option {option}; see flsuite sweep --help")
        if not equals:
            if not rest:
                raise FlsuiteError(f"sweep: {option} needs a value")
            value, *rest = rest
        overrides[key] = read_value(value)
    return overrides


class _CellProcess:
    """The process that cells are forked from, see :mod:`flsuite.commands.cells`.

    Args:
        sweep: The sweep.
        folder: Its folder.
        is_dry: Whether nothing may be downloaded.
    """

    def __init__(self, sweep: Sweep, folder: Path, is_dry: bool) -> None:
        with interrupts_ignored():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flsuite.commands.cells"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Libraries for linear algebra read the number of threads when they are imported.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._limit = _CHECK + _CHECK_ONE * len(samples_of(sweep))
        self._send(pickle.dumps((sweep, folder, is_dry, os.getpid())))

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def __enter__(self) -> "_CellProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self.wait(_PATIENCE)

    def check(self) -> dict[str, Any]:
        """Wait until every method has been prepared, and return the result of :func:`check`.

        Raises:
            FlsuiteError: If the sweep cannot be checked.
            FederationError: If it takes too long, or the process has ended.
        """
        assert self._process.stdout is not None
        if not any(select.select([self._process.stdout], [], [], self._limit)):
            raise FederationError(
                f"sweep: the check of the methods did not end within {self._limit:g} seconds; run "
                "flsuite fit with one method to see what waits"
            )
        line = self._process.stdout.readline()
        if not line:
            raise FederationError("the process that cells are forked from has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise FlsuiteError(f"sweep: {answer['error']}")
        return answer

    def start(self) -> None:
        """Run the cells."""
        self._send(b"run\n")

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or ``None`` if the process still runs after this time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the runs in progress, with their last round on disk."""
        self._process.terminate()
        self.wait(_PATIENCE)


def _run(queue: Queue, process: _CellProcess) -> None:
    """Run all cells, and show their progress.

    Raises:
        KeyboardInterrupt: After Ctrl-C or SIGTERM, when the runs have ended.
    """
    with SweepProgress(queue) as progress:
        process.start()
        try:
            # Without a limit: runs take as long as they do.
            while (status := process.wait(_LOOK)) is None:
                progress.look()
        except KeyboardInterrupt:
            with suppress(OSError):  # the terminal may be closed
                print("stopping; the runs keep their last finished round", file=sys.stderr)
            process.stop()
            raise
    if status:
        raise FederationError("a worker has died; the same command continues the sweep")


def _print_end(queue: Queue) -> None:
    failed, done = failures(queue), queue.counts()["done"]
    for line in (*strangers(queue), *failed):
        print(line)
    if failed:
        retries = "the same command retries them"
        if queue.sweep.until:
            retries += "; seeds are added only when all cells are done"
        raise FederationError(f"{queue.size - done} of {queue.size} cells are not done; {retries}")
    print(f"{done} of {queue.size} cells are done; compare them: flsuite report {queue.folder}")


def _require_ready(sweep: Sweep, answer: Mapping[str, Any]) -> None:
    """Print all experiments that cannot start, and warn if there are more workers than intended.

    Args:
        sweep: The sweep.
        answer: The result of :func:`flsuite.commands.cells.check`.

    Raises:
        FlsuiteError: If an experiment cannot start.
    """
    refused, own = answer["refused"], answer["workers"]
    if len(refused) == 1:
        raise FlsuiteError(f"sweep: {refused[0]}")
    reasons = {line.partition(": ")[2] for line in refused}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise FlsuiteError(f"sweep: {len(refused)} experiments cannot start: {reason}")
    for line in refused[:_MOST_LINES]:
        print(line, file=sys.stderr)
    if refused:
        more = len(refused) - _MOST_LINES
        rest = f" and {more} more" if more > 0 else ""
        raise FlsuiteError(
            f"sweep: {len(refused)} experiments cannot start, for the reasons above{rest}; nothing "
            "has been run"
        )
    if own > 1 and sweep.workers > 1:
        print(
            f"warning: {sweep.workers} cells run at the same time, and each has an engine with "
            f"{own} workers; set trainer.engine to InProcess under overrides, or workers to 1",
            file=sys.stderr,
        )
