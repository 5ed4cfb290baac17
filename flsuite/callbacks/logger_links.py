"""The ways of a round's numbers into the loggers of Lightning, and how each of them is resumed."""

import csv
import logging
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from flsuite.errors import one_line
from flsuite.runs.run import Run

log = logging.getLogger("flsuite")

_LONGEST = 64  # characters of a tag in W&B


def run_name(settings: Mapping[str, Any]) -> str:
    """Return the method and the seed, such as ``FedProx-1``."""
    return f"{_class_name(settings['aggregator'])}-{settings['seed']}"


def group_name(settings: Mapping[str, Any]) -> str:
    """Return the method and a hash that runs share if they differ in nothing but the seed.

    For example ``FedProx-1a2b3c4d``. Groups are those of ``flsuite report``.
    """
    from flsuite.analysis.groups import experiment_hash  # pandas is of no use before

    return f"{_class_name(settings['aggregator'])}-{experiment_hash(settings)}"


def tags(settings: Mapping[str, Any]) -> list[str]:
    """Return the dataset and the partition, such as ``retinamnist`` and ``Dirichlet(0.05)``."""
    arguments = settings["data"].get("init_args", {})
    dataset = arguments.get("name") or _class_name(settings["data"])
    partition = arguments.get("partition")
    found = [str(dataset), *([_with_value(partition)] if isinstance(partition, Mapping) else [])]
    return [tag[:_LONGEST] for tag in found]


def _class_name(description: Mapping[str, Any]) -> str:
    return str(description["class_path"]).rsplit(".", 1)[-1]


def _with_value(description: Mapping[str, Any]) -> str:
    """Return a class with its first argument, which is the one that every use of it sets."""
    arguments = description.get("init_args", {})
    first = next((value for value in arguments.values() if value is not None), None)
    return _class_name(description) + ("" if first is None else f"({first})")


_MOST_METRICS = 500  # MLflow takes at most 1,000 at once


@dataclass(frozen=True)
class RoundNumbers:
    """The numbers of a round.

    Attributes:
        round: The round.
        numbers: Those for every logger.
        of_clients: The numbers of single clients, as ``client/<n>/<split>/<metric>``.
    """

    round: int
    numbers: dict[str, float]
    of_clients: dict[str, float]


class LoggerLink:
    """Sends the numbers of a run to any logger, with the round as the step.

    Args:
        logger: The logger.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger

    def start(self, run: Run, state: dict[str, Any]) -> None:
        """Begin, or go on where :meth:`state_dict` was called. The state is then not empty."""
        self.logger.log_hyperparams(run.settings)

    def start_round(self, run: Run) -> None:
        """Handle the start of a round. The engine is running."""

    def log(self, run: Run, row: RoundNumbers) -> None:
        """Send the numbers of a round."""
        self.logger.log_metrics(row.numbers, step=row.round)

    def finish(self, run: Run) -> None:
        """End the log of the run."""
        self.logger.finalize(run.status)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {"link": type(self).__name__}


class _VersionLink(LoggerLink, ABC):
    """Goes on in the version, which is a folder, of the run that is resumed.

    Each round is written at once. A killed run then has lost nothing.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        if state and self.logger._version is None:
            self.logger._version = state["version"]
        if state:
            self.go_on(run)
        else:
            super().start(run, state)

    @abstractmethod
    def go_on(self, run: Run) -> None:
        """Open the files of the run that is resumed."""

    def log(self, run: Run, row: RoundNumbers) -> None:
        super().log(run, row)
        self.logger.save()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.logger.version}


class CSVLink(_VersionLink):
    """Keeps the rows of the earlier rounds, which Lightning's logger deletes when it starts."""

    def go_on(self, run: Run) -> None:
        earlier = _read_rows(Path(self.logger.log_dir) / "metrics.csv")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "previous log files will be deleted"
            self.logger.log_hyperparams(run.settings)
        # Rounds after the checkpoint are done again.
        for row in earlier:
            if (step := int(row.pop("step"))) <= run.round:
                self.logger.log_metrics(row, step=step)
        self.logger.save()


class TensorBoardLink(_VersionLink):
    """Adds a second file to the version's folder, which TensorBoard shows as one run."""

    def go_on(self, run: Run) -> None:
        # TensorBoard then drops rounds after the checkpoint, which are done again.
        self.logger._kwargs["purge_step"] = run.round + 1


class MLflowLink(LoggerLink):
    """Goes on in the same MLflow run, and names metrics so that every store of MLflow takes them.

    A file store cannot have both ``test/accuracy`` and ``test/accuracy/0``: one of them would be a
    folder. The second one becomes ``test/accuracy.0``.
    """

    def start(self, run: Run, state: dict[str, Any]) -> None:
        if self.logger._run_name is None:
            self.logger._run_name = run_name(run.settings)
        if self._can_resume(state):
            return
        super().start(run, state)

    def log(self, run: Run, row: RoundNumbers) -> None:
        numbers = [(_mlflow_name(name), value) for name, value in row.numbers.items()]
        for first in range(0, len(numbers), _MOST_METRICS):
            self.logger.log_metrics(dict(numbers[first : first + _MOST_METRICS]), step=row.round)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run_id": self.logger._run_id}

    def _can_resume(self, state: dict[str, Any]) -> bool:
        """Open the MLflow run again, if it is still there."""
        if not state or self.logger._run_id is not None:
            return False
        from mlflow.exceptions import MlflowException

        self.logger._run_id = state["run_id"]
        try:
            self.logger.experiment.update_run(state["run_id"], status="RUNNING")
        except MlflowException as error:
            log.warning("MLflow: the run is not there, starting a new one (%s)", one_line(error))
            self.logger._run_id = None
            return False
        return True


def _read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a file of Lightning's CSVLogger, without the empty cells."""
    if not path.is_file():
        return []
    rows = []
    with path.open(newline="", errors="replace") as file:
        for cells in csv.DictReader(file):
            row = {}
            for name, cell in cells.items():
                with suppress(ValueError, TypeError):  # empty, or cut off by a kill
                    row[name] = float(cell)
            if math.isfinite(row.get("step", math.nan)):
                rows.append(row)
    return rows


def _mlflow_name(name: str) -> str:
    """Return a name with one folder, or two more for a client, and with characters of MLflow."""
    folders = 3 if name.startswith("client/") else 1
    *parents, last = name.split("/", folders)
    return re.sub(r"[^\w/. -]", "_", "/".join([*parents, last.replace("/", ".")]), flags=re.ASCII)
