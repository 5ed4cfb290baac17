"""Parts at a limit where they have no effect, in whole federations, bit for bit.

The model has BatchNorm and a private entry, and some of the clients take part per round.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from flsuite import FederatedTrainer
from flsuite.aggregators import (
    AdaptiveAdam,
    Aggregator,
    ClipUpdates,
    ControlVariates,
    FedAvg,
    GaussianMechanism,
    Mean,
)
from flsuite.federation import Synchronous
from flsuite.models import Classifier
from tests.aggregators.federations import (
    Normalised,
    assert_equal,
    assert_same_tree,
    federation,
    table_data,
)

PRIVATE = "network.3.bias"
LR = 0.05

OPTIMIZERS: dict[str, Callable[..., Optimizer] | None] = {
    "fedavg": None,
    "fedadam": partial(AdaptiveAdam, lr=0.1),
}


def model() -> Classifier:
    return Classifier(Normalised(), optimizer=partial(SGD, lr=LR), private=[PRIVATE])


def ended(aggregator: Aggregator, rounds: int = 2, **kwargs: Any) -> FederatedTrainer:
    settings = {"schedule": Synchronous(0.75), "max_epochs": 2, **kwargs}
    made = federation(aggregator, rounds, **settings)
    made.fit(model(), table_data())
    assert PRIVATE not in made.federation.state and not made.federation.log.failures
    return made


def assert_same_run(a: FederatedTrainer, b: FederatedTrainer) -> None:
    """Compare all models, and the memories of objective and server optimizer."""
    for client in [None, *range(4)]:
        assert_equal(a.federation.client_state(client), b.federation.client_state(client))
    for part in ("objective", "server_optimizer"):
        assert_same_tree(*({**m.federation.server.memory.get(part, {})} for m in (a, b)))


@pytest.mark.parametrize(
    ("name", "buffers"), [("fedavg", "average"), ("fedadam", "local"), ("scaffold", "average")]
)
def test_a_clip_without_a_limit_changes_nothing(name: str, buffers: Any) -> None:
    parts: dict[str, Any] = {"server_optimizer": OPTIMIZERS.get(name)}
    if name == "scaffold":
        parts["objective"] = ControlVariates()
    plain = ended(Aggregator(**parts), batchnorm=buffers)
    clipped = ended(Aggregator(transforms=[ClipUpdates(math.inf)], **parts), batchnorm=buffers)
    assert_same_run(plain, clipped)
    assert all(update.metrics["update_norm"] > 0 for update in clipped.federation.log.updates)


def test_a_gaussian_mechanism_without_noise_and_limit_changes_nothing() -> None:
    parts = {"rule": Mean("uniform")}
    plain = ended(Aggregator(**parts), batchnorm="local")
    silent = [GaussianMechanism(clip=math.inf, noise_multiplier=0.0)]
    assert_same_run(plain, ended(Aggregator(transforms=silent, **parts), batchnorm="local"))


def test_a_server_step_of_rate_one_takes_the_mean() -> None:
    """``w - (w - mean)`` in float64 is the mean to one unit in the last place."""
    plain = ended(FedAvg(), rounds=1)
    stepped = ended(FedAvg(server_optimizer=partial(SGD, lr=1.0)), rounds=1)
    for name, value in plain.federation.state.items():
        other = stepped.federation.state[name]
        if not value.is_floating_point():
            assert torch.equal(value, other)
            continue
        below, above = (torch.nextafter(value, value + sign) for sign in (-1.0, 1.0))
        assert bool(((below <= other) & (other <= above)).all()), name
