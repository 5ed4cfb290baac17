"""Norm clipping: Sun et al. 2019, section 3.

Can You Really Backdoor Federated Learning?, arXiv:1911.07963.
"""

from dataclasses import dataclass

from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import Weighting
from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.common.arguments import Radius


@dataclass(frozen=True)
class NormClipping(ParameterRule):
    """The mean of the clients' changes, each clipped to a maximum norm.

    A change ``d`` counts as ``d min(1, radius / |d|)``, so a client with weight ``q`` moves the
    global model by at most ``q radius``. With an infinite radius, it is FedAvg.

    Logged are each client's ``update_norm``, ``clipped`` (1 if it was scaled down) and ``weight``,
    the factor of its change, and ``train/clip_radius``. A log line names clipped clients.

    Args:
        radius: The maximum norm of a change. Default: the (lower) median of the cohort's norms.
        weighting: ``uniform``, or ``samples`` as in FedAvg. With ``samples``, an attacker could
            claim many samples.
    """

    radius: Radius | None = None
    weighting: Weighting = "uniform"

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        norms = cohort.parameters.squared_norms().sqrt()
        radius = norms.median().item() if self.radius is None else self.radius
        factors = clip_factors(norms, radius).tolist()

        own = cohort.weights(self.weighting)
        weights = [n * factor for n, factor in zip(own, factors, strict=True)]
        total = sum(own)
        cohort.note("update_norm", norms.tolist())
        cohort.note("clipped", (factor < 1 for factor in factors))
        cohort.note("weight", (weight / total for weight in weights))
        server.metrics["clip_radius"] = radius
        cohort.name_clients(self, "clipped", (k for k, factor in enumerate(factors) if factor < 1))
        # The clipped fraction of a client's weight goes to the global model.
        return cohort.parameters.mean(weights, total, total - sum(weights))


def clip_factors(norms: Tensor, radius: float) -> Tensor:
    """Return ``min(1, radius / norm)`` of each norm, and 1 for a norm of 0."""
    # Select only ratios below 1, because 0 / 0 and infinity / infinity are NaN.
    return (radius / norms).where(norms > radius, 1.0)
