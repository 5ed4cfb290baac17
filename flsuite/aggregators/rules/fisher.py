"""Fisher averaging: each client's parameter counts as far as the client's data determines it.

Matena and Raffel 2022, Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832, eq. 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import Callback

from flsuite.aggregators.rules.fisher_mean import FisherMean
from flsuite.aggregators.rules.fisher_passes import EmpiricalPass
from flsuite.aggregators.rules.mean import Weighting
from flsuite.arguments import NonNegativeFloat, PositiveInt
from flsuite.messages import ClientContext
from flsuite.metrics.fisher import Estimator

__all__ = ["FisherAveraging"]


@dataclass(frozen=True)
class FisherAveraging(FisherMean):
    """FedAvg with the Fisher-weighted mean for the named groups of parameters.

    The model declares the groups in ``parameter_groups``, and has a method
    ``log_likelihood(batch)``, such as the density of ``NFClassifier``'s features. At the end of its
    fit a client measures the diagonal of the empirical Fisher, that of the samples' labels, in
    float32 and evaluation mode. It takes one pass over its training batches, augmented as in
    training: the Fisher is that of the data that the parameters were fitted to.

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

    groups: Sequence[str] | None = ("flow",)
    estimator: Estimator = "exact"
    damping: NonNegativeFloat = 1e-12
    by_samples: bool = False
    batches: PositiveInt | None = None
    weighting: Weighting = "samples"

    def callbacks(self, client: ClientContext) -> list[Callback]:
        names = self._names(client.layout)
        return [EmpiricalPass(client, names, self.estimator, self.batches)]

    def least(self, clients: float) -> float:
        return self.damping
