"""``flsuite workspace``: the charts of a project in Weights & Biases."""

from typing import Any

from flsuite.analysis.publish.wandb_charts import build_workspace, default_entity, panels, saved
from flsuite.commands.parsers import parser_of


def workspace(args: list[str]) -> None:
    """Save a workspace, or print its sections and panels."""
    request = parser_of("workspace").parse_args(args)

    panels()  # before any call to W&B
    named = request.entity or ("ENTITY" if request.dry_run else None)
    entity = named or default_entity(None)
    made = build_workspace(entity, request.project, request.name, request.metric)
    if request.dry_run:
        _print(made)
    else:
        saved("the workspace", made.save)
        print(saved("its address", lambda: made.url))


def _print(made: Any) -> None:
    print(f"workspace {made.name!r} of {made.entity}/{made.project}, runs grouped by W&B group")
    for section in made.sections:
        print(f"  {section.name}")
        for panel in section.panels:
            title = getattr(panel, "title", None)
            print(f"    {type(panel).__name__}" + (f": {title}" if title else ""))
