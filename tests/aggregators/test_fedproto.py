"""FedProto sends class means and no weights, and pulls features to the means of others."""

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import FedProto, LocalOnly
from flsuite.aggregators.fedproto import Prototypes
from flsuite.data import Pathological, Synthetic
from tests.aggregators.federations import reference, run

CLASSES = {"classes": 3, "samples": 120, "clients": 3, "batch_size": 16}


def data() -> Synthetic:
    return Synthetic(features=5, partition=Pathological(1), **CLASSES)


def test_no_weights_are_sent() -> None:
    made = run(FedProto(), 2)
    assert made.federation.state == {}
    numbers = 3 * 8 + 3  # prototypes of eight features, and counts
    assert made.federation.log.updates[0].bytes_up == 4 * numbers


def test_without_its_term_clients_train_alone() -> None:
    made, alone = run(FedProto(lam=0.0)), reference(LocalOnly)
    for client in range(4):
        own, local = (each.federation.client_state(client) for each in (made, alone))
        assert all(torch.equal(own[k], local[k]) for k in local)


def test_with_one_class_per_client_a_prototype_is_the_clients_mean() -> None:
    """Each prototype is then the mean feature of its client's trained model."""
    made = run(FedProto(), 1, data())
    memory = made.federation.server.memory["objective"]
    federated = made.federation.data
    for client in range(3):
        rows = federated.train.rows[client]
        x, y = federated.train.x[rows], federated.train.y[rows]
        (label,) = set(y.tolist())
        model = made.run.evaluator.model
        model.load_state_dict(made.federation.client_state(client))
        model.eval()
        with torch.no_grad():
            features = model.network[:3](federated.scaling(x)).mean(0)
        torch.testing.assert_close(memory["prototypes"][label], features, rtol=1e-4, atol=1e-5)
        assert memory["known"][label] == 1.0


def test_a_head_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="must be linear"):
        run(FedProto(head="network.2"))


def test_a_prototype_stays_where_no_client_of_the_round_has_the_class() -> None:
    made = run(FedProto(), 1, data())
    memory = made.federation.server.memory["objective"]
    before = memory["prototypes"].clone()
    rule = made.federation.aggregator.objective
    only = {"classes": torch.tensor([0.0, 1.0, 0.0]), "features": torch.full((3, 8), 2.0)}
    rule.conclude(made.federation.server.of("objective"), only, 1)
    after = made.federation.server.memory["objective"]["prototypes"]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[1], torch.full((8,), 2.0))


def test_a_class_without_a_prototype_pulls_nothing() -> None:
    distance = Prototypes("network.3.", lam=1.0, shape=(3, 8))
    held = {"prototypes": torch.zeros(3, 8), "known": torch.tensor([0.0, 1.0, 0.0])}
    batch = torch.zeros(2, 5), torch.tensor([0, 1])
    features = torch.ones(2, 8, requires_grad=True)
    distance.term(features, [], batch, held).backward()
    assert features.grad is not None
    assert torch.equal(features.grad[0], torch.zeros(8))
    assert (features.grad[1] > 0).all()
