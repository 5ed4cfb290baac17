"""The callback that sends the federation's metrics and pictures to Lightning's loggers."""

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
from flsuite.callbacks.wandb_link import WandbLink
from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.common.errors import log
from flsuite.common.score_names import score_of
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.run import Run
from flsuite.runs.scoring import class_probabilities

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_LINKS: tuple[tuple[type[Logger], type[LoggerLink]], ...] = (
    (WandbLogger, WandbLink),
    (CSVLogger, CSVLink),
    (TensorBoardLogger, TensorBoardLink),
    (MLFlowLogger, MLflowLink),
)


@dataclass(eq=False)
class RoundLogger(FederationCallback, Settings):
    """Sends every round's metrics to all loggers, as ``<split>/<metric>``.

    Take it to choose what the loggers get. Every run with a logger has it.

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
            kinds = (link for kind, link in _LINKS if isinstance(logger, kind))
            link = next(kinds, LoggerLink)(logger)
            link.start(run, self._take_state(link))
            self._links.append(link)
        empty = [link for link in self._links if link.last == NOTHING]
        _show(0, lambda: _first_pictures(run), empty)
        self._send_missing(run)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        clock, summary = run.federation.clock, run.summary
        traffic = clock.bytes, summary.bytes_up, summary.bytes_down
        axes = clock.seconds, clock.client_updates, *traffic, summary.wall_seconds
        row = _numbers(round, metrics, axes, self._with_clients(run), run.pictures)
        for link in self._links:
            link.log(run, row)

    def on_federation_end(self, run: Run) -> None:
        if run.status == "success" and run.round:
            _show(run.round, lambda: _final_pictures(run), self._links)
        for link in self._links:
            link.finish(run)

    def state_dict(self) -> dict[str, Any]:
        return {"loggers": [*(link.state_dict() for link in self._links), *self._states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict.get("loggers", []))

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
        axes = row.virtual_s, row.client_updates, row.bytes, up, down, row.wall_s
        yield _numbers(round, named, axes, with_clients, {})


_AXES = ("virtual_s", "client_updates", "bytes", "total/bytes_up", "total/bytes_down", LAST_NUMBER)


def _numbers(
    round: int,
    named: Mapping[str, float],
    axes: tuple[float, ...],
    with_clients: bool,
    pictures: Mapping[str, "Figure"],
) -> RoundNumbers:
    """Return the numbers of a round for the loggers.

    Args:
        round: The round.
        named: Its numbers, as ``<split>/<metric>`` and ``client/<n>/<split>/<metric>``.
        axes: The numbers named by :data:`_AXES`.
        with_clients: Whether the numbers of single clients go to every logger too.
        pictures: The pictures of callbacks.
    """
    of_clients = {name: v for name, v in named.items() if name.startswith("client/")}
    numbers = {name: v for name, v in named.items() if with_clients or name not in of_clients}
    numbers |= zip(_AXES, axes, strict=True)
    return RoundNumbers(round, numbers, of_clients, pictures)


_MOST_CLASSES = 100


def _first_pictures(run: Run) -> dict[str, "Figure"]:
    """Draw the picture that is available before the first round: the partition."""
    from flsuite.analysis.partition import partition_figure
    from flsuite.runs.partition import partition_table

    return {"partition": partition_figure(partition_table(run.federation.data))}


def _final_pictures(run: Run) -> dict[str, "Figure"]:
    """Draw the pictures of a finished run, as far as it has the data.

    They are the clients' scores over the rounds, the timeline if time is virtual, and the confusion
    matrix on test data.
    """
    pictures = {}
    # The first of these that clients have.
    for metric in (score_of(run.summary.monitor), "accuracy", "loss"):
        scores = client_rounds(run, metric)
        if not scores.empty:
            title = f"test {metric.replace('_', ' ')}"
            pictures["clients/heatmap"] = _client_figure(scores, title)
            break

    if run.folder.path is not None and run.federation.schedule.is_virtual:
        from flsuite.analysis.timeline import read_timeline, timeline_figure

        timeline = read_timeline(run.folder.path)
        if not timeline.empty:
            pictures["timeline"] = timeline_figure(timeline)

    if (counts := confusion_counts(run)) is not None:
        from flsuite.analysis.clients import draw_confusion

        pictures["confusion"] = draw_confusion({f"test data, round {run.round}": counts})
    return pictures


def client_rounds(run: Run, metric: str) -> "pd.DataFrame":
    """Return the clients' test scores, with clients as rows and rounds as columns.

    Missing scores are NaN.
    """
    import pandas as pd

    rows = [
        (int(row.scope), row.round, row.value)
        for row in run.folder.table.rows
        if row.scope != GLOBAL and row.split == "test" and row.metric == metric
    ]
    table = pd.DataFrame(rows, columns=["client", "round", "value"])
    return table.pivot(index="client", columns="round", values="value")


def _client_figure(scores: "pd.DataFrame", title: str) -> "Figure":
    """Draw the scores of clients (rows) over rounds (columns) as colors."""
    from matplotlib.figure import Figure

    from flsuite.analysis.panels import draw_client_rounds

    clients, rounds = scores.shape
    size = min(3.2 + 0.12 * rounds, 11), min(1.6 + 0.22 * clients, 9)
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    figure.colorbar(draw_client_rounds(panel, scores), ax=panel, label=title)
    return figure


def confusion_counts(run: Run) -> "pd.DataFrame | None":
    """Count the test samples by true class (row) and class predicted by the global model (column).

    If each client has its own model, the mean of their predictions is used. The result is ``None``
    unless targets are one class per sample, and if the server cannot get the clients' models.
    """
    federation = run.federation
    data = federation.data  # all tasks, if there are any
    targets = data.test.y
    is_one_class = targets.ndim == 1 and not targets.is_floating_point()
    is_shown = is_one_class and 2 <= data.spec.num_classes <= _MOST_CLASSES
    has_models = not federation.entries.personal or (
        federation.clients.is_local and data.clients <= run.options.score_clients
    )
    if not (is_shown and has_models and run.evaluator.has_classes):
        return None

    from flsuite.analysis.clients import count_pairs

    probabilities, _ = class_probabilities(federation, run.evaluator)
    run.evaluator.load(federation.client_state(None))  # the resident model is the global one again
    return count_pairs(targets.numpy(), probabilities.argmax(1).numpy(), list(data.spec.names))
