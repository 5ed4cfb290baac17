"""Runs side by side: runs that differ in nothing but the seed are one row, with mean and spread."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from flsuite.analysis.runs import read_metrics
from flsuite.errors import FlsuiteError

__all__ = ["Group", "find_runs", "group_runs", "report_figure", "report_markdown", "report_table"]

_NOT_THE_EXPERIMENT = (  # what may differ between runs of one experiment
    "seed_everything",
    "seed",
    "run_dir",
    "ckpt_path",
    "config",
    "plugins",
    "trainer.logger",
    "trainer.engine",
    "trainer.enable_progress_bar",
    "trainer.run_dir",
    "data.init_args.root",
    "data.init_args.download",
)
_OBSERVERS = {"ForestProbe", "GradientDissimilarity", "LatentSpace", "RoundLogger", "RoundProgress"}  # they change nothing
_UP = ("accuracy", "f1_macro", "balanced_accuracy", "auroc", "probe_")
_DOWN = ("loss", "nll", "kl", "reconstruction")

Flat = dict[str, Any]


class _Class(str):
    """The path of a class in a config, whose name says by itself what it is."""


@dataclass
class Group:
    """Runs of one experiment.

    Attributes:
        settings: What they share, flat: ``model`` is a class's name, ``model.lr`` one of its parameters.
        label: What tells them from the other groups.
        runs: Folder to its metrics.
    """

    settings: Flat
    label: str = ""
    runs: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def curves(self, metric: str, split: str) -> pd.DataFrame:
        """Round by run: the global score."""
        return pd.DataFrame({folder: curve(table, metric, split) for folder, table in self.runs.items()})


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Run folders among and below ``places``.

    Raises:
        FlsuiteError: If there are none.
    """
    roots = [Path(place) for place in places]
    found = sorted({table.parent.resolve() for root in roots for table in root.rglob("metrics.csv")})
    if not found:
        raise FlsuiteError(f"no run below {', '.join(map(str, roots))}: name folders that hold metrics.csv of flsuite fit")
    return found


def group_runs(folders: Iterable[Path]) -> list[Group]:
    """Group by config, and label each group by what tells it apart."""
    groups: dict[str, Group] = {}
    for folder in folders:
        settings = flat_settings(folder)
        key = repr(sorted(settings.items(), key=lambda item: item[0]))
        table = read_metrics(folder)
        if len(table):  # a run whose first round is not done yet
            groups.setdefault(key, Group(settings)).runs[folder] = table
    found = list(groups.values())
    if not found:
        raise FlsuiteError("none of these runs has a finished round yet")
    for group in found:
        group.label = _label(group.settings, [other.settings for other in found])
    return sorted(found, key=lambda group: group.label)


def flat_settings(folder: Path) -> Flat:
    """A run's config without what does not belong to the experiment, flat."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise FlsuiteError(f"{folder} is not the folder of a run: it has no config.yaml")
    content = yaml.safe_load(path.read_text()) or {}
    return dict(_flatten(content))


def seed_of(folder: Path) -> int | None:
    content = yaml.safe_load((folder / "config.yaml").read_text()) or {}
    seed = content.get("seed_everything", content.get("seed"))
    return None if seed is None else int(seed)


def _flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if path in _NOT_THE_EXPERIMENT:
        return
    if path == "trainer.callbacks":
        node = [c for c in node or [] if str(c.get("class_path")).rsplit(".", 1)[-1] not in _OBSERVERS]
        if not node:
            return
    if isinstance(node, Mapping) and "class_path" in node:
        yield _short(path), _Class(node["class_path"])
        for key, value in (node.get("init_args") or {}).items():
            yield from _flatten(value, f"{path}.init_args.{key}")
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}" if path else str(key))
    else:
        yield _short(path), repr(node) if isinstance(node, (list, Mapping)) else node


def _short(path: str) -> str:
    return path.replace(".init_args", "")


def _label(own: Flat, everybody: Sequence[Flat]) -> str:
    """Settings in which groups differ; a parameter only among groups that share the class it belongs to."""
    keys = [key for key in dict.fromkeys(key for other in everybody for key in other) if _differs(key, own, everybody)]
    parts = []
    for key in keys:
        value = own.get(key)
        last = key.rsplit(".", 1)[-1]
        name = last if sum(other.rsplit(".", 1)[-1] == last for other in keys) == 1 else key
        parts.append(value.rsplit(".", 1)[-1] if isinstance(value, _Class) else f"{name}={value}")
    return ", ".join(parts) or "all"


def _differs(key: str, own: Flat, everybody: Sequence[Flat]) -> bool:
    peers = [other for other in everybody if _same_owners(key, own, other)]
    return any(key in other for other in peers) and len({repr(other.get(key)) for other in peers}) > 1


def _same_owners(key: str, own: Flat, other: Flat) -> bool:
    parts = key.split(".")
    owners = [".".join(parts[:n]) for n in range(1, len(parts))]
    return all(own.get(owner) == other.get(owner) for owner in owners)


def curve(table: pd.DataFrame, metric: str, split: str, scope: str = "global") -> pd.Series:
    """A score over rounds."""
    chosen = table[(table["scope"] == scope) & (table["split"] == split) & (table["metric"] == metric)]
    return chosen.set_index("round")["value"]


def lower_is_better(metric: str) -> bool | None:
    """``None`` where that is not known, and no round can be called the best."""
    if metric.endswith("_std") or metric.startswith(_DOWN):
        return True
    return False if metric.startswith(_UP) else None


def run_scores(table: pd.DataFrame, metric: str, monitor: str, last: int) -> dict[str, float]:
    """What one run came to on test data; empty where it has no such score.

    ``last``; ``picked`` in the round whose ``monitor`` is best on validation data, the earlier of equals; ``mean_last`` over
    the last rounds; and ``best_on_test``, which no honest choice could have picked, for comparison with tables made so.
    """
    test, validation = curve(table, metric, "test"), curve(table, monitor, "val")
    if test.empty:
        return {}
    found = {"last": float(test.iloc[-1]), "mean_last": float(test.iloc[-last:].mean())}
    validation = validation[validation.index.isin(test.index)].dropna()
    if len(validation) and lower_is_better(monitor) is not None:
        picked = validation.index[int((validation if lower_is_better(monitor) else -validation).argmin())]
        found |= {"picked": float(test[picked]), "picked_round": float(picked)}
    if (lower := lower_is_better(metric)) is not None:
        found["best_on_test"] = float(test.min() if lower else test.max())
    return found


def report_table(groups: Sequence[Group], metrics: Sequence[str] = ("accuracy",), last: int = 10) -> pd.DataFrame:
    """One row a group and metric: ``group, metric, runs``, then mean and spread of each score of :func:`run_scores`.

    The spread is the standard deviation over runs with ddof 1, empty for a single run.

    Raises:
        FlsuiteError: If no run has one of the metrics.
    """
    rows: list[dict[str, Any]] = []
    for metric in metrics:
        before = len(rows)
        for group in groups:
            monitor = str(group.settings.get("trainer.monitor", "accuracy"))
            scores = [run_scores(t, metric, monitor, last) for t in group.runs.values()]
            if table := [row for row in scores if row]:
                rows.append({"group": group.label, "metric": metric, "runs": len(table), **_mean_and_spread(table)})
        if len(rows) == before:
            tables = [t for group in groups for t in group.runs.values()]
            known = sorted({name for t in tables for name in t[(t["split"] == "test") & (t["scope"] == "global")]["metric"]})
            raise FlsuiteError(f"no run has the test score {metric!r}; there are {', '.join(known)}")
    return pd.DataFrame(rows)


def _mean_and_spread(scores: list[dict[str, float]]) -> dict[str, float]:
    table = pd.DataFrame(scores)
    found: dict[str, float] = {}
    for name in ("last", "picked", "picked_round", "mean_last", "best_on_test"):
        if name in table:
            found |= {name: float(table[name].mean()), f"{name}_std": float(table[name].std())}
    return found


def report_markdown(table: pd.DataFrame, last: int = 10) -> str:
    """The table as Markdown, ``mean ± spread``."""
    titles = {
        "last": "last round",
        "picked": "picked on validation",
        "mean_last": f"mean of the last {last}",
        "best_on_test": "best on test",
    }
    lines = [
        f"| what differs | metric | runs | {' | '.join(titles.values())} |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for row in table.to_dict("records"):
        cells = [_cell(row, name) for name in titles]
        lines.append(f"| {row['group']} | {row['metric']} | {row['runs']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[Any, Any], name: str) -> str:
    mean, spread = row.get(name, float("nan")), row.get(f"{name}_std", float("nan"))
    if pd.isna(mean):
        return ""
    return f"{mean:.3f}" if pd.isna(spread) else f"{mean:.3f} ± {spread:.3f}"


def report_figure(groups: Sequence[Group], metrics: Sequence[str] = ("accuracy",), split: str = "test") -> Figure:
    """The global score over rounds: the mean of each group's runs, and the range they span."""
    height = 3.6 + 0.2 * len(groups)
    figure = Figure(figsize=(max(5.2, 4.6 * len(metrics)), height), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for group in groups:
            curves = group.curves(metric, split)
            line = panel.plot(curves.index, curves.mean(axis=1), label=f"{group.label} ({curves.shape[1]})", linewidth=1.6)[0]
            panel.fill_between(curves.index, curves.min(axis=1), curves.max(axis=1), color=line.get_color(), alpha=0.15, lw=0)
        panel.set(xlabel="round", ylabel=f"{split} {metric.replace('_', ' ')}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8)
    return figure
