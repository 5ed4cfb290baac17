"""The solvers of a sum of quadratics, against closed forms."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.aggregators.rules.solvers import (
    Block,
    Corrections,
    Dense,
    Diagonal,
    Kronecker,
    SolverName,
    adam,
    best_iterate,
    conjugate_gradients,
    default_steps,
    gradient_descent,
    is_scored,
    iterates,
    solvers,
)

SHARES = (0.2, 0.3, 0.5)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moments(size: int, rank: int, seed: int) -> Tensor:
    """Return a positive semidefinite matrix of a rank, with eigenvalues that are not far apart."""
    basis = torch.linalg.qr(random(size, rank, seed=seed))[0]
    return basis @ (1 + torch.arange(rank, dtype=torch.float64)).diag() @ basis.T


def kfac(out: int = 3, inputs: int = 4, rank: int = 1) -> tuple[Kronecker, Tensor, list[Tensor]]:
    """Return a layer of three clients, its S as a matrix, and the clients' models."""
    factors = [
        (share, moments(inputs, rank + 1, 10 + i), moments(out, rank, 20 + i))
        for i, share in enumerate(SHARES)
    ]
    models = [random(out, inputs, seed=30 + i) for i in range(3)]
    mean = sum((p * w for (p, _, _), w in zip(factors, models, strict=True)), torch.zeros(()))
    target = sum(
        (p * g @ w @ a for (p, a, g), w in zip(factors, models, strict=True)), torch.zeros(())
    )
    # vec by rows: G W A is (G kron A) vec(W), as A is symmetric.
    matrix = sum((p * torch.kron(g, a) for p, a, g in factors), torch.zeros(()))
    return Kronecker(mean, target, factors), matrix, models


def last(path: Iterator[Tensor], steps: int) -> Tensor:
    return list(islice(path, steps))[-1]


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return float((a - b).abs().max()) < tolerance


# The iterations


def test_kfac_descent_and_conjugate_gradients_reach_the_pseudoinverse() -> None:
    """S of the layer is singular: all three add nothing outside its range."""
    layer, matrix, _ = kfac()
    assert torch.linalg.matrix_rank(matrix) < len(matrix)
    expected = (torch.linalg.pinv(matrix, hermitian=True) @ layer.residual.flatten()).view(3, 4)

    assert close(last(conjugate_gradients(layer), 100), expected, 1e-11)
    assert close(last(gradient_descent(layer), 5000), expected, 1e-11)
    assert close(layer.limit(100), expected, 1e-11)


def test_the_product_is_that_of_the_kronecker_matrix() -> None:
    layer, matrix, _ = kfac()
    x = random(3, 4, seed=1)
    assert close(layer.product(x).flatten(), matrix @ x.flatten(), 1e-13)
    assert close(layer.diagonal().flatten(), matrix.diagonal(), 1e-13)


def test_the_residual_of_a_large_layer_is_float64() -> None:
    """Its products are float32, and an equal start must not see their rounding."""
    size = 400
    w = random(size, size)
    a, g = moments(size, 5, 1), moments(size, 5, 2)
    layer = Kronecker(w, g @ w @ a, [(1.0, a, g)])
    assert float(layer.residual.norm()) <= layer.noise
    exact = g @ w @ a
    error = float((layer.product(w) - exact).norm() / exact.norm())
    assert 1e-9 < error < 1e-6


def test_the_largest_eigenvalue() -> None:
    layer, matrix, _ = kfac()
    expected = float(torch.linalg.eigvalsh(matrix).max())
    assert layer.largest() == pytest.approx(expected, rel=0.02)
    zeros = Dense(torch.ones(3), torch.ones(3), torch.zeros(3, 3))
    assert zeros.largest() == 0.0
    assert Diagonal(torch.ones(2), torch.ones(2), torch.tensor([0.5, 3.0])).largest() == 3.0


def test_a_quadratic_that_knows_nothing_stays_at_its_start() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    for solver in ("cg", "gd", "exact"):
        block = Diagonal(torch.ones(2, dtype=torch.float64), zeros, zeros)
        end = best_iterate([block], solver, 10)
        assert end.corrections[0].tolist() == [0.0, 0.0]


def test_adam_by_hand() -> None:
    """It is torch's Adam with bias correction undone: lr .01, betas (.9, .99), eps .001."""
    s, r = torch.tensor([2.0, 0.5]), torch.tensor([1.0, -0.3])
    d, m, v = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    averaged, first, second = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    path = adam(Diagonal(torch.zeros(2), r, s), inside=False)
    for _ in range(20):
        g = s * d - r
        m, v = 0.9 * m + g, 0.99 * v + g * g
        d = d - 0.01 * m / (v.sqrt() + 0.01)
        g = s * averaged - r
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        averaged = averaged - 0.01 * first / (second.sqrt() + 0.001)
        step = next(path)
        torch.testing.assert_close(step, d)
        torch.testing.assert_close(step, averaged)


def test_adam_with_epsilon_inside_the_root() -> None:
    s, r = torch.tensor([2.0]), torch.tensor([1.0])
    first = next(adam(Diagonal(torch.zeros(1), r, s), inside=True))
    assert float(first) == pytest.approx(0.01 / 1.01**0.5)


# The blocks


def test_a_diagonal_is_divided_where_it_is_above_zero() -> None:
    fisher = torch.tensor([0.5, 0.0, 1e-30], dtype=torch.float64)
    mean = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    block = Diagonal(mean, fisher * torch.tensor([4.0, 0.0, 5.0]), fisher)
    assert (mean + block.limit(1)).tolist() == pytest.approx([4.0, 2.0, 5.0])


# The choice


def two_blocks() -> list[Block]:
    layer, _, _ = kfac()
    fisher = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    return [layer, Diagonal(random(3, seed=5), fisher * random(3, seed=6), fisher)]


def test_all_blocks_are_scored_at_one_step_and_the_first_of_the_best_is_taken() -> None:
    blocks = two_blocks()
    seen: list[list[Tensor]] = []

    def score(corrections: Corrections) -> float:
        seen.append([c.clone() for c in corrections])
        return (0.1, 0.1, 0.2, 0.2, 0.4, 0.3, 0.4, 0.2)[len(seen) - 1]

    best = best_iterate(blocks, "gd", 70, score)
    assert best.step == 10 and best.score == 0.4
    # The mean, 1, 2, 5, 10, 20, 50 and the last.
    assert len(seen) == 8 and all(not c.any() for c in seen[0])
    for step, corrections in zip((1, 2, 5, 10, 20, 50, 70), seen[1:], strict=True):
        for block, correction in zip(blocks, corrections, strict=True):
            path = gradient_descent(block)
            assert torch.equal(correction, last(path, step))
    assert all(torch.equal(a, b) for a, b in zip(best.corrections, seen[4], strict=True))


@pytest.mark.parametrize(
    ("solver", "steps", "expected"),
    [("gd", 20, 6), ("gd", 21, 7), ("adam", 250, 4), ("exact", 9, 2)],
)
def test_the_end_is_scored_once_wherever_it_is(solver: Any, steps: int, expected: int) -> None:
    blocks, calls = two_blocks(), list[Sequence[Tensor]]()

    def score(corrections: Corrections) -> float:
        calls.append(corrections)
        return 0.0

    best_iterate(blocks, solver, steps, score)
    assert len(calls) == expected


def test_a_block_that_has_converged_waits_for_the_others() -> None:
    layer, matrix, _ = kfac(rank=2)
    one = Diagonal(torch.zeros(1).double(), torch.ones(1).double(), torch.ones(1).double())
    path = [[c.clone() for c in corrections] for corrections in iterates([one, layer], "cg", 60)][
        1:
    ]
    assert 2 < len(path) < 60
    assert all(corrections[0].item() == 1.0 for corrections in path)
    expected = (torch.linalg.pinv(matrix, hermitian=True) @ layer.residual.flatten()).view(3, 4)
    assert close(path[-1][1], expected, 1e-11)


def test_default_steps_and_scored_steps() -> None:
    assert default_steps("cg", True) == 200 and default_steps("cg", False) == 50
    assert default_steps("cg+gd", True) == 100 and default_steps("cg+gd", False) == 50
    assert solvers("cg+gd", True) == ("cg", "gd") and solvers("cg+gd", False) == ("cg",)
    assert default_steps("adam", True) == default_steps("gd", False) == 2000
    names: tuple[SolverName, ...] = ("cg", "adam")
    scored = [[step for step in range(201) if is_scored(name, step)] for name in names]
    assert scored == [[0, 1, 2, 5, 10, 20, 50, 100, 200], [0, 100, 200]]
