"""Tables and figures of finished runs, from the files of a run and nothing else."""

from flsuite.analysis.groups import find_runs, group_runs
from flsuite.analysis.partition import partition_figure
from flsuite.analysis.report import report_figure, report_markdown, report_table
from flsuite.analysis.runs import curves_figure, read_metrics, read_partition
from flsuite.analysis.tasks import task_plan_figure
from flsuite.analysis.timeline import read_timeline, timeline_figure

__all__ = [
    "curves_figure",
    "find_runs",
    "group_runs",
    "partition_figure",
    "read_metrics",
    "read_partition",
    "read_timeline",
    "report_figure",
    "report_markdown",
    "report_table",
    "task_plan_figure",
    "timeline_figure",
]
