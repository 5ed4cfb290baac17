"""Links from a run to Lightning's loggers. A link sends numbers and resumes the log."""

import csv
import logging
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from flsuite.callbacks.round_numbers import LAST_NUMBER, RoundNumbers
from flsuite.callbacks.tensorboard_files import logged_steps
from flsuite.common.errors import one_line
from flsuite.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("flsuite")

_LONGEST = 64  # characters of a tag in W&B


def run_name(settings: Mapping[str, Any]) -> str:
    """Return the method and the seed, such as ``FedProx-1``."""
    return f"{_class_name(settings['aggregator'])}-{settings['seed']}"


def group_name(settings: Mapping[str, Any]) -> str:
    """Return the method and a hash shared by runs that differ only in the seed.

    For example ``FedProx-1a2b3c4d``. The groups match those in ``flsuite report``.
    """
    from flsuite.analysis.groups import experiment_hash  # imports pandas

    return f"{_class_name(settings['aggregator'])}-{experiment_hash(settings)}"


def tags(settings: Mapping[str, Any]) -> list[str]:
    """Return the dataset and the partition, such as ``retinamnist`` and ``Dirichlet(0.05)``."""
    arguments = settings["data"].get("init_args", {})
    dataset = arguments.get("name") or _class_name(settings["data"])
    partition = arguments.get("partition")
    names = [str(dataset), *([_with_value(partition)] if isinstance(partition, Mapping) else [])]
    return [tag[:_LONGEST] for tag in names]


def _class_name(description: Mapping[str, Any]) -> str:
    return str(description["class_path"]).rsplit(".", 1)[-1]


def _with_value(description: Mapping[str, Any]) -> str:
    """Return a class name with its first argument, which every use of the class sets."""
    arguments = description.get("init_args", {})
    first = next((value for value in arguments.values() if value is not None), None)
    return _class_name(description) + ("" if first is None else f"({first})")


LIGHTNING_NAME = "lightning_logs"
"""Lightning's default project name."""
PROJECT = "flsuite"
"""Our default name for the project in W&B and the experiment in MLflow."""
_MOST_METRICS = 500  # MLflow takes at most 1,000 at once


class LoggerLink:
    """Sends the numbers of a run to any logger, with the round as the step.

    Args:
        logger: The logger.

    Attributes:
        held: The rounds that the log had when the link started. They are not sent again. Round 0
            is everything sent before the first round.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger
        self.held: Set[int] = frozenset()

    def start(self, run: Run, state: dict[str, Any]) -> None:
        """Start a new log, or resume one from the result of :meth:`state_dict` (not empty then).

        By default, a logger is assumed to have kept everything that it was sent.
        """
        self.held = rounds_of(run) if state else frozenset()
        self.logger.log_hyperparams(run.settings)

    def log(self, run: Run, row: RoundNumbers) -> None:
        """Send the numbers of a round, unless the log already has them."""
        if row.round not in self.held:
            self.send(run, row)

    def send(self, run: Run, row: RoundNumbers) -> None:
        """Send the numbers and pictures of a round."""
        self.logger.log_metrics(row.numbers, step=row.round)
        self.try_to_show(row.round, row.pictures)

    def try_to_show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        """Send named pictures of the run after a round. A failure does not end the run."""
        try:
            self.show(round, pictures)
        except Exception as error:  # from the logger, its transport or its server
            self.warn_of(pictures, error)

    def warn_of(self, pictures: Iterable[str], error: Exception) -> None:
        """Say which pictures are missing, and why."""
        kind = type(self.logger).__name__
        log.warning("%s: no %s (%s)", kind, ", ".join(pictures), one_line(error, 200))

    def show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        """Send named pictures to a logger that accepts pictures."""

    def finish(self, run: Run) -> None:
        """End the log of the run."""
        self.logger.finalize(run.status)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {"link": type(self).__name__}


def rounds_of(run: Run) -> Set[int]:
    """Return the rounds done by the run, starting at 0."""
    return frozenset(range(run.round + 1))


class _VersionLink(LoggerLink, ABC):
    """Continues in the version folder of the resumed run.

    Each round is written at once. A killed run loses only what the system had not yet written.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        if state and self.logger._version is None:
            self.logger._version = state["version"]
        if state:
            self.held = self._resume(run)
        else:
            super().start(run, state)

    @abstractmethod
    def _resume(self, run: Run) -> Set[int]:
        """Open the files of the resumed run, and return the rounds in them."""

    def send(self, run: Run, row: RoundNumbers) -> None:
        super().send(run, row)
        self.logger.save()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.logger.version}


class CSVLink(_VersionLink):
    """Keeps the rows of the earlier rounds, which Lightning's logger deletes when it starts."""

    def _resume(self, run: Run) -> Set[int]:
        rows = _read_rows(Path(self.logger.log_dir))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "previous log files will be deleted"
            self.logger.log_hyperparams(run.settings)
        # Rounds after the checkpoint are done again.
        earlier = [row for row in rows if row["step"] <= run.round]
        for row in earlier:
            numbers = {name: value for name, value in row.items() if name != "step"}
            self.logger.log_metrics(numbers, step=int(row["step"]))
        self.logger.save()
        return frozenset(int(row["step"]) for row in earlier if _last_name(self.logger) in row)


class TensorBoardLink(_VersionLink):
    """Adds a second file to the version's folder, which TensorBoard shows as one run."""

    def start(self, run: Run, state: dict[str, Any]) -> None:
        self.logger._default_hp_metric = False  # a chart of the number -1
        super().start(run, state)

    def _resume(self, run: Run) -> Set[int]:
        # TensorBoard then drops the rounds after the checkpoint, which are done again.
        self.logger._kwargs["purge_step"] = run.round + 1
        steps = logged_steps(Path(self.logger.log_dir), _last_name(self.logger))
        if steps is None:
            return rounds_of(run)
        if not steps:
            self.logger.log_hyperparams(run.settings)
            return frozenset()
        return rounds_of(run) & {0, *steps}

    def show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        for name, figure in pictures.items():
            self.logger.experiment.add_figure(name, figure, global_step=round, close=False)
        if pictures:
            self.logger.save()


class MLflowLink(LoggerLink):
    """Continues the same MLflow run, with metric names that every MLflow store accepts.

    A file store cannot have both ``test/accuracy`` and ``test/accuracy/0``, because the first would
    also be a folder. The second one becomes ``test/accuracy.0``. A picture replaces an earlier one
    of its name.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        if self.logger._run_name is None:
            self.logger._run_name = run_name(run.settings)
        if self.logger._experiment_name in (None, LIGHTNING_NAME):
            self.logger._experiment_name = PROJECT
        if self._can_resume(state):
            history = self.logger.experiment.get_metric_history(
                self.logger.run_id, _last_name(self.logger)
            )
            self.held = frozenset({0, *(metric.step for metric in history)})
        else:
            super().start(run, {})

    def send(self, run: Run, row: RoundNumbers) -> None:
        numbers = [(_mlflow_name(name), value) for name, value in row.numbers.items()]
        for first in range(0, len(numbers), _MOST_METRICS):
            self.logger.log_metrics(dict(numbers[first : first + _MOST_METRICS]), step=row.round)
        self.try_to_show(row.round, row.pictures)

    def show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        for name, figure in pictures.items():
            path = f"pictures/{_mlflow_name(name)}.png"
            self.logger.experiment.log_figure(self.logger.run_id, figure, path)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run_id": self.logger._run_id}

    def _can_resume(self, state: dict[str, Any]) -> bool:
        """Reopen the MLflow run if it still exists, and return whether it does."""
        if not state or self.logger._run_id is not None:
            return False
        from mlflow.exceptions import MlflowException

        self.logger._run_id = state["run_id"]
        try:
            self.logger.experiment.update_run(state["run_id"], status="RUNNING")
        except MlflowException as error:
            log.warning("MLflow: the run is missing, starting a new one (%s)", one_line(error))
            self.logger._run_id = None
            return False
        return True


def _last_name(logger: Any) -> str:
    """Return the logged name of the number that is sent last."""
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}{LAST_NUMBER}" if prefix else LAST_NUMBER


def _read_rows(folder: Path) -> list[dict[str, float]]:
    """Return the complete rows of a CSVLogger file, without empty cells."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    rows = []
    with path.open(encoding="utf-8", newline="", errors="replace") as file:
        whole = [line for line in file if line.endswith("\n")]  # a kill truncates the last one
        for cells in csv.DictReader(whole):
            row = {}
            for name, cell in cells.items():
                with suppress(ValueError, TypeError):  # empty, or damaged
                    row[name] = float(cell)
            if math.isfinite(row.get("step", math.nan)):
                rows.append(row)
    return rows


def _mlflow_name(name: str) -> str:
    """Return a name with one folder (three for a client) and only characters MLflow allows."""
    folders = 3 if name.startswith("client/") else 1
    *parents, last = name.split("/", folders)
    return re.sub(r"[^\w/. -]", "_", "/".join([*parents, last.replace("/", ".")]), flags=re.ASCII)
