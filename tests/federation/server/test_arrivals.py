"""What arrives from clients is checked before an aggregator sees it."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    ControlVariates,
    FedAvg,
    FedBuff,
    Mean,
    Rule,
    Statistic,
)
from flsuite.aggregators.uplink import Uplink
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import Broadcast, ClientFailure, ClientResult, ClientUpdate
from flsuite.common.state import StateLayout
from flsuite.federation import Asynchronous
from flsuite.federation.server.arrivals import RoundLog, _count_refused
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.absent import WithoutOne
from tests.federation.schedules.simulation import PerClient

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


@dataclass(frozen=True)
class _Faulty(ControlVariates):
    """Control variates with one client that sends something else in the second round."""

    change: Any = None

    def end(self, client: Any, w: Any, held: Any) -> None:
        super().end(client, w, held)
        if (client.id, client.round) == (1, 2):
            self.change(client.extras)


def fit(aggregator: Aggregator | Rule, **kwargs: Any) -> Any:
    made = trainer(rounds=2, aggregator=aggregator, **kwargs)
    made.fit(classifier(), digits())
    return made


@pytest.fixture(scope="module")
def without() -> Any:
    """Return a federation without the client that the faulty ones refuse."""
    torch.set_num_threads(1)
    return fit(SCAFFOLD(), schedule=WithoutOne())


@pytest.mark.parametrize("name", CHANGES)
def test_a_faulty_client_is_refused_and_named_and_the_round_goes_on(
    name: str, without: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = CHANGES[name]
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        made = fit(Aggregator(Mean("uniform"), _Faulty(change=change)))
    (failure,) = made.federation.log.failures
    assert (failure.client, failure.round) == (1, 2)
    assert re.search(words, failure.reason)
    assert any("round 2: client 1 failed" in record.getMessage() for record in caplog.records)
    assert equal_states(made.federation.state, without.federation.state)
    ours, theirs = (m.federation.server.memory["objective"]["control"] for m in (made, without))
    assert equal_states(ours, theirs)


@dataclass(frozen=True)
class Counts(Mean):
    """Sends a number and a tensor that it may or may not declare."""

    declares: bool = True

    def end(self, client: Any, w: Any, held: Any) -> None:
        client.extras.update(count=1, mean=torch.zeros(2))

    def statistics(self, layout: Any, state: Any) -> dict[str, Statistic]:
        own = {"count": Statistic(0), "mean": Statistic(torch.zeros(2))}
        return own if self.declares else {}


def test_extras_that_are_not_declared_are_refused_with_what_to_do() -> None:
    assert not fit(Counts(declares=True)).federation.log.failures
    with pytest.raises(FederationError, match=r"has unknown entries count, mean.*statistics"):
        fit(Counts(declares=False))


def test_a_rule_is_a_part_and_not_a_method_of_an_aggregator() -> None:
    """An override would miss the sums of workers and of secure aggregation."""
    for name in ("aggregate", "contribution"):
        with pytest.raises(FlsuiteError, match=rf"Own overrides Aggregator.{name}; write a Linear"):
            type("Own", (FedAvg,), {name: lambda *args: None})


_COUNTS = torch.tensor([3, 1])


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        *(({name: 10**400}, "more than 2") for name in ("steps", "bytes_up", "bytes_down")),
        ({"samples": 10**18}, r"it claims more than 2\*\*53 training samples"),
        ({"seconds": 1e300}, "its seconds are 1e"),
        ({"samples": 5}, "it claims 5 training samples, and 4 is the most"),
        ({"class_counts": torch.ones(3, dtype=torch.int64)}, "it has 3 class counts; 2 are"),
        ({"class_counts": torch.tensor([1.0, float("nan")])}, "class counts are torch.float32"),
        ({"class_counts": _COUNTS.to_sparse()}, "torch.sparse_coo"),
        ({"class_counts": torch.tensor([-1, 4])}, "not between 0 and its 4 samples"),
        ({"class_counts": torch.ones(1, 2, dtype=torch.int64)}, "are not a vector"),
    ],
)
def test_claims_that_are_not_possible_are_refused(claim: dict[str, Any], words: str) -> None:
    state = {"w": torch.zeros(2)}
    uplink = Uplink(FedAvg(), StateLayout(("w",), 2), state, classes=2, most_samples=4)
    update = ClientUpdate(0, 1, samples=4, steps=1, class_counts=_COUNTS, state=state)
    broadcast, honest = Broadcast(1, state, {}), ClientResult(update, {})
    assert uplink.checked(honest, broadcast) == honest
    refused = uplink.checked(ClientResult(replace(update, **claim), {}), broadcast)
    assert isinstance(refused, ClientFailure) and len(refused.reason) < 250
    assert re.search(words, refused.reason)
    record = RoundLog(1)
    _count_refused(replace(update, **claim), record)
    assert record.lost_up == 0, "the round's bytes would overflow"


@pytest.mark.parametrize("max_share", [None, 1.0, 0.2])
def test_a_client_may_claim_a_share_of_the_samples(max_share: float | None) -> None:
    made, data = trainer(rounds=1, max_share=max_share), digits()
    made.fit(classifier(), data)
    sizes = [data.federated.samples(client) for client in range(5)]
    above = [c for c, size in enumerate(sizes) if size > (max_share or 1.0) * sum(sizes)]
    assert [failure.client for failure in made.federation.log.failures] == above
    assert bool(above) == (max_share == 0.2)


def test_staleness_counts_the_aggregations_since_the_start_of_a_fit(tmp_path: Path) -> None:
    """Two clients of 1.0 and 2.5 seconds: the second one starts at 0 s, and arrives third."""
    schedule = Asynchronous(concurrency=2, buffer_size=1, speeds=PerClient(1.0, 2.5))
    made = trainer(run_dir=tmp_path, rounds=4, aggregator=FedBuff(), schedule=schedule)
    made.fit(classifier(), digits(clients=2))

    table = pd.read_csv(tmp_path / "metrics.csv", dtype={"scope": str})
    rows = table[(table["metric"] == "staleness") & (table["scope"] != "global")]
    arrived = list(zip(rows["round"], rows["scope"], rows["value"], strict=True))
    # The first client's third fit starts at 2.0 s from version 2, and arrives after version 3.
    assert arrived == [(1, "0", 0.0), (2, "0", 0.0), (3, "1", 2.0), (4, "0", 1.0)]
