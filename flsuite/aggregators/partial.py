"""Methods that keep a part of the model on each client: FedPer, LG-FedAvg and FedBN."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import matches
from flsuite.models.abilities import head_of
from flsuite.models.layers import batchnorm_layers


class HeadAware(FedAvg):
    """FedAvg for a model whose head is known.

    Args:
        head: Prefix of the head's entries. Default: as named by the model.
        kwargs: See FedAvg.
    """

    def __init__(self, head: str | None = None, **kwargs: Any) -> None:
        self.head = head
        super().__init__(**kwargs)

    def head_of(self, model: LightningModule) -> str:
        """Return the prefix of the head's entries.

        Raises:
            FlsuiteError: If neither the config nor the model names the head.
        """
        return head_of(model, self.head)

    def with_objective(self, objective: Objective, private: Sequence[str] = ()) -> Aggregator:
        """Return a copy with the method's objective, and with more private entries.

        Raises:
            FlsuiteError: If the config sets another objective.
        """
        if type(self.objective) is not Objective:
            raise FlsuiteError(
                f"trainer.aggregator.objective: {self.name} has an objective of its own; leave "
                f"{type(self.objective).__name__} out"
            )
        return self.changed(private, objective=objective)


class FedPer(HeadAware):
    """Each client keeps its head: Arivazhagan et al. 2019, algorithms 1 and 2.

    Take it if clients label alike inputs differently. It is the simplest personal method.

    Federated Learning with Personalization Layers, arXiv:1912.00818.
    """

    def bound(self, model: LightningModule) -> Aggregator:
        return self.changed([self.head_of(model)])


class LGFedAvg(HeadAware):
    """Each client keeps its representation, and the heads are averaged: Liang et al. 2020.

    Take it if inputs differ from client to client, and the classes mean the same.

    Think Locally, Act Globally: Federated Learning with Local and Global Representations,
    arXiv:2001.01523, algorithm 1.
    """

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        names = list(model.state_dict())
        body = [name for name in names if not name.startswith(head)]
        # Entries are named by prefix, so that w would keep words.weight, too.
        if any(matches(name, body) for name in names if name.startswith(head)):
            raise FlsuiteError(
                f"LGFedAvg: the head {head} begins like an entry of the body; rename one of them"
            )
        return self.changed(body)


class FedBN(FedAvg):
    """Each client keeps its BatchNorm layers: Li et al. 2021, algorithm 1.

    Take it if clients differ in their inputs, such as scanners, and the model has BatchNorm.

    FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, arXiv:2102.07623.
    A client keeps the running statistics and the trained scale and shift.

    Args:
        kwargs: See FedAvg.
    """

    def bound(self, model: LightningModule) -> Aggregator:
        layers = batchnorm_layers(model)
        if not layers:
            raise FlsuiteError(
                f"FedBN keeps BatchNorm layers, and {type(model).__name__} has none; choose a "
                "network with norm batch, or name other layers in FedAvg's private"
            )
        return self.changed(f"{layer}." for layer in layers)
