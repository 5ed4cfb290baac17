"""The page: tables as text, charts as data, and the script that shows them."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import flsuite
import flsuite.publish.page.tables as tables
from flsuite.analysis.comparison import comparison_note, default_score
from flsuite.analysis.groups import Group
from flsuite.analysis.report import require_score
from flsuite.analysis.results import results_of
from flsuite.analysis.target import own_target
from flsuite.errors import FlsuiteError
from flsuite.files import replace_file
from flsuite.publish.page.data import gather
from flsuite.publish.page.reproduction import reproductions

_ALSO_SHOWN = ("accuracy", "f1_macro", "loss", "balanced_accuracy", "auroc")
_MOST_CURVES = 5


@dataclass(frozen=True)
class PageRequest:
    """What the page is to show.

    Attributes:
        metrics: The scores; the first one is that of all charts but the curves.
        last: Rounds in the mean of the last ones.
        split: Data of the curves and of the target.
        x: The axis that is shown first.
        target: A score to reach. ``None`` chooses one.
        against: Compare with this method only.
    """

    metrics: Sequence[str] = ("accuracy",)
    last: int = 10
    split: str = "test"
    x: str = "round"
    target: float | None = None
    against: str | None = None


def require_page() -> None:
    """Refuse a page where its libraries are not installed.

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
        notes: Lines on what cannot be compared.
    """
    require_page()
    text = _render(_content(groups, request, tuning, notes))
    replace_file(lambda temporary: temporary.write_text(text, encoding="utf-8"), path)


def _content(
    groups: Sequence[Group],
    request: PageRequest,
    tuning: pd.DataFrame | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return what the template shows."""
    from flsuite.publish.page.charts import charts

    results, metric, split = results_of(groups), request.metrics[0], request.split
    score, _ = default_score(results, metric)
    target = request.target
    if target is None:
        target = own_target(results, metric, split)

    for name in request.metrics:
        require_score(groups, name, split)
    shown = _curves_of(results, request.metrics, split)
    data = gather(results, shown, split, request.x, target, request.against)
    specs = charts(data)
    return {
        "title": Path(os.path.commonpath([run for g in groups for run in g.runs])).name,
        "facts": tables.facts(results),
        "headline": tables.headline(groups, metric, score),
        "scores": [tables.scores(groups, name, request.last) for name in request.metrics],
        "last": request.last,
        "partitions": data.partitions,
        "metric": metric,
        "split": split,
        "target": target,
        "is_own_target": request.target is None,
        "targets": None if target is None else tables.targets(results, target, metric, split),
        "pairs": tables.pairs(data.pairs) if len(data.pairs) else None,
        "comparison_note": comparison_note(data.pairs, metric, score),
        "settings": tables.settings(groups),
        "tuning": tables.tuning(tuning) if tuning is not None else None,
        "reproductions": reproductions(groups),
        "notes": notes,
        "version": flsuite.__version__,
        "specs": {name: _json(spec) for name, spec in specs.items()},
        "has": dict.fromkeys(specs, True),
    }


def _curves_of(results: pd.DataFrame, metrics: Sequence[str], split: str) -> list[str]:
    """Return the scores of the curves: those asked for, and well-known ones that were logged."""
    is_global = (results["scope"] == "global") & (results["split"] == split)
    logged = set(results.loc[is_global, "metric"].unique())
    names = dict.fromkeys([*metrics, *(name for name in _ALSO_SHOWN if name in logged)])
    return list(names)[: max(_MOST_CURVES, len(metrics))]


def _json(content: Any) -> str:
    """Return JSON that can stand in a script: no text in it ends the script."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _render(content: dict[str, Any]) -> str:
    import jinja2
    import vl_convert
    from altair import SCHEMA_VERSION

    here = Path(__file__).parent
    # Vega, Vega-Lite and vega-embed as one script, of the version that the charts are of.
    version = "_".join(SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    files = {
        # Its types do not know that the snippet may be left out.
        "library": vl_convert.javascript_bundle(vl_version=version),  # type: ignore[call-arg]
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": (here / "page.js").read_text(encoding="utf-8"),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(**content, **files)
