"""The numbers of a round for the loggers: the round just done, or the rounds before a resume."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_NUMBER = "wall_s"
"""The number that is sent last. A log with this number has the whole round."""


@dataclass(frozen=True)
class RoundNumbers:
    """The numbers of a round.

    Attributes:
        round: The round.
        numbers: The numbers for every logger. :data:`LAST_NUMBER` is the last one.
        of_clients: The numbers of single clients, as ``client/<n>/<split>/<metric>``.
        pictures: The pictures of callbacks.
    """

    round: int
    numbers: dict[str, float]
    of_clients: dict[str, float]
    pictures: Mapping[str, "Figure"] = field(default_factory=dict)


def latest_round(run: Run, named: Mapping[str, float], with_clients: bool) -> RoundNumbers:
    """Return the numbers of the round just done.

    Args:
        run: The run.
        named: All numbers of the round, as ``<split>/<metric>`` and
            ``client/<n>/<split>/<metric>``.
        with_clients: Whether the numbers of single clients go to every logger too.
    """
    clock, summary = run.federation.clock, run.summary
    axes = {
        "virtual_s": clock.seconds,
        "client_updates": clock.client_updates,
        "bytes": clock.bytes,
        "total/bytes_up": summary.bytes_up,
        "total/bytes_down": summary.bytes_down,
        LAST_NUMBER: summary.wall_seconds,
    }
    numbers = _numbers(run.round, named, axes, with_clients)
    return replace(numbers, pictures=run.pictures)


def earlier_rounds(run: Run, with_clients: bool) -> Iterator[RoundNumbers]:
    """Yield the numbers of all rounds in the run's table, up to its checkpoint."""
    up = down = 0.0
    for round, rows in groupby(run.folder.table.rows, key=attrgetter("round")):
        named = {}
        for row in rows:
            of = "" if row.scope == GLOBAL else f"client/{row.scope}/"
            named[f"{of}{row.split}/{row.metric}"] = row.value
        up += named.get("train/bytes_up", 0.0)
        down += named.get("train/bytes_down", 0.0)
        axes = {
            "virtual_s": row.virtual_s,
            "client_updates": row.client_updates,
            "bytes": row.bytes,
            "total/bytes_up": up,
            "total/bytes_down": down,
            LAST_NUMBER: row.wall_s,
        }
        yield _numbers(round, named, axes, with_clients)


def _numbers(
    round: int, named: Mapping[str, float], axes: Mapping[str, float], with_clients: bool
) -> RoundNumbers:
    of_clients = {name: v for name, v in named.items() if name.startswith("client/")}
    numbers = {name: v for name, v in named.items() if with_clients or name not in of_clients}
    return RoundNumbers(round, {**numbers, **axes}, of_clients)
