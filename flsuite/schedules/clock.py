"""The time of a run."""

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass
class Clock:
    """The time of a run: rounds, virtual seconds, and the work done so far.

    Virtual time is what the run would take if every client had a machine of its own.

    Attributes:
        round: Aggregations done, which is also the version of the global model.
        seconds: Virtual seconds since the start of the run.
        client_updates: Client updates that have been aggregated.
        bytes: Bytes that clients have sent and received, those that never answered included.
    """

    round: int = 0
    seconds: float = 0.0
    client_updates: int = 0
    bytes: int = 0
