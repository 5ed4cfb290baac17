"""Fisher averaging: parameters are weighted by how well each client's data determines them.

Matena and Raffel 2022, Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832, eq. 4.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule

from flsuite.aggregators.part import ClientHalf, Server, Statistic
from flsuite.aggregators.rules.after_fit import after_fit, plain_batches, training_batches
from flsuite.aggregators.rules.base import LinearRule, Weighting, withheld_by
from flsuite.aggregators.rules.mean import quotient
from flsuite.common.arguments import NonNegativeFloat, PositiveInt, Range, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import torch_generator
from flsuite.common.state import State, StateLayout, Tree, clone, divided, scaled
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import Expectation
from flsuite.metrics.fisher.forms import Estimator, fisher_diagonal, predictive_diagonal
from flsuite.models.abilities import LikelihoodModel, require_logits

_ONE_NAME = Range(
    "a list of at least one name, or null for all parameters",
    lambda names: len(names) > 0 and not isinstance(names, str),
)
_Groups = Annotated[Sequence[str], _ONE_NAME] | None


class FisherMean(LinearRule, Settings):
    """FedAvg with ``sum_k q_k F_k w_k / sum_k q_k F_k`` for the named groups of parameters.

    A subclass defines how clients measure the diagonal F_k. They send as many bytes as the groups
    have. Under secure aggregation, which sums in fixed-point steps, parameters whose Fishers are as
    small as the steps may differ greatly from a plain sum.

    Attributes:
        groups: Names of the model's ``parameter_groups``, or ``None`` for all parameters.
        by_samples: Whether ``q_k`` is the number of samples instead of 1.
        weighting: See FedAvg, for all other parameters.
    """

    groups: _Groups
    by_samples: bool
    weighting: Weighting

    needs = frozenset({"current models", "shared parameters"})
    withholds = withheld_by("Fisher information")

    @abstractmethod
    def least(self, clients: float) -> float:
        """Return the sum of ``q_k F_k`` up to which a parameter takes FedAvg's value.

        Args:
            clients: The sum of ``q_k``.
        """

    # The client half

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        # The Fisher is float32, regardless of the parameter's dtype.
        return {"fisher": Statistic({name: state[name].float() for name in self.names(layout)})}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        fisher = {name: value.double() for name, value in update.extras["fisher"].items()}
        products = {name: f * update.state[name].double() for name, f in fisher.items()}
        share = float(update.samples) if self.by_samples else 1.0
        return {
            **scaled({"weight": 1.0, "model": update.state}, self.weight(update)),
            **scaled({"share": 1.0, "fisher": fisher, "product": products}, share),
            # For the log only.
            "mass": {name: float(f.sum()) for name, f in fisher.items()},
        }

    # The server half

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        new: State = divided(sums["model"], sums["weight"])
        least = self.least(sums["share"])
        for name, fisher in sums["fisher"].items():
            # Keep FedAvg's value where no client's data determines a parameter.
            new[name] = quotient(sums["product"][name], fisher, least, otherwise=new[name])
        self._report(server, sums, new, len(updates))
        return new

    def _report(self, server: Server, sums: Tree, new: State, clients: int) -> None:
        layers: dict[str, float] = defaultdict(float)
        for name, mass in sums["mass"].items():
            # The layer is the parameter's name without its last component.
            layers[name.rpartition(".")[0] or name] += mass / clients
        server.metrics.update({f"fisher_mass/{layer}": mass for layer, mass in layers.items()})

        least = self.least(sums["share"])
        for group, members in self._members(server.layout).items():
            size = sum(new[name].numel() for name in members)
            covered = sum(int((sums["fisher"][name] > least).sum()) for name in members)
            server.metrics[f"fisher_covered/{group}"] = covered / size

    def _members(self, layout: StateLayout) -> dict[str, tuple[str, ...]]:
        """Return the names of the parameters of each group."""
        if self.groups is None:
            return {"all": layout.parameters}
        return {group: layout.groups[group] for group in self.groups}

    def names(self, layout: StateLayout) -> list[str]:
        """Return the names of the parameters in the groups."""
        return [name for members in self._members(layout).values() for name in members]

    # Before the first round

    def prepare(self, server: Server) -> None:
        """Refuse a model that does not share the parameter groups."""
        layout, owner = server.layout, type(self).__name__
        for group in self.groups or ():
            # A private or empty group has nothing to average.
            if not layout.groups.get(group):
                shared = [name for name, members in layout.groups.items() if members]
                raise FlsuiteError(
                    f"{owner}: the model shares no parameters in the group {group!r} "
                    f"(it has {', '.join(shared) or 'none'}); declare parameter_groups = "
                    f"{{{group!r}: (prefix, ...)}} on the model, or name others in "
                    "aggregator.groups"
                )


@dataclass(frozen=True)
class FisherAveraging(FisherMean):
    """FedAvg with the Fisher-weighted mean for the named groups of parameters.

    Take it if some groups of parameters have a likelihood, as a flow has.

    The model declares the groups in ``parameter_groups``, and has a method
    ``log_likelihood(batch)``, such as the density of ``NFClassifier``'s features. At the end of its
    fit, a client measures the diagonal of the empirical Fisher (with the samples' labels), in
    float32 and evaluation mode. It makes one pass over its training batches, augmented as in
    training, because the Fisher should describe the data that the parameters were fitted to.

    Where all Fishers are equal, a parameter is the clients' plain mean, not the mean by samples.
    Where one client has all the Fisher, it is that client's value.

    Logged as ``train/<name>``, ``fisher_mass`` by the clients and the others by the server:

    - ``fisher_mass``: the trace of F_k over the parameters in the groups;
    - ``fisher_mass/<layer>``: its mean over clients;
    - ``fisher_covered/<group>``: the fraction of parameters above the damping. Near zero, this is
      FedAvg.

    Args:
        groups: Names of the model's ``parameter_groups``. ``null`` means all parameters, logged as
            the group ``all``.
        estimator: ``exact`` is the mean over samples of the squared gradients. ``batch`` is the
            mean over batches of the squared gradient of the batch mean, about ``exact`` divided by
            the batch size. The factor cancels unless clients have fewer samples than a batch.
            ``training`` is the mean over the steps of the fit of the squared gradient of the
            training loss, before clipping. It needs no pass after the fit and no
            ``log_likelihood``, but includes all terms of that loss, at the weights on the way.
        damping: Sum of the Fishers up to which a parameter takes FedAvg's value, because no
            client's data determines it and the mean would be a quotient of rounding errors. It is
            in units of the Fisher, so smaller for ``batch``.
        by_samples: Whether to weight by ``n_k F_k``, the precision of the posterior after n_k
            samples, instead of ``F_k``.
        batches: Maximum number of batches of the pass after the fit. Default: an epoch.
        weighting: See FedAvg, for all other parameters.
    """

    groups: _Groups = ("flow",)
    estimator: Estimator | Literal["training"] = "exact"
    damping: NonNegativeFloat = 1e-12
    by_samples: bool = False
    batches: PositiveInt | None = None
    weighting: Weighting = "samples"

    @property
    def half(self) -> ClientHalf:
        if self.estimator == "training":
            return _OfSteps(self)
        return _OfLikelihood(self, self.estimator)

    def least(self, clients: float) -> float:
        return self.damping


@dataclass(frozen=True)
class FisherMerge(FisherMean):
    """The Fisher-weighted mean of all parameters, ``sum p_i F_i w_i / sum p_i F_i`` elementwise.

    Take it to merge models of any layers, with one more message of the model's size.

    F_i is the diagonal of the true Fisher of each model's own prediction, which does not vanish on
    fitted data, and ``p_i = n_i / N``. Any layer with parameters is supported, including norm
    layers. The model has a method ``logits(x)``. The samples are not augmented.

    Equation 4, this Fisher, and merging all parameters are from the paper. The weights by samples
    and the floor on the sum are from the comparison in FedFisher's paper. The paper's code also
    divides each Fisher by its norm, searches the models' coefficients, and applies a floor to the
    first model only. These are omitted.

    It logs the metrics of :class:`~flsuite.aggregators.FisherAveraging`.

    Args:
        floor: The value of ``sum p_i F_i`` up to which a parameter takes FedAvg's value. Default:
            1e-6, as in that comparison. With a larger floor, more parameters take FedAvg's value.
        samples: Maximum number of a client's samples for its Fisher. ``null`` means all.
        expectation: ``exact`` is the expectation over the model's prediction, with one backward
            pass per output. ``sampled`` draws one label per sample, with one backward pass.
        groups: Names of the model's ``parameter_groups`` to merge. Default: all parameters, logged
            as the group ``all``.
        by_samples: Whether ``p_i`` is the client's fraction of the samples, instead of equal for
            all.
        weighting: See FedAvg, for all other parameters.
    """

    floor: NonNegativeFloat = 1e-6
    samples: PositiveInt | None = 2000
    expectation: Expectation = "exact"
    groups: _Groups = None
    by_samples: bool = True
    weighting: Weighting = "samples"

    needs = FisherMean.needs | {"classes or labels"}

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        with after_fit(client, module):
            fisher = predictive_diagonal(
                module,
                self.names(client.layout),
                plain_batches(module, loader, self.samples),
                loader.data.spec.task,
                self.expectation,
                torch_generator(loader.seed, "FisherMerge", loader.round, loader.client),
            )
            client.extras["fisher"] = _logged(client, fisher)

    def check(self, model: LightningModule) -> None:
        require_logits("FisherMerge", model)

    def least(self, clients: float) -> float:
        # The sums are over n_i F_i, which is N times the sum over p_i F_i.
        return self.floor * clients


@dataclass(frozen=True)
class _OfLikelihood(ClientHalf):
    """The client half with a pass over the training batches after the fit."""

    rule: FisherAveraging
    estimator: Estimator

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        names = self.rule.names(client.layout)
        # The fit's batches: the Fisher describes the data that the parameters were fitted to.
        batches = islice(training_batches(module, loader), self.rule.batches)
        # bfloat16 and dropout would add noise to the squared gradients.
        with after_fit(client, module):
            fisher = fisher_diagonal(module, names, batches, self.estimator)
            client.extras["fisher"] = _logged(client, fisher)

    def check(self, model: LightningModule) -> None:
        if not isinstance(model, LikelihoodModel):
            raise FlsuiteError(
                "FisherAveraging needs the log-likelihood of each sample, but "
                f"{type(model).__name__} has none: add a method log_likelihood(batch) -> (n,), "
                "differentiable in its groups, or choose another aggregator"
            )


@dataclass(frozen=True)
class _OfSteps(ClientHalf):
    """The client half without a pass: the mean of the squared gradients of the fit's own steps."""

    rule: FisherAveraging

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        names = self.rule.names(client.layout)
        return w, {k: torch.zeros_like(w[k], dtype=torch.float32) for k in names}

    def gradient(self, oracle: Oracle, w: State, held: State, batch: Any) -> tuple[State, State]:
        g = oracle(w, batch)
        return g, {k: s + g[k].float().square() if k in g else s for k, s in held.items()}

    def end(self, client: ClientContext, w: State, held: State) -> None:
        steps = sum(own.steps for own in client.fit.taken if held.keys() & own.names)
        fisher = {name: squares / max(steps, 1) for name, squares in held.items()}
        client.extras["fisher"] = _logged(client, fisher)


def _logged(client: ClientContext, diagonal: State) -> State:
    """Return a snapshot of a Fisher diagonal, and log its sum, the trace."""
    fisher = clone(diagonal)
    trace = sum(f.sum(dtype=torch.float64) for f in fisher.values())
    client.metrics["fisher_mass"] = float(trace)
    return fisher
