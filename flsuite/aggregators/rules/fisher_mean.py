"""The Fisher-weighted mean of the clients' parameters: Matena and Raffel 2022, eq. 4.

Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832. With F_k the diagonal of the Fisher
information, it is the mode of the product of the clients' Laplace posteriors.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import LinearRule
from flsuite.aggregators.rules.mean import Weighting
from flsuite.arguments import Settings
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.state import State, StateLayout, Tree, divided, scaled

__all__ = ["FisherMean", "fisher_mean"]


class FisherMean(LinearRule, Settings):
    """FedAvg with ``sum_k q_k F_k w_k / sum_k q_k F_k`` for the named groups of parameters.

    A subclass says how clients measure the diagonal F_k. They send as many bytes as the groups
    have. Under masks, which need sums in fixed steps, parameters whose Fishers are as small
    as the steps may end far from those of the plain sum.

    Attributes:
        groups: Names of the model's ``parameter_groups``, or ``None`` for all parameters.
        by_samples: Whether ``q_k`` is the number of samples, and not 1.
        weighting: As for FedAvg, for all other parameters.
    """

    groups: Sequence[str] | None
    by_samples: bool
    weighting: Weighting

    needs = frozenset({"current models"})
    _sends = "Fisher information"

    @abstractmethod
    def least(self, clients: float) -> float:
        """Return the sum of ``q_k F_k`` up to which a parameter takes FedAvg's value.

        Args:
            clients: The sum of ``q_k``.
        """

    # The client half

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        # The Fisher is float32, whatever the dtype of the parameter.
        return {"fisher": Statistic({name: state[name].float() for name in self._names(layout)})}

    def weight(self, update: ClientUpdate) -> float:
        return float(update.samples) if self.weighting == "samples" else 1.0

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        fisher = {name: value.double() for name, value in update.extras["fisher"].items()}
        model = {name: update.state[name].double() for name in fisher}
        products = {name: f * model[name] for name, f in fisher.items()}
        share = float(update.samples) if self.by_samples else 1.0
        return {
            **scaled({"weight": 1.0, "model": update.state}, self.weight(update)),
            **scaled({"share": 1.0, "fisher": fisher, "product": products}, share),
            # For the log alone.
            "plain": model,
            "square": {name: float(w.square().sum()) for name, w in model.items()},
            "mass": {name: float(f.sum()) for name, f in fisher.items()},
        }

    # The server half

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        new: State = divided(sums["model"], sums["weight"])
        least = self.least(sums["share"])
        for name, fisher in sums["fisher"].items():
            # FedAvg's value stays where no client's data determines a parameter.
            new[name] = fisher_mean(sums["product"][name], fisher, least, otherwise=new[name])
        self._report(server, sums, new, len(updates))
        return new

    def _report(self, server: Server, sums: Tree, new: State, clients: int) -> None:
        layers: dict[str, float] = defaultdict(float)
        for name, mass in sums["mass"].items():
            # A layer is all of a parameter's name but the last part.
            layers[name.rpartition(".")[0] or name] += mass / clients
        server.metrics.update({f"fisher_mass/{layer}": mass for layer, mass in layers.items()})

        least = self.least(sums["share"])
        for group, members in self._members(server.layout).items():
            size = sum(new[name].numel() for name in members)
            covered = sum(int((sums["fisher"][name] > least).sum()) for name in members)
            distance = sum(
                _squared_distance(sums["plain"][name], sums["square"][name], new[name], clients)
                for name in members
            )
            server.metrics[f"fisher_covered/{group}"] = covered / size
            server.metrics[f"spread/{group}"] = max(distance, 0.0) / size

    def _members(self, layout: StateLayout) -> dict[str, tuple[str, ...]]:
        """Return the names of the parameters of each group."""
        if self.groups is None:
            return {"all": layout.parameters}
        return {group: layout.groups[group] for group in self.groups}

    def _names(self, layout: StateLayout) -> list[str]:
        """Return the names of the parameters in the groups."""
        return [name for members in self._members(layout).values() for name in members]

    # Before the first round

    def prepare(self, server: Server) -> None:
        """Refuse a model that does not share the groups."""
        layout, owner = server.layout, type(self).__name__
        if self.groups is None and not layout.parameters:
            raise FlsuiteError(
                f"{owner}: the clients share no parameters to average; keep fewer in "
                "model.private, or set trainer.aggregator to LocalOnly"
            )
        for group in self.groups or ():
            # A group that is private, or empty, shares nothing to average.
            if not layout.groups.get(group):
                shared = [name for name, members in layout.groups.items() if members]
                raise FlsuiteError(
                    f"{owner}: the model shares no parameters in the group {group!r} "
                    f"(it has {', '.join(shared) or 'none'}); declare parameter_groups = "
                    f"{{{group!r}: (prefix, ...)}} on the model, or name others in "
                    "aggregator.groups"
                )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, str) or (self.groups is not None and not self.groups):
            raise FlsuiteError(
                f"{type(self).__name__}: groups must be a list of at least one name, or null for "
                f"all parameters, got {self.groups!r}"
            )


def fisher_mean(product: Tensor, fisher: Tensor, least: float, otherwise: Tensor) -> Tensor:
    """Return ``product / fisher``, or ``otherwise`` where the Fisher is not above ``least``."""
    known = fisher > least
    # Divide by 1 elsewhere: 0 / 0 would be NaN even where it is not chosen.
    return torch.where(known, product / torch.where(known, fisher, 1.0), otherwise)


def _squared_distance(total: Tensor, squares: float, new: Tensor, clients: int) -> float:
    """Return the mean over clients of ``||w_k - new||^2``, from ``sum w_k`` and ``sum |w_k|^2``."""
    return (squares - 2 * float((total * new).sum())) / clients + float(new.square().sum())
