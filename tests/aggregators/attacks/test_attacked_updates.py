"""Each attack on updates against its formula, on hand-made updates and on quadratic clients."""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, TypeVar

import pytest
import torch

from flsuite.aggregators import (
    Aggregator,
    ALittleIsEnough,
    Attack,
    ClipUpdates,
    Collusion,
    FedAvg,
    FreeRider,
    GaussianMechanism,
    GaussianNoise,
    InnerProduct,
    Krum,
    Mean,
    Quantize,
    ScaledUpdate,
    SignFlip,
    TopK,
    Transform,
    with_attack,
)
from flsuite.aggregators.attacks.updates import collude, largest_hidden
from flsuite.aggregators.part import refuse_conflicts
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State
from flsuite.data import FederatedDataModule
from tests.aggregators.federations import Quadratics, Updates, optimum, run, table_data, update
from tests.conftest import equal_states

AttackT = TypeVar("AttackT", bound=Attack)
LEARNED = 1 - 0.95**10  # ten steps of rate 0.05 from 0 towards 1, with curvature 1


def numbers(*values: float) -> State:
    return {"w": torch.tensor(values, dtype=torch.float32)}


def sent(attack: Attack, trained: State, received: State, notes: Any = None) -> State:
    fit = FitView(0, 1, seed=0, memory={} if notes is None else notes)
    return attack.alter(trained, received, fit)


def with_attackers(attack: AttackT, data: FederatedDataModule) -> AttackT:
    data.use_seed(0)
    data.setup("fit")
    attack.configure(data.federated, seed=0)
    return attack


# Attacks on an update of one's own


def test_a_flipped_sign_of_one_of_two_equal_clients_cancels_the_mean() -> None:
    data = Quadratics((1.0, 1.0), (1.0, 1.0))
    assert optimum(FedAvg(), data, rounds=1) == pytest.approx(LEARNED)
    assert optimum(FedAvg(), data, rounds=3, attack=SignFlip([1])) == pytest.approx(0, abs=1e-7)
    assert sent(SignFlip([0], scale=3.0), numbers(2.0), numbers(1.0))["w"].tolist() == [-2.0]


def test_a_scaled_update_puts_the_attackers_model_in_place() -> None:
    # The three others are at their minimum, so only the attacker changes.
    data = Quadratics((1.0,) * 4, (0.0, 0.0, 1.0, 0.0))
    honest = optimum(FedAvg(), data, rounds=1)
    assert honest == pytest.approx(LEARNED / 4)
    replaced = optimum(FedAvg(), data, rounds=1, attack=ScaledUpdate([2], boost=4 / 1))
    assert replaced == pytest.approx(LEARNED, rel=1e-6)


def test_noise_has_the_deviation_and_leaves_the_trained_model_as_it_is() -> None:
    trained = {"w": torch.full((100_000,), 3.0), "b": torch.zeros(100_000)}
    noisy = sent(GaussianNoise([0], std=0.5), trained, trained)
    assert float(noisy["w"].mean()) == pytest.approx(3.0, abs=0.01)
    assert float(noisy["w"].std()) == pytest.approx(0.5, abs=0.01)
    correlation = float(((noisy["w"] - 3) * noisy["b"]).mean())
    assert correlation == pytest.approx(0, abs=0.01)
    assert bool((trained["w"] == 3).all())
    assert equal_states(sent(GaussianNoise([0], std=0.0), trained, trained), trained)


def test_a_free_rider_returns_what_it_has_received() -> None:
    received, trained = numbers(1.0, 2.0), numbers(5.0, 5.0)
    assert equal_states(sent(FreeRider([0]), trained, received), received)
    disguised = sent(FreeRider([0], noise=0.1), trained, received)["w"]
    assert 0 < float((disguised - received["w"]).abs().max()) < 1

    # Or it repeats the last change of the global model.
    attack, notes = FreeRider([0], last_change=True), dict[str, State]()
    for model, expected in ((1.0, 1.0), (1.5, 2.0), (1.25, 1.0)):
        assert sent(attack, numbers(9.0), numbers(model), notes)["w"].tolist() == [expected]


def test_buffers_and_private_entries_stay_as_trained() -> None:
    def outcomes(attack: Attack | None) -> list[ClientUpdate]:
        kept = Updates()
        run(FedAvg(), rounds=1, callbacks=[kept], attack=attack)
        return kept.all

    honest, attacked = outcomes(None)[1].state, outcomes(SignFlip([1]))[1].state
    buffers = [name for name in honest if "running" in name or "num_batches" in name]
    assert len(buffers) == 3
    # In front of BatchNorm, the gradient of a bias is zero up to rounding.
    for name in honest.keys() - {"network.0.bias"}:
        assert torch.equal(honest[name], attacked[name]) == (name in buffers)


def test_an_update_that_overflows_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    made = run(FedAvg(), rounds=1, attack=GaussianNoise([1], std=3e38))
    assert [failure.client for failure in made.federation.log.failures] == [1]
    assert "client 1 failed: its update was refused" in caplog.text


# Attackers that work together


def handed(
    attack: Collusion, values: dict[int, float], received: float = 0.0
) -> list[ClientUpdate]:
    """Return a round's updates of one number each, as the aggregator receives them."""
    updates = iter([update(client, numbers(value)) for client, value in values.items()])
    return list(collude(attack, numbers(received), ["w"], updates))


def of_five(attack: Collusion) -> Collusion:
    return with_attackers(attack, table_data(clients=5))


ALIE, IPM = ALittleIsEnough, InnerProduct


@pytest.mark.parametrize(
    ("attack", "values", "received", "expected"),
    [
        # Mean and deviations of the attackers.
        (
            ALIE([0, 2, 4], z=1.5),
            [11.0, 100.0, 12.0, 200.0, 13.0],
            10.0,
            [100.0, 200.0] + [10 + 2 + 1.5 * (2 / 3) ** 0.5] * 3,
        ),
        # One may know all clients, and a single one sees no deviation.
        (ALIE([4], z=1.0, knows="all"), [1.0, 2.0, 3.0, 4.0, 5.0], 0.0, [1, 2, 3, 4, 3 + 2**0.5]),
        (ALIE([4], z=1.0), [None, 5.0, None, None, 7.0], 0.0, [5.0, 7.0]),
        # The honest mean backwards.
        (
            IPM([1, 3], epsilon=2.0),
            [11.0, 50.0, 12.0, 50.0, 13.0],
            10.0,
            [11.0, 12.0, 13.0, 6.0, 6.0],
        ),
        # They may know their own mean alone, or nobody: then they send what they have received.
        (
            IPM([1, 3], epsilon=1.0, knows="attackers"),
            [1.0, 4.0, None, 6.0],
            0.0,
            [1.0, -5.0, -5.0],
        ),
        (IPM([1, 3]), [None, 4.0, None, 6.0], 2.5, [2.5, 2.5]),
    ],
)
def test_attackers_that_work_together_send_what_their_papers_say(
    attack: Collusion, values: list[float | None], received: float, expected: list[float]
) -> None:
    there = {client: value for client, value in enumerate(values) if value is not None}
    out = handed(of_five(attack), there, received)
    honest = [client for client in there if client not in attack.attackers]
    assert [u.client for u in out] == honest + [c for c in there if c in attack.attackers]
    assert [float(u.state["w"]) for u in out] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("clients", "attackers", "share"), [(50, 24, 24 / 26), (50, 12, 24 / 38), (9, 3, 4 / 6)]
)
def test_the_largest_hidden_deviation_is_that_of_the_paper(
    clients: int, attackers: int, share: float
) -> None:
    assert largest_hidden(clients, attackers) == pytest.approx(NormalDist().inv_cdf(share))
    assert largest_hidden(10, 1) == 0.0
    assert largest_hidden(4, 3) == largest_hidden(4, 4) == pytest.approx(3.09, abs=0.005)


def test_a_deviation_of_zero_is_said_at_the_start() -> None:
    def line(z: float | None, who: list[int]) -> str:
        attack = ALittleIsEnough(who, z=z)
        attack.attackers = tuple(who)
        return attack.line(10)

    assert line(None, [0, 1]).startswith("ALittleIsEnough by 2 of 10 clients: 0, 1; ")
    assert line(None, [0, 1]).endswith(
        "z is 0 for so few, which is the mean of their changes: set z"
    )
    assert "one attacker sees no deviation" in line(1.5, [3])
    for quiet in (line(1.5, [0, 1]), line(None, [0, 1, 2, 3]), line(None, [])):
        assert "z is 0" not in quiet


def test_honest_updates_pass_through_one_at_a_time_and_buffers_are_kept() -> None:
    taken = []

    def arriving() -> Iterator[ClientUpdate]:
        for client in range(5):
            taken.append(client)
            state = {**numbers(float(client)), "count": torch.tensor(10 + client)}
            yield update(client, state)

    attack = of_five(ALittleIsEnough([3, 4], z=0.0))
    received = {**numbers(0.0), "count": torch.tensor(9)}
    out = collude(attack, received, ["w"], arriving())
    assert next(out).client == 0 and taken == [0]
    rest = {u.client: u.state for u in out}
    assert [int(rest[client]["count"]) for client in (3, 4)] == [13, 14]
    assert float(rest[3]["w"]) == float(rest[4]["w"]) == 3.5


# An algorithm under attack


def test_attackers_alter_what_clips_have_left_and_before_codecs_pack_it() -> None:
    aggregator = Aggregator(transforms=[ClipUpdates(), TopK(0.5), Quantize(8)])
    attack = with_attackers(SignFlip([1]), table_data(clients=3))
    attacked = with_attack(aggregator, attack)
    names = [type(transform).__name__ for transform in attacked.transforms]
    assert names == ["ClipUpdates", "_Altering", "TopK", "Quantize"]
    assert attacked.rule is aggregator.rule and len(aggregator.transforms) == 3


def test_a_rule_under_attack_passes_on_what_it_needs_and_withholds() -> None:
    attack = with_attackers(InnerProduct([1]), table_data(clients=3))
    for rule in (Krum(), Mean("uniform")):
        attacked = with_attack(Aggregator(rule), attack)
        assert attacked.name == type(rule).__name__
        assert attacked.rule.needs == rule.needs
        assert attacked.rule.withholds == rule.withholds


@pytest.mark.parametrize("part", [ClipUpdates(), GaussianMechanism(noise_multiplier=1.0)])
def test_attackers_that_collude_would_escape_a_clip_on_the_server(part: Transform) -> None:
    attack = with_attackers(InnerProduct([1]), table_data(clients=3))
    attacked = with_attack(Aggregator(Mean("uniform"), transforms=[part]), attack)
    with pytest.raises(FlsuiteError, match="InnerProduct needs plain updates"):
        refuse_conflicts(attacked.named_parts())
