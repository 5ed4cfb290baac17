"""Links from a run to Lightning's loggers. A link sends numbers and resumes the log.

A kill may come between a round's row in a log and the run's checkpoint, and a resume then repeats
the round. A logger that buffers may also lose rows of rounds in the checkpoint. So each link knows
the last round that is surely in its log. Later rounds are sent from the run's table.
"""

import csv
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from flsuite.common.errors import log, one_line
from flsuite.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LAST_NUMBER = "wall_s"
"""The number that is sent last. A log with this number has the whole round."""
NOTHING = -1
"""The last round of an empty log. Round 0 is everything sent before the first round."""
LIGHTNING_NAME = "lightning_logs"
"""Lightning's default project name."""
PROJECT = "flsuite"
"""Our default name for the project in W&B and the experiment in MLflow."""
_LONGEST = 64  # characters of a tag in W&B
_MOST_METRICS = 500  # MLflow takes at most 1,000 at once


@dataclass(frozen=True)
class RoundNumbers:
    """The numbers of a round.

    Attributes:
        round: The round.
        numbers: The numbers for every logger. :data:`LAST_NUMBER` is the last one.
        of_clients: The numbers of single clients, as ``client/<n>/<split>/<metric>``.
        pictures: The pictures of callbacks.
    """

    round: int
    numbers: dict[str, float]
    of_clients: dict[str, float]
    pictures: Mapping[str, "Figure"] = field(default_factory=dict)


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


class LoggerLink:
    """Sends the numbers of a run to any logger, with the round as the step.

    Args:
        logger: The logger.

    Attributes:
        last: The last round that is surely in the log. Later ones are sent. :data:`NOTHING` if the
            log is empty.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger
        self.last = NOTHING

    def start(self, run: Run, state: dict[str, Any]) -> None:
        """Start a new log, or resume one from the result of :meth:`state_dict` (not empty then).

        By default, a logger is assumed to have kept everything that it was sent.
        """
        self.last = _sent_until(run, state) if state else NOTHING
        self.logger.log_hyperparams(run.settings)

    def log(self, run: Run, row: RoundNumbers) -> None:
        """Send the numbers of a round, unless the log already has them."""
        if row.round > self.last:
            self.send(run, row)
            self.last = row.round

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
        return {"link": type(self).__name__, "last": self.last}


def _sent_until(run: Run, state: Mapping[str, Any]) -> int:
    """Return the last round that was sent before the checkpoint, from a link's state.

    Checkpoints of earlier versions do not say it. Their loggers were sent all rounds.
    """
    return int(state.get("last", run.round))


class _VersionLink(LoggerLink, ABC):
    """Continues in the version folder of the resumed run.

    Each round is written before the checkpoint that has it. A killed run has at most one round more
    in the log than in the checkpoint, which :meth:`_resume` removes.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        if state and self.logger._version is None:
            self.logger._version = state["version"]
        if state and Path(self.logger.log_dir).is_dir():
            self.last = self._resume(run, _sent_until(run, state))
        else:
            super().start(run, {})

    @abstractmethod
    def _resume(self, run: Run, last: int) -> int:
        """Open the files of the resumed run without the rounds after the checkpoint.

        Args:
            run: The run, at the checkpoint.
            last: The last round that was sent before the checkpoint.

        Returns:
            The last round in the files.
        """

    def send(self, run: Run, row: RoundNumbers) -> None:
        super().send(run, row)
        self.logger.save()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.logger.version}


class CSVLink(_VersionLink):
    """Keeps the rows of the earlier rounds, which Lightning's logger deletes when it starts.

    The file is read back, because Lightning rewrites all of it where a number is new: a kill in
    that moment loses rows.
    """

    def _resume(self, run: Run, last: int) -> int:
        rows = [row for row in _read_rows(Path(self.logger.log_dir)) if row["step"] <= run.round]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "previous log files will be deleted"
            self.logger.log_hyperparams(run.settings)
        for row in rows:  # not by the logger, which would add its prefix again
            self.logger.experiment.log_metrics(row, step=row["step"])
        self.logger.save()
        return max((row["step"] for row in rows if _last_name(self.logger) in row), default=0)


class TensorBoardLink(_VersionLink):
    """Adds a second file to the version's folder, which TensorBoard shows as one run.

    The first file is not read back. It is flushed after each round, so a kill loses no row of the
    checkpoint.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        self.logger._default_hp_metric = False  # a chart of the number -1
        super().start(run, state)

    def _resume(self, run: Run, last: int) -> int:
        # TensorBoard then drops the rounds after the checkpoint, which are done again.
        self.logger._kwargs["purge_step"] = run.round + 1
        return last

    def show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        for name, figure in pictures.items():
            self.logger.experiment.add_figure(name, figure, global_step=round, close=False)
        if pictures:
            self.logger.save()


class MLflowLink(LoggerLink):
    """Continues the same MLflow run, with metric names that every MLflow store accepts.

    The server is asked for its last round, which may be later than the checkpoint.

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
            number, run_id = _last_name(self.logger), self.logger.run_id
            history = self.logger.experiment.get_metric_history(run_id, number)
            self.last = max((metric.step for metric in history), default=0)
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


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a CSVLogger file as text, without empty cells.

    Only the step is a number.
    """
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]  # a kill truncates the last line
    rows = [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(whole.splitlines())]
    return [{**row, "step": int(row["step"])} for row in rows if row.get("step", "").isdigit()]


def _mlflow_name(name: str) -> str:
    """Return a name with one folder (three for a client) and only characters MLflow allows."""
    folders = 3 if name.startswith("client/") else 1
    *parents, last = name.split("/", folders)
    return re.sub(r"[^\w/. -]", "_", "/".join([*parents, last.replace("/", ".")]), flags=re.ASCII)
