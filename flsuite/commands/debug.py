"""``flsuite debug``: one client's fit of a run again, in this process, step by step."""

import copy
import logging
import math
import pdb
import statistics
import tempfile
import time
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves_with_path

from flsuite.commands.comparison import environment_differences
from flsuite.commands.fit import build
from flsuite.commands.fork import QUIET, keep, repetition, require_same_files
from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.arguments import PositiveInt, require
from flsuite.common.errors import FederationError, FlsuiteError, some, with_place
from flsuite.common.lightning_internals import loss_of, scaler_of
from flsuite.common.messages import FitRequest, Outcome
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.setup import remedy_of
from flsuite.federation.engines.base import InProcess
from flsuite.federation.schedules.base import Fit
from flsuite.runs.preparation import worker_setup
from flsuite.runs.record import (
    Row,
    is_asynchronous,
    is_finished,
    kept_rounds,
    read_settings,
    rows_of,
    start_round,
)
from flsuite.runs.run import Run
from flsuite.runs.session import left_on_cpu, opened, started

_ALONE = (
    *("--trainer.keep_updates", "false", "--trainer.keep_rounds", "null"),
    *("--trainer.from_updates", "null"),
)
"""Arguments for a fit whose run keeps nothing."""
_SHOWN = 20  # steps of a table
_AROUND = 3  # steps shown of a long fit: at its ends, and on both sides of one at fault or slow
_SLOW = 1.0  # seconds below which no step is called slow


@dataclass
class Step:
    """One step of a fit.

    Attributes:
        epoch: The epoch, counted from 1.
        batch: The number of the batch in the epoch, counted from 1.
        samples: The numbers of the samples in the published splits.
        note: Which numbers of the batch are not finite. A model may mask them.
        loss: The loss. ``None`` before the step is done, or if it returns none.
        gradient: The norm of the gradient, before the algorithm changes it.
        seconds: The time of the step, and of reading its batch. ``None`` before the step is done.
        fault: What is wrong, or an empty text.
    """

    epoch: int
    batch: int
    samples: list[int]
    note: str
    loss: float | None = None
    gradient: float | None = None
    seconds: float | None = None
    fault: str = ""


class _FitWatch(Callback):
    """Records the steps of one fit. It changes nothing.

    Args:
        stop_at: The number of the step, counted from 1, whose ``training_step`` runs in the
            debugger. Default: none.

    Attributes:
        steps: The steps so far.
        fault: The number of the step at fault, counted from 1: the one that raised an exception, or
            the first whose loss or gradient is not finite. ``None`` if there is none.
        error: The exception that ended the fit, if any.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[Step] = []
        self.fault: int | None = None
        self.error: BaseException | None = None
        self._stop_at, self._epoch, self._batch = stop_at, 0, None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_FitWatch":
        return self  # a fit has copies of its callbacks, and the record must come back

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        twin: TrainLoader = copy.copy(loader)
        twin.epoch = self._epoch
        self._rows, self._split, self._epoch = twin.rows(), loader.data.train, self._epoch + 1
        self._since = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        samples = self._split.numbers[next(self._rows)].tolist()
        self.steps.append(Step(self._epoch, batch_idx + 1, samples, _not_finite(batch, samples)))
        self._batch = batch
        if len(self.steps) == self._stop_at:
            own = pl_module.training_step
            vars(pl_module)["training_step"] = partial(pdb.Pdb().runcall, own)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [_norm(p.grad) for p in parameters if p.grad is not None]
        if norms and self.steps:
            self.steps[-1].gradient = math.hypot(*norms)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        vars(pl_module).pop("training_step", None)
        step, loss = self.steps[-1], loss_of(outputs)
        if loss is not None:
            # Lightning has divided it, because gradients of several batches are summed.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            step.loss = float(loss) * parts
        # A scaler skips a step whose gradient overflows.
        gradient = step.gradient if scaler_of(trainer) is None else None
        for name, value in (("loss", step.loss), ("gradient", gradient)):
            if self.fault is None and value is not None and not math.isfinite(value):
                self._blame(f"the {name} is not finite")
        self._batch, now = None, time.perf_counter()
        step.seconds, self._since = now - self._since, now

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.error, self.fault = exception, None
        vars(pl_module).pop("training_step", None)
        if self._batch is not None:
            place = with_place(exception, longest=300)
            self._blame(f"{type(exception).__name__}: {place}{remedy_of(exception)}")

    def _blame(self, what: str) -> None:
        """Note that the last step is at fault, with what is to know of its batch."""
        step, self.fault = self.steps[-1], len(self.steps)
        step.fault = "; ".join(filter(None, (what, step.note, _ranges(self._batch, step.samples))))


def _norm(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))  # float32 overflows earlier


def _parts(batch: Any, samples: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a batch that have one row per sample, by their places."""
    for place, leaf in tree_leaves_with_path(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(samples) and leaf.numel():
            yield f"batch{keystr(place)}", leaf.detach().reshape(len(leaf), -1)


def _not_finite(batch: Any, samples: Sequence[int]) -> str:
    """Return which numbers of a batch are not finite, or an empty text."""
    bad = ((name, ~torch.isfinite(part).all(1)) for name, part in _parts(batch, samples))
    return ", ".join(f"{n} is not finite in {_named(samples, b)}" for n, b in bad if b.any())


def _ranges(batch: Any, samples: Sequence[int]) -> str:
    """Return the ranges of the numbers in a batch, with the samples that have the ends."""
    ranges = []
    for name, part in _parts(batch, samples):
        is_ordered = not part.is_complex() and part.dtype != torch.bool
        if is_ordered and bool(torch.isfinite(part).all()):
            form = ".6g" if part.is_floating_point() else "d"
            low, high = (
                f"{end.item():{form}} ({_named(samples, (part == end).any(1))})"
                for end in part.aminmax()
            )
            ranges.append(f"{name} is from {low} to {high}")
    return ", ".join(ranges)


def _named(samples: Sequence[int], chosen: Tensor) -> str:
    numbers = [str(samples[place]) for place in chosen.nonzero().flatten().tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {some(numbers)}"


class Replay(NamedTuple):
    """One fit of a run, ready to be done again: the run before it, an engine, and the request."""

    run: Run
    engine: InProcess
    request: FitRequest

    def fit(self, watch: _FitWatch) -> Outcome:
        """Do the fit again, without a fault that the schedule injects."""
        broadcast = self.request.broadcast
        watched = replace(broadcast, callbacks=(*broadcast.callbacks, watch))
        self.engine.submit([replace(self.request, broadcast=watched, fault=None)])
        return self.engine.collect(self.request.number)


@contextmanager
def replayed(run: Path, at: int, client: int) -> Iterator[Replay]:
    """Yield one fit of a run, ready to be done again from the state before it.

    Args:
        run: The folder of the run.
        at: The round, counted from 1, in which the fit begins.
        client: The client.

    Raises:
        FlsuiteError: If there is no such fit, or nothing can repeat its start.
    """
    first = start_round(run)
    done = max(first, *kept_rounds(run), 0)
    last = done if done > first and is_finished(run) else done + 1
    if not first < at <= last:
        raise FlsuiteError(f"debug: --at must be from {first + 1} to {last}, the rounds of {run}")
    fits = [row for row in rows_of(run / "timeline.csv") if row["version"] == str(at - 1)]
    clients = {int(row["client"]) for row in fits}
    if clients and client not in clients and not is_asynchronous(run):
        raise _no_fit(client, at, clients)
    trainer, _, data = build(repetition(run, None, *QUIET, *_ALONE))
    require_same_files("debug", run, trainer, data)
    if at - 1 > first:
        keep("debug", run, at - 1)
    with tempfile.TemporaryDirectory(prefix="flsuite-debug-") as folder:
        changes = ("--run_dir", str(Path(folder) / "run"), *QUIET, *_ALONE)
        start = at - 1 if at - 1 > first else None
        trainer, model, data = build(repetition(run, start, *changes))
        logging.getLogger("flsuite").setLevel(logging.ERROR)
        prepared = trainer.prepare(model, data)
        engine = InProcess(getattr(trainer.engine, "threads", 1))
        setup, number = worker_setup(trainer, prepared), _failed_fit(run, at, client)
        with left_on_cpu(model), opened(prepared), started(engine, setup):
            yield Replay(prepared, engine, _begun(prepared, engine, client, number))


def _begun(run: Run, engine: InProcess, client: int, number: int | None) -> FitRequest:
    """Begin a round, and return a client's fit that begins in it: of this number, or the first.

    Without rounds, the fit may begin when others, which the engine trains, have come back.
    """
    begun: list[FitRequest] = []

    def begin(fits: Sequence[Fit]) -> list[FitRequest]:
        requests = run.requests(fits)
        begun.extend(r for r in requests if r.broadcast.round == run.round + 1)
        return requests

    schedule = run.federation.schedule
    engine.submit(begin(run.begin_round()))
    arrivals = schedule.arrivals(engine, run.federation.clock, begin)
    while True:
        for request in begun:
            if request.client == client and number in (None, request.number):
                return request
        outcome = next(arrivals, None) if schedule.is_asynchronous else None
        if outcome is None:
            break
        run.accept(outcome)
    raise _no_fit(client, run.round + 1, {request.client for request in begun})


def _no_fit(client: int, round: int, clients: set[int]) -> FlsuiteError:
    what = f"client {client} did not begin a fit in round {round}"
    return FlsuiteError(f"debug: {what}; --client may be {some([*map(str, sorted(clients))], 10)}")


def _failed_fit(run: Path, at: int, client: int) -> int | None:
    """Return the number of the client's first fit that failed from a version, if one did."""
    row = _row(run / "timeline.csv", client=client, version=at - 1, outcome="failed")
    return int(row["fit"]) if row else None


def _row(path: Path, **cells: object) -> Row:
    """Return the first row of a table with these cells, or an empty one."""
    wanted = {name: str(cell) for name, cell in cells.items()}.items()
    return next((row for row in rows_of(path) if wanted <= row.items()), {})


def debug(args: list[str]) -> None:
    """Do one fit of a run again, print its steps, and stop at the fault in the debugger.

    Raises:
        FederationError: If the fit fails, or its loss or gradient is not finite.
    """
    request = parser_of("debug").parse_args(args)
    require("debug", PositiveInt | None, **{"--step": request.step})
    run, at, client = require_run("debug", Path(request.run)), request.at, request.client
    with replayed(run, at, client) as replay:
        watch = _FitWatch()
        outcome = replay.fit(watch)
        steps, where = len(watch.steps), f"round {at}: client {client}"
        if request.step is not None and request.step > steps:
            raise FlsuiteError(f"debug: the fit has {steps} steps, got --step {request.step}")
        _print(watch, where, replay)
        _compare(run, at, client, outcome)

        stop = request.step or (watch.fault if watch.error is None else None)
        if not request.no_pdb and stop is not None:
            with suppress(BdbQuit):
                replay.fit(_FitWatch(stop))
        elif not request.no_pdb and watch.error is not None:
            pdb.post_mortem(watch.error.__traceback__)
        checked = replay.run.federation.check(outcome)
        if watch.fault is not None:
            step = watch.steps[watch.fault - 1]
            raise FederationError(
                f"{where}: step {watch.fault}, batch {step.batch} of epoch {step.epoch}, is at "
                f"fault: {step.fault}; its samples: {some([*map(str, step.samples)], 10)}"
            )
        if checked and checked.failed:
            raise FederationError(f"{where}: {checked.reason}")


def _print(watch: _FitWatch, where: str, replay: Replay) -> None:
    """Print a client's classes and the steps of its fit."""
    request = replay.request
    data = replay.run.federation.data.at(request.broadcast.round)
    counts = zip(data.spec.names, data.class_counts(request.client).tolist(), strict=False)
    classes = ", ".join(f"{name}: {count}" for name, count in counts if count)
    print(f"{where}, {data.samples(request.client)} samples, classes {classes}")
    if request.fault is not None:
        print(f"trainer.schedule injects the fault {request.fault} into the fit, not done here")
    steps, fault, slow = watch.steps, watch.fault, _slow(watch.steps)
    table = Table(title="steps", title_justify="left", show_edge=False)
    for column in ("step", "epoch", "batch", "samples", "loss", "gradient", ""):
        table.add_column(column, justify="right" if column else "left")
    for number, step in enumerate(steps, start=1):
        ends = 1, len(steps), fault or 1, slow or 1
        if len(steps) <= _SHOWN or min(abs(number - end) for end in ends) <= _AROUND:
            whole = map(str, (number, step.epoch, step.batch, len(step.samples)))
            values = ("" if v is None else f"{v:.6g}" for v in (step.loss, step.gradient))
            note = "at fault" if number == fault else "slow" if number == slow else step.note
            table.add_row(*whole, *values, escape(note))
    Console().print(table)
    if slow:
        samples = some([*map(str, steps[slow - 1].samples)], 10)
        print(
            f"step {slow} takes {steps[slow - 1].seconds:.1f} seconds with the reading of its "
            f"batch, much longer than the others; its samples: {samples}"
        )


def _slow(steps: Sequence[Step]) -> int | None:
    """Return the number of a step that takes much longer than the others, counted from 1."""
    seconds = [step.seconds or 0.0 for step in steps]
    slowest = max(seconds, default=0.0)
    is_slow = slowest > _SLOW and slowest > 10 * statistics.median(seconds)
    return seconds.index(slowest) + 1 if is_slow else None


def _compare(run: Path, at: int, client: int, outcome: Outcome) -> None:
    """Print whether the loss of the fit is the one of the record, if it has one."""
    if is_asynchronous(run) or outcome.failed:
        return  # without rounds, the row is that of the round in which the fit arrived
    row = _row(run / "metrics.csv", round=at, scope=client, split="train", metric="loss")
    record, now = row.get("value"), outcome.update.metrics.get("loss")
    if record is None or now is None:
        return
    if record == f"{now:.9g}":
        print(f"the loss of the fit is that of the record: {record}")
        return
    print(f"the loss of the fit is {now:.9g}, and {record} in the record")
    if "engine" in read_settings(run):
        print("the run trained the client in a stack, which rounds otherwise")
    for line in environment_differences(run):
        print(f"another environment: {line}")
