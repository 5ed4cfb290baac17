"""Parts at a limit where they have no effect, in whole federations, bit for bit.

The model has BatchNorm and a private entry, and some of the clients take part per round.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import (
    SCAFFOLD,
    AdaptiveAdam,
    Aggregator,
    ClipUpdates,
    ControlVariates,
    DPFedAvg,
    FedAdam,
    FedAvg,
    FedAvgM,
    GaussianMechanism,
    Mean,
    Proximal,
)
from flsuite.callbacks import FederationCallback
from flsuite.data.loader import TrainLoader
from flsuite.models import Classifier
from flsuite.schedules import Synchronous
from flsuite.state import State, clone
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


def test_a_proximal_term_without_weight_changes_nothing() -> None:
    step = OPTIMIZERS["fedadam"]
    plain = ended(Aggregator(server_optimizer=step))
    assert_same_run(plain, ended(Aggregator(objective=Proximal(0.0), server_optimizer=step)))


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


def test_no_noise_covers_control_variates() -> None:
    silent = [GaussianMechanism(clip=math.inf, noise_multiplier=0.0)]
    with pytest.raises(FlsuiteError, match="GaussianMechanism needs only changes"):
        ended(SCAFFOLD(transforms=silent), batchnorm="local")


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


def test_server_momentum_is_a_step_of_torch() -> None:
    step = partial(SGD, lr=0.5, momentum=0.9)
    assert_same_run(ended(FedAvgM(lr=0.5, momentum=0.9)), ended(Aggregator(server_optimizer=step)))


def test_a_mechanism_that_does_nothing_before_a_server_step_is_fedadam() -> None:
    adam = FedAdam(lr=0.05, beta1=0.5, weighting="uniform")
    private = DPFedAvg(math.inf, noise_multiplier=0.0, server_optimizer=adam.server_optimizer)
    assert_same_run(ended(adam, batchnorm="local"), ended(private, batchnorm="local"))


def test_the_other_parts_do_not_enter_the_guarantee() -> None:
    def spent(**others: Any) -> list[float]:
        made = ended(DPFedAvg(0.5, noise_multiplier=1.0, **others), batchnorm="local")
        rows = made.run.folder.table.rows
        return [row.value for row in rows if (row.scope, row.metric) == ("global", "epsilon")]

    alone = spent()
    assert len(alone) == 2
    assert spent(objective=Proximal(0.1)) == alone
    assert spent(server_optimizer=partial(AdaptiveAdam, lr=0.1)) == alone
    assert spent(transforms=[ClipUpdates(0.1)]) == alone


# SCAFFOLD, in plain torch


class Cohorts(FederationCallback):
    """Records which clients take part."""

    def __init__(self) -> None:
        self.all: list[list[int]] = []

    def on_round_end(self, run: Any, round: int) -> None:
        self.all.append([update.client for update in run.federation.log.updates])


def scaffold(cohorts: Sequence[Sequence[int]], epochs: int = 2, clients: int = 4) -> State:
    """Return the shared state after algorithm 1, option II, in plain torch."""
    made = federation(SCAFFOLD(), 1)
    run = made.prepare(model(), table_data())
    net, data = copy.deepcopy(run.evaluator.model), run.federation.data
    x = clone(net.state_dict())
    private = [{PRIVATE: x[PRIVATE]} for _ in range(clients)]
    shared = [name for name, _ in net.named_parameters() if name != PRIVATE]
    c = {name: torch.zeros_like(x[name]) for name in shared}
    own = [dict(c) for _ in range(clients)]

    for round, cohort in enumerate(cohorts, 1):
        ends: list[State] = []
        change = {name: torch.zeros_like(value) for name, value in c.items()}
        for i in cohort:
            net.load_state_dict({**x, **private[i]})
            net.train()
            loader, steps = TrainLoader(data, i, run.options.seed, round), 0
            for _ in range(epochs):
                for features, labels in loader:
                    _corrected_step(net, features, labels, c, own[i])
                    steps += 1
            y = clone(net.state_dict())
            for name in shared:
                renewed = own[i][name] - c[name] + (x[name] - y[name]) / (steps * LR)
                change[name] = change[name] + (renewed - own[i][name])
                own[i][name] = renewed
            private[i] = {PRIVATE: y.pop(PRIVATE)}
            ends.append(y)

        for name in ends[0]:
            sent = torch.stack([y[name] for y in ends])
            is_counter = not sent.is_floating_point()
            x[name] = sent.amax(0) if is_counter else sent.double().mean(0).float()
        c = {name: value + change[name] / clients for name, value in c.items()}
    del x[PRIVATE]
    return x


def _corrected_step(net: Any, features: Tensor, labels: Tensor, c: State, own: State) -> None:
    loss = F.cross_entropy(net(features), labels)
    names, parameters = zip(*net.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            correction = c[name] - own[name] if name in c else 0.0
            parameter.sub_(LR * (gradient + correction))


def test_scaffold_is_its_algorithm_in_plain_torch() -> None:
    torch.set_num_threads(1)  # like the engine: two threads add in another order
    seen = Cohorts()
    made = ended(SCAFFOLD(), rounds=3, callbacks=[seen])
    assert len(seen.all) == 3 and all(len(cohort) == 3 for cohort in seen.all)
    expected = scaffold(seen.all)
    assert expected.keys() == made.federation.state.keys()
    for name, value in made.federation.state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)
