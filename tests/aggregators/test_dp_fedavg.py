"""DP-FedAvg: its limits, clipping and noise by hand, epsilon, resume, engines, refusals."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import Aggregator, DPFedAvg, FedAvg, PairwiseMasks, Quantize
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.transforms.base import FitView
from flsuite.aggregators.uplink import Uplink
from flsuite.callbacks import FederationCallback
from flsuite.callbacks.wandb_link import _summary
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout
from flsuite.data import Dirichlet, Synthetic
from flsuite.federation import Asynchronous, Bernoulli, Oort, Stragglers, Synchronous
from flsuite.metrics.privacy import RandomDraw, epsilon
from flsuite.models import MLP, Classifier
from flsuite.runs.summary import print_summary
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    ServerHalf,
    assert_equal,
    assert_same_models,
    federation,
    table_data,
    table_model,
)
from tests.conftest import classifier, digits, trainer

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'flsuite[privacy]'")

WIDE = 20_000


def ready(
    aggregator: Aggregator, clients: int = 2, seed: int = 0, rounds: int | None = 5
) -> ServerHalf:
    """Return a server half at the start of a round in which all clients take part."""
    sampling = RandomDraw(clients, float(clients), True)
    tools = ServerTools(seed=seed, rounds=rounds, sampling=sampling)
    half = ServerHalf(aggregator, StateLayout(("w",), clients), tools=tools)
    half.aggregator.prepare(half.server({}))
    half.broadcast({})
    return half


def update(client: int, *values: float, **extras: Any) -> ClientUpdate:
    return ClientUpdate(client, 1, 1, 1, torch.ones(1), {"w": torch.tensor(values).float()}, extras)


def fold(half: ServerHalf, base: State, *updates: ClientUpdate) -> torch.Tensor:
    """Return the next parameters from arriving updates."""
    uplink, received = Uplink(half.aggregator, half.layout, base), half.broadcast(base)
    return half.aggregate(base, [uplink.unpack(u, base, received) for u in updates])["w"]


def kept(half: Any) -> dict[str, Any]:
    """Return the mechanism's memory on the server."""
    return half.memory["transforms/0"]


# Limits and clipping


def test_without_noise_and_clip_it_is_the_uniform_mean_bit_for_bit() -> None:
    """Of 46 clients, whose shares of 1 / 46 do not add up to 1 in floating point."""

    def fitted(aggregator: Aggregator) -> State:
        data = Synthetic(features=5, classes=3, samples=230, clients=46, partition=Dirichlet(5.0))
        made = federation(aggregator, 1)
        made.fit(Classifier(MLP(hidden=(8,)), optimizer=partial(SGD, lr=0.1)), data)
        return made.federation.state

    ours = fitted(DPFedAvg(clip=math.inf, noise_multiplier=0.0))
    assert_equal(ours, fitted(FedAvg(weighting="uniform")))


def test_clipping_by_hand() -> None:
    """Changes (3, 4) and (0.3, 0.4) from (1, 1), clipped to the norm 1."""
    base = {"w": torch.ones(2)}
    new = fold(
        ready(DPFedAvg(clip=1.0, noise_multiplier=0.0)), base, update(0, 4, 5), update(1, 1.3, 1.4)
    )
    assert new.tolist() == pytest.approx([1 + (0.6 + 0.3) / 2, 1 + (0.8 + 0.4) / 2])
    assert base["w"].tolist() == [1, 1]


def test_a_client_clips_its_own_change_and_tells_nothing_else() -> None:
    base = {"w": torch.ones(2)}
    for clip, told, left in [(1.0, 0.0, [1.6, 1.8]), (5.0, 1.0, [4.0, 5.0])]:
        half = ready(DPFedAvg(clip=clip, noise_multiplier=0.0, quantile=0.5))
        fit = FitView(0, 1, 0, received=half.broadcast(base))
        uplink = Uplink(half.aggregator, half.layout, base)
        sent, _ = uplink.pack(update(0, 4.0, 5.0), base, fit, {})
        assert sent.state["w"].tolist() == pytest.approx(left)
        assert sent.state["w"].dtype == torch.float32
        assert sent.extras == {"within_clip": told}
        assert fit.metrics["update_norm"] == pytest.approx(5.0)


def test_who_is_missing_counts_as_a_client_without_a_change() -> None:
    base = {"w": torch.tensor([1.0])}
    aggregator = ready(DPFedAvg(clip=1.0, noise_multiplier=0.0), clients=4)
    assert fold(aggregator, base, update(0, 1.5), update(2, 2.0)).tolist() == [1 + 1.5 / 4]


# Noise


@pytest.mark.parametrize("secure", [False, True])
def test_the_deviation_of_the_noise(secure: bool) -> None:
    base = {"w": torch.zeros(WIDE)}
    aggregator = ready(DPFedAvg(clip=0.5, noise_multiplier=3.0, secure_rng=secure), clients=10)
    draws = [fold(aggregator, base, update(0, *([0.0] * WIDE))) for _ in range(3)]

    expected = 3.0 * 0.5 / 10
    assert aggregator.metrics["noise"] == pytest.approx(expected)
    for noise in draws:
        # Five standard errors of a deviation and of a mean.
        assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * WIDE))
        assert abs(float(noise.mean())) < 5 * expected / math.sqrt(WIDE)
        kurtosis = float((noise / expected).pow(4).mean())
        assert kurtosis == pytest.approx(3.0, abs=5 * math.sqrt(96 / WIDE))
    correlation = torch.corrcoef(torch.stack(draws))
    assert float((correlation - torch.eye(3)).abs().max()) < 5 / math.sqrt(WIDE)


def test_seeded_noise_comes_back_and_secure_noise_does_not() -> None:
    base = {"w": torch.zeros(100)}

    torch.manual_seed(1)
    first = drawn_alone(base)
    torch.manual_seed(2)
    assert torch.equal(first, drawn_alone(base))
    assert not torch.equal(first, drawn_alone(base, seed=1))
    assert not torch.equal(drawn_alone(base, secure_rng=True), drawn_alone(base, secure_rng=True))


def drawn_alone(base: State, seed: int = 0, **kwargs: Any) -> torch.Tensor:
    return fold(ready(DPFedAvg(noise_multiplier=1.0, **kwargs), seed=seed), base)


def test_an_empty_cohort_takes_a_step_of_noise_alone() -> None:
    base = {"w": torch.full((WIDE,), 2.0)}
    aggregator = ready(DPFedAvg(clip=1.0, noise_multiplier=1.0), clients=4)
    new = fold(aggregator, base)
    assert float(new.mean()) == pytest.approx(2.0, abs=0.01)
    assert float(new.std()) == pytest.approx(0.25, rel=0.03)
    assert kept(aggregator)["rounds"] == 1 and aggregator.metrics["epsilon"] > 0


# Adaptive clipping


def test_one_step_of_the_clip_by_hand() -> None:
    """Andrew et al., algorithm 1: three of four are whole, ``C exp(-0.2 (0.75 - 0.5))``."""
    aggregator = ready(DPFedAvg(clip=2.0, noise_multiplier=0.0, quantile=0.5), clients=4)
    bits = [update(c, 0.0, within_clip=bit) for c, bit in enumerate((1.0, 1.0, 0.0, 1.0))]
    fold(aggregator, {"w": torch.zeros(1)}, *bits)
    assert kept(aggregator)["clip"] == pytest.approx(2.0 * math.exp(-0.05))
    assert aggregator.metrics == pytest.approx(
        {"epsilon": math.inf, "delta": 4**-1.1, "clip": 2.0, "noise": 0.0, "within_clip": 0.75}
    )


def test_a_client_that_lies_about_its_bit_counts_once() -> None:
    def clip(bit: float) -> float:
        aggregator = ready(DPFedAvg(noise_multiplier=0.0, quantile=0.5))
        fold(aggregator, {"w": torch.zeros(1)}, update(0, 0.0, within_clip=bit))
        return kept(aggregator)["clip"]

    assert clip(1e9) == clip(1.0) and clip(-1e9) == clip(0.0)


def test_the_count_is_paid_for_with_noise_on_the_changes() -> None:
    base = {"w": torch.zeros(WIDE)}
    plain = ready(DPFedAvg(noise_multiplier=1.0), clients=10)
    adaptive = ready(DPFedAvg(noise_multiplier=1.0, quantile=0.5, count_noise=0.6), clients=10)
    for aggregator in (plain, adaptive):
        fold(aggregator, base)
    assert adaptive.metrics["epsilon"] == plain.metrics["epsilon"]
    assert adaptive.metrics["noise"] == pytest.approx((1 - 1.2**-2) ** -0.5 / 10)


# Whole runs


class Stop(FederationCallback):
    """Ends a run with its second round."""

    affects = "rounds"

    def on_evaluation_end(self, run: Any, round: int, split: str, scores: Any) -> None:
        if round == 2:
            run.stop()


def fit(
    aggregator: Aggregator, rounds: int = 3, ckpt_path: str | None = None, **kwargs: Any
) -> Any:
    made = trainer(rounds=rounds, aggregator=aggregator, **kwargs)
    made.fit(classifier(), digits(), ckpt_path=ckpt_path)
    return made


def numbers(made: Any, metric: str) -> list[float]:
    rows = made.run.folder.table.rows
    return [row.value for row in rows if (row.scope, row.metric) == ("global", metric)]


def adaptive() -> DPFedAvg:
    return DPFedAvg(clip=0.3, noise_multiplier=0.8, quantile=0.5)


SLOW = Stragglers()
POISSON: dict[str, Any] = {"schedule": Synchronous(0.4, sampling="poisson")}
EVERYONE: dict[str, Any] = {"schedule": Synchronous(1.0, sampling="poisson")}


def test_epsilon_is_logged_by_round_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made = fit(DPFedAvg(clip=0.5, noise_multiplier=1.5, delta=0.02), **POISSON)
    sampling = RandomDraw(5, 2.0, True)
    spent = [epsilon(sampling, 1.5, rounds, 0.02) for rounds in (1, 2, 3)]
    assert numbers(made, "epsilon") == spent
    assert made.run.summary.privacy == {"epsilon": spent[-1], "delta": 0.02}

    print_summary(made.run.summary, None)
    row = next(line for line in capsys.readouterr().out.splitlines() if "epsilon" in line)
    assert f"{spent[-1]:.4g}" in row
    summary = _summary(made.run)
    assert (summary["last/epsilon"], summary["last/delta"]) == (spent[-1], 0.02)


def test_a_target_is_reached_and_not_passed_by_a_run_that_is_cut_short(tmp_path: Path) -> None:
    """Cut short, it has spent less and goes on with its noise. Afterwards, it goes no further."""
    there: dict[str, Any] = {"run_dir": str(tmp_path / "run"), **EVERYONE}
    first = fit(DPFedAvg(target_epsilon=6.0, quantile=0.5), 4, callbacks=[Stop()], **there)
    assert first.round == 2 and numbers(first, "epsilon")[-1] < 5.0
    whole = fit(DPFedAvg(target_epsilon=6.0, quantile=0.5), 4, **EVERYONE)
    last = fit(DPFedAvg(target_epsilon=6.0, quantile=0.5), 4, ckpt_path="last", **there)
    assert_same_models(whole, last)
    assert 5.99 < numbers(last, "epsilon")[-1] <= 6.0
    with pytest.raises(FlsuiteError, match=r"over 4 rounds, and more would exceed it"):
        fit(DPFedAvg(target_epsilon=6.0, quantile=0.5), 5, ckpt_path="last", **there)


def test_failures_change_neither_divisor_nor_epsilon() -> None:
    """One of three clients raises, one sends a number that is not finite."""

    def data(*curvatures: float) -> Quadratics:
        return Quadratics(curvatures, (0.2, 0.5, 1.0))

    ends = []
    for curvatures in ((1.0, -1.0, math.inf), (1.0, 0.0, 0.0)):  # absent, and without a change
        made = federation(DPFedAvg(clip=0.1, noise_multiplier=1.0), 2, max_epochs=3)
        made.fit(Quadratic(), data(*curvatures))
        ends.append((made.federation.state["w"], made.run.summary.privacy))
    assert ends[0][1] == ends[1][1]
    assert float(ends[0][0]) == pytest.approx(float(ends[1][0]), abs=1e-6)


def test_compressed_updates_are_clipped_again() -> None:
    made = fit(DPFedAvg(clip=0.05, noise_multiplier=0.0), 1, compression=Quantize(4))
    start = trainer(rounds=1, aggregator=FedAvg())
    run = start.prepare(classifier(), digits())
    change = {k: made.federation.state[k] - v for k, v in run.federation.state.items()}
    assert math.sqrt(sum(float(v.square().sum()) for v in change.values())) <= 0.05 * (1 + 1e-5)


def test_masked_changes_are_clipped_by_the_clients_and_get_the_same_noise() -> None:
    """The server learns only their sum, in fixed point."""
    masked, plain = (fit(adaptive(), 2, secure_sum=s) for s in (PairwiseMasks(), None))
    for name, value in plain.federation.state.items():
        torch.testing.assert_close(masked.federation.state[name], value, rtol=0, atol=1e-5)
    assert kept(masked.federation.server)["clip"] == pytest.approx(
        kept(plain.federation.server)["clip"]
    )


# Refusals


def test_a_count_with_too_little_noise_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"count_noise must be above 0\.5, half"):
        ready(DPFedAvg(noise_multiplier=1.0, quantile=0.5, count_noise=0.5))


def test_a_delta_of_one_client_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"delta must be below 1 / 10, .* got 0\.1: .* to 0\.08"):
        ready(DPFedAvg(noise_multiplier=1.0, delta=0.1), clients=10)
    ready(DPFedAvg(noise_multiplier=1.0, delta=0.09), clients=10)
    with pytest.raises(FlsuiteError, match=r"GaussianMechanism: delta must be below 1 / \d+, "):
        fit(DPFedAvg(noise_multiplier=1.0, delta=0.9), 1, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_no_noise_is_said_to_be_no_privacy_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    ready(DPFedAvg(noise_multiplier=0.0), clients=100)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no privacy, epsilon is infinite" in caplog.text
    caplog.clear()
    ready(DPFedAvg(noise_multiplier=1.0), clients=100)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_target_needs_a_number_of_rounds() -> None:
    with pytest.raises(FlsuiteError, match=r"set trainer\.rounds"):
        ready(DPFedAvg(target_epsilon=1.0), rounds=None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"schedule": Synchronous(2, sampling="size")}, "needs random cohorts"),
        ({"schedule": Synchronous(2, sampling=Oort())}, "needs random cohorts"),
        ({"schedule": Synchronous(2, availability=Bernoulli(0.1))}, "needs random cohorts"),
        ({"schedule": Synchronous(2, over_selection=1.5, speeds=SLOW)}, "needs random cohorts"),
        ({"schedule": Synchronous(2, deadline=1.0, speeds=SLOW)}, "needs random cohorts"),
        ({"schedule": Asynchronous(2)}, "GaussianMechanism needs random cohorts"),
        ({"keep_updates": True}, "keep_updates stores the clients' models"),
    ],
    ids=["size", "oort", "availability", "over_selection", "deadline", "asynchronous", "kept"],
)
def test_what_a_guarantee_does_not_go_with_is_refused(
    kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FlsuiteError, match=message) as error:
        fit(DPFedAvg(noise_multiplier=1.0), 1, run_dir=str(tmp_path / "run"), **kwargs)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_batch_norm_is_refused_unless_its_statistics_stay() -> None:
    def made(**kwargs: Any) -> Any:
        return federation(DPFedAvg(noise_multiplier=1.0), 1, **kwargs)

    with pytest.raises(FlsuiteError, match=r"needs only parameters, .*running_mean"):
        made().fit(table_model(), table_data())
    local = made(batchnorm="local")
    local.fit(table_model(), table_data())
    assert local.round == 1
