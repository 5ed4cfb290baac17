"""``flsuite report --wandb``: the table of the report and its charts in Weights & Biases."""

from typing import Any

from flsuite.publish.wandb_panels import default_entity, panels, saved, sections

__all__ = ["build_report", "send_report"]


def send_report(project: str, metric: str, table: str) -> None:
    """Save a report in W&B, and print its address.

    Args:
        project: The project of the runs, as ``PROJECT`` or ``ENTITY/PROJECT``.
        metric: The score to compare.
        table: The table of the runs, as Markdown.
    """
    panels()  # before W&B is asked for anything
    entity, _, name = project.rpartition("/")
    made = build_report(default_entity(entity), name, metric, table)
    saved("the report", made.save)
    print(made.url)


def build_report(entity: str, project: str, metric: str, table: str) -> Any:
    """Return the report, without any network call. Its charts are of all runs of the project."""
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
