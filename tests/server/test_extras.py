"""What clients send beside the model is checked before an aggregator sees it."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite.aggregators import SCAFFOLD, Aggregator, FedAvg, FisherAveraging
from flsuite.engines import Processes
from flsuite.errors import FederationError
from flsuite.models import MLP, NFClassifier
from tests.conftest import classifier, digits, equal_states, trainer

CHANGES = {
    "no_extras": (lambda e: e.clear(), r"extras lacks control_change"),
    "another_entry": (lambda e: e.update(more=torch.ones(1)), r"extras has unknown entries more"),
    "no_dict": (lambda e: e.update(control_change=1.0), r"extras.control_change is a float"),
    "a_name_missing": (
        lambda e: e["control_change"].pop("network.1.weight"),
        r"extras.control_change lacks network.1.weight",
    ),
    "shape": (
        lambda e: e["control_change"].update({"network.1.bias": torch.zeros(())}),
        r"extras.control_change.network.1.bias has shape \(\); \(16,\) is expected",
    ),
    "dtype": (
        lambda e: e["control_change"].update({"network.1.bias": torch.zeros(16).double()}),
        r"extras.control_change.network.1.bias has dtype torch.float64",
    ),
    "nan": (
        lambda e: e["control_change"]["network.1.bias"].fill_(float("nan")),
        r"extras.control_change.network.1.bias is not finite",
    ),
}


class _Spoils(Callback):
    def __init__(self, client: Any, change: Any) -> None:
        self.client, self.change = client, change

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.change(self.client.extras)


class Faulty(SCAFFOLD):
    """SCAFFOLD with one client that sends something else in the second round."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def client_callbacks(self, client: Any) -> list[Callback]:
        spoils = [_Spoils(client, self.change)] if (client.id, client.round) == (1, 2) else []
        return [*super().client_callbacks(client), *spoils]


class Without(SCAFFOLD):
    """SCAFFOLD that was never told of that client in that round."""

    def aggregate(self, global_state: Any, updates: Any) -> Any:
        kept = (u for u in updates if (u.client, u.round) != (1, 2))
        return super().aggregate(global_state, kept)


def fit(aggregator: Aggregator, **kwargs: Any) -> Any:
    made = trainer(rounds=2, aggregator=aggregator, **kwargs)
    made.fit(classifier(), digits())
    return made


@pytest.mark.parametrize("name", CHANGES)
def test_a_faulty_client_is_refused_and_named_and_the_round_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = CHANGES[name]
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        made = fit(Faulty(change))
    (failure,) = made.federation.log.failures
    assert (failure.client, failure.round) == (1, 2)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(failure.reason)
    assert any("round 2: client 1 failed" in record.getMessage() for record in caplog.records)
    without = fit(Without())
    assert equal_states(made.federation.state, without.federation.state)
    ours, theirs = made.aggregator.memory["control"], without.aggregator.memory["control"]
    assert equal_states(ours, theirs)


def test_a_fisher_of_another_shape_is_refused() -> None:
    class Cut(FisherAveraging):
        def client_callbacks(self, client: Any) -> list[Callback]:
            def cut(extras: Any) -> None:
                if client.id == 0:
                    name = next(iter(extras["fisher"]))
                    extras["fisher"][name] = extras["fisher"][name][:1]

            return [*super().client_callbacks(client), _Spoils(client, cut)]

    made = trainer(rounds=1, aggregator=Cut())
    model = NFClassifier(feature_dim=8, couplings=1, flow_width=8, backbone=MLP(hidden=(16,)))
    made.fit(model, digits(clients=2))
    (failure,) = made.federation.log.failures
    assert failure.client == 0 and "extras.fisher." in failure.reason


class Counts(FedAvg):
    """Sends a number and a tensor that it may or may not declare."""

    def __init__(self, declares: bool) -> None:
        super().__init__()
        self.declares = declares

    def client_callbacks(self, client: Any) -> list[Callback]:
        return [_Spoils(client, lambda e: e.update(count=1, mean=torch.zeros(2)))]

    def expected_extras(self, global_state: Any) -> dict[str, Any]:
        return {"count": 0, "mean": torch.zeros(2)} if self.declares else {}


def test_extras_that_are_not_declared_are_refused_with_what_to_do() -> None:
    assert not fit(Counts(declares=True)).federation.log.failures
    with pytest.raises(FederationError, match=r"has unknown entries count, mean.*expected_extras"):
        fit(Counts(declares=False))


class Reads(FedAvg):
    """Its client half reads what only the server knows."""

    def client_callbacks(self, client: Any) -> list[Callback]:
        return [Callback()] if self.memory.get("round") else []


@pytest.mark.parametrize("engine", [None, Processes(workers=1)], ids=["in_process", "workers"])
def test_a_client_half_that_reads_the_servers_memory_is_refused(engine: Any) -> None:
    from flsuite.errors import FlsuiteError

    with pytest.raises(FlsuiteError, match=r"client half of Reads uses self\.memory.*broadcast"):
        fit(Reads(), engine=engine)
