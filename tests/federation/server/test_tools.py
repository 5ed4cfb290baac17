"""The tools that the server offers to an aggregator."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score

from flsuite import FederatedTrainer
from flsuite.aggregators import Aggregator, CohortRule, FedAvg, Mean, Rule, Server
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Sums
from flsuite.data import DataSpec, DataSplit, FashionMNIST, PublishedSplits
from flsuite.federation import Processes
from flsuite.models import Classifier
from flsuite.models.backbones import LeNet5
from tests.conftest import classifier, digits, equal_states, trainer


class Curious(CohortRule):
    """The mean, by a server that scores every client's model."""

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        sums, rule = Sums(), Mean()
        for update in updates:
            server.metrics[f"score/{update.client}"] = server.tools.score(update.state)
            sums.add(rule.terms(update, server.layout))
        return rule.result(server, sums.values, [])


def fitted(
    aggregator: Aggregator | Rule, private: Sequence[str] = (), engine: Any = None, **data: Any
) -> FederatedTrainer:
    made = trainer(rounds=1, aggregator=aggregator, engine=engine)
    made.fit(classifier(private=private), digits(clients=3, **data))
    return made


@pytest.fixture(scope="module")
def curious() -> FederatedTrainer:
    torch.set_num_threads(1)
    return fitted(Curious(), server_samples=50)


def test_the_score_is_the_accuracy_on_the_samples_that_only_the_server_has(
    curious: FederatedTrainer,
) -> None:
    run, tools, data = curious.run, curious.federation.server.tools, curious.federation.data
    assert len(data.server) == 50

    model = tools.module(run.federation.state)
    with torch.no_grad():
        predicted = model(data.scaling(data.server.x)).argmax(1)
    expected = accuracy_score(data.server.y, predicted)
    assert tools.score(run.federation.state) == pytest.approx(expected)
    assert tools.score_module(model) == pytest.approx(expected)
    assert len([name for name in run.federation.log.server if name.startswith("score/")]) == 3


def test_scoring_between_the_rounds_changes_no_weight(curious: FederatedTrainer) -> None:
    plain = fitted(FedAvg(), server_samples=50)
    there = fitted(Curious(), server_samples=50, engine=Processes(workers=2))
    assert equal_states(plain.federation.state, curious.federation.state)
    assert equal_states(plain.federation.state, there.federation.state)


def test_modules_share_nothing() -> None:
    tools = fitted(FedAvg()).federation.server.tools
    state = {k: torch.zeros_like(v) for k, v in tools.module({}).state_dict().items()}
    zeros, other = tools.module(state), tools.module({})
    assert all(not value.any() for value in zeros.state_dict().values())
    assert any(value.any() for value in other.state_dict().values())
    assert not zeros.training


def test_what_is_missing_is_said() -> None:
    tools = fitted(FedAvg()).federation.server.tools
    assert tools.score is None
    assert "set data.server_samples" in str(tools.refusal("X", "score", "picks"))
    tools = fitted(FedAvg(), server_samples=20, private=["network.3"]).federation.server.tools
    assert tools.score is None and tools.module is None
    assert "clients keep network.3" in str(tools.refusal("X", "module", "distils"))


def test_images_become_inputs_as_the_clients_see_them() -> None:
    federation = trainer().prepare(Classifier(LeNet5()), _Pictures(clients=2)).federation
    tools, data = federation.server.tools, federation.data
    stored = data.train.x[:4]
    images = stored.permute(0, 3, 1, 2).float() / 255
    assert torch.allclose(tools.to_inputs(images), data.scaling(stored), atol=1e-6)
    assert (tools.shape, tools.outputs) == ((1, 28, 28), 10)


class _Pictures(FashionMNIST):
    def load(self) -> PublishedSplits:
        x = torch.randint(0, 256, (60, 28, 28, 1), dtype=torch.uint8)
        split = DataSplit(x, torch.arange(60) % 10)
        return PublishedSplits(DataSpec((1, 28, 28), 10), split, split)
