"""Fisher averaging: each client's parameter counts as far as the client's data determines it.

``theta = (sum_k F_k)^-1 sum_k F_k theta_k``, elementwise, with F_k the diagonal of the empirical
Fisher information: the mode of the product of the clients' Laplace posteriors. Matena and Raffel
2022, Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832, eq. 4.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.aggregators.fisher_mean import FisherMean
from flsuite.errors import FlsuiteError, require_at_least, require_one_of
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import Estimator, fisher_diagonal, measuring
from flsuite.models.protocols import LikelihoodModel
from flsuite.state import RunningMean, State, StateLayout, clone

__all__ = ["FisherAveraging"]


class FisherAveraging(FedAvg):
    """FedAvg with the Fisher-weighted mean for the named groups of parameters.

    The model declares the groups in ``parameter_groups`` and has a method
    ``log_likelihood(batch)``, such as the density of ``NFClassifier``'s features. At the end of its
    fit a client takes one pass over its training batches, in float32 and evaluation mode, and sends
    the groups' Fisher diagonal with its update, as many bytes as the groups have. The batches are
    augmented as in training: the Fisher is that of the data that the parameters were fitted to.

    Where all Fishers are equal, a parameter is the clients' plain mean, not the mean by samples.
    Where one client has all the Fisher, it is that client's value.

    Logged as ``train/<name>``, ``fisher_mass`` by the clients and the others by the server:

    - ``fisher_mass``: the trace of F_k;
    - ``fisher_mass/<layer>``: its mean over clients;
    - ``fisher_covered/<group>``: the share of parameters above the damping;
    - ``spread/<group>``: the mean squared distance of the clients' parameters to the aggregate.

    Args:
        groups: Names of the model's ``parameter_groups``.
        estimator: ``exact`` is the mean over samples of the squared gradients. ``batch`` is the
            mean over batches of the squared gradient of the batch's mean, about ``exact`` divided
            by the batch size. The factor cancels unless clients have fewer samples than a batch.
        damping: Sum of the Fishers up to which a parameter takes FedAvg's value: no client's data
            determines it, and the mean would be a quotient of rounding errors. It is in units of
            the Fisher, so smaller for ``batch``.
        by_samples: Whether to weight by ``n_k F_k``, the precision of the posterior after n_k
            samples, instead of ``F_k``.
        batches: The largest number of batches of the pass. Default: an epoch.
        weighting: As for FedAvg, for all other parameters.
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
        require_one_of("FisherAveraging", get_args(Estimator), estimator=estimator)
        require_at_least("FisherAveraging", 0, damping=damping)
        require_at_least("FisherAveraging", 1, batches=batches)

        self.groups = tuple(groups)
        self.estimator: Estimator = estimator
        self.damping = damping
        self.by_samples = by_samples
        self.batches = batches

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_FisherPass(client, self._names(), self.estimator, self.batches)]

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        # fisher_diagonal returns float32, whatever the dtype of the parameter.
        return {"fisher": {name: global_state[name].float() for name in self._names()}}

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        names, mean = self._names(), RunningMean()
        clients = {name: FisherMean(global_state[name]) for name in names}
        for update in updates:
            mean.add(update.state, self.weight(update))
            # Without ``by_samples``, a client's samples count through its Fisher alone.
            fisher_weight = float(update.samples) if self.by_samples else 1.0
            for name in names:
                fisher = update.extras["fisher"][name]
                clients[name].add(update.state[name], fisher, fisher_weight)

        new = mean.mean()
        # FedAvg's value stays where no client's data determines a parameter.
        for name in names:
            new[name] = clients[name].mean(self.damping, otherwise=new[name])
        self._report(new, clients)
        return new

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model, and refuse one without the groups."""
        super().configure(layout)
        for group in self.groups:
            # A group that is private, or empty, shares nothing to average.
            if not layout.groups.get(group):
                shared = [name for name, members in layout.groups.items() if members]
                raise FlsuiteError(
                    f"FisherAveraging: the model shares no parameters in the group {group!r} "
                    f"(it has {', '.join(shared) or 'none'}); declare parameter_groups = "
                    f"{{{group!r}: (prefix, ...)}} on the model, or name others in "
                    "aggregator.groups"
                )

    def _names(self) -> list[str]:
        """Return the names of the parameters in the groups."""
        return [name for group in self.groups for name in self.layout.groups[group]]

    def _report(self, new: State, clients: dict[str, FisherMean]) -> None:
        layers: dict[str, float] = defaultdict(float)
        for name, client_mean in clients.items():
            # A layer is all of a parameter's name but the last part.
            layer = name.rpartition(".")[0] or name
            layers[layer] += float(client_mean.mass) / client_mean.count
        self.metrics |= {f"fisher_mass/{layer}": mass for layer, mass in layers.items()}

        for group in self.groups:
            members = self.layout.groups[group]
            size = sum(new[name].numel() for name in members)
            covered = sum(int((clients[name].fisher > self.damping).sum()) for name in members)
            distance = sum(clients[name].squared_distance(new[name]) for name in members)
            self.metrics[f"fisher_covered/{group}"] = covered / size
            self.metrics[f"spread/{group}"] = distance / size


class _FisherPass(Callback):
    """The client half, which takes one pass over the training batches at the end of the fit."""

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
                "FisherAveraging needs the log-likelihood of each sample, and "
                f"{type(pl_module).__name__} has none: add a method log_likelihood(batch) -> (n,), "
                "differentiable in its groups, or choose another aggregator"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The batches of the fit: the Fisher is that of the data the parameters were fitted to.
        loader: Any = trainer.train_dataloader
        batches = (
            trainer.strategy.batch_to_device(batch) for batch in islice(loader, self.batches)
        )
        # bfloat16 and dropout would add noise to the squared gradients.
        with measuring(pl_module):
            fisher = clone(fisher_diagonal(pl_module, self.names, batches, self.estimator))

        mass = sum(f.sum(dtype=torch.float64) for f in fisher.values())
        self.client.extras["fisher"] = fisher
        self.client.metrics["fisher_mass"] = float(mass)
