"""The workspace of a project in Weights & Biases: the charts that its runs share."""

from typing import Any

from flsuite.publish.wandb_panels import sections

__all__ = ["build_workspace"]


def build_workspace(entity: str, project: str, name: str, metric: str) -> Any:
    """Return the workspace, without any network call.

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
