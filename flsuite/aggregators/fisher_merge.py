"""FisherMerge: Matena and Raffel 2022, eq. 4, over all parameters.

Merging Models with Fisher-Weighted Averaging, arXiv:2111.09832.
"""

from collections.abc import Iterator

from flsuite.aggregators.fisher import FisherAveraging
from flsuite.errors import require_at_least
from flsuite.messages import ClientUpdate
from flsuite.metrics.fisher import Expectation
from flsuite.state import State

__all__ = ["FisherMerge"]


class FisherMerge(FisherAveraging):
    """The Fisher-weighted mean of all parameters, ``sum p_i F_i w_i / sum p_i F_i`` elementwise.

    It is :class:`FisherAveraging` with the true Fisher of each model's prediction and with weights
    by samples, ``p_i = n_i / N``. Any layer with parameters is allowed, norm layers too. The model
    has a method ``logits(x)``.

    Equation 4 and this Fisher are the paper's, and so is merging all parameters. The weights by
    samples and the floor on the sum are those of the comparison in FedFisher's paper. The code of
    the paper also divides each Fisher by its norm, searches the models' coefficients, and applies a
    floor to the first model alone: these are left out.

    Logged beside the metrics of :class:`FisherAveraging`, with the group ``all``:

    - ``fisher_floor``: the share of parameters on the floor. Near one, this is FedAvg.

    Args:
        floor: The value of ``sum p_i F_i`` up to which a parameter takes FedAvg's value. Default:
            1e-6, as in that comparison. A larger one turns more parameters into FedAvg's.
        samples: The largest number of a client's samples that its Fisher is computed over, without
            augmentation. 2,000 cost a fraction of all, and ``null`` is all.
        expectation: ``exact`` is the expectation over the model's prediction, with a backward pass
            per output. ``sampled`` draws one label per sample, with one backward pass.
    """

    def __init__(
        self,
        floor: float = 1e-6,
        samples: int | None = 2000,
        expectation: Expectation = "exact",
    ) -> None:
        super().__init__(
            groups=None,
            fisher="predictive",
            by_samples=True,
            samples=samples,
            expectation=expectation,
        )
        self.floor = floor
        require_at_least("FisherMerge", 0, floor=floor)

    def least_fisher(self, samples: int) -> float:
        # The sums are of n_i F_i, N times those of p_i F_i.
        return self.floor * samples

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        new = super().aggregate(global_state, updates)
        self.metrics["fisher_floor"] = 1.0 - self.metrics["fisher_covered/all"]
        return new
