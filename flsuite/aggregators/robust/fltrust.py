"""FLTrust: Cao, Fang, Liu, Gong 2021, algorithm 2.

FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS, arXiv:2012.13995.
"""

import logging

import torch
from torch import Tensor

from flsuite.aggregators.robust.base import ParameterRule
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.state import StateLayout

__all__ = ["FLTrust"]

log = logging.getLogger("flsuite")


class FLTrust(ParameterRule):
    """The mean of the clients' changes by their likeness to a change of the server's own.

    The server trains like a client, from the same global model, on the samples that it holds for
    itself (``data.server_samples``), which no client has and no test uses. The trust in a client is
    ``max(0, cos(d_k, d_0))`` for the change ``d_k`` and the server's ``d_0`` (equation 1). The
    global model moves by the mean of the changes by trust, each scaled to the server's norm
    (equations 3 and 4). It stays as it was in a round without any trust, which a warning names.

    Any number of attackers can be withstood, as far as the server's samples are like the clients'.

    The log has each client's ``trust`` and its ``weight``, the factor of its change, and
    ``train/server_norm``, the norm of ``d_0``. Clients without trust are named in a line. The
    models of a round are in memory at a time, ``4 n d`` bytes for ``n`` clients of ``d``
    parameters, and the server keeps a second copy of the model to train.
    """

    def combine(self, cohort: Cohort) -> Tensor:
        assert self.tools.train is not None  # configure has refused
        trained = self.tools.train(cohort.global_state, cohort.round)
        own = cohort.vector(trained).double() - cohort.parameters.start
        norm, norms = own.norm(), cohort.parameters.squared_norms().sqrt()

        cosines = cohort.parameters.products(own) / norm / norms
        # No change has no direction, and no trust.
        trust = cosines.where((norms > 0) & (norm > 0), 0.0).clamp(min=0.0, max=1.0)
        total = trust.sum().item()
        weights = torch.where(trust > 0, trust * norm / norms, 0.0)
        self.metrics["server_norm"] = norm.item()
        cohort.note("trust", trust.tolist())
        cohort.note_weights((weights / total if total else weights).tolist())
        if not total:
            log.warning("round %d: FLTrust trusts no client; the model stays", cohort.round)
            return cohort.parameters.start.clone()

        self.name(cohort, "left out", (trust == 0).nonzero().flatten().tolist())
        # The smaller a change, the larger its weight.
        return cohort.parameters.moved(weights.tolist(), total)

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model. Refuse a server that cannot train."""
        super().configure(layout)
        if self.tools.train is None:
            raise self.tools.refusal("FLTrust", "train", "trains on the server's own samples")
