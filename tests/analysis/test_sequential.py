"""Tests after every seed: against Student's t, and by simulation."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy.stats import t as student

from flsuite.analysis.sequential import Decision, critical_values, look, stopping_lines

SERIES = np.random.default_rng(1).standard_normal((1500, 20))


def test_a_single_look_is_the_t_test() -> None:
    for seeds in (5, 20):
        ours = critical_values(seeds, seeds, 0.05)[seeds]
        assert ours == pytest.approx(student.ppf(0.975, seeds - 1), rel=0.01)
    many = critical_values(5, 20, 0.05)
    assert all(value > student.ppf(0.975, seeds - 1) for seeds, value in many.items())


@pytest.mark.parametrize("first", [2, 5])
def test_without_a_difference_few_series_are_decided(first: int) -> None:
    """The usual t-test after every seed would be wrong three times as often."""
    wrong = [look(series, first, 20).because == "zero" for series in SERIES]
    assert np.mean(wrong) <= 0.05
    assert np.mean(wrong) > 0.03, "it spends the error that it may make"

    naive = np.zeros(len(SERIES), dtype=bool)
    for seeds in range(first, 21):
        own = SERIES[:, :seeds]
        t = own.mean(1) / own.std(1, ddof=1) * math.sqrt(seeds)
        naive |= np.abs(t) > student.ppf(0.975, seeds - 1)
    assert naive.mean() > 0.15


def test_a_clear_difference_is_found_early() -> None:
    looks = [look(series + 1.5, 3, 20) for series in SERIES[:300]]
    assert np.mean([own.because == "zero" and own.low > 0 for own in looks]) > 0.95
    assert np.median([own.seeds for own in looks]) < 8


def test_a_decision_stays_and_what_is_narrow_enough_stops() -> None:
    series = [1.0, 1.1, 0.9, 1.0, -9.0, 9.0]
    assert look(series[:4], 3, 6) == look(series, 3, 6)
    assert look(series, 3, 6).because == "zero" and look(series, 3, 6).seeds == 3
    narrow = [0.01, -0.01, 0.01, -0.01]
    assert look(narrow, 4, 6).because is None
    stopped = look(narrow, 4, 6, width=0.1)
    assert stopped.because == "width" and stopped.high - stopped.low <= 0.1
    half = critical_values(4, 6, 0.05)[4] * np.std(narrow, ddof=1) / 2
    assert stopped.high == pytest.approx(half)


@pytest.mark.parametrize("values", [[0.1] * 4, [0.1, math.nan, 0.2, 0.3], [math.inf, 0, 1, 2]])
def test_what_has_no_interval_is_open_until_the_last_seed(values: list[float]) -> None:
    assert look(values[:3], 2, 4, width=9.0).because is None
    assert look(values, 2, 4, width=9.0).because == "seeds"


def test_the_lines_of_a_report() -> None:
    decision = Decision("loss", "B", "A", "", "B-0", look([1.0, 1.1, 0.9], 3, 3))
    record = {"seeds": 3, "alpha": 0.05, "width": 0.2, "pairs": [asdict(decision)]}
    first, second = stopping_lines(record)
    assert "of test loss excluded" in first
    assert "interval was at most 0.2, up to 3" in first and "Lan and DeMets" in first
    assert second.startswith("B - A: +1.0000 (+0.7") and second.endswith("after 3 seeds, differs")
