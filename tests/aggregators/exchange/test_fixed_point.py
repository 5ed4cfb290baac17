"""Integers modulo 2^32: their error, and sums at the ends of the range."""

import numpy as np
import pytest
import torch

from flsuite.aggregators.exchange.sharing import bits_per_number, decode_sum, encode_values, step


def test_the_bits_leave_room_for_the_sum() -> None:
    clients = {2: 31, 3: 30, 4: 30, 5: 29, 8: 29, 9: 28, 30: 27, 1024: 22}
    assert {count: bits_per_number(count) for count in clients} == clients


@pytest.mark.parametrize("clients", [2, 3, 4, 5, 8, 16, 30])
@pytest.mark.parametrize("largest", [1e-3, 1.0, 12345.678, 1e300, 1e-300])
def test_the_error_of_a_sum_is_at_most_half_a_step_per_client(clients: int, largest: float) -> None:
    generator = np.random.default_rng(clients)
    values = torch.from_numpy(generator.uniform(-1, 1, (clients, 1000))) * largest
    values[:, 0], values[:, 1], values[:, 2] = largest, -largest, 0.0
    total = np.zeros(1000, np.uint32)
    for row in values:
        total += encode_values(row, largest, clients)

    bound = clients * step(largest, clients) / 2
    errors = (decode_sum(total, largest, clients) - values.sum(0)).abs()
    # At both ends of the range every client is off by half a step.
    assert float(errors.max()) <= bound * (1 + 1e-6)
    assert float(errors[2]) == 0.0


def test_the_step_is_that_of_the_definition() -> None:
    assert step(3.0, 5) == pytest.approx(2 * 3.0 / (2**29 - 1), rel=1e-15)
    assert encode_values(torch.tensor([-1.0]), 3.0, 5)[0] == 2**32 - round(1 / step(3.0, 5))


def test_a_range_of_zero_holds_zeros() -> None:
    for largest in (0.0, 5e-324):
        codes = encode_values(torch.zeros(3), largest, 4)
        assert codes.tolist() == [0, 0, 0]
        assert decode_sum(codes, largest, 4).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [1.01, -1.01, float("inf"), float("nan")])
def test_a_value_outside_the_range_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="outside its range of 1"):
        encode_values(torch.tensor([0.0, bad]), 1.0, 2)
