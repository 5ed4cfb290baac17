"""Hooks of a federation."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from flsuite.messages import ClientFailure, ClientResult

if TYPE_CHECKING:
    from flsuite.server.evaluation import Scores
    from flsuite.trainer import FederatedTrainer

__all__ = ["FederationCallback"]


class FederationCallback(Callback):
    """A callback of the federation: the trainer calls these hooks, in its own process, once each.

    It is an ordinary Lightning callback too: the hooks of Lightning that a subclass implements are called by every client's
    Trainer, wherever that runs, on a fresh copy for each fit; ``trainer.train_dataloader`` has the ``client`` and ``round``.
    ``state_dict`` and ``load_state_dict`` go into the run's checkpoint.
    """

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        """Everything is set up; ``trainer.round`` rounds are done already."""

    def on_round_start(
        self, trainer: "FederatedTrainer", round: int, cohort: Sequence[int]
    ) -> None:
        """The cohort is drawn."""

    def on_client_end(
        self, trainer: "FederatedTrainer", outcome: ClientResult | ClientFailure
    ) -> None:
        """A client is back, in the fixed order of the cohort; a failed or refused one as a failure."""

    def on_round_end(self, trainer: "FederatedTrainer", round: int) -> None:
        """The new global model is in place; evaluation and checkpoint follow."""

    def on_evaluation_end(
        self, trainer: "FederatedTrainer", round: int, split: str, scores: "Scores"
    ) -> None:
        """A split has been scored."""

    def on_round_recorded(
        self, trainer: "FederatedTrainer", round: int, metrics: Mapping[str, float]
    ) -> None:
        """All numbers of the round are known, as ``<split>/<metric>`` and ``client/<number>/<split>/<metric>``."""

    def on_federation_end(self, trainer: "FederatedTrainer") -> None:
        """The last round is done; called too when the run ends by an error or an interrupt."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return None
