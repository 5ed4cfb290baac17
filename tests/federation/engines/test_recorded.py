"""A recorded step gives the numbers of the step, or is not replayed."""

import copy
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flsuite.aggregators import MOON, SCAFFOLD, Aggregator, Ditto, FedAvg, FedBABU, FedProx
from flsuite.callbacks import FederationCallback
from flsuite.common.state import State
from flsuite.data import IID, CropFlip
from flsuite.federation import Vectorized
from flsuite.federation.client import recorded
from flsuite.models import Backbone, Classifier
from flsuite.runs.run import Run
from tests.aggregators.federations import federation
from tests.conftest import equal_states, long
from tests.federation.engines.test_vectorized import images

Replays = list[bool]


class Drops(Backbone):
    """A network with batch statistics, and draws of its own."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        head = nn.Linear(4 * shape[1] * shape[2], outputs)
        layers = conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), head
        return nn.Sequential(*layers)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Return which of the recorded steps can be replayed, recorded from the second one on."""
    made: Replays = []
    record = recorded._recorded

    def recording(*args: Any) -> Any:
        graph = record(*args)
        made.append(graph is not None)
        return graph

    monkeypatch.setattr(recorded, "_AFTER", 1)
    monkeypatch.setattr(recorded, "_recorded", recording)
    return made


def ends(model: Classifier, graph: bool, data: Any = None, **kwargs: Any) -> State:
    """Return the global model after three rounds, trained in stacks."""
    own = copy.deepcopy(model)
    aggregator, callback = kwargs.pop("aggregator", FedAvg()), kwargs.pop("anneals", None)
    kwargs = {"max_epochs": 2, "callbacks": [callback(own)] if callback else None, **kwargs}
    made = federation(aggregator, 3, engine=Vectorized(clients=3, graph=graph), **kwargs)
    made.fit(own, data or images(IID(), clients=3))
    return made.federation.state


def assert_same(model: Classifier, **kwargs: Any) -> None:
    assert equal_states(ends(model, True, **kwargs), ends(model, False, **kwargs))


@pytest.mark.parametrize(
    "aggregator",
    [SCAFFOLD(), MOON(), FedBABU(), *long(FedAvg(), FedProx(mu=0.1), Ditto())],
    ids=lambda aggregator: aggregator.name,
)
def test_the_weights_are_the_same_bit_for_bit(aggregator: Aggregator, replays: Replays) -> None:
    assert_same(Classifier(Drops()), aggregator=aggregator)
    assert replays and all(replays)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "aggregator", [FedAvg(), SCAFFOLD(), Ditto(), MOON()], ids=lambda one: one.name
)
def test_a_gpu_replays_a_step_in_one_launch(
    aggregator: Aggregator, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch = recorded._OneLaunch.__call__

    def counted(self: Any, *leaves: Any) -> list[Any]:
        launched.append(len(leaves))
        return launch(self, *leaves)

    monkeypatch.setattr(recorded._OneLaunch, "__call__", counted)
    kwargs: Any = {"aggregator": aggregator, "accelerator": "gpu", "deterministic": True}
    plain, replayed = (ends(Classifier(Drops()), graph, **kwargs) for graph in (False, True))
    assert equal_states(plain, replayed)
    assert replays and all(replays) and launched


def test_batches_of_several_sizes_and_with_random_changes(replays: Replays) -> None:
    data = images(clients=3, batch_size=7, augment=CropFlip(1))
    assert_same(Classifier(Drops()), data=data)
    assert replays.count(True) > 1


class ByNumber(Classifier):
    """Weights the loss by the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 / (1 + batch_idx))


class First(Classifier):
    """Looks the number of the batch up."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * {0: 2.0}.get(batch_idx, 1.0)


class Tries(Classifier):
    """Catches the error of reading the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            factor = 3.0 if int(batch_idx) == 0 else 1.0
        except RuntimeError:
            factor = 1.0
        return super().training_step(batch, batch_idx) * factor


class Reads(Classifier):
    """Reads a tensor that it has not registered."""

    scales = (torch.tensor(0.5),)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scales[0]


class Halves(Classifier):
    """Changes its batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByNumber, "_Unread"),
        (First, "it reads the number of the batch"),
        (Tries, "it reads the number of the batch"),
        (Reads, "it reads a tensor that it is not given"),
        (Halves, "it changes a tensor that it is given"),
    ],
)
def test_a_step_that_a_graph_would_change_is_not_recorded(
    kind: type[Classifier], reason: str, replays: Replays, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flsuite")
    assert_same(kind(Drops()))
    assert replays and not any(replays)
    assert reason in caplog.text


class DrawsAgain(Classifier):
    """Ends a step with the random state before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = torch.get_rng_state()
        loss = super().training_step(batch, batch_idx)
        torch.set_rng_state(state)
        return loss


def test_a_step_that_sets_the_random_state_is_not_replayed(replays: Replays) -> None:
    assert_same(DrawsAgain(Drops()))
    assert replays


class Raises(Classifier):
    """Changes the rate of its dropout in each step."""

    steps: ClassVar[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(batch_idx)
        drops: Any = self.network[4]
        drops.p = min(0.9, drops.p + 0.05)
        return super().training_step(batch, batch_idx)


class Scale:
    """Holds a tensor that no module registers."""

    def __init__(self) -> None:
        self.value = torch.tensor(1.0)


class Scaled(Classifier):
    """Multiplies the loss by a number that a callback changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(self.scale.value)


class Rescales(FederationCallback):
    def __init__(self, model: Scaled) -> None:
        self.model, model.scale = model, Scale()

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        self.model.scale.value.fill_(round)


def test_a_graph_serves_no_step_that_changes_the_model(replays: Replays) -> None:
    ends(Raises(Drops()), False)
    alone = len(Raises.steps)
    ends(Raises(Drops()), True)
    # All steps run, and a recording runs one more.
    assert len(Raises.steps) - alone == alone + len(replays) and replays


def test_numbers_of_other_tensors_are_recorded_anew(replays: Replays) -> None:
    assert_same(Scaled(Drops()), anneals=Rescales)
    assert len(replays) == 6


@pytest.mark.parametrize("change", ["p", *long("hook", "mode")])
def test_layers_that_differ_from_round_to_round_are_recorded_anew(
    change: str, replays: Replays
) -> None:
    class Changes(FederationCallback):
        def __init__(self, model: Classifier) -> None:
            self.model = model

        def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
            drops: Any = self.model.network[4]
            if change == "p":
                drops.p = 0.2 * round
            elif change == "mode" and round == 2:
                drops.eval()
            elif round == 2:
                drops.register_forward_hook(lambda layer, x, y: 2 * y)

    assert_same(Classifier(Drops()), anneals=Changes)
    assert len(replays) == (6 if change == "p" else 4) and all(replays)  # of two sizes


def test_other_attributes_of_a_model_are_recorded_anew(replays: Replays) -> None:
    model, recorder = Classifier(Drops()), recorded.Recorder()
    given = (torch.ones(2, 3),)
    for round, model.scale in enumerate((1.0, 1.0, 2.0), 1):
        recorder.begin(model, round)
        steps = [recorder.step(lambda _, x: x * model.scale, 0, given, None) for _ in range(3)]
        assert all(torch.equal(step, given[0] * model.scale) for step in steps)
    assert replays == [True, True]


_global = [0]


class Hidden(Classifier):
    """Changes its step by something that flsuite cannot see."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1.0 + (_global[0] > 2))


class Counts(FederationCallback):
    def __init__(self, model: Hidden) -> None:
        super().__init__()

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        _global[0] = round


def test_a_replay_that_differs_from_the_step_is_the_last_one(
    replays: Replays, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorded, "_EVERY", 3)
    assert_same(Hidden(Drops()), anneals=Counts)
    assert all(replays)
    assert caplog.text.count("steps of a stack are no longer replayed") == 1
