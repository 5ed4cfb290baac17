"""FLTrust: Cao, Fang, Liu, Gong 2021, algorithm 2.

FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS, arXiv:2012.13995.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.cohort import Cohort

log = logging.getLogger("flsuite")


@dataclass(frozen=True)
class FLTrust(ParameterRule):
    """Averages the clients' changes by their similarity to the server's own change.

    The server trains like a client, from the same global model, on its own samples
    (``data.server_samples``), which are neither a client's nor test samples. The trust in a client
    is ``max(0, cos(d_k, d_0))`` for the change ``d_k`` and the server's ``d_0`` (equation 1). The
    global model moves by the trust-weighted mean of the changes, each scaled to the server's norm
    (equations 3 and 4). In a round without any trust, it does not move, and a warning is logged.

    It withstands any number of attackers, provided that the server's samples resemble the clients'.

    Logged are each client's ``trust``, its ``weight`` (the factor of its change), and
    ``train/server_norm``, the norm of ``d_0``. A log line names clients without trust. The
    server keeps a second copy of the model to train.
    """

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        assert server.tools.train is not None  # prepare has refused
        trained = server.tools.train(server.state, server.round)
        own = cohort.vector(trained).double() - cohort.parameters.start
        norm, norms = own.norm(), cohort.parameters.squared_norms().sqrt()

        cosines = cohort.parameters.products(own) / norm / norms
        # A change of zero, or of rounding alone, has no direction, so its trust is 0.
        has_direction = (norms > 0) & (norm > 0) & ~cohort.parameters.are_rounding()
        trust = cosines.where(has_direction, 0.0).clamp(min=0.0, max=1.0)
        total = trust.sum().item()
        weights = torch.where(trust > 0, trust * norm / norms, 0.0)
        server.metrics["server_norm"] = norm.item()
        cohort.note("trust", trust.tolist())
        cohort.note("weight", (weights / total if total else weights).tolist())
        if not total:
            log.warning("round %d: FLTrust trusts no client; the model stays", cohort.round)
            return cohort.parameters.start.clone()

        cohort.name_clients(self, "left out", (trust == 0).nonzero().flatten().tolist())
        # moved() is accurate for the large weights of small changes.
        return cohort.parameters.moved(weights.tolist(), total)

    def prepare(self, server: Server) -> None:
        """Refuse a server that cannot train."""
        if server.tools.train is None:
            raise server.tools.refusal("FLTrust", "train", "trains on the server's own samples")
