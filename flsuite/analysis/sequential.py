"""Paired differences that are tested again with each added seed, corrected for looking.

Lan and DeMets 1983, Discrete Sequential Boundaries for Clinical Trials. The spending function is
their version of Pocock's: after a share ``x`` of the seeds, ``alpha log(1 + (e - 1) x)`` of the
error may have been made. It stops early if a difference is clear.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flsuite.analysis.runs import files_of_sweeps
from flsuite.common.score_names import shown_number
from flsuite.runs.record import SWEEP, read_sweep_record

_PATHS = 200_000  # the standard error of an error of 0.05 is 0.0005


Because = Literal["zero", "width", "seeds"]
"""Why a difference is decided."""


@dataclass(frozen=True)
class _Look:
    """What the seeds so far say about a paired difference.

    Attributes:
        seeds: Number of seeds. If it is decided, the first number at which it was.
        difference: The mean difference.
        low: The lower end of its interval, corrected for looking.
        high: The upper end.
        because: ``zero`` is outside of the interval, or the interval is as narrow as the ``width``,
            or these were all ``seeds``. It is ``None`` as long as it is undecided.
    """

    seeds: int
    difference: float
    low: float
    high: float
    because: Because | None


def look(
    differences: Sequence[float],
    first: int,
    most: int,
    alpha: float = 0.05,
    width: float | None = None,
) -> _Look:
    """Test a paired difference after each seed, and return the first decision, or the last look.

    If there is no difference, the share of runs of this procedure in which an interval ever
    excludes zero is at most ``alpha`` (for normal differences).

    Args:
        differences: Differences of two methods, one per seed, in the order of the seeds.
        first: Number of seeds at the first look, at least 2.
        most: Maximum number of seeds.
        alpha: Probability of a wrong decision that there is a difference.
        width: Also stop if the interval is at most this wide.
    """
    values, critical = np.asarray(differences, dtype=float), critical_values(first, most, alpha)
    for seeds in range(first, len(values) + 1):
        with np.errstate(invalid="ignore"):  # infinite losses
            mean, spread = values[:seeds].mean(), values[:seeds].std(ddof=1)
        half = critical[seeds] * spread / math.sqrt(seeds)
        # Equal differences say nothing about their spread, and NaN is a run without a score.
        is_known = bool(half > 1e-12 * np.abs(values[:seeds]).max())
        because: Because | None
        if is_known and half < abs(mean):
            because = "zero"
        elif is_known and width is not None and 2 * half <= width:
            because = "width"
        else:
            because = "seeds" if seeds >= most else None
        if because or seeds == len(values):
            return _Look(seeds, float(mean), float(mean - half), float(mean + half), because)
    return _Look(len(values), float(values.mean()), math.nan, math.nan, None)


@cache
def critical_values(first: int, most: int, alpha: float) -> dict[int, float]:
    """Return the absolute t statistic that decides, by the number of seeds.

    They are quantiles of simulated series of seeds without a difference, so that they hold for a
    few seeds too: each look stops the share of all series that may be spent until then.
    """
    rng = np.random.default_rng(0)
    total, squares = np.zeros(_PATHS), np.zeros(_PATHS)
    goes_on, stopped, values = np.ones(_PATHS, dtype=bool), 0, {}
    for seeds in range(1, most + 1):
        draws = rng.standard_normal(_PATHS)
        total, squares = total + draws, squares + draws**2
        if seeds < first:
            continue
        mean = total / seeds
        t = np.abs(mean) / np.sqrt((squares / seeds - mean**2) / (seeds - 1))
        own = np.sort(t[goes_on])
        more = int(_spent(seeds / most, alpha) * _PATHS) - stopped
        values[seeds] = float(own[-more - 1]) if more else math.inf
        goes_on &= t <= values[seeds]
        stopped += more
    return values


def _spent(share: float, alpha: float) -> float:
    """Return the error that may have been made after a share of the seeds."""
    return alpha * math.log1p((math.e - 1) * share)


@dataclass(frozen=True)
class Decision:
    """The state of one pair of methods of a sweep that adds seeds until it is decided.

    Attributes:
        metric: The test score.
        method: The method.
        baseline: The method that is subtracted.
        point: The grid point, empty without a grid.
        folder: Name of the folder with the method's runs at this point.
        look: What the seeds say.
    """

    metric: str
    method: str
    baseline: str
    point: str
    folder: str
    look: _Look

    def __str__(self) -> str:
        own = self.look
        ends = {
            "zero": "differs",
            "width": "does not differ by more than the interval",
            "seeds": "open at the maximum",
            None: "open",
        }
        shown = [shown_number(n, sign="+") for n in (own.difference, own.low, own.high)]
        pair = f"{self.method} - {self.baseline} {self.point}".strip()
        return (
            f"{pair}: {shown[0]} ({shown[1]} to {shown[2]}) after {own.seeds} seeds, "
            f"{ends[own.because]}"
        )


def stopping_lines(record: Mapping[str, Any]) -> list[str]:
    """Return how a sweep was stopped, a line for all, and one per pair.

    Args:
        record: ``seeds``, the maximum, ``alpha``, ``width``, and ``pairs``, the decisions as
            dictionaries. There are none before the sweep has stopped.
    """
    decisions = _decisions(record)
    if not decisions:
        return [
            f"seeds are being added, up to {record['seeds']}, until each paired difference is "
            "decided; so far, none is tested"
        ]
    width = "" if record["width"] is None else f", or its interval was at most {record['width']:g}"
    together = f" over {len(decisions)} pairs" if len(decisions) > 1 else ""
    return [
        f"seeds were added until each difference of test {decisions[0].metric} excluded "
        f"zero{width}, up to {record['seeds']}; the intervals are corrected for looking after "
        "every seed (alpha spending by Lan and DeMets, Pocock's type, alpha "
        f"{record['alpha']:g}{together})",
        *map(str, decisions),
    ]


def stopping_of(places: Iterable[str | Path]) -> list[str]:
    """Return how the sweeps in or above some folders were stopped, see :func:`stopping_lines`."""
    records = [read_sweep_record(path.parent) for path in files_of_sweeps(places, SWEEP)]
    return [line for own in records if "until" in own for line in stopping_lines(own["until"])]


def decisions_of(run: str | Path) -> list[Decision] | None:
    """Return what the sweep of a run has decided so far, or ``None`` if it adds no seeds."""
    record = read_sweep_record(Path(run).parent.parent).get("until")
    return _decisions(record) if record else None


def _decisions(record: Mapping[str, Any]) -> list[Decision]:
    return [Decision(**{**pair, "look": _Look(**pair["look"])}) for pair in record["pairs"]]
