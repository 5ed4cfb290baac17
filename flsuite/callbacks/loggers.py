"""The callback that sends the federation's metrics to Lightning's loggers, by round."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    CSVLink,
    LoggerLink,
    MLflowLink,
    TensorBoardLink,
    rounds_of,
)
from flsuite.callbacks.pictures import final_pictures, first_pictures
from flsuite.callbacks.round_numbers import earlier_rounds, latest_round
from flsuite.callbacks.wandb_link import WandbLink
from flsuite.common.arguments import NonNegativeInt, Settings
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
        if run.round == 0:
            self._states = []
        self._links = []
        for logger in run.loggers:
            link = _link(logger)
            link.start(run, self._take_state(link))
            self._links.append(link)
        _show(0, lambda: first_pictures(run), [link for link in self._links if 0 not in link.held])
        self._send_missing(run)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        row = latest_round(run, metrics, self._with_clients(run))
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
        done = rounds_of(run) - {0}
        lacking = [link for link in self._links if done - link.held]
        if not lacking:
            return
        for link in lacking:
            rounds = sorted(done - link.held)
            kind = type(link.logger).__name__
            log.info(
                "%s: sending %d missing rounds to the log, from %d on", kind, len(rounds), rounds[0]
            )
        for row in earlier_rounds(run, self._with_clients(run)):
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
