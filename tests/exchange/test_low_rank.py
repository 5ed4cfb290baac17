"""Low-rank compression: its error, its bytes, and messages that are not its own."""

import copy
import pickle
from typing import Any

import pytest
import torch
from compressions import (
    LENET,
    NARROW_CNN,
    assert_same,
    configured,
    factors_of,
    psd,
    state_of,
)

from flsuite.aggregators import FedAvg
from flsuite.errors import FlsuiteError
from flsuite.exchange import LowRank, Quantize
from flsuite.exchange.tree_eigen import TreeEigen
from flsuite.exchange.tree_quantizer import TreeQuantizer
from flsuite.state import StateLayout, nbytes

WEIGHT = {"w": torch.linspace(-1, 1, 4000)}


def round_trip(compression: LowRank, matrix: torch.Tensor) -> torch.Tensor:
    extras = {"gram": {"0": matrix}}
    configured(compression, WEIGHT, extras, psd_extras=("gram",))
    message, _ = compression.encode(WEIGHT, extras, WEIGHT, {})
    return compression.decode(message, WEIGHT)[1]["gram"]["0"]


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
    compression, extras = LowRank(rank=2), {"gram": {"0": matrix}}
    configured(compression, WEIGHT, extras, psd_extras=("gram",))
    message, metrics = compression.encode(WEIGHT, extras, WEIGHT, {})
    _, decoded = compression.decode(message, WEIGHT)
    assert metrics["trace_kept"] == pytest.approx(13 / 16)
    assert float(decoded["gram"]["0"].trace()) == pytest.approx(13.0)
    assert set(metrics) == {"trace_kept", "quantized_to_zero/state"}


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
    compression = configured(LowRank(), state, {"fisher": factors}, psd_extras=("fisher",))
    assert compression.largest_rank == rank

    rest = TreeQuantizer(16).size(state)
    assert 0.99 * nbytes(state) < rest + TreeEigen(rank, 8).size(sides) <= nbytes(state)
    assert rest + TreeEigen(rank + 1, 8).size(sides) > nbytes(state)


@pytest.mark.parametrize("bits", [5, 8, 16])
def test_the_bytes_of_a_message_are_those_that_the_rank_was_chosen_for(bits: int) -> None:
    state = state_of(*LENET)
    extras = {"fisher": factors_of(state)}
    compression = configured(LowRank(bits), state, extras, psd_extras=("fisher",))
    message, _ = compression.encode(state, extras, state, {})
    assert nbytes(message) == compression.size() <= nbytes(state)


def test_state_and_other_extras_are_those_of_quantize() -> None:
    state = state_of(*LENET)
    others = {"scale": torch.linspace(0, 1, 50), "steps": 4}
    extras = {"fisher": factors_of(state), **others}
    low_rank = LowRank(rank=5)
    configured(low_rank, state, extras, psd_extras=("fisher",))
    quantize = configured(Quantize(16), state, others)

    low_rank = pickle.loads(pickle.dumps(low_rank))
    message, metrics = low_rank.encode(state, extras, state, {})
    plain, plain_metrics = quantize.encode(state, others, state, {})
    decoded, decoded_extras = low_rank.decode(message, state)
    expected, expected_others = quantize.decode(plain, state)
    assert_same(decoded, expected)
    assert list(decoded_extras) == list(extras)
    assert_same({name: decoded_extras[name] for name in others}, expected_others)
    assert plain_metrics.items() < metrics.items()


def test_a_message_of_another_form_is_refused() -> None:
    extras = {"gram": {"0": psd(6, torch.Generator().manual_seed(0))}, "n": 1}
    compression = configured(LowRank(rank=3), WEIGHT, extras, psd_extras=("gram",))
    good, _ = compression.encode(WEIGHT, extras, WEIGHT, {})
    factor = good["matrices"]["gram"]["0"]
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
    messages = [{**good, "matrices": {"gram": {"0": bad}}} for bad in bad_factors]
    messages += [{**good, "matrices": {}}, {**good, "others": {}}, {"state": good["state"]}]
    for bad in messages:
        with pytest.raises(ValueError, match=r"\w"):
            compression.decode(copy.deepcopy(bad), WEIGHT)
    compression.decode(good, WEIGHT)


def test_a_matrix_that_is_not_finite_cannot_be_sent() -> None:
    extras = {"gram": {"0": torch.eye(6)}}
    compression = configured(LowRank(rank=3), WEIGHT, extras, psd_extras=("gram",))
    with pytest.raises(ValueError, match=r"extras\.gram\.0 is not finite"):
        compression.encode(WEIGHT, {"gram": {"0": torch.eye(6) / 0.0}}, WEIGHT, {})


def test_what_cannot_be_compressed_is_refused() -> None:
    fedavg = FedAvg()
    fedavg.configure(StateLayout(("w",), 2))
    with pytest.raises(FlsuiteError, match="FedAvg sends none: use Quantize"):
        LowRank().configure(fedavg, WEIGHT, {})
    for weight, matrix, match in (
        (WEIGHT, torch.ones(3, 4), r"extras of Sends\.gram\.0 is not a square matrix"),
        ({"w": torch.ones(40)}, torch.eye(100), r"set trainer\.compression\.rank"),
    ):
        with pytest.raises(FlsuiteError, match=match):
            configured(LowRank(), weight, {"gram": {"0": matrix}}, psd_extras=("gram",))
    for arguments in ({"bits": 1}, {"state_bits": 17}, {"rank": 0}, {"rank": 2.5}):
        with pytest.raises(FlsuiteError, match="LowRank: "):
            LowRank(**arguments)
