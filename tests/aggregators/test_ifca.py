"""IFCA finds two clusters of opposite labels, and with one model it is FedAvg."""

import pytest
import torch
from torch.optim import SGD

from flsuite.aggregators import IFCA, FedAvg
from flsuite.aggregators.ifca import ClusterMeans
from flsuite.common.state import StateLayout, Sums, clone, scaled
from flsuite.data import DataSpec, FederatedDataModule
from flsuite.data.federated import DataSplit, PublishedSplits
from flsuite.data.partitions import Natural
from flsuite.models import MLP, Classifier
from tests.aggregators.federations import assert_equal, assert_same_models, federation, run, update


class Opposite(FederatedDataModule):
    """Six clients with points of the plane. Every second one has the labels swapped."""

    def __init__(self) -> None:
        super().__init__(clients=6, partition=Natural(), batch_size=20, val_fraction=0.0)

    def load(self) -> PublishedSplits:
        x = torch.randn(360, 2, generator=torch.Generator().manual_seed(0))
        owners = torch.arange(360) % 6
        y = (x[:, 0] > 0).long()
        y = torch.where(owners % 2 == 0, y, 1 - y)
        split = DataSplit(x, y, owners)
        return PublishedSplits(DataSpec((2,), 2), split, split)


def test_clients_with_opposite_labels_are_told_apart() -> None:
    made = federation(IFCA(2), 6, max_epochs=3, evaluate_every=6)
    made.fit(Classifier(MLP((8,)), lambda p: SGD(p, lr=0.3)), Opposite())
    chosen = [made.federation.clients[c]["objective"]["cluster"] for c in range(6)]
    assert chosen in ([0, 1] * 3, [1, 0] * 3)
    assert made.callback_metrics["test/accuracy_client_mean"] > 0.95


def test_with_one_model_it_is_fedavg() -> None:
    made, average = run(IFCA(1), 3), run(FedAvg(), 3)
    for name, value in average.federation.state.items():
        torch.testing.assert_close(made.federation.state[name], value)


def test_statistics_that_every_fit_resets_are_those_of_fedavg() -> None:
    made = run(IFCA(1), 3, batchnorm="reset", max_epochs=2)
    average = run(FedAvg(), 3, batchnorm="reset", max_epochs=2)
    for name, value in average.federation.state.items():
        assert torch.allclose(made.federation.state[name], value, atol=1e-6), name


def test_bytes_down_are_all_models_and_bytes_up_one() -> None:
    one, three = (run(IFCA(k), 1).federation.log.updates[0] for k in (1, 3))
    assert three.bytes_down == pytest.approx(3 * one.bytes_down, rel=0.01)
    assert three.bytes_up == pytest.approx(one.bytes_up, rel=0.02)
    assert_same_models(run(IFCA(3), 2), run(IFCA(3), 2))


def test_a_cluster_without_clients_keeps_its_model() -> None:
    made = run(IFCA(3), 1)
    server = made.federation.server.of("rule")
    before = {c: clone(m) for c, m in server.memory["models"].items()}
    rule = made.federation.aggregator.rule
    sums = {
        "weights": {"0": 2.0, "1": 0.0, "2": 0.0},
        "models": {c: scaled(made.federation.state, 2.0) for c in "012"},
    }
    rule.result(server, sums, [])
    for c, model in before.items():
        assert_equal(model, server.memory["models"][c])


def test_the_counters_of_a_cluster_are_those_of_its_own_clients() -> None:
    """With BatchNorm(momentum=None), they decide how statistics are averaged."""
    rule, sums, layout = ClusterMeans(clusters=2), Sums(), StateLayout(("w",), 2)
    for client, cluster, batches in ((0, [1, 0], 4), (1, [0, 1], 9)):
        own = {"w": torch.ones(2), "batches": torch.tensor(batches)}
        sums.add(rule.terms(update(client, own, cluster=torch.tensor(cluster)), layout))
    assert [int(sums.values["models"][cluster]["batches"]) for cluster in "01"] == [4, 9]
