"""A mean in which a client's parameter weighs as much as the client's data constrains it.

``theta = (sum_k F_k)^-1 sum_k F_k theta_k``, elementwise, F_k the diagonal of the empirical Fisher information: the mode of the
product of the clients' Laplace posteriors. Matena and Raffel 2022, Merging Models with Fisher-Weighted Averaging,
arXiv:2111.09832, eq. 4.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import Estimator, fisher_diagonal
from flsuite.models import modes
from flsuite.models.protocols import LikelihoodModel
from flsuite.state import RunningMean, State, StateLayout, clone

__all__ = ["FisherAveraging"]


class FisherAveraging(FedAvg):
    """The groups of parameters that are named take the Fisher-weighted mean; everything else is FedAvg's.

    Fisher and log-likelihood are the model's: it declares the groups (``parameter_groups``) and has a method
    ``log_likelihood(batch)``, such as ``NFClassifier``'s density of its features. At the end of its fit a client takes one
    pass over its training batches, in float32 and evaluation mode, as the model saw them (augmented, if they are: the Fisher
    is of the data that the parameters were fitted to), and sends the Fisher of the groups with its update, as many bytes again
    as the groups have.

    Where all Fishers are equal a parameter is the clients' plain mean, not the one by samples; where one client has all the
    Fisher, its value is taken as it is.

    Logged, as ``train/<name>``: by clients ``fisher_mass``, the trace of F_k; by the server ``fisher_mass/<layer>``, its mean
    over the clients; ``fisher_covered/<group>``, the share of parameters that are above the damping; ``spread/<group>``,
    mean squared distance of the clients' parameters to the aggregate.

    Args:
        groups: Of the model's ``parameter_groups``.
        estimator: ``exact`` is the mean over samples of the squared gradients; ``batch`` the mean over batches of the squared
            gradient of the batch's mean, about ``exact`` divided by the batch size: a factor that cancels, unless clients
            have fewer samples than a batch.
        damping: Where the sum of the Fishers is not above this, a parameter takes FedAvg's value: nobody's data constrains
            it, and a quotient of rounding errors would be its mean. In units of the Fisher, so smaller for ``batch``.
        by_samples: Weigh by ``n_k F_k``, the precision of the posterior that n_k samples leave, instead of ``F_k``.
        batches: The most batches that the pass looks at; default all of an epoch.
        weighting: Of FedAvg's mean.
    """

    def __init__(
        self,
        groups: Sequence[str] = ("flow",),
        estimator: Estimator = "exact",
        damping: float = 1e-12,
        by_samples: bool = False,
        batches: int | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(weighting)
        if isinstance(groups, str) or not groups:
            raise FlsuiteError(
                f"FisherAveraging: groups must be a list of at least one name, got {groups!r}"
            )
        if estimator not in get_args(Estimator):
            raise FlsuiteError(
                f"FisherAveraging: estimator must be one of {', '.join(get_args(Estimator))}, got {estimator!r}"
            )
        if not 0 <= damping < math.inf:
            raise FlsuiteError(
                f"FisherAveraging: damping must be a finite number from 0 up, got {damping}"
            )
        if batches is not None and batches < 1:
            raise FlsuiteError(
                f"FisherAveraging: batches must be at least 1, or null for all of an epoch, got {batches}"
            )
        self.groups = tuple(groups)
        self.estimator: Estimator = estimator
        self.damping = damping
        self.by_samples = by_samples
        self.batches = batches

    def configure(self, layout: StateLayout) -> None:
        super().configure(layout)
        for group in self.groups:
            if not layout.groups.get(group):
                has = (
                    ", ".join(name for name, members in layout.groups.items() if members) or "none"
                )
                raise FlsuiteError(
                    f"FisherAveraging: the model shares no parameters in the group {group!r} (it has {has}); declare "
                    f"parameter_groups = {{{group!r}: (prefix, ...)}} on the model, or name others in aggregator.groups"
                )

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        return {"fisher": {name: global_state[name].float() for name in self._names()}}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_FisherPass(client, self._names(), self.estimator, self.batches)]

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        names, mean = self._names(), RunningMean()
        clients = {name: _FisherMean(global_state[name]) for name in names}
        for update in updates:
            mean.add(update.state, update.samples if self.weighting == "samples" else 1.0)
            for name in names:
                weight = float(update.samples) if self.by_samples else 1.0
                clients[name].add(update.state[name], update.extras["fisher"][name], weight)
        new = mean.mean()
        for name in names:
            new[name] = clients[name].mean(self.damping, otherwise=new[name])
        self._report(new, clients)
        return new

    def _names(self) -> list[str]:
        return [name for group in self.groups for name in self.layout.groups[group]]

    def _report(self, new: State, clients: "dict[str, _FisherMean]") -> None:
        layers: dict[str, float] = defaultdict(float)
        for name, found in clients.items():
            layers[name.rpartition(".")[0] or name] += float(found.mass) / found.count
        self.metrics |= {f"fisher_mass/{layer}": mass for layer, mass in layers.items()}
        for group in self.groups:
            members = self.layout.groups[group]
            size = sum(new[name].numel() for name in members)
            covered = sum(int((clients[name].fisher > self.damping).sum()) for name in members)
            self.metrics[f"fisher_covered/{group}"] = covered / size
            self.metrics[f"spread/{group}"] = (
                sum(clients[name].squared_distance(new[name]) for name in members) / size
            )


class _FisherMean:
    """One parameter of the clients, weighed by Fisher, an update at a time, in float64.

    Sums are of the distance to where the clients started: a small number, so that nothing is lost to rounding.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start.double()
        self.fisher = torch.zeros_like(self.start)
        self.moved = torch.zeros_like(self.start)
        self.plain = torch.zeros_like(self.start)
        self.square = self.mass = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def add(self, value: Tensor, fisher: Tensor, weight: float) -> None:
        distance, fisher = value.double() - self.start, fisher.double()
        self.fisher.add_(fisher, alpha=weight)
        self.moved.addcmul_(fisher, distance, value=weight)
        self.plain += distance
        self.square = self.square + distance.square().sum()
        self.mass = self.mass + fisher.sum()
        self.count += 1

    def mean(self, damping: float, otherwise: Tensor) -> Tensor:
        """``sum F_k theta_k / sum F_k`` where the sum of Fishers is above ``damping``, in the dtype of ``otherwise``."""
        known = self.fisher > damping
        merged = self.start + self.moved / torch.where(known, self.fisher, 1.0)
        return torch.where(known, merged.to(otherwise.dtype), otherwise)

    def squared_distance(self, new: Tensor) -> float:
        """Mean over clients of ``||theta_k - new||^2``."""
        moved = new.double() - self.start
        return float(
            (self.square - 2 * (self.plain * moved).sum()) / self.count + moved.square().sum()
        )


class _FisherPass(Callback):
    """The client half: one pass at the end of the fit."""

    def __init__(
        self, client: ClientContext, names: Sequence[str], estimator: Estimator, batches: int | None
    ) -> None:
        self.client = client
        self.names = names
        self.estimator: Estimator = estimator
        self.batches = batches

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, LikelihoodModel):
            raise FlsuiteError(
                f"FisherAveraging needs each sample's log-likelihood, and {type(pl_module).__name__} has none: add a method "
                "log_likelihood(batch) -> (n,), differentiable in its groups, or choose another aggregator"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        batches = (
            trainer.strategy.batch_to_device(batch) for batch in islice(loader, self.batches)
        )
        with evaluating(pl_module):
            fisher = clone(fisher_diagonal(pl_module, self.names, batches, self.estimator))
        self.client.extras["fisher"] = fisher
        self.client.metrics["fisher_mass"] = float(
            sum(f.sum(dtype=torch.float64) for f in fisher.values())
        )


@contextmanager
def evaluating(module: LightningModule) -> Iterator[None]:
    """Compute in evaluation mode and float32, with gradients; restore modes and generators at the end."""
    float32 = torch.autocast(module.device.type, enabled=False)
    with modes.evaluating(module), isolate_rng(), torch.enable_grad(), float32:
        yield
