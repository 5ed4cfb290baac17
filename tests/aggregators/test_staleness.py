"""Weights of late updates: their values, their names in a config, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flsuite import FlsuiteError
from flsuite.aggregators import (
    Constant,
    FedAdam,
    FedAsync,
    FedBuff,
    Hinge,
    Hyperbolic,
    Polynomial,
    Staleness,
)
from flsuite.aggregators.staleness import staleness_weight
from flsuite.commands.fit import build
from flsuite.runs.settings import describe

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Growing(Staleness):
    def __call__(self, tau: int) -> float:
        return float(tau)


class Undefined(Staleness):
    def __call__(self, tau: int) -> float:
        return math.nan


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (Constant(), {0: 1.0, 1: 1.0, 1000: 1.0}),
        (Hyperbolic(), {0: 1.0, 1: 0.5, 3: 0.25}),
        (Hyperbolic(c=0.5), {0: 0.5, 1: 0.25, 4: 0.1}),
        (Polynomial(), {0: 1.0, 3: 0.5, 8: 1 / 3}),
        (Polynomial(p=2.0), {0: 1.0, 1: 0.25, 9: 0.01}),
        (Polynomial(p=0.0), {0: 1.0, 5: 1.0}),
        (Hinge(), {0: 1.0, 4: 1.0, 5: 1 / 11, 6: 1 / 21}),
        (Hinge(a=0.5, b=2.0), {2: 1.0, 3: 2 / 3, 4: 0.5}),
    ],
)
def test_values_by_hand(weights: Staleness, expected: dict[int, float]) -> None:
    for tau, weight in expected.items():
        assert weights(tau) == pytest.approx(weight, rel=1e-12)
        assert staleness_weight(weights, tau) == weights(tau)


def test_a_name_stands_for_the_defaults_of_its_class() -> None:
    named = {
        "constant": Constant(),
        "hyperbolic": Hyperbolic(),
        "polynomial": Polynomial(),
        "hinge": Hinge(),
    }
    for name, weights in named.items():
        assert [staleness_weight(name, tau) for tau in range(9)] == [weights(t) for t in range(9)]


def test_weights_that_grow_are_refused() -> None:
    """A mixing rate, checked for fresh updates, could then exceed 1."""
    with pytest.raises(FlsuiteError, match=r"Growing: the weight at staleness 2 is 2.0"):
        staleness_weight(Growing(), 2)
    with pytest.raises(FlsuiteError, match=r"Undefined: the weight at staleness 0 is nan"):
        staleness_weight(Undefined(), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hyperbolic(c=0.0), "c must be positive"),
        (lambda: Hyperbolic(c=math.nan), "c must be positive"),
        (lambda: Polynomial(p=-0.5), "p must be at least 0"),
        (lambda: Polynomial(p=math.inf), "p must be at least 0"),
        (lambda: Hinge(a=0.0), "a must be positive"),
        (lambda: Hinge(b=-1.0), "b must be at least 0"),
        (lambda: FedAsync(staleness="linear"), "Mixing: staleness must be one of constant, "),
        (lambda: FedBuff(staleness="linear"), "FedBuff: staleness must be one of constant, "),
        (lambda: FedAdam(staleness="linear"), "Mean: staleness must be one of constant, "),
        (lambda: FedAsync(staleness=math.sqrt), r"or a flsuite.aggregators.staleness.Stale"),
    ],
)
def test_a_bad_argument_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        make()


def aggregator_of(*arguments: str) -> Any:
    return build(["--config", str(QUICKSTART), *arguments])[0].aggregator


def test_a_config_gives_a_name_or_a_class(tmp_path: Path) -> None:
    own = ["--run_dir", str(tmp_path), "--trainer.aggregator", "FedAsync"]
    named = aggregator_of(*own, "--trainer.aggregator.staleness", "hinge")
    assert describe(named)["init_args"]["staleness"] == "hinge"

    config = tmp_path / "own.yaml"
    config.write_text(
        "trainer:\n  aggregator:\n"
        "    class_path: FedAdam\n"
        "    init_args: {staleness: {class_path: Hyperbolic, init_args: {c: 0.5}}}\n"
    )
    made = aggregator_of("--run_dir", str(tmp_path), "--config", str(config))
    assert describe(made)["init_args"]["staleness"] == {
        "class_path": "flsuite.aggregators.Hyperbolic",
        "init_args": {"c": 0.5},
    }
