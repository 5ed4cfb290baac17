"""Whole runs with compressed updates, for algorithms that use them in different ways."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    Centralized,
    ClipUpdates,
    FedAvg,
    FedBuff,
    LocalOnly,
    LowRank,
    Mean,
    PairwiseMasks,
    Quantize,
    Statistic,
    TopK,
    Transform,
)
from flsuite.aggregators.transforms.base import FitView, Payload
from flsuite.commands.fit import build
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, StateLayout, nbytes
from flsuite.federation import Asynchronous, Processes
from flsuite.models import MLP, Classifier
from flsuite.trainer import FederatedTrainer
from tests.commands.command import QUICKSTART
from tests.conftest import digits, equal_states, trainer as quiet

RUNS = {
    "FedAvg": (FedAvg, None),
    "SCAFFOLD": (SCAFFOLD, None),
    "FedBuff": (FedBuff, lambda: Asynchronous(concurrency=3, buffer_size=2)),
}


class Normalised(MLP):
    """The same network with BatchNorm in front."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(shape[0]), super().build(shape, outputs))


def fitted(
    aggregator: Aggregator, compression: Transform | None, network: type[MLP] = MLP, **others: Any
) -> FederatedTrainer:
    ckpt_path = others.pop("ckpt_path", None)
    data = digits(train_samples=others.pop("samples", 300))
    others = {"rounds": 3, "evaluate_every": 1000, **others}
    trainer = quiet(aggregator=aggregator, compression=compression, **others)
    model = Classifier(network(hidden=(16,)), optimizer=partial(SGD, lr=0.1))
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def run(name: str, compression: Transform | None) -> FederatedTrainer:
    aggregator, schedule = RUNS[name]
    arguments = {} if schedule is None else {"schedule": schedule()}
    return fitted(aggregator(), compression, **arguments)


@pytest.fixture(scope="module", params=RUNS)
def plain(request: pytest.FixtureRequest) -> tuple[str, FederatedTrainer]:
    return request.param, run(request.param, None)


def test_all_entries_of_top_k_are_no_compression_bit_for_bit(
    plain: tuple[str, FederatedTrainer],
) -> None:
    name, whole = plain
    assert equal_states(whole.federation.state, run(name, TopK(1.0)).federation.state)


def test_sixteen_bits_stay_close_and_take_half_the_bytes_up(
    plain: tuple[str, FederatedTrainer],
) -> None:
    name, whole = plain
    short = run(name, Quantize(16))
    for entry, value in whole.federation.state.items():
        assert torch.allclose(value, short.federation.state[entry], atol=2e-3)
    up = [t.federation.log.updates[0].bytes_up for t in (whole, short)]
    assert 0.5 < up[1] / up[0] < 0.52


def test_the_change_is_coded_and_not_the_model_so_that_two_bits_still_learn() -> None:
    """Two bits of a model lose its scale, and two bits of a variance bring it to zero."""
    settings = {"rounds": 5, "max_epochs": 3, "network": Normalised, "samples": None}
    scores = [
        fitted(FedAvg(), codec, **settings).test()[0]["accuracy"] for codec in (None, Quantize(2))
    ]
    assert scores[1] > 0.75 * scores[0] > 0.6


def test_error_feedback_carries_on_over_a_resume_and_on_workers(tmp_path: Path) -> None:
    codecs = Aggregator(transforms=[TopK(0.1), Quantize(8)])
    whole = fitted(codecs, None, rounds=4)
    folder = {"run_dir": str(tmp_path / "run")}
    fitted(codecs, None, rounds=2, **folder)
    resumed = fitted(codecs, None, rounds=4, ckpt_path="last", **folder)
    assert equal_states(whole.federation.state, resumed.federation.state)
    there = fitted(codecs, None, rounds=4, engine=Processes(workers=2))
    assert equal_states(whole.federation.state, there.federation.state)


def test_compression_is_a_last_transform() -> None:
    one = fitted(Aggregator(transforms=[TopK(0.1)]), Quantize(8), rounds=2)
    two = fitted(Aggregator(transforms=[TopK(0.1), Quantize(8)]), None, rounds=2)
    assert equal_states(one.federation.state, two.federation.state)


@pytest.mark.parametrize("codec", [Quantize(8), Quantize(5), TopK(0.2)])
def test_the_bytes_are_those_of_the_message(codec: Transform) -> None:
    trainer = fitted(FedAvg(), codec, network=Normalised, rounds=1)
    chain = trainer.federation.uplink.pipeline
    (sent,) = {update.bytes_up for update in trainer.federation.log.updates}
    assert sent == chain.bytes_up < nbytes(trainer.federation.state)


class Garbled(Quantize):
    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload = super().encode(payload, fit)
        if fit.client == 1:
            payload.change.pop(next(iter(payload.change)))
        return payload


def test_a_message_that_cannot_be_read_costs_the_round_its_client() -> None:
    failures = fitted(FedAvg(), Garbled(), rounds=1).federation.log.failures
    assert [failure.client for failure in failures] == [1]
    assert "change lacks network" in failures[0].reason


def test_the_server_adds_up_what_codes_have_become_under_masks() -> None:
    clear = fitted(FedAvg(), Quantize(4), rounds=2).federation.state
    masked = fitted(FedAvg(), Quantize(4), rounds=2, secure_sum=PairwiseMasks()).federation.state
    assert all(torch.allclose(clear[name], masked[name], atol=1e-5) for name in clear)


@pytest.mark.parametrize(("aggregator", "compression", "arguments", "message"), [
    (Centralized(), Quantize(), {}, "Quantize needs clients, but Centralized"),
    (LocalOnly(), Quantize(), {}, "Quantize: clients send nothing"),
    (LocalOnly(), TopK(), {}, "TopK: clients send no parameters"),
    (FedAvg(), LowRank(), {}, "LowRank needs matrices, but (FedAvg|Mean) "),
    (Aggregator(transforms=[Quantize(), ClipUpdates()]), None, {}, "ClipUpdates needs dense chan"),
    (Aggregator(transforms=[Quantize()]), TopK(), {}, "TopK needs dense changes, but Quantize"),
])  # fmt: skip
def test_what_cannot_be_composed_is_refused(
    aggregator: Aggregator, compression: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(aggregator, compression, **arguments)


class Moments(Mean):
    """A mean whose clients also send a positive semidefinite matrix."""

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {"moments": Statistic(torch.zeros(4, 4), is_psd=True)}

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        client.extras["moments"] = torch.eye(4)


def test_the_statistics_alone_say_which_codec_fits_their_matrices() -> None:
    with pytest.raises(FlsuiteError, match="needs rounded matrices, but Moments sends moments"):
        fitted(Aggregator(Moments()), Quantize())
    assert fitted(Aggregator(Moments()), LowRank(), rounds=1).round == 1


def test_models_are_not_kept_where_the_server_sees_others(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"set trainer.keep_updates to false"):
        fitted(FedAvg(), Quantize(), keep_updates=True, run_dir=str(tmp_path / "run"))


def test_a_config_names_codecs_by_their_short_names_in_both_places(tmp_path: Path) -> None:
    top_k = "[{class_path: TopK, init_args: {fraction: 0.1}}]"
    chosen = ["--trainer.aggregator", "Aggregator", "--trainer.aggregator.transforms", top_k]
    codec = ["--trainer.compression", "Quantize"]
    made = build(["--config", QUICKSTART, "--run_dir", str(tmp_path), *chosen, *codec])[0]
    assert made.aggregator.transforms == [TopK(0.1)] and made.compression == Quantize()
