"""Low-rank compression: its error, its bytes, and foreign messages."""

import copy
import pickle
from typing import Any

import pytest
import torch

from flsuite.aggregators import LowRank, Quantize
from flsuite.aggregators.transforms.base import Payload
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import nbytes
from tests.aggregators.exchange.compressions import (
    LENET,
    NARROW_CNN,
    assert_refused,
    assert_same,
    factors_of,
    packed,
    payload_of,
    psd,
    sent,
    state_of,
    template_for,
)

WEIGHT = {"w": torch.linspace(-1, 1, 4000)}


def gram(matrix: torch.Tensor) -> Payload:
    return payload_of(WEIGHT, {"gram": {"0": matrix}}, psd=("gram",))


def round_trip(low_rank: LowRank, matrix: torch.Tensor) -> torch.Tensor:
    _, decoded, _ = sent(low_rank, gram(matrix))
    got: torch.Tensor = decoded.statistics["gram"]["0"]
    return got


@pytest.mark.parametrize("rank", [1, 7, 19])
def test_the_spectral_error_is_the_next_eigenvalue(rank: int) -> None:
    matrix = psd(20, torch.Generator().manual_seed(0))
    decoded = round_trip(LowRank(bits=16, rank=rank), matrix)
    *_, left_out = torch.linalg.eigvalsh(matrix)[:-rank].tolist()
    error = float(torch.linalg.matrix_norm(decoded - matrix, 2))
    # Codes of 16 bits add little.
    assert error == pytest.approx(left_out, abs=1e-4 * float(torch.linalg.matrix_norm(matrix, 2)))


@pytest.mark.parametrize("bits", [2, 4, 8, 11, 16])
def test_matrices_arrive_symmetric_and_positive_semi_definite(bits: int) -> None:
    decoded = round_trip(LowRank(bits, rank=9), psd(30, torch.Generator().manual_seed(1)))
    assert torch.equal(decoded, decoded.T)
    assert torch.linalg.eigvalsh(decoded.double()).min() > -1e-6 * torch.linalg.norm(decoded)
    assert torch.linalg.matrix_rank(decoded.double(), rtol=1e-5) <= 9


def test_the_trace_that_is_sent_arrives_and_is_logged() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 10.0]))
    _, decoded, metrics = sent(LowRank(rank=2), gram(matrix))
    assert metrics["trace_kept"] == pytest.approx(13 / 16)
    assert float(decoded.statistics["gram"]["0"].trace()) == pytest.approx(13.0)
    assert set(metrics) == {"trace_kept", "quantized_to_zero/change"}


def test_a_matrix_of_zeros_and_one_that_rounding_has_made_indefinite() -> None:
    assert torch.equal(round_trip(LowRank(rank=3), torch.zeros(5, 5)), torch.zeros(5, 5))
    indefinite = torch.diag(torch.tensor([1.0, 0.0, -1e-9]))
    assert torch.linalg.eigvalsh(round_trip(LowRank(rank=3), indefinite)).min() >= 0


@pytest.mark.parametrize(("network", "rank"), [(LENET, 109), (NARROW_CNN, 542)])
def test_the_default_rank_is_the_largest_within_the_bytes_of_fedavg(
    network: tuple[Any, tuple[int, ...]], rank: int
) -> None:
    state = state_of(*network)
    sides = [side for weight in state.values() for side in weight.flatten(1).shape]
    factors = {f"{i}": torch.zeros(side, side) for i, side in enumerate(sides)}
    template = template_for(payload_of(state, {"fisher": factors}, psd=("fisher",)))
    assert LowRank().rank_of(template) == rank

    size = nbytes(LowRank().template(template))
    assert size == nbytes(LowRank(rank=rank).template(template))
    assert 0.99 * nbytes(state) < size <= nbytes(state)
    assert nbytes(LowRank(rank=rank + 1).template(template)) > nbytes(state)


@pytest.mark.parametrize("bits", [5, 8, 16])
def test_the_bytes_of_a_message_are_those_that_the_rank_was_chosen_for(bits: int) -> None:
    state = state_of(*LENET)
    payload = payload_of(state, {"fisher": factors_of(state)}, psd=("fisher",))
    message, *_ = sent(LowRank(bits), payload)
    size = nbytes(LowRank(bits).template(template_for(payload)))
    assert nbytes(message) == size <= nbytes(state)


def test_change_and_other_statistics_are_those_of_quantize() -> None:
    state = state_of(*LENET)
    others = {"scale": torch.linspace(0, 1, 50), "steps": 4}
    statistics = {"fisher": factors_of(state), **others}
    low_rank = pickle.loads(pickle.dumps(LowRank(rank=5)))
    _, decoded, metrics = sent(low_rank, payload_of(state, statistics, psd=("fisher",)))
    _, plain, plain_metrics = sent(Quantize(16), payload_of(state, others))
    assert_same(decoded.change, plain.change)
    assert list(decoded.statistics) == list(statistics)
    assert_same({name: decoded.statistics[name] for name in others}, plain.statistics)
    assert plain_metrics.items() < metrics.items()


def test_a_message_of_another_form_is_refused() -> None:
    matrix = psd(6, torch.Generator().manual_seed(0))
    payload = payload_of(WEIGHT, {"gram": {"0": matrix}, "n": 1}, psd=("gram",))
    low_rank, template = LowRank(rank=3), template_for(payload)
    good, _ = packed(low_rank, payload)
    factor = good.statistics["gram"]["0"]
    vectors, values = factor["vectors"], factor["values"]
    bad_factors = (
        vectors,
        {"vectors": vectors},
        {**factor, "vectors": vectors[:, :2]},
        {**factor, "vectors": vectors.T},
        {**factor, "vectors": vectors.float()},
        {**factor, "vectors": torch.zeros_like(vectors)},
        {**factor, "vectors": torch.full_like(vectors, -128)},
        {**factor, "values": -values},
        {**factor, "values": values.double()},
        {**factor, "values": values[:2]},
        {**factor, "values": values * float("nan")},
        {**factor, "values": values.to_sparse()},
        {**factor, "vectors": vectors.to_sparse()},
    )
    statistics = [{"gram": {"0": bad}, "n": 1} for bad in bad_factors]
    statistics += [{"gram": {}, "n": 1}, {"n": 1}, {"gram": good.statistics["gram"]}, {}]
    messages = [good._replace(statistics=bad) for bad in (*statistics, None)]
    messages += [good._replace(change=bad) for bad in (None, {})]
    assert_refused(low_rank, template, good, copy.deepcopy(messages))


def test_a_matrix_that_is_not_finite_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match=r"statistics\.gram\.0 is not finite"):
        packed(LowRank(rank=3), gram(torch.eye(6) / 0.0))


def test_what_cannot_be_compressed_is_refused() -> None:
    for weight, matrix, match in (
        (WEIGHT, torch.ones(3, 4), r"the statistic gram/0 is not a square matrix"),
        ({"w": torch.ones(40)}, torch.eye(100), "one eigenvalue per matrix .* set its rank"),
    ):
        payload = payload_of(weight, {"gram": {"0": matrix}}, psd=("gram",))
        with pytest.raises(FlsuiteError, match=match):
            LowRank().template(template_for(payload))
    for arguments in ({"bits": 1}, {"state_bits": 17}, {"rank": 0}, {"rank": 2.5}):
        with pytest.raises(FlsuiteError, match="LowRank: "):
            LowRank(**arguments)
