"""The time of a run."""

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass
class Clock:
    """The time of a run: rounds done, and virtual seconds.

    Virtual time is what the run would take if every client had a machine of its own.

    Attributes:
        round: Aggregations done, which is also the version of the global model.
        seconds: Virtual seconds since the start of the run.
    """

    round: int = 0
    seconds: float = 0.0
