"""The base class of callbacks with federation hooks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Outcome, Scores
from flsuite.runs.run import Run

Affects = Literal["weights", "rounds", "nothing"]


class FederationCallback(Callback):
    """A callback with federation hooks, which the run calls once each in its own process.

    It is also an ordinary Lightning callback. Every client's Trainer calls the Lightning hooks that
    a subclass implements, on a fresh copy for each fit. On every engine, the copy has the state
    that the callback had when the round started. Changes that a fit makes to it are dropped.
    ``trainer.train_dataloader`` has the ``client`` and the ``round``.

    The run's checkpoint stores ``state_dict`` as plain data.

    Attributes:
        affects: What callbacks of this class can change. Those that affect ``weights`` or
            ``rounds`` (how long the run lasts) belong to the settings of a run: a report groups
            runs by them, and a resume refuses other callbacks that affect weights. Callbacks that
            affect ``nothing`` only observe.
        reads_updates: Whether :meth:`on_client_end` reads the client's model. If no callback does,
            workers may send the sum of several models, and ``outcome.update.state`` is empty.
    """

    affects: ClassVar[Affects] = "weights"
    reads_updates: ClassVar[bool] = True

    def on_federation_start(self, run: Run) -> None:
        """Handle the start of a run.

        After a resume, ``run.round`` rounds have already been done.
        """

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        """Handle the start of a round in which these clients will train."""

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        """Handle the outcome of a client.

        Clients come in a fixed order. A refused update is a failure.
        """

    def on_evaluation_end(self, run: Run, round: int, split: str, scores: Scores) -> None:
        """Handle the scores of a split.

        ``run.stop()`` here ends the run with this round.
        """

    def on_round_end(self, run: Run, round: int) -> None:
        """Handle the end of a round that is aggregated and scored but not yet recorded.

        ``run.finished`` is true in the last round. ``run.log_metric`` adds numbers to the round,
        and ``run.log_picture`` adds pictures.
        """

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        """Handle all numbers of a round.

        The names are ``<split>/<metric>`` and ``client/<n>/<split>/<metric>``.
        """

    def on_federation_end(self, run: Run) -> None:
        """Handle the end of a run, also after an error or an interrupt.

        ``run.status`` tells them apart.
        """


def require_model(run: Run, kind: type, needs: str, example: str) -> Any:
    """Return the model of a run, and refuse a callback if the model lacks what it needs.

    Args:
        run: The run.
        kind: The class or protocol that the model must have.
        needs: What the callback does with it, as the start of the message.
        example: A class that has it.
    """
    model = run.evaluator.model
    if not isinstance(model, kind):
        raise FlsuiteError(
            f"{needs}, and {type(model).__name__} has none; use a model such as {example}, or "
            "remove the callback"
        )
    return model


def is_due(run: Run, every: int | None) -> bool:
    """Return whether a callback acts in the round just done: each such number, and the last one."""
    return run.finished or bool(every and run.round % every == 0)
