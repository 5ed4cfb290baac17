"""q-FedAvg: Li et al. 2020, algorithm 2.

Fair Resource Allocation in Federated Learning, arXiv:1905.10497.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.fedexp import squared_change
from flsuite.aggregators.optimizers import base_rate
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import LinearRule, withheld_by
from flsuite.aggregators.rules.mean import mixed, split_buffers
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.client import ClientContext
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, divided, scaled


class QFedAvg(Aggregator):
    """Clients with a higher loss weigh more, so that clients are served more equally.

    Take it if the worst client matters more than the mean.

    With ``L = 1 / eta``, the client's loss ``F_k`` at the received model and ``d_k = L (w - w_k)``:
    ``w <- w - sum_k F_k^q d_k / sum_k h_k`` and
    ``h_k = q F_k^(q-1) |d_k|^2 + L F_k^q`` (lines 6 to 9). The rate ``eta`` is the optimizer's at
    the start of the fit. It sends as many bytes as FedAvg. A fit costs one more forward pass.

    Args:
        q: Fairness. With 0 this is FedAvg with uniform weights.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(self, q: NonNegativeFloat = 1.0, **kwargs: Any) -> None:
        self.q = q
        super().__init__(rule=FairMean(q), **kwargs)


@dataclass(frozen=True)
class FairMean(LinearRule, Settings):
    """The rule of :class:`QFedAvg`.

    Args:
        q: Fairness.
    """

    q: NonNegativeFloat = 1.0

    needs = frozenset({"current models", "exact changes"})
    withholds = withheld_by("its loss")

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        loss = client.fit.mean_loss({})  # of the received model
        if loss < 0:
            raise FlsuiteError("QFedAvg needs a loss of at least 0; choose another aggregator")
        inverse = 1.0 / base_rate(client.fit.optimizers[0].param_groups[0])
        client.extras |= {"received_loss": loss, "inverse_lr": inverse}
        return w, {}

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        client.extras["squared_change"] = squared_change(client, w)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {name: Statistic(0.0) for name in ("squared_change", "received_loss", "inverse_lr")}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        loss, inverse = update.extras["received_loss"], update.extras["inverse_lr"]
        # F^(q - 1) of a loss of zero, which a client can reach.
        loss = max(loss, 1e-10)
        squared = inverse**2 * update.extras["squared_change"]
        h = self.q * loss ** (self.q - 1) * squared + inverse * loss**self.q
        weight = inverse * loss**self.q
        model, buffers = split_buffers(update.state, layout)
        return {
            "h": h,
            "weight": weight,
            "model": scaled(model, weight),
            "buffers": scaled(buffers, 1.0),
        }

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        # w - sum L F^q (w - w_k) / sum h, as a step towards the mean with the weights L F^q.
        if sums["h"] <= 0:  # with a large q, if all losses are zero
            return server.state
        rate = sums["weight"] / sums["h"]
        mean = divided(sums["model"], sums["weight"])
        model = {name: mixed(server.state[name], value, rate) for name, value in mean.items()}
        return model | divided(sums["buffers"], len(updates))
