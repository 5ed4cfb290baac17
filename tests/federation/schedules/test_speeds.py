"""Seconds of fits on the virtual clock: closed forms, repeatable draws, and what is refused."""

from typing import Any

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.commands.parsing import OneLineParser, plain_errors
from flsuite.federation import Fit, LogNormal, Measured, PerSample, Speeds, Stragglers
from flsuite.runs.settings import describe

DRAWN: list[Speeds] = [
    Stragglers(),
    Stragglers(per_fit=True),
    LogNormal(),
    LogNormal(per_fit=True),
    PerSample(spread=0.5),
]


def work(client: int, number: int = 0, **kwargs: Any) -> Fit:
    amounts = {"started": 0.0, "samples": 100, "bytes_down": 1000, "bytes_up": 500, **kwargs}
    return Fit(number, client, version=0, repeat=0, **amounts)


def seconds(speeds: Speeds, clients: int, seed: int = 0, number: int = 0) -> np.ndarray:
    """Return the seconds of fit ``number``, once for each client."""
    speeds.configure(clients, seed)
    return np.array([speeds.seconds(work(client, number)) for client in range(clients)])


def parsed(text: str) -> Speeds:
    """Return the speeds of a config."""
    parser = OneLineParser()
    parser.add_subclass_arguments(Speeds, "speeds")
    with plain_errors():
        return parser.instantiate(parser.parse_string(f"speeds: {text}")).speeds


# All of them


@pytest.mark.parametrize("speeds", DRAWN, ids=lambda speeds: repr(describe(speeds)["init_args"]))
def test_seconds_are_a_function_of_the_seed_and_the_work(speeds: Speeds) -> None:
    fits = [work(client, number) for client in range(5) for number in range(20)]
    speeds.configure(5, seed=7)
    expected = [speeds.seconds(fit) for fit in fits]
    np.random.rand(3)
    assert [speeds.seconds(fit) for fit in reversed(fits)] == expected[::-1]
    assert {type(value) for value in expected} == {float}
    assert [speeds.seconds(fits[3]) for _ in range(3)] == [expected[3]] * 3

    speeds.configure(5, seed=8)
    assert not {speeds.seconds(fit) for fit in fits} & {*expected}
    speeds.configure(5, seed=7)
    assert [speeds.seconds(fit) for fit in fits] == expected


def test_measured_knows_no_seconds() -> None:
    measured = Measured()
    measured.configure(3, seed=0)
    assert measured.seconds(work(1)) is None


# Stragglers


@pytest.mark.parametrize(
    ("fraction", "clients", "slow"),
    [(0.3, 20, 6), (0.0, 7, 0), (0.25, 10, 3), (0.24, 10, 2), (0.3, 1, 0)],
)
@pytest.mark.parametrize("per_fit", [False, True])
def test_the_number_of_slow_clients_is_exact(
    fraction: float, clients: int, slow: int, per_fit: bool
) -> None:
    for seed in range(10):
        given = seconds(Stragglers(fraction, jitter=0.0, per_fit=per_fit), clients, seed)
        is_slow = given >= 0.8
        assert is_slow.sum() == slow
        assert np.all(given[is_slow] <= 2.0) and np.all(given[~is_slow] <= 0.2)


def test_the_same_clients_are_slow_in_every_fit() -> None:
    speeds = Stragglers(0.4, per_fit=True)
    fits = np.array([seconds(speeds, 20, number=number) for number in range(50)])
    assert {tuple(fit >= 0.8) for fit in fits} == {tuple(fits[0] >= 0.8)}
    assert all(len({*client}) == 50 for client in fits.T)


def test_without_jitter_a_client_takes_equally_long_for_each_fit() -> None:
    speeds = Stragglers(jitter=0.0)
    fits = np.array([seconds(speeds, 20, number=number) for number in range(10)])
    assert np.all(fits == fits[0]) and len({*fits[0]}) == 20


def test_jitter_is_uniform_and_added_per_fit() -> None:
    fixed = Stragglers(1.0, slow=(1.0, 1.0), jitter=0.5)
    fixed.configure(1, seed=0)
    added = np.array([fixed.seconds(work(0, number)) for number in range(2000)]) - 1.0
    assert added.min() >= 0 and added.max() <= 0.5
    assert np.quantile(added, [0.25, 0.5, 0.75]) == pytest.approx([0.125, 0.25, 0.375], abs=0.02)


@pytest.mark.parametrize("per_fit", [False, True])
def test_a_range_is_uniform(per_fit: bool) -> None:
    speeds = Stragglers(0.0, fast=(1.0, 3.0), jitter=0.0, per_fit=per_fit)
    quartiles = np.quantile(seconds(speeds, 4000), [0, 0.25, 0.5, 0.75, 1])
    assert quartiles == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0], abs=0.06)


def test_with_and_without_draws_per_fit_the_jitter_is_the_same() -> None:
    settings: dict[str, Any] = {"fast": (1.0, 1.0), "slow": (2.0, 2.0)}
    fixed, drawn = Stragglers(**settings), Stragglers(**settings, per_fit=True)
    assert np.array_equal(seconds(fixed, 20), seconds(drawn, 20))


# Log-normal


@pytest.mark.parametrize("per_fit", [False, True])
def test_logarithms_are_normal_around_the_median(per_fit: bool) -> None:
    logarithms = np.log(seconds(LogNormal(3.0, 0.5, per_fit=per_fit), 10_000))
    quantiles = np.quantile(logarithms, [0.1587, 0.5, 0.8413])
    assert quantiles == pytest.approx(np.log(3.0) + np.array([-0.5, 0.0, 0.5]), abs=0.03)


def test_a_client_is_drawn_once_or_for_each_fit() -> None:
    once = np.array([seconds(LogNormal(), 20, number=number) for number in range(10)])
    assert np.all(once == once[0]) and len({*once[0]}) == 20
    each = np.array([seconds(LogNormal(per_fit=True), 20, number=number) for number in range(10)])
    assert len({*each.flat}) == 200


# Per sample


def test_seconds_by_hand() -> None:
    speeds = PerSample(0.01, seconds_per_byte_down=1e-6, seconds_per_byte_up=2e-6)
    speeds.configure(4, seed=0)
    fit = work(3, samples=120, bytes_down=4_000_000, bytes_up=1_000_000)
    assert speeds.seconds(fit) == pytest.approx(1.2 + 4.0 + 2.0, rel=1e-12)
    assert speeds.seconds(work(3, samples=0, bytes_down=0, bytes_up=0)) == 0.0
    assert np.all(seconds(PerSample(), 5) == 0.1), "bytes take no time by default"
    assert np.all(seconds(LogNormal(2.5, sigma=0.0), 10) == 2.5)


def test_a_factor_of_each_client_scales_all_its_work() -> None:
    equal, spread = PerSample(0.01, 1e-6, 2e-6), PerSample(0.01, 1e-6, 2e-6, spread=0.5)
    factors = seconds(spread, 10_000) / seconds(equal, 10_000)
    assert np.median(factors) == pytest.approx(1.0, abs=0.02)
    assert np.log(factors).std() == pytest.approx(0.5, abs=0.02)

    for samples in (1, 7, 1000):
        fit = work(17, number=samples, samples=samples)
        assert spread.seconds(fit) == pytest.approx(factors[17] * equal.seconds(fit), rel=1e-12)


# Arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stragglers(float("nan")), "Stragglers: fraction must be from 0 to 1"),
        (lambda: Stragglers(jitter=-1.0), "Stragglers: jitter must be at least 0, got -1"),
        (lambda: Stragglers(fast=(0.2, 0.1)), r"Stragglers: fast must be two numbers"),
        (lambda: Stragglers(slow=(-1.0, 1.0)), r"slow must be two numbers .* got \(-1.0, 1.0\)"),
        (lambda: Stragglers(slow=(float("nan"), 1.0)), r"slow must be .* got \(nan, 1.0\)"),
        (lambda: LogNormal(0.0), "LogNormal: median must be positive, got 0.0"),
        (lambda: LogNormal(sigma=-0.5), "LogNormal: sigma must be at least 0, got -0.5"),
        (lambda: PerSample(-1.0), "seconds_per_sample must be at least 0"),
        (lambda: PerSample(seconds_per_byte_up=-1.0), "seconds_per_byte_up must be at least 0"),
        (lambda: PerSample(spread=float("inf")), "PerSample: spread must be at least 0, got inf"),
    ],
)
def test_arguments_out_of_range_are_named(make: Any, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        make()


@pytest.mark.parametrize(
    ("fast", "message"),
    [
        ("[0.5, 0.1]", r"^Stragglers: fast must be two numbers"),
        ("[0.1, 0.2, 0.3]", r"^speeds.fast: expected a list"),
        ("0.1", r"^speeds.fast: expected a list.*, got 0.1$"),
        ("[0.1, soon]", "fast"),
    ],
)
def test_a_range_of_a_config_that_is_no_range_is_named(fast: str, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        parsed(f"{{class_path: Stragglers, init_args: {{fast: {fast}}}}}")
