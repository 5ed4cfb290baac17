"""Tables and pictures of a run for Weights & Biases."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flsuite.runs.predictions import predict
from flsuite.runs.run import Run
from flsuite.server.evaluation import GLOBAL

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MOST_CLASSES = 100  # W&B draws at most 10,000 cells


def client_table(run: Run, of_clients: Mapping[str, float]) -> dict[str, Any]:
    """Return one row per client of an evaluation: client, training samples, scores.

    It is empty in a round that is not scored.

    Args:
        run: The run.
        of_clients: Numbers named ``client/<n>/<split>/<metric>``.
    """
    scores: dict[int, dict[str, float]] = {}
    for name, value in of_clients.items():
        _, client, split, metric = name.split("/", 3)
        if split != "train" and metric != "samples":
            scores.setdefault(int(client), {})[f"{split}/{metric}"] = value
    if not scores:
        return {}

    import wandb

    data = run.federation.data.at(run.round)
    names = list(dict.fromkeys(name for row in scores.values() for name in row))
    rows = [
        [client, data.samples(client), *(row.get(name) for name in names)]
        for client, row in sorted(scores.items())
    ]
    return {"clients": wandb.Table(columns=["client", "samples", *names], data=rows)}


def partition_picture(run: Run) -> dict[str, Any]:
    """Return the picture of the partition."""
    from flsuite.analysis import partition_figure
    from flsuite.runs.partition import partition_table

    return {"partition": _image(partition_figure(partition_table(run.federation.data)))}


def final_pictures(run: Run) -> dict[str, Any]:
    """Return the clients' scores over the rounds, and who trained when if times are virtual."""
    pictures = {}
    for metric in (run.summary.monitor, "accuracy", "loss"):  # the first that clients have
        scores = client_rounds(run, metric)
        if not scores.empty:
            title = f"test {metric.replace('_', ' ')}"
            pictures["clients/heatmap"] = _image(client_figure(scores, title))
            break

    if run.folder.path is not None and run.federation.schedule.declarations.is_virtual:
        from flsuite.analysis import read_timeline, timeline_figure

        timeline = read_timeline(run.folder.path)
        if not timeline.empty:
            pictures["timeline"] = _image(timeline_figure(timeline))
    return pictures


def client_rounds(run: Run, metric: str) -> "pd.DataFrame":
    """Return the clients' test scores, with clients as rows and rounds as columns.

    A score that is missing is NaN.
    """
    import pandas as pd

    rows = [
        (int(row.scope), row.round, row.value)
        for row in run.folder.table.rows
        if row.scope != GLOBAL and row.split == "test" and row.metric == metric
    ]
    table = pd.DataFrame(rows, columns=["client", "round", "value"])
    return table.pivot(index="client", columns="round", values="value")


def client_figure(scores: "pd.DataFrame", title: str) -> "Figure":
    """Draw the scores of clients (rows) over rounds (columns) as colors."""
    from matplotlib.figure import Figure

    from flsuite.analysis.panels import draw_client_rounds

    clients, rounds = scores.shape
    size = min(3.2 + 0.12 * rounds, 11), min(1.6 + 0.22 * clients, 9)
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    figure.colorbar(draw_client_rounds(panel, scores), ax=panel, label=title)
    return figure


def confusion_chart(run: Run) -> dict[str, Any]:
    """Return the confusion matrix of the global model on test data, as a chart of W&B.

    It is that of the mean prediction where each client has a model of its own. There is none for
    other targets than one class per sample, and where the server cannot have the clients' models.
    """
    federation = run.federation
    data = federation.data  # of all tasks, if there are any
    classes = data.spec.num_classes
    targets = data.test.y
    is_one_class = targets.ndim == 1 and not targets.is_floating_point()
    is_shown = is_one_class and 2 <= classes <= _MOST_CLASSES
    has_models = not federation.entries.personal or (
        federation.clients.is_local and data.clients <= run.options.score_clients
    )
    if not (is_shown and has_models):
        return {}

    import wandb

    probabilities, _ = predict(federation, run.evaluator, None)
    run.evaluator.load(federation.client_state(None))  # the resident model is the global one again
    chart = wandb.plot.confusion_matrix(
        preds=probabilities.argmax(1).tolist(),
        y_true=targets.tolist(),
        class_names=list(data.spec.names),
        title="test data",
    )
    return {"confusion": chart}


def _image(figure: "Figure") -> Any:
    import wandb

    return wandb.Image(figure)
