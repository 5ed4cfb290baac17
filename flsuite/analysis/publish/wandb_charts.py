"""Charts of a federation in Weights & Biases, as a report or as a workspace of a project.

They are built without network calls. The package ``wandb-workspaces`` validates them.
"""

import os
from collections.abc import Callable
from typing import Any

from flsuite.common.errors import FlsuiteError, one_line, require_extra
from flsuite.common.score_names import shown_score

_AXES = {  # as they are logged, see RoundLogger
    "round": "round",
    "bytes": "bytes sent and received",
    "virtual_s": "virtual seconds",
    "client_updates": "client updates",
    "wall_s": "seconds",
}
_GAMMA = ("gamma", "gamma_relative", "gamma_orig", "R", "Phi")


def panels() -> Any:
    """Return W&B's module of panels.

    Raises:
        FlsuiteError: If the extra is not installed.
    """
    require_extra("this command", ("wandb_workspaces",), "workspaces")
    import wandb_workspaces.reports.v2 as module

    return module


def sections(metric: str) -> dict[str, list[Any]]:
    """Return the panels of each section.

    The charts expect runs grouped by their W&B group. A curve is then a mean over seeds, and its
    band is the standard deviation.

    Args:
        metric: The score to compare, such as ``accuracy``.
    """
    wr = panels()

    def lines(title: str, *names: str, x: str = "round") -> Any:
        return wr.LinePlot(
            title=title,
            x=x,
            y=list(names),
            title_x=_AXES[x],
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
        )

    score = shown_score(metric)
    return {
        score[0].upper() + score[1:]: [
            lines(f"test {score} by {title}", f"test/{metric}", x=x) for x, title in _AXES.items()
        ],
        "Last and picked round": [
            wr.BarPlot(title=title, metrics=[wr.SummaryMetric(name)])
            for title, name in (
                (f"last round: test {score}", f"last/test/{metric}"),
                (f"picked on validation data: test {score}", f"picked/test/{metric}"),
                ("rounds to the target", "rounds_to_target"),
            )
        ],
        "Dissimilarity of gradients": [lines(name, f"train/{name}") for name in _GAMMA],
        "Clients": [
            lines("mean over clients", f"test/{metric}_client_mean"),
            lines("worst client", f"test/{metric}_client_worst"),
            lines("spread over clients", f"test/{metric}_client_std"),
            wr.MediaBrowser(title="clients over rounds", media_keys=["clients/heatmap"]),
            wr.WeavePanelSummaryTable(table_name="clients"),
        ],
        "Partition": [
            wr.MediaBrowser(title="samples by client and class", media_keys=["partition"]),
            wr.MediaBrowser(title="who trained when", media_keys=["timeline"]),
        ],
        "Comparison of runs": [
            wr.RunComparer(diff_only="split"),
            wr.MediaBrowser(title="confusion on test data", media_keys=["confusion"]),
        ],
    }


def default_entity(named: str | None) -> str:
    """Return the user or team to save for: the named one, else W&B's default."""
    entity = named or os.environ.get("WANDB_ENTITY")
    if entity:
        return entity
    import wandb

    return saved("the default entity", lambda: wandb.Api().default_entity) or ""


def saved(what: str, request: Callable[[], Any]) -> Any:
    """Return W&B's answer to a request.

    Raises:
        FlsuiteError: If W&B refuses it or cannot be reached.
    """
    try:
        return request()
    except Exception as error:  # from the client, its transport or a check
        raise FlsuiteError(
            f"W&B: no answer to the request for {what} ({one_line(error, longest=200)}); log in "
            "with wandb login, and set --entity"
        ) from error


def send_report(project: str, metric: str, table: str) -> None:
    """Save a report in W&B, and print its address.

    Args:
        project: The project of the runs, as ``PROJECT`` or ``ENTITY/PROJECT``.
        metric: The score to compare.
        table: The table of the runs, as Markdown.
    """
    panels()  # before any call to W&B
    entity, _, name = project.rpartition("/")
    made = build_report(default_entity(entity), name, metric, table)
    saved("the report", made.save)
    print(made.url)


def build_report(entity: str, project: str, metric: str, table: str) -> Any:
    """Return the report, without network calls. Its charts show all runs of the project."""
    wr = panels()
    runset = wr.Runset(entity=entity, project=project, name="runs", groupby=["group"])

    blocks = [wr.TableOfContents(), wr.H1(text="Scores"), wr.MarkdownBlock(text=table)]
    for title, charts in sections(metric).items():
        blocks += [wr.H1(text=title), wr.PanelGrid(runsets=[runset], panels=charts)]
    return wr.Report(
        entity=entity,
        project=project,
        title=f"Comparison of {metric.replace('_', ' ')}",
        description="Mean and spread over seeds, by flsuite report.",
        blocks=blocks,
    )


def build_workspace(entity: str, project: str, name: str, metric: str) -> Any:
    """Return the workspace, without network calls.

    Args:
        entity: The user or team that owns the project.
        project: The project of the runs.
        name: The title of the workspace.
        metric: The score to compare.
    """
    import wandb_workspaces.workspaces as ws

    made = [
        ws.Section(name=title, panels=charts, is_open=True)
        for title, charts in sections(metric).items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=made,
        settings=ws.WorkspaceSettings(x_axis="round", max_runs=50),
        runset_settings=ws.RunsetSettings(groupby=[ws.Metric("Group")]),
    )
