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

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        assert server.tools.train is not None  # prepare has refused
        trained = server.tools.train(server.state, server.round)
        own = cohort.vector(trained).double() - cohort.parameters.start
        norm, norms = own.norm(), cohort.parameters.squared_norms().sqrt()

        cosines = cohort.parameters.products(own) / norm / norms
        # No change has no direction, and no trust.
        trust = cosines.where((norms > 0) & (norm > 0), 0.0).clamp(min=0.0, max=1.0)
        total = trust.sum().item()
        weights = torch.where(trust > 0, trust * norm / norms, 0.0)
        server.metrics["server_norm"] = norm.item()
        cohort.note("trust", trust.tolist())
        cohort.note("weight", (weights / total if total else weights).tolist())
        if not total:
            log.warning("round %d: FLTrust trusts no client; the model stays", cohort.round)
            return cohort.parameters.start.clone()

        cohort.name_clients(self, "left out", (trust == 0).nonzero().flatten().tolist())
        # The smaller a change, the larger its weight.
        return cohort.parameters.moved(weights.tolist(), total)

    def prepare(self, server: Server) -> None:
        """Refuse a server that cannot train."""
        if server.tools.train is None:
            raise server.tools.refusal("FLTrust", "train", "trains on the server's own samples")
