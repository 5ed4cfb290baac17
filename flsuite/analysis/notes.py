"""Notes for the reader on runs that are not comparable."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flsuite.analysis.groups import Group
from flsuite.analysis.listing import has_ended
from flsuite.analysis.panels import aligned
from flsuite.analysis.runs import curve, run_scores
from flsuite.common.files import failure_reason
from flsuite.runs.record import read_settings

_MOST_LINES = 5  # runs that are named one by one


def finished(groups: Sequence[Group]) -> tuple[Sequence[Group], list[str]]:
    """Return the groups without unfinished runs, and a line on the runs that are left out.

    If no run is finished, all are kept.
    """
    ended: list[Group] = []
    for group in groups:
        runs = {f: t for f, t in group.runs.items() if has_ended(f, read_settings(f), t)}
        ended += [replace(group, runs=runs)] if runs else []
    kept = {folder for group in ended for folder in group.runs}
    left = {f: t for group in groups for f, t in group.runs.items() if f not in kept}
    if not ended or not left:
        return groups, []
    folder, table = next(iter(left.items()))
    runs_are = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
    end = f"{folder} ends with round {int(table['round'].max())}{_why(folder)}"
    return ended, [f"{runs_are} not finished and left out: {'such as ' * (len(left) > 1)}{end}"]


def uneven(groups: Sequence[Group]) -> list[str]:
    """Return a line for each run that ended before the others, or one line for many of them.

    Such runs are not comparable with the others, unless all have spent the same budget of client
    updates or virtual seconds, because rounds may differ in size.
    """
    if _share_budget(groups, "max_client_updates", "client_updates") or _share_budget(
        groups, "max_virtual_seconds", "virtual_s"
    ):
        return []
    ends = {
        folder: int(table["round"].max())
        for group in groups
        for folder, table in group.runs.items()
    }
    most = max(ends.values())
    early = {folder: end for folder, end in ends.items() if end < most}
    if len(early) > _MOST_LINES:
        low, high = min(early.values()), max(early.values())
        last = f"round {low}" if low == high else f"rounds {low} to {high}"
        return [f"{len(early)} of {len(ends)} runs end with {last} of {most}"]
    return [
        f"{folder} ends with round {end} of {most}{_why(folder)}" for folder, end in early.items()
    ]


def _why(folder: Path) -> str:
    """Return why a run of a sweep failed, if it did."""
    reason = failure_reason(folder)
    return f" ({reason})" if reason else ""


def _share_budget(groups: Sequence[Group], setting: str, column: str) -> bool:
    """Return whether all runs have the same limit and reached it."""
    limit = groups[0].settings.get(setting)
    is_common = limit is not None and all(g.settings.get(setting) == limit for g in groups)
    ends = [table[column].max() for group in groups for table in group.runs.values()]
    return is_common and min(ends) >= limit


def own_models(groups: Sequence[Group], metrics: Sequence[str], split: str) -> list[str]:
    """Return a line per score of one global model in some groups and of many models in others."""
    lines = []
    for metric in metrics:
        owns = [_has_score(group, f"{metric}_worst", split) for group in groups]
        if any(owns) and not all(owns):
            names = dict.fromkeys(g.method for g, own in zip(groups, owns, strict=True) if own)
            lines.append(
                f"{metric} of {', '.join(names)} is the mean over the clients' own models, each on "
                f"the whole {split} split; --metric {metric}_client_mean scores the models of all "
                f"methods on each client's own {split} samples"
            )
    return lines


def undefined(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    """Return a line per group and score that some runs do not have in their last round."""
    lines = []
    for group in groups:
        for metric in metrics:
            scores = [run_scores(table, metric, group.monitor, 1) for table in group.runs.values()]
            last = [row["last"] for row in scores if row]
            if without := sum(map(math.isnan, last)):
                lines.append(
                    f"{group.label}: test {metric} is undefined in the last round of {without} of "
                    f"{len(last)} runs, so its mean is, too; pairs of methods leave such runs out"
                )
    return lines


def measured(groups: Sequence[Group], x: str) -> list[str]:
    """Return a line for each group whose virtual seconds cannot be compared."""
    if x != "virtual_s":
        return []
    return [
        f"{group.label}: its virtual seconds were measured on the machine; compare it with others "
        "of the same trainer.schedule.speeds"
        for group in groups
        if _is_measured(group)
    ]


def _is_measured(group: Group) -> bool:
    settings = group.settings
    key = "schedule.schedule" if "schedule.schedule" in settings else "schedule"  # in Faults
    schedule, speeds = str(settings.get(key, "")), settings.get(f"{key}.speeds")
    # Without speeds, a synchronous round takes its measured time.
    return (speeds is None and schedule.endswith("Synchronous")) or str(speeds).endswith("Measured")


def apart(groups: Sequence[Group], metric: str, split: str, x: str) -> list[str]:
    """Return a line for each group without a curve in the picture, or one line for many of them.

    Such runs lack the score, for example an attack's success in runs with another attack, or share
    no part of the axis.
    """
    scored = [group for group in groups if _has_score(group, metric, split)]
    without = [group for group in groups if not _has_score(group, metric, split)]
    if len(without) > _MOST_LINES:
        lines = [f"{len(without)} of {len(groups)} rows have no {split} {metric} and no curve"]
    else:
        lines = [f"{g.label}: its runs have no {split} {metric}; it is not drawn" for g in without]
    return lines + [
        f"{group.label}: its runs have no {x} of {split} {metric} in common; it is not drawn"
        for group in scored
        if not _have_common_points(group, metric, split, x)
    ]


def _have_common_points(group: Group, metric: str, split: str, x: str) -> bool:
    curves = {folder: curve(table, metric, split, x) for folder, table in group.runs.items()}
    return not aligned(curves, x).empty


def _has_score(group: Group, metric: str, split: str) -> bool:
    return any(len(curve(table, metric, split)) for table in group.runs.values())


def repeated(groups: Sequence[Group]) -> list[str]:
    """Return a line for each group in which a seed appears more than once."""
    lines = []
    for group in groups:
        seeds = list(group.seeds.values())
        twice = sorted({str(seed) for seed in seeds if seed is not None and seeds.count(seed) > 1})
        if twice:
            which = ", ".join(twice)
            lines.append(f"{group.label}: seed {which} more than once; the spread is too small")
    return lines
