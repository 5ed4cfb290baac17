"""The federation's metrics in Lightning's loggers, with the round as their axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from flsuite.arguments import NonNegativeInt, Settings
from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.callbacks.logger_links import (
    CSVLink,
    LoggerLink,
    MLflowLink,
    RoundNumbers,
    TensorBoardLink,
)
from flsuite.callbacks.wandb_link import WandbLink
from flsuite.runs.run import Run

_LINKS: tuple[tuple[type[Logger], type[LoggerLink]], ...] = (
    (WandbLogger, WandbLink),
    (CSVLogger, CSVLink),
    (TensorBoardLogger, TensorBoardLink),
    (MLFlowLogger, MLflowLink),
)


@dataclass(eq=False)
class RoundLogger(FederationCallback, Settings):
    """Sends every round's metrics to all loggers, as ``<split>/<metric>``.

    Virtual seconds, wall seconds, client updates and bytes so far go with them, so that a chart can
    have any of these as its horizontal axis. Scores of single clients go to W&B as tables and as a
    picture. ``metrics.csv`` of the run has all of them.

    A resumed federation goes on in the same W&B run, TensorBoard version, CSV file or MLflow run. A
    round that was logged but not saved when the run was killed is logged again.

    Args:
        log_model: Whether to upload the final model to W&B as an artifact.
        per_client: Largest number of clients whose numbers are logged one by one, as
            ``client/<n>/<split>/<metric>``. The default is none, because every number becomes a
            chart. Mean, worst and spread are always logged.
    """

    affects: ClassVar[Affects] = "nothing"

    log_model: bool = False
    per_client: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._links: list[LoggerLink] = []
        self._states: list[dict[str, Any]] = []  # of loggers that this process does not have

    def on_federation_start(self, run: Run) -> None:
        self._links = []
        if run.round == 0:
            self._states = []
        for logger in run.loggers:
            link = _link(logger, self.log_model)
            link.start(run, self._take_state(link))
            self._links.append(link)

    def on_round_start(self, run: Run, round: int, clients: Any) -> None:
        for link in self._links:
            link.start_round(run)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        of_clients = {name: v for name, v in metrics.items() if name.startswith("client/")}
        numbers = {name: v for name, v in metrics.items() if name not in of_clients}
        clock = run.federation.clock
        totals = {
            "virtual_s": clock.seconds,
            "wall_s": run.summary.wall_seconds,
            "client_updates": clock.client_updates,
            "bytes": clock.bytes,
            "total/bytes_up": run.summary.bytes_up,
            "total/bytes_down": run.summary.bytes_down,
        }
        shown = of_clients if run.federation.data.clients <= self.per_client else {}
        row = RoundNumbers(round, {**numbers, **shown, **totals}, of_clients)
        for link in self._links:
            link.log(run, row)

    def on_federation_end(self, run: Run) -> None:
        for link in self._links:
            link.finish(run)

    def state_dict(self) -> dict[str, Any]:
        return {"loggers": [*(link.state_dict() for link in self._links), *self._states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict.get("loggers", []))
        if state_dict.get("wandb_id"):  # of an earlier version
            self._states = [{"link": WandbLink.__name__, "id": state_dict["wandb_id"]}]

    def _take_state(self, link: LoggerLink) -> dict[str, Any]:
        """Return what a link of this kind has saved, if any, and keep the states of the others."""
        for place, state in enumerate(self._states):
            if state["link"] == type(link).__name__:
                return self._states.pop(place)
        return {}


def _link(logger: Logger, log_model: bool) -> LoggerLink:
    for kind, link in _LINKS:
        if isinstance(logger, kind):
            return WandbLink(logger, log_model) if link is WandbLink else link(logger)
    return LoggerLink(logger)
