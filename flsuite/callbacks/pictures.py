"""Pictures of a run for its loggers, as matplotlib figures."""

from typing import TYPE_CHECKING

from flsuite.common.score_names import score_of
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.predictions import class_probabilities
from flsuite.runs.run import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MOST_CLASSES = 100


def first_pictures(run: Run) -> dict[str, "Figure"]:
    """Draw the picture that is available before the first round: the partition."""
    from flsuite.analysis.partition import partition_figure
    from flsuite.runs.predictions import partition_table

    return {"partition": partition_figure(partition_table(run.federation.data))}


def final_pictures(run: Run) -> dict[str, "Figure"]:
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

    if run.folder.path is not None and run.federation.schedule.declarations.is_virtual:
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

    probabilities = class_probabilities(federation, run.evaluator)
    run.evaluator.load(federation.client_state(None))  # the resident model is the global one again
    return count_pairs(targets.numpy(), probabilities.argmax(1).numpy(), list(data.spec.names))
