"""The HTML page: tables as text, charts as data, and the script that shows them."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import flsuite
import flsuite.analysis.publish.page.tables as tables
from flsuite.analysis.comparison import compare, comparison_note, default_score
from flsuite.analysis.groups import Group
from flsuite.analysis.publish.page.data import gather
from flsuite.analysis.report import own_targets, require_score
from flsuite.analysis.results import results_of, short_path
from flsuite.analysis.runs import logged
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import parse_yaml, replace_text

_ALSO_SHOWN = ("accuracy", "f1_macro", "loss", "balanced_accuracy", "auroc")
_MOST_CURVES = 5
_MOST_CONFIGS = 40
_LONGEST_CONFIG = 12_000  # characters


def _reproduction(group: Group, with_config: bool) -> dict[str, Any]:
    """Return how to run an experiment again.

    ``command`` is lines of bash, empty for a run that was started from Python. ``config`` is the
    config, or the settings of a run that was started from Python.
    """
    first, *_ = group.runs
    folders = tuple(short_path(folder) for folder in group.runs)
    config, command = _read(first / "config.yaml"), ""
    if _is_request(config):
        command = _command(group, short_path(first / "config.yaml"))
    else:
        config = _read(first / "settings.yaml")
    return {
        "method": group.method,
        "partition": group.partition,
        "command": command,
        "config": config if with_config and len(config) <= _LONGEST_CONFIG else "",
        "folders": folders,
    }


def _command(group: Group, config: str) -> str:
    """Return a loop over the seeds, or one command for a single seed."""
    fit = f"flsuite fit --config {shlex.quote(config)}"
    seeds = [str(seed) for seed in group.seeds.values() if seed is not None]
    if len(seeds) < 2:
        return fit
    return f"for seed in {' '.join(seeds)}; do\n  {fit} --seed_everything $seed\ndone"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _is_request(config: str) -> bool:
    """Return whether a text is a config of the command. Runs from Python leave settings instead."""
    try:
        content = parse_yaml(config)
    except Exception:  # the page shows the text unchanged
        return False
    return isinstance(content, dict) and "trainer" in content


@dataclass(frozen=True)
class PageRequest:
    """The requested content of the page.

    Attributes:
        metrics: The scores. All charts except the curves show the first one.
        last: Maximum number of last scores to average.
        split: Data of the curves and of the target.
        x: The default axis.
        target: A score to reach. ``None`` chooses one for each partition.
        against: Compare with this method only.
    """

    metrics: Sequence[str]
    last: int
    split: str
    x: str
    target: float | None
    against: str | None


def require_page() -> None:
    """Refuse a page if its libraries are not installed.

    Raises:
        FlsuiteError: If one of them is missing.
    """
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise FlsuiteError(
            f"report: --html needs altair and vl-convert ({error}); install flsuite[report], or "
            "leave --html out"
        ) from error


def write_page(
    path: Path,
    groups: Sequence[Group],
    request: PageRequest,
    tuning: pd.DataFrame | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        path: The file.
        groups: The experiments.
        request: What to show.
        tuning: The trials of the sweep's tuning.
        notes: Lines on runs that cannot be compared.
    """
    require_page()
    text = _render(_content(groups, request, tuning, notes))
    replace_text(text, path)


def _content(
    groups: Sequence[Group],
    request: PageRequest,
    tuning: pd.DataFrame | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the content for the template."""
    from flsuite.analysis.publish.page.charts import charts

    results, metric, split = results_of(groups), request.metrics[0], request.split
    score, _ = default_score(results, metric)
    targets = own_targets(results, metric, split)
    if request.target is not None:
        targets = {str(name): request.target for name in results["partition"].unique()}

    for name in request.metrics:
        require_score(groups, name, split)
    shown = _curves_of(results, request.metrics, split)
    pairs = compare(results, metric, against=request.against)
    data = gather(results, shown, split, request.x, targets, pairs)
    return {
        "title": Path(os.path.commonpath([run for g in groups for run in g.runs])).name,
        "facts": tables.facts(results),
        "headline": tables.headline(groups, compare(results, metric), metric, score),
        "scores": {
            name: tables.scores(groups, name, request.last, split).short()
            for name in request.metrics
        },
        "partitions": data.partitions,
        "metric": metric,
        "split": split,
        "target": request.target,
        "targets": tables.targets(results, targets, metric, split).short() if targets else None,
        "pairs": tables.pairs(pairs).short() if len(pairs) else None,
        "comparison_note": comparison_note(pairs, metric, score),
        "settings": tables.settings(groups),
        "tuning": tables.tuning(tuning) if tuning is not None else None,
        "reproductions": [_reproduction(g, n < _MOST_CONFIGS) for n, g in enumerate(groups)],
        "notes": notes,
        "version": flsuite.__version__,
        "specs": {name: _json(spec) for name, spec in charts(data).items()},
    }


def _curves_of(results: pd.DataFrame, metrics: Sequence[str], split: str) -> list[str]:
    """Return the scores for the curves: the requested ones, and well-known logged ones."""
    known = logged([results], split)
    names = dict.fromkeys([*metrics, *(name for name in _ALSO_SHOWN if name in known)])
    return list(names)[: max(_MOST_CURVES, len(metrics))]


def _json(content: Any) -> str:
    """Return JSON that is safe inside an HTML script element."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _render(content: dict[str, Any]) -> str:
    import jinja2
    import vl_convert
    from altair import SCHEMA_VERSION

    here = Path(__file__).parent
    # Vega, Vega-Lite and vega-embed as one script, in the version of the charts.
    version = "_".join(SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    files = {
        # The type stubs do not declare the snippet as optional.
        "library": vl_convert.javascript_bundle(vl_version=version),  # type: ignore[call-arg]
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": (here / "page.js").read_text(encoding="utf-8"),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(**content, **files)
