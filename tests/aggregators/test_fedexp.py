"""FedExP's step by its formula, and FedAvg where the step is one."""

from collections.abc import Sequence

import torch

from flsuite.aggregators import FedAvg, FedExP
from flsuite.common.state import StateLayout
from tests.aggregators.federations import ServerHalf, assert_equal, reference, run, update


def test_a_bound_above_all_changes_is_fedavg() -> None:
    made, average = run(FedExP(eps=1e6)), reference(FedAvg, "uniform")
    assert made.federation.log.server["server_step"] == 1.0
    assert_equal(made.federation.state, average.federation.state)


def stepped(changes: Sequence[tuple[float, float]], eps: float) -> torch.Tensor:
    """Return how far the model of two weights moves from (1, 1) by these changes."""
    half = ServerHalf(FedExP(eps=eps), StateLayout(("w",), 2))
    updates = [
        update(i, {"w": 1 + torch.tensor(change)}, squared_change=sum(x * x for x in change))
        for i, change in enumerate(changes)
    ]
    server = half.server({"w": torch.ones(2)})
    return half.aggregator.aggregate(server, iter(updates))["w"] - 1


def test_opposite_changes_are_extrapolated() -> None:
    """The mean is (0, 0.1), and the ratio 2.02 / (4 * (0.01 + 0.01)) = 25.25."""
    new = stepped([(1.0, 0.1), (-1.0, 0.1)], 0.01)
    torch.testing.assert_close(new, 25.25 * torch.tensor([0.0, 0.1]))
