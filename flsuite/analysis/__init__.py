"""Tables and figures of finished runs, based only on the files of the runs."""

from flsuite.analysis.clients import (
    client_gains,
    clients_figure,
    confusion_figure,
    confusion_matrix,
    gain_figure,
)
from flsuite.analysis.comparison import compare
from flsuite.analysis.cross import cross_figure, cross_markdown, cross_matrices, cross_table
from flsuite.analysis.curves import curves_figure, gamma_figure, run_figure
from flsuite.analysis.groups import find_runs, group_runs
from flsuite.analysis.latent import flow_figure, latent_figure, load_model
from flsuite.analysis.latex import latex_table
from flsuite.analysis.listing import list_runs
from flsuite.analysis.partition import (
    forgetting_figure,
    label_skew,
    partition_figure,
    partitions_figure,
    task_plan_figure,
)
from flsuite.analysis.ranking import Ranks, ranks, ranks_figure
from flsuite.analysis.report import report_markdown, report_table, target_figure, target_table
from flsuite.analysis.results import Results, load
from flsuite.analysis.runs import read_metrics, read_partition
from flsuite.analysis.timeline import read_timeline, timeline_figure

__all__ = [
    "Ranks",
    "Results",
    "client_gains",
    "clients_figure",
    "compare",
    "confusion_figure",
    "confusion_matrix",
    "cross_figure",
    "cross_markdown",
    "cross_matrices",
    "cross_table",
    "curves_figure",
    "find_runs",
    "flow_figure",
    "forgetting_figure",
    "gain_figure",
    "gamma_figure",
    "group_runs",
    "label_skew",
    "latent_figure",
    "latex_table",
    "list_runs",
    "load",
    "load_model",
    "partition_figure",
    "partitions_figure",
    "ranks",
    "ranks_figure",
    "read_metrics",
    "read_partition",
    "read_timeline",
    "report_markdown",
    "report_table",
    "run_figure",
    "target_figure",
    "target_table",
    "task_plan_figure",
    "timeline_figure",
]
