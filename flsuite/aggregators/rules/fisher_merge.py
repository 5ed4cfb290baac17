"""FisherMerge: Matena and Raffel 2022, eq. 4, over all parameters.

Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import Callback

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.fisher_mean import FisherMean
from flsuite.aggregators.rules.fisher_passes import PredictivePass
from flsuite.aggregators.rules.mean import Weighting
from flsuite.arguments import NonNegativeFloat, PositiveInt
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import Expectation
from flsuite.state import State, Tree

__all__ = ["FisherMerge"]


@dataclass(frozen=True)
class FisherMerge(FisherMean):
    """The Fisher-weighted mean of all parameters, ``sum p_i F_i w_i / sum p_i F_i`` elementwise.

    F_i is the diagonal of the true Fisher of each model's own prediction, which does not vanish on
    fitted data, and ``p_i = n_i / N``. Any layer with parameters is allowed, norm layers too. The
    model has a method ``logits(x)``. The samples are not augmented.

    Equation 4 and this Fisher are the paper's, and so is merging all parameters. The weights by
    samples and the floor on the sum are those of the comparison in FedFisher's paper. The code of
    the paper also divides each Fisher by its norm, searches the models' coefficients, and applies a
    floor to the first model alone: these are left out.

    Logged beside the metrics of :class:`~flsuite.aggregators.FisherAveraging`:

    - ``fisher_floor``: the share of parameters on the floor. Near one, this is FedAvg.

    Args:
        floor: The value of ``sum p_i F_i`` up to which a parameter takes FedAvg's value. Default:
            1e-6, as in that comparison. A larger one turns more parameters into FedAvg's.
        samples: The largest number of a client's samples that its Fisher is computed over. 2,000
            cost a fraction of all, and ``null`` is all.
        expectation: ``exact`` is the expectation over the model's prediction, with a backward pass
            per output. ``sampled`` draws one label per sample, with one backward pass.
        groups: Names of the model's ``parameter_groups`` that are merged. Default: all parameters,
            logged as the group ``all``.
        by_samples: Whether ``p_i`` is the client's share of the samples, and not the same for all.
        weighting: As for FedAvg, for all other parameters.
    """

    floor: NonNegativeFloat = 1e-6
    samples: PositiveInt | None = 2000
    expectation: Expectation = "exact"
    groups: Sequence[str] | None = None
    by_samples: bool = True
    weighting: Weighting = "samples"

    def callbacks(self, client: ClientContext) -> list[Callback]:
        names = self._names(client.layout)
        return [PredictivePass(client, "FisherMerge", names, self.samples, self.expectation)]

    def least(self, clients: float) -> float:
        # The sums are of n_i F_i, N times those of p_i F_i.
        return self.floor * clients

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        new, least = super().result(server, sums, updates), self.least(sums["share"])
        fishers = sums["fisher"].values()
        covered = sum(int((fisher > least).sum()) for fisher in fishers)
        server.metrics["fisher_floor"] = 1.0 - covered / sum(f.numel() for f in fishers)
        return new
