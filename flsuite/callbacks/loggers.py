"""The callback that sends the federation's metrics to Lightning's loggers, by round."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.callbacks.logger_links import (
    LAST_NUMBER,
    NOTHING,
    CSVLink,
    LoggerLink,
    MLflowLink,
    RoundNumbers,
    TensorBoardLink,
)
from flsuite.callbacks.pictures import final_pictures, first_pictures
from flsuite.callbacks.wandb_link import WandbLink
from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("flsuite")

_LINKS: tuple[tuple[type[Logger], type[LoggerLink]], ...] = (
    (WandbLogger, WandbLink),
    (CSVLogger, CSVLink),
    (TensorBoardLogger, TensorBoardLink),
    (MLFlowLogger, MLflowLink),
)


@dataclass(eq=False)
class RoundLogger(FederationCallback, Settings):
    """Sends every round's metrics to all loggers, as ``<split>/<metric>``.

    Virtual seconds, wall seconds, client updates and bytes so far are sent too, so that a chart can
    use any of them as its horizontal axis. W&B gets the scores of single clients as tables; the
    run's ``metrics.csv`` has all of them. W&B, TensorBoard and MLflow get pictures: the partition,
    the clients over the rounds, the timeline, the confusion matrix, and those of
    :meth:`~flsuite.runs.run.Run.log_picture`. With ``log_model`` of Lightning's ``WandbLogger``,
    W&B gets the final model.

    A resumed federation continues the same W&B run, TensorBoard version, CSV file or MLflow run.
    Rounds missing from the log are sent from ``metrics.csv``: rounds that were in transit when the
    run was killed, or all earlier rounds if the logger is new.

    Args:
        per_client: Log the numbers of single clients, as ``client/<n>/<split>/<metric>``, if there
            are at most this many clients. The default is 0, because every number becomes a chart.
            Mean, worst and spread are always logged.
    """

    affects: ClassVar[Affects] = "nothing"

    per_client: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._links: list[LoggerLink] = []
        self._states: list[dict[str, Any]] = []  # of loggers missing in this process

    def on_federation_start(self, run: Run) -> None:
        if run.round + 1 == run.federation.first_round:  # a fork has its parent's states
            self._states = []
        self._links = []
        for logger in run.loggers:
            link = _link(logger)
            link.start(run, self._take_state(link))
            self._links.append(link)
        empty = [link for link in self._links if link.last == NOTHING]
        _show(0, lambda: first_pictures(run), empty)
        self._send_missing(run)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        row = _latest_round(run, metrics, self._with_clients(run))
        for link in self._links:
            link.log(run, row)

    def on_federation_end(self, run: Run) -> None:
        if run.status == "success" and run.round:
            _show(run.round, lambda: final_pictures(run), self._links)
        for link in self._links:
            link.finish(run)

    def state_dict(self) -> dict[str, Any]:
        return {"loggers": [*(link.state_dict() for link in self._links), *self._states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict.get("loggers", []))
        if state_dict.get("wandb_id"):  # from an earlier version of flsuite
            self._states = [{"link": WandbLink.__name__, "id": state_dict["wandb_id"]}]

    def _with_clients(self, run: Run) -> bool:
        """Return whether there are few enough clients to log each of them."""
        return run.federation.data.clients <= self.per_client

    def _send_missing(self, run: Run) -> None:
        """Send the rounds missing from the logs of a resumed run, from the run's table."""
        lacking = [link for link in self._links if link.last < run.round]
        for link in lacking:
            kind, first = type(link.logger).__name__, max(link.last, 0) + 1
            missing = run.round + 1 - first
            log.info("%s: sending %d missing rounds to the log, from %d on", kind, missing, first)
        for row in _earlier_rounds(run, self._with_clients(run)) if lacking else ():
            for link in lacking:
                link.log(run, row)

    def _take_state(self, link: LoggerLink) -> dict[str, Any]:
        """Remove and return the saved state of a link of this kind, or an empty mapping."""
        for place, state in enumerate(self._states):
            if state["link"] == type(link).__name__:
                return self._states.pop(place)
        return {}


def _show(round: int, draw: Callable[[], dict[str, "Figure"]], links: Sequence[LoggerLink]) -> None:
    """Draw pictures and send them to the loggers that accept pictures."""
    links = [link for link in links if type(link).show is not LoggerLink.show]
    pictures = draw() if links else {}
    for link in links:
        link.try_to_show(round, pictures)


def _link(logger: Logger) -> LoggerLink:
    kinds = (link for kind, link in _LINKS if isinstance(logger, kind))
    return next(kinds, LoggerLink)(logger)


def _latest_round(run: Run, named: Mapping[str, float], with_clients: bool) -> RoundNumbers:
    """Return the numbers of the round just done.

    Args:
        run: The run.
        named: All numbers of the round, as ``<split>/<metric>`` and
            ``client/<n>/<split>/<metric>``.
        with_clients: Whether the numbers of single clients go to every logger too.
    """
    clock, summary = run.federation.clock, run.summary
    traffic, wall = (summary.bytes_up, summary.bytes_down), summary.wall_seconds
    axes = _axes(clock.seconds, wall, clock.client_updates, clock.bytes, *traffic)
    return _numbers(run.round, named, axes, with_clients, run.pictures)


def _earlier_rounds(run: Run, with_clients: bool) -> Iterator[RoundNumbers]:
    """Yield the numbers of all rounds in the run's table, up to its checkpoint."""
    up = down = 0.0
    for round, rows in groupby(run.folder.table.rows, key=attrgetter("round")):
        named = {}
        for row in rows:
            of = "" if row.scope == GLOBAL else f"client/{row.scope}/"
            named[f"{of}{row.split}/{row.metric}"] = row.value
        up += named.get("train/bytes_up", 0.0)
        down += named.get("train/bytes_down", 0.0)
        axes = _axes(row.virtual_s, row.wall_s, row.client_updates, row.bytes, up, down)
        yield _numbers(round, named, axes, with_clients, {})


def _axes(
    virtual_s: float, wall_s: float, client_updates: int, bytes: int, up: float, down: float
) -> dict[str, float]:
    return {
        "virtual_s": virtual_s,
        "client_updates": client_updates,
        "bytes": bytes,
        "total/bytes_up": up,
        "total/bytes_down": down,
        LAST_NUMBER: wall_s,
    }


def _numbers(
    round: int,
    named: Mapping[str, float],
    axes: Mapping[str, float],
    with_clients: bool,
    pictures: Mapping[str, "Figure"],
) -> RoundNumbers:
    of_clients = {name: v for name, v in named.items() if name.startswith("client/")}
    numbers = {name: v for name, v in named.items() if with_clients or name not in of_clients}
    return RoundNumbers(round, {**numbers, **axes}, of_clients, pictures)
