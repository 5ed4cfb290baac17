"""The scores of one run that experiments are compared by."""

import pandas as pd

from flsuite import metrics
from flsuite.analysis.runs import curve

_UP = (
    "accuracy",
    "f1_macro",
    "balanced_accuracy",
    "auroc",
    "probe_",
    "task_",
    "backward_",
    "forward_",
    "sample_agreement",
)
_DOWN = ("loss", "nll", "kl", "reconstruction", "forgetting", "flow_nll")


def lower_is_better(metric: str) -> bool | None:
    """Return whether low values of a score are good, or ``None`` if that is not known.

    Without it no round can be called the best.
    """
    metric = metric.removeprefix("all_clients/")
    if metric.endswith("_std") or metric.startswith(_DOWN):
        return True
    # Any other name is one that a model of the user's own has logged.
    return False if metric.startswith(_UP) else metrics.lower_is_better(metric)


def run_scores(table: pd.DataFrame, metric: str, monitor: str, last: int) -> dict[str, float]:
    """Return the test scores of one run, or nothing if it has no such score.

    Args:
        table: The metrics of the run.
        metric: The score.
        monitor: The score on validation data that picks a round.
        last: Rounds that ``mean_last`` is the mean of.

    Returns:
        ``last`` is the score of the last round. ``picked`` is that of the round whose ``monitor``
        is best on validation data, of equals the earlier one. ``mean_last`` is the mean over the
        last rounds. ``best_on_test`` is for comparison with tables that were made so: no honest
        choice could have picked it.
    """
    table = of_last_task(table)
    test, validation = curve(table, metric, "test"), curve(table, monitor, "val")
    if test.empty:
        return {}
    scores = {"last": float(test.iloc[-1]), "mean_last": float(test.iloc[-last:].mean())}

    validation = validation[validation.index.isin(test.index)].dropna()
    if len(validation) and lower_is_better(monitor) is not None:
        losses = validation if lower_is_better(monitor) else -validation
        picked = validation.index[int(losses.argmin())]  # argmin gives the earlier of equals
        scores |= {"picked": float(test[picked]), "picked_round": float(picked)}

    if (lower := lower_is_better(metric)) is not None:
        scores["best_on_test"] = float(test.min() if lower else test.max())
    return scores


def of_last_task(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rounds of the last task of a sequence, or all rounds if there are no tasks.

    Scores after different tasks are not of the same classes.
    """
    tasks = curve(table, "task", "train")
    return table[table["round"].isin(tasks.index[tasks == tasks.max()])] if len(tasks) else table
