"""The start and end of a run: its folder, a resume, and cleanup."""

import errno
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningModule

from flsuite.aggregators.part import named
from flsuite.common.arguments import arguments
from flsuite.common.errors import FederationError, FlsuiteError, add_note, log, one_line, path_of
from flsuite.common.files import replace_tensors
from flsuite.common.state import plain
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.auto import Auto
from flsuite.federation.engines.base import Engine, EngineChoice
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import first_round, read_settings
from flsuite.runs.run import Run
from flsuite.runs.settings import describe, described_engine
from flsuite.runs.summary import print_profile, print_summary

_IN_FLIGHT, _ROUNDS = 8, 100  # assumed where a schedule has no rounds, or a run no end
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES)


@contextmanager
def opened(run: Run, ckpt_path: str | None = None) -> Iterator[Run]:
    """Open a run's folder or resume from a checkpoint, and close the run at the end.

    Args:
        run: The run, before its first round.
        ckpt_path: A checkpoint of this run. ``last`` is the one in its folder, if there is one.

    Raises:
        FlsuiteError: If the request cannot be met. A new run without a round leaves no files.
    """
    folder, is_restart = run.folder, ckpt_path is not None
    with _saying_what_is_left(folder):
        if folder.find_checkpoint(ckpt_path) is None:
            if run.reuse:
                run.reuse.read(run.settings)
            folder.make()
        with folder.locked():
            # Only under the lock, because another process may be writing the first checkpoint.
            checkpoint = folder.find_checkpoint(ckpt_path)
            if checkpoint is None:
                _begin(run, is_restart)
            else:
                run.store.resume(checkpoint)
                run.folder.write_clients(run.federation.data, run.evaluator.attack)
                # If the other run was deleted, clients of the first version that are still in
                # flight train, with the same result.
                reuse, is_first = run.reuse, 0 in run.store.versions_in_flight
                if reuse and reuse.source and reuse.source.exists() and is_first:
                    reuse.read(run.settings)
            run.folder.forget_errors(run.round)
            yield from _running(run, is_resumed=checkpoint is not None)


@contextmanager
def left_on_cpu(model: LightningModule) -> Iterator[None]:
    """Move a model to the CPU at the end, where Lightning leaves it too."""
    try:
        yield
    finally:
        model.cpu()


@contextmanager
def started(engine: Engine, setup: WorkerSetup) -> Iterator[None]:
    """Start the engine, which trains and scores the clients, and stop it at the end."""
    try:
        engine.start(setup)
        yield
    finally:
        engine.stop()


def choose_engine(
    run: Run, choice: EngineChoice, setup: WorkerSetup, ckpt_path: str | None
) -> Engine:
    """Return the engine of a run, and record what ``Auto`` chooses where it decides the result.

    Args:
        run: The run, before its folder is made.
        choice: The requested engine, or ``Auto``.
        setup: The setup of the run's workers.
        ckpt_path: The checkpoint that will be resumed, if any.
    """
    if isinstance(choice, Engine):
        return choice
    assert isinstance(choice, Auto)
    checkpoint = run.folder.find_checkpoint(ckpt_path)
    before = None if checkpoint is None else load_checkpoint(checkpoint)["settings"]
    if before is None and run.store.parent is not None and run.store.parent.round:
        before = read_settings(Path(run.store.parent.run))
    federation, budget = run.federation, run.options.budget
    schedule = federation.schedule
    in_flight = schedule.cohort or max(_IN_FLIGHT, schedule.at_once)
    cohort = max(1, min(in_flight, federation.data.clients))
    if setup.uplink.aggregator.pools:  # one fit on all samples
        cohort = 1
    engine = choice.choose(
        setup,
        federation.first_requests(run.callbacks.for_clients, cohort),
        fits=budget.max_client_updates or cohort * (budget.rounds or _ROUNDS),
        schedule=named("trainer.schedule", schedule),
        at_once=schedule.at_once if schedule.is_asynchronous else None,
        before=before,
    )
    run.settings.update(described_engine(engine))
    return engine


@contextmanager
def _saying_what_is_left(folder: RunFolder) -> Iterator[None]:
    """Say how to continue after an interrupt or a fault of the disk: only the run knows its folder.

    Raises:
        FederationError: If a full or read-only disk caused an error. It names the file or folder.
    """
    path = folder.path
    try:
        yield
    except OSError as error:
        if path is None or error.errno not in _DISK_ERRNOS:
            raise
        remedy = "free some space or make the folder writable"
        if error.errno == errno.EFBIG:
            remedy = "raise the limit of file sizes (ulimit -f)"
        raise FederationError(
            f"cannot write to {error.filename or path} ({error.strerror}); the last "
            f"checkpoint, if there is one, is kept: {remedy}, and continue with --ckpt_path last"
        ) from error
    except (KeyboardInterrupt, BdbQuit) as error:
        if path is None or not (path / "metrics.csv").is_file():
            error.args = ("no folder is left; the same command starts again",)
        else:
            error.args = (f"flsuite resume {path} continues after the last finished round",)
        raise


def _begin(run: Run, is_restart: bool) -> None:
    """Start in a new folder, which is removed if this fails or is interrupted."""
    try:
        data, attack = run.federation.data, run.evaluator.attack
        run.folder.create(run.config, run.settings, data, is_restart, attack)
        run.store.create()
        _begin_at_the_parent(run)
    except BaseException:
        run.folder.discard()
        raise
    if is_restart:
        first = first_round(run.settings)
        log.info("no checkpoint in %s yet: starting with round %d", run.folder.checkpoints, first)
    if run.settings.get("initial_weights"):
        log.warning(
            "the model was built before, perhaps by another fit: the federation starts from "
            "its weights; pass a new model to start from weights drawn from the seed"
        )


def _begin_at_the_parent(run: Run) -> None:
    if run.store.parent is None:
        return
    run.store.fork()
    if run.options.budget.is_spent(run.federation.clock):
        raise FlsuiteError(
            f"trainer.fork: nothing is left to train after round {run.round}; begin at an "
            f"earlier one, or raise {run.options.budget}"
        )


def _running(run: Run, is_resumed: bool) -> Iterator[Run]:
    is_useless = False  # a setting was wrong, and nothing has been trained
    try:
        run.callbacks.notify("on_federation_start", run)
        if attack := run.evaluator.attack:
            log.info("attack: %s", attack.line(run.federation.data.clients))
        if run.finished:
            _say_finished(run)
        # A resumed run may have more rounds. A finished one keeps the record of what it did.
        elif is_resumed:
            run.folder.write_request(run.config, run.settings)
        yield run
        run.store.close(must_succeed=True)
        run.status = "success"
    except BaseException as error:
        run.status = "failed"
        run.store.roll_back()
        is_refused = isinstance(error, FlsuiteError)
        if isinstance(error, Exception) and not is_refused:
            _keep_traceback(run, error)
        # Any other error, or a later one, leaves a run to resume.
        is_useless = is_refused and run.round < first_round(run.settings)
        raise
    finally:
        _close(run, is_useless)
    if run.profile:
        print_profile(run.profile)
    if run.options.show:
        print_summary(run.summary, run.folder.path)


def _keep_traceback(run: Run, error: Exception) -> None:
    """Write the traceback of an error to the run's folder, and say so in a note."""
    round = run.round + 1
    if not isinstance(error, FederationError):  # which says what has happened
        add_note(error, f"round {round} is not done")
        run.folder.keep_error(round, "".join(traceback.format_exception(error)))
    path = run.folder.inside(f"errors/round-{round}.txt")
    if path is not None and path.exists():
        add_note(error, f"the traceback is in {path}")


def _say_finished(run: Run) -> None:
    is_stopped = not run.options.budget.is_spent(run.federation.clock)
    log.warning(
        "nothing to train: the run is finished after round %d; raise %s%s to extend it",
        run.round,
        run.options.budget,
        ", or the patience of the callback that stops it," if is_stopped else "",
    )


def _close(run: Run, is_useless: bool) -> None:
    """Load the global model into the resident model, write it to disk, and notify callbacks."""
    run.store.close(must_succeed=False)
    if run.round:
        _export_model(run)
    run.callbacks.notify("on_federation_end", run)
    if is_useless:
        run.folder.discard()


def _export_model(run: Run) -> None:
    run.evaluator.load(run.federation.client_state(None))
    # A checkpoint of tensors on a GPU could not be read on a machine without one.
    model = run.evaluator.model.cpu()
    if run.folder.checkpoints is None:
        return
    try:
        export_model(model, run.folder.checkpoints / "model.ckpt")
    except Exception as error:
        if run.status == "success":
            raise
        log.warning("model.ckpt was not written: %s", one_line(error))


def export_model(model: LightningModule, path: Path) -> None:
    """Write an ordinary Lightning checkpoint, which ``load_from_checkpoint`` reads.

    Settings that only code can express, such as an optimizer given as a lambda, keep their
    defaults.
    """
    # The source of a lambda describes a run, but cannot be instantiated.
    settings = {
        name: value
        for name, value in describe(arguments(model)).items()
        if not (isinstance(value, str) and ("lambda" in value or "\n" in value))
    }

    content: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": model.state_dict(),
        "hyper_parameters": {
            "_class_path": path_of(type(model)),
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            **settings,
        },
    }

    model.on_save_checkpoint(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_tensors(plain(content, "model"), path, flush=True)
