"""Fisher averaging: each client's parameter counts as far as the client's data determines it.

``theta = (sum_k F_k)^-1 sum_k F_k theta_k``, elementwise, with F_k the diagonal of the Fisher
information: the mode of the product of the clients' Laplace posteriors. Matena and Raffel 2022,
Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832, eq. 4.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch import Callback

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.aggregators.fisher_mean import FisherMean
from flsuite.aggregators.fisher_passes import EmpiricalPass, PredictivePass
from flsuite.errors import FlsuiteError, require_at_least, require_one_of, require_whole
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import Estimator, Expectation
from flsuite.state import RunningMean, State, StateLayout

__all__ = ["FisherAveraging"]

FisherKind = Literal["empirical", "predictive"]

_ALL = "all"


class FisherAveraging(FedAvg):
    """FedAvg with the Fisher-weighted mean for the named groups of parameters.

    The model declares the groups in ``parameter_groups``. At the end of its fit a client measures
    the groups' Fisher diagonal, in float32 and evaluation mode, and sends it with its update, as
    many bytes as the groups have.

    ``empirical`` is the Fisher of the samples' labels. The model has a method
    ``log_likelihood(batch)``, such as the density of ``NFClassifier``'s features. A client takes
    one pass over its training batches, augmented as in training: the Fisher is that of the data
    that the parameters were fitted to. ``predictive`` is the true Fisher of the model's own
    prediction, which does not vanish on fitted data. The model has a method ``logits(x)``, and the
    samples are not augmented.

    Where all Fishers are equal, a parameter is the clients' plain mean, not the mean by samples.
    Where one client has all the Fisher, it is that client's value.

    Logged as ``train/<name>``, ``fisher_mass`` by the clients and the others by the server:

    - ``fisher_mass``: the trace of F_k, of the parameters in the groups;
    - ``fisher_mass/<layer>``: its mean over clients;
    - ``fisher_covered/<group>``: the share of parameters above the damping;
    - ``spread/<group>``: the mean squared distance of the clients' parameters to the aggregate.

    Args:
        groups: Names of the model's ``parameter_groups``. ``null`` is all parameters, logged as the
            group ``all``.
        estimator: Of the empirical Fisher. ``exact`` is the mean over samples of the squared
            gradients. ``batch`` is the mean over batches of the squared gradient of the batch's
            mean, about ``exact`` divided by the batch size. The factor cancels unless clients have
            fewer samples than a batch.
        damping: Sum of the Fishers up to which a parameter takes FedAvg's value: no client's data
            determines it, and the mean would be a quotient of rounding errors. It is in units of
            the Fisher, so smaller for ``batch``.
        by_samples: Whether to weight by ``n_k F_k``, the precision of the posterior after n_k
            samples, instead of ``F_k``.
        batches: The largest number of batches of the empirical pass. Default: an epoch.
        weighting: As for FedAvg, for all other parameters.
        fisher: The kind of Fisher, ``empirical`` or ``predictive``.
        samples: The largest number of a client's samples for the predictive Fisher. Default: all.
        expectation: Of the predictive Fisher. ``exact`` takes a backward pass per output of the
            model, ``sampled`` one, for a label drawn from the prediction.
    """

    def __init__(
        self,
        groups: Sequence[str] | None = ("flow",),
        estimator: Estimator = "exact",
        damping: float = 1e-12,
        by_samples: bool = False,
        batches: int | None = None,
        weighting: Weighting = "samples",
        fisher: FisherKind = "empirical",
        samples: int | None = None,
        expectation: Expectation = "exact",
    ) -> None:
        super().__init__(weighting)
        self.groups = groups if groups is None or isinstance(groups, str) else tuple(groups)
        self.estimator: Estimator = estimator
        self.damping = damping
        self.by_samples = by_samples
        self.batches = batches
        self.fisher: FisherKind = fisher
        self.samples = samples
        self.expectation: Expectation = expectation
        self._check_arguments()

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        if self.fisher == "empirical":
            return [EmpiricalPass(client, self._names(), self.estimator, self.batches)]
        owner = type(self).__name__
        return [PredictivePass(client, owner, self._names(), self.samples, self.expectation)]

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        # fisher_diagonal returns float32, whatever the dtype of the parameter.
        return {"fisher": {name: global_state[name].float() for name in self._names()}}

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        names, mean, samples = self._names(), RunningMean(), 0
        clients = {name: FisherMean(global_state[name]) for name in names}
        for update in updates:
            mean.add(update.state, self.weight(update))
            samples += update.samples
            # Without ``by_samples``, a client's samples count through its Fisher alone.
            fisher_weight = float(update.samples) if self.by_samples else 1.0
            for name in names:
                fisher = update.extras["fisher"][name]
                clients[name].add(update.state[name], fisher, fisher_weight)

        new, damping = mean.mean(), self.least_fisher(samples)
        # FedAvg's value stays where no client's data determines a parameter.
        for name in names:
            new[name] = clients[name].mean(damping, otherwise=new[name])
        self._report(new, clients, damping)
        return new

    def least_fisher(self, samples: int) -> float:
        """Return the sum of the Fishers up to which a parameter takes FedAvg's value.

        Args:
            samples: Training samples of the round's clients.
        """
        return self.damping

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model, and refuse one that does not share the groups."""
        super().configure(layout)
        if self.groups is None and not layout.parameters:
            raise FlsuiteError(
                f"{type(self).__name__}: the clients share no parameters to average; keep fewer in "
                "model.private, or set trainer.aggregator to LocalOnly"
            )
        for group in self.groups or ():
            # A group that is private, or empty, shares nothing to average.
            if not layout.groups.get(group):
                shared = [name for name, members in layout.groups.items() if members]
                raise FlsuiteError(
                    f"FisherAveraging: the model shares no parameters in the group {group!r} "
                    f"(it has {', '.join(shared) or 'none'}); declare parameter_groups = "
                    f"{{{group!r}: (prefix, ...)}} on the model, or name others in "
                    "aggregator.groups"
                )

    def _members(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the parameters of each group."""
        if self.groups is None:
            return {_ALL: self.layout.parameters}
        return {group: self.layout.groups[group] for group in self.groups}

    def _names(self) -> list[str]:
        """Return the names of the parameters in the groups."""
        return [name for members in self._members().values() for name in members]

    def _report(self, new: State, clients: dict[str, FisherMean], damping: float) -> None:
        layers: dict[str, float] = defaultdict(float)
        for name, client_mean in clients.items():
            # A layer is all of a parameter's name but the last part.
            layer = name.rpartition(".")[0] or name
            layers[layer] += float(client_mean.mass) / client_mean.count
        self.metrics |= {f"fisher_mass/{layer}": mass for layer, mass in layers.items()}

        for group, members in self._members().items():
            size = sum(new[name].numel() for name in members)
            covered = sum(int((clients[name].fisher > damping).sum()) for name in members)
            distance = sum(clients[name].squared_distance(new[name]) for name in members)
            self.metrics[f"fisher_covered/{group}"] = covered / size
            self.metrics[f"spread/{group}"] = distance / size

    def _check_arguments(self) -> None:
        owner = type(self).__name__
        if isinstance(self.groups, str) or (self.groups is not None and not self.groups):
            raise FlsuiteError(
                f"{owner}: groups must be a list of at least one name, or null for all parameters, "
                f"got {self.groups!r}"
            )
        require_one_of(owner, get_args(FisherKind), fisher=self.fisher)
        require_one_of(owner, get_args(Estimator), estimator=self.estimator)
        require_one_of(owner, get_args(Expectation), expectation=self.expectation)
        require_at_least(owner, 0, damping=self.damping)
        require_whole(owner, 1, batches=self.batches, samples=self.samples)

        chosen: dict[FisherKind, dict[str, bool]] = {
            "empirical": {
                "estimator": self.estimator != "exact",
                "batches": self.batches is not None,
            },
            "predictive": {
                "samples": self.samples is not None,
                "expectation": self.expectation != "exact",
            },
        }
        for kind, arguments in chosen.items():
            for name, is_chosen in arguments.items():
                if is_chosen and kind != self.fisher:
                    raise FlsuiteError(
                        f"{owner}: {name} is an argument of the {kind} Fisher, and has no effect "
                        f"with fisher {self.fisher!r}"
                    )
