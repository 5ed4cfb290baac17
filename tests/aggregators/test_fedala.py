"""FedALA with weights of one is FedAvg, and its weights go where the loss falls."""

import pytest
import torch

from flsuite.aggregators import FedALA, FedAvg
from tests.aggregators.federations import Quadratic, Quadratics, assert_equal, federation, run


def test_with_all_weights_at_one_it_is_fedavg() -> None:
    made, average = run(FedALA(rate=0.0), 3), run(FedAvg(), 3)
    assert_equal(made.federation.state, average.federation.state)


def test_a_client_is_scored_by_its_own_trained_model() -> None:
    made = run(FedALA(), 2)
    own = made.federation.clients[1]["objective"]["local"]
    state = made.federation.client_state(1)
    assert_equal({k: state[k] for k in own}, own)


def test_a_client_far_from_the_mean_starts_from_its_own_model() -> None:
    """Client 2's loss falls from the global model towards its own one, down to a weight of 0."""
    made = federation(FedALA(rate=1.0), 12, max_epochs=20)
    made.fit(Quadratic(), Quadratics((1.0, 1.0, 1.0), (0.0, 0.0, 3.0)))
    weights = [float(made.federation.clients[c]["objective"]["weights"]["w"]) for c in range(3)]
    assert weights[2] < 0.05
    assert float(made.federation.client_state(2)["w"]) == pytest.approx(3.0, abs=0.05)
    assert all(0 <= weight <= 1 for weight in weights)


def test_only_the_upper_layers_are_mixed() -> None:
    made = run(FedALA(layers=1), 2)
    assert set(made.federation.clients[0]["objective"]["weights"]) == {
        "network.3.weight",
        "network.3.bias",
    }
    assert all(torch.isfinite(v).all() for v in made.federation.state.values())
