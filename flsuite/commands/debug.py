"""``flsuite debug``: one client's fit of a run again, in this process, step by step."""

import copy
import logging
import math
import pdb
import tempfile
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves_with_path

from flsuite.commands.comparison import environment_differences
from flsuite.commands.fit import build
from flsuite.commands.fork import QUIET, keep, repetition
from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.arguments import NonNegativeInt, PositiveInt, require
from flsuite.common.errors import FederationError, FlsuiteError, some, with_place
from flsuite.common.lightning_internals import scaler_of
from flsuite.common.messages import ClientFailure, ClientResult, FitRequest, Outcome
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.engines.base import threads_set
from flsuite.runs.preparation import worker_setup
from flsuite.runs.record import is_asynchronous, is_finished, kept_rounds, rows_of
from flsuite.runs.run import Run
from flsuite.runs.session import left_on_cpu, opened

_ALONE = (
    *("--trainer.keep_updates", "false", "--trainer.keep_rounds", "null"),
    *("--trainer.from_updates", "null"),
)
"""Arguments for a fit whose run keeps nothing."""
_SHOWN = 20  # steps of a table
_AROUND = 3  # steps before and after the one at fault


@dataclass
class Step:
    """One step of a fit.

    Attributes:
        epoch: The epoch, counted from 1.
        batch: The number of the batch in the epoch, counted from 1.
        samples: The numbers of the samples in the training split.
        content: What to know of the batch if the step fails.
        loss: The loss. ``None`` before the step is done, or if it returns none.
        gradient: The norm of the gradient, before the algorithm changes it.
        fault: What is wrong, or an empty text.
    """

    epoch: int
    batch: int
    samples: list[int]
    content: str
    loss: float | None = None
    gradient: float | None = None
    fault: str = ""


class FitWatch(Callback):
    """Records the steps of one fit. It changes nothing.

    Args:
        stop_at: The number of the step, counted from 1, whose ``training_step`` runs in the
            debugger. Default: none.

    Attributes:
        steps: The steps so far.
        error: The exception that ended the fit, if any.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[Step] = []
        self.error: BaseException | None = None
        self._stop_at, self._epoch, self._is_inside = stop_at, 0, False

    def __deepcopy__(self, memo: dict[int, Any]) -> "FitWatch":
        return self  # a fit has copies of its callbacks, and the record must come back

    @property
    def fault(self) -> int | None:
        """Return the number of the first step with a fault, counted from 1."""
        return next((n for n, step in enumerate(self.steps, start=1) if step.fault), None)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        twin: TrainLoader = copy.copy(loader)
        twin.epoch = self._epoch
        self._rows, self._data, self._epoch = twin.rows(), loader.data, self._epoch + 1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        split, rows = self._data.train, next(self._rows)
        # The samples of a dataset that is read on demand have the numbers of that dataset.
        samples = (rows if split.in_memory else split.x[rows]).tolist()
        step = Step(self._epoch, batch_idx + 1, samples, _content(batch, samples))
        step.fault = _fault_of(batch, samples)
        self.steps.append(step)
        self._is_inside = True
        if len(self.steps) == self._stop_at:
            own = pl_module.training_step
            vars(pl_module)["training_step"] = partial(pdb.Pdb().runcall, own)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
        if not norms or not self.steps:
            return
        step = self.steps[-1]
        step.gradient = float(torch.linalg.vector_norm(torch.stack(norms)))
        if scaler_of(trainer) is None and not math.isfinite(step.gradient):
            step.fault = step.fault or "the gradient is not finite"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self._is_inside = False
        vars(pl_module).pop("training_step", None)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:
            return
        step = self.steps[-1]
        step.loss = float(loss)
        if not math.isfinite(step.loss) and not step.fault.startswith("batch"):
            step.fault = "the loss is not finite"

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.error = exception
        vars(pl_module).pop("training_step", None)
        if self._is_inside:
            step = self.steps[-1]
            step.fault = f"{type(exception).__name__}: {with_place(exception, longest=300)}"


def _parts(batch: Any, samples: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a batch that have one row per sample, by their places."""
    for place, leaf in tree_leaves_with_path(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(samples):
            yield f"batch{keystr(place)}", leaf.detach().reshape(len(leaf), -1)


def _fault_of(batch: Any, samples: Sequence[int]) -> str:
    """Return which numbers of a batch are not finite, or an empty text."""
    for name, part in _parts(batch, samples):
        bad = ~torch.isfinite(part).all(1)
        if bad.any():
            return f"{name} is not finite in {_named(samples, bad)}"
    return ""


def _content(batch: Any, samples: Sequence[int]) -> str:
    """Return the ranges of the whole numbers in a batch, such as classes and words."""
    ranges = []
    for name, part in _parts(batch, samples):
        if part.numel() and not part.is_floating_point() and not part.is_complex():
            low, high = (f"{e} ({_named(samples, (part == e).any(1))})" for e in part.aminmax())
            ranges.append(f"{name} is from {low} to {high}")
    return ", ".join(ranges)


def _named(samples: Sequence[int], chosen: Tensor) -> str:
    numbers = [str(samples[place]) for place in chosen.nonzero().flatten().tolist()]
    return f"sample{'s' * (len(numbers) > 1)} {some(numbers)}"


@dataclass
class Replay:
    """One fit of a run, ready to be done again.

    Args:
        run: The run, before the round.
        runner: Trains the client.
        request: The fit.
        threads: torch threads of the run's fits.
    """

    run: Run
    runner: JobRunner
    request: FitRequest
    threads: int

    def fit(self, watch: FitWatch) -> Outcome:
        """Do the fit again."""
        broadcast = self.request.broadcast
        watched = replace(broadcast, callbacks=(*broadcast.callbacks, watch))
        with threads_set(self.threads):
            (outcome,) = self.runner.answer([replace(self.request, broadcast=watched)])
        return outcome


@contextmanager
def replayed(run: Path, at: int, client: int) -> Iterator[Replay]:
    """Yield one fit of a run, ready to be done again from the state before it.

    Args:
        run: The folder of the run.
        at: The round, counted from 1.
        client: The client.

    Raises:
        FlsuiteError: If there is no such fit, or nothing can repeat its start.
    """
    _require_round(run, at)
    keep("debug", run, at - 1)
    with tempfile.TemporaryDirectory(prefix="flsuite-debug-") as folder:
        start = at - 1 if at - 1 in kept_rounds(run) else None
        changes = ("--run_dir", str(Path(folder) / "run"), *QUIET, *_ALONE)
        trainer, model, data = build(repetition(run, start, *changes))
        logging.getLogger("flsuite").setLevel(logging.ERROR)
        prepared = trainer.prepare(model, data)
        with left_on_cpu(model), opened(prepared):
            requests = prepared.requests(prepared.begin_round())
            fits = {request.client: request for request in requests}
            if client not in fits:
                raise FlsuiteError(
                    f"debug: client {client} did not begin a fit in round {at}; --client may be "
                    f"{some(sorted(map(str, fits), key=int), 10)}"
                )
            runner = JobRunner(worker_setup(trainer, prepared))
            threads = getattr(trainer.engine, "threads", 1)
            yield Replay(prepared, runner, fits[client], threads)


def _require_round(run: Path, at: int) -> None:
    """Refuse a round that a run has not begun."""
    done = max(kept_rounds(run), default=0)
    last = done if done and is_finished(run) else done + 1
    if at > last:
        raise FlsuiteError(f"debug: {run} has {done} finished rounds; give --at up to {last}")


def debug(args: list[str]) -> None:
    """Do one fit of a run again, print its steps, and stop at the fault in the debugger.

    Raises:
        FederationError: If the fit fails, or a number in it is not finite.
    """
    request = parser_of("debug").parse_args(args)
    require("debug", PositiveInt | None, **{"--at": request.at, "--step": request.step})
    require("debug", NonNegativeInt, **{"--client": request.client})
    run, client = require_run("debug", Path(request.run)), request.client
    with replayed(run, request.at, client) as replay:
        data = replay.run.federation.data.at(replay.request.broadcast.round)
        watch = FitWatch()
        outcome = replay.fit(watch)
        where = f"round {request.at}: client {client}"
        _print(watch, where, data, client)
        _compare(run, request.at, client, outcome)

        stop = request.step or (watch.fault if watch.error is None else None)
        if not request.no_pdb and stop is not None:
            with suppress(BdbQuit):
                replay.fit(FitWatch(stop))
        elif not request.no_pdb and watch.error is not None:
            pdb.post_mortem(watch.error.__traceback__)
        if fault := _fault(watch, replay.run.federation.check(outcome)):
            raise FederationError(f"{where}: {fault}")


def _fault(watch: FitWatch, outcome: Outcome | None) -> str:
    """Return what is wrong with a fit, or an empty text."""
    if (number := watch.fault) is not None:
        step = watch.steps[number - 1]
        content = f"; {step.content}" if step.content and watch.error is not None else ""
        numbers = some([*map(str, step.samples)], 10)
        return (
            f"step {number}, batch {step.batch} of epoch {step.epoch}, is at fault: {step.fault}"
            f"{content}; its samples of the training split: {numbers}"
        )
    return outcome.reason if isinstance(outcome, ClientFailure) else ""


def _print(watch: FitWatch, where: str, data: FederatedData, client: int) -> None:
    """Print a client's classes and the steps of its fit."""
    counts = zip(data.spec.names, data.class_counts(client).tolist(), strict=False)
    classes = ", ".join(f"{name}: {count}" for name, count in counts if count)
    print(f"{where}, {data.samples(client)} samples, classes {classes}")
    table = Table(title="steps", title_justify="left", show_edge=False)
    for column in ("step", "epoch", "batch", "samples", "loss", "gradient", ""):
        table.add_column(column, justify="left" if not column else "right")
    before, fault = 0, watch.fault
    for number in _shown_steps(len(watch.steps), fault):
        if number > before + 1:
            table.add_row("...")
        step, before = watch.steps[number - 1], number
        numbers = ("" if value is None else f"{value:.6g}" for value in (step.loss, step.gradient))
        counts_of = map(str, (number, step.epoch, step.batch, len(step.samples)))
        table.add_row(*counts_of, *numbers, "at fault" if number == fault else "")
    Console().print(table)


def _shown_steps(steps: int, fault: int | None) -> list[int]:
    """Return the numbers of the steps to print: all, or the first, the last and the faulty ones."""
    if steps <= _SHOWN:
        return list(range(1, steps + 1))
    ends = {*range(1, _AROUND + 1), *range(steps - _AROUND, steps + 1)}
    near = range(max(fault - _AROUND, 1), min(fault + _AROUND, steps) + 1) if fault else ()
    return sorted({*ends, *near})


def _compare(run: Path, at: int, client: int, outcome: Outcome) -> None:
    """Print whether the loss of the fit is the one of the record, if it has one."""
    if is_asynchronous(run) or not isinstance(outcome, ClientResult):
        return  # without rounds, the row is that of the round in which the fit arrived
    place = {"round": str(at), "scope": str(client), "split": "train", "metric": "loss"}
    rows = (row for row in rows_of(run / "metrics.csv") if place.items() <= row.items())
    record, now = next(rows, {}).get("value"), outcome.update.metrics.get("loss")
    if record is None or now is None:
        return
    if record == f"{now:.9g}":
        print(f"the loss of the fit is that of the record: {record}")
        return
    print(f"the loss of the fit is {now:.9g}, and {record} in the record")
    for line in environment_differences(run):
        print(f"another environment: {line}")
