"""Rules that choose updates, group them, or trust those like the server's own.

- Krum and Multi-Krum: Blanchard et al. 2017, sections 3 and 5. Machine Learning with Adversaries:
  Byzantine Tolerant Gradient Descent, NeurIPS 2017, arXiv:1703.02757.
- Bucketing: Karimireddy, He, Jaggi 2022, algorithm 1. Byzantine-Robust Learning on Heterogeneous
  Datasets via Bucketing, arXiv:2006.09365.
- FLTrust: Cao, Fang, Liu, Gong 2021, algorithm 2. FLTrust: Byzantine-robust Federated Learning via
  Trust Bootstrapping, NDSS, arXiv:2012.13995.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import CohortRule, Rule, RuleAround
from flsuite.aggregators.rules.robust.base import (
    Clients,
    Cohort,
    ParameterRule,
    bucket_of,
    more_clients,
    number_of,
    place,
    refuse_few,
)
from flsuite.aggregators.rules.robust.vectors import squared_distances
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import numpy_generator
from flsuite.common.state import State


@dataclass(frozen=True)
class MultiKrum(ParameterRule):
    """The mean of the ``m`` models that are closest to their neighbors.

    Take it if you can bound the number of attackers.

    The score of a client is the sum of the squared distances to its ``n - f - 2`` nearest others,
    and the ``m`` lowest scores win. Ties go to the lower client number. With ``m = n``, it is the
    plain mean.

    Logged are each client's ``krum_score`` and its ``weight``, ``1 / m`` or 0. A log line names
    clients without weight.

    Args:
        byzantine: Attackers to withstand, ``f``, as an integer, or their fraction in [0, 0.5) as a
            float. More than ``2 f + 2`` clients must come back.
        selected: Clients whose models count, ``m``. Default: ``n - f``.
    """

    byzantine: Clients = 0.2
    selected: PositiveInt | None = None

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        count = len(cohort)
        byzantine = number_of(self.byzantine, count)
        scores = _krum_scores(squared_distances(cohort.parameters.gram()), byzantine)

        number = self.selected or count - byzantine
        chosen = set(torch.sort(scores, stable=True).indices[:number].tolist())
        weights = [float(k in chosen) for k in range(count)]
        cohort.note("krum_score", scores.tolist())
        cohort.note("weight", (weight / number for weight in weights))
        cohort.name_clients(self, "left out", set(range(count)) - chosen)
        return cohort.parameters.mean(weights, number)

    def too_few(self, updates: int) -> str | None:
        name, byzantine = type(self).__name__, number_of(self.byzantine, updates)
        remedy = more_clients("byzantine", (updates - 3) // 2)
        if updates <= 2 * byzantine + 2:
            return (
                f"{name} needs more than 2 f + 2 = {2 * byzantine + 2} updates for f = {byzantine} "
                f"attackers, but there are {updates}; {remedy}"
            )
        if updates < (self.selected or 0):
            return (
                f"{name} needs the {self.selected} updates that it selects, but there are "
                f"{updates}; {more_clients('selected', updates)}"
            )
        return None


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one model that is closest to its neighbors: Multi-Krum with ``m = 1``.

    Take it to reproduce tables: ``MultiKrum`` uses more of the updates.

    The global model becomes a single client's model.

    Args:
        byzantine: See Multi-Krum.
    """

    selected: PositiveInt | None = field(default=1, init=False)


def _krum_scores(squares: Tensor, byzantine: int) -> Tensor:
    """Return the sum of the squared distances of each client to its ``n - f - 2`` nearest others.

    Args:
        squares: Squared distances ``(n, n)``.
        byzantine: The number of attackers, ``f``. ``n`` must be above ``f + 2``.
    """
    # Exclude the client itself, even if others are at distance 0.
    others = squares.clone().fill_diagonal_(-1.0).sort(1).values[:, 1:]
    return others[:, : len(squares) - byzantine - 2].sum(1)


@dataclass(frozen=True)
class Bucketing(RuleAround, Settings):
    """Applies a rule to the means of random buckets of clients.

    Take it around another robust rule, if the clients' data differ.

    Clients with different data look like attackers to each other. The means of a few of them differ
    less. An attacker spoils its whole bucket, so the rule must withstand as many buckets as there
    are attackers. With ``size`` 1, it is the rule itself, and with one bucket of all clients, the
    plain mean.

    The buckets are redrawn in each round, by the run's seed. To the rule, a bucket is an update:
    the plain mean of the models (for late clients, their changes applied to the global model), the
    mean of the statistics by samples, and the largest staleness. The rule's metrics of a bucket are
    logged for each of its clients, and the bucket's weight is split equally. For ``n`` clients of
    ``d`` parameters, the models take ``4 n d`` bytes, and the means ``4 n d / size``.

    Args:
        rule: Any rule, such as a robust one. Its counts, such as ``byzantine``, refer to buckets.
        size: Clients per bucket, ``s``. The last bucket may have fewer.
    """

    rule: Rule
    size: PositiveInt = 2

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        members = sorted(updates, key=place)
        refuse_few(self, server, len(members))
        rng = numpy_generator(server.tools.seed, "bucketing", server.round)
        order = rng.permutation(len(members)).tolist()
        starts = range(0, len(order), self.size)
        buckets = [sorted(order[start : start + self.size]) for start in starts]
        # Sorted by their first clients, so buckets of one keep the clients' order.
        groups = [[members[k] for k in bucket] for bucket in sorted(buckets)]

        members.clear()

        metrics = [[update.metrics for update in group] for group in groups]
        notes = [own[0] if len(own) == 1 else {} for own in metrics]
        for number, note in enumerate(notes):
            note["bucket"] = float(number)
        # The models of a bucket are released once its mean is computed.
        means = (bucket_of(server, groups.pop(0), note) for note in notes)
        # A separate part each, so a linear rule sums them one by one.
        means = (m if m.part is None else replace(m, part=k) for k, m in enumerate(means))
        model = self.of_rule(server, means)
        for own, note in zip(metrics, notes, strict=True):
            if "weight" in note:
                note["weight"] /= len(own)
            for each in own:
                each.update(note)
        return model

    def too_few(self, updates: int) -> str | None:
        buckets = math.ceil(updates / self.size)
        fault = super().too_few(buckets)
        return fault and f"Bucketing makes {buckets} buckets of {updates} updates, and {fault}"

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return CohortRule.needs | super().needs

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        return {**super().withholds, "a plain sum": "takes the means of random buckets"}

    def prepare(self, server: Server) -> None:
        """Refuse a rule that cannot work with means of clients, and run the rule's own checks."""
        for name, statistic in self.statistics(server.layout, server.state).items():
            if self.size > 1 and not statistic.is_sum:
                raise FlsuiteError(
                    f"Bucketing: {type(self.rule).__name__} needs every client's own {name}, but "
                    "a bucket only has their mean; use another rule, or set size to 1"
                )
        super().prepare(server)


@dataclass(frozen=True)
class FLTrust(ParameterRule):
    """Averages the clients' changes by their similarity to the server's own change.

    Take it if the server has some samples of its own, and attackers may be many.

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
