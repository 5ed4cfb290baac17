"""Tables and figures of finished runs, based only on the files of the runs."""

from flsuite.analysis.clients import (
    client_gains as client_gains,
    clients_figure as clients_figure,
    confusion_figure as confusion_figure,
    confusion_matrix as confusion_matrix,
    gain_figure as gain_figure,
)
from flsuite.analysis.comparison import compare as compare
from flsuite.analysis.cross import (
    cross_figure as cross_figure,
    cross_markdown as cross_markdown,
    cross_matrices as cross_matrices,
    cross_table as cross_table,
)
from flsuite.analysis.curves import (
    curves_figure as curves_figure,
    gamma_figure as gamma_figure,
    run_figure as run_figure,
)
from flsuite.analysis.groups import find_runs as find_runs, group_runs as group_runs
from flsuite.analysis.latent import (
    flow_figure as flow_figure,
    latent_figure as latent_figure,
    load_model as load_model,
)
from flsuite.analysis.latex import latex_table as latex_table
from flsuite.analysis.listing import list_runs as list_runs
from flsuite.analysis.partition import (
    forgetting_figure as forgetting_figure,
    label_skew as label_skew,
    partition_figure as partition_figure,
    partitions_figure as partitions_figure,
    task_plan_figure as task_plan_figure,
)
from flsuite.analysis.ranking import Ranks as Ranks, ranks as ranks, ranks_figure as ranks_figure
from flsuite.analysis.report import (
    report_markdown as report_markdown,
    report_table as report_table,
    target_figure as target_figure,
    target_table as target_table,
)
from flsuite.analysis.results import Results as Results, load as load
from flsuite.analysis.runs import read_metrics as read_metrics, read_partition as read_partition
from flsuite.analysis.timeline import (
    read_timeline as read_timeline,
    timeline_figure as timeline_figure,
)
