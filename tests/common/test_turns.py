"""Runs that take turns: one acts at a time, and each keeps what is global in a process."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from flsuite.common.turns import Turns, companions, shared, together


def doubled(questions: Sequence[int]) -> list[int]:
    ASKED.append(list(questions))
    return [2 * question for question in questions]


def failing(questions: Sequence[int]) -> list[int]:
    raise ValueError(f"{len(questions)} at once")


ASKED: list[list[int]] = []


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    ASKED.clear()


def nowhere(place: int) -> None:
    """Enter a run without a trace."""


def taken(*calls: Callable[[], Any], enter: Callable[[int], None] = nowhere) -> list[Any]:
    """Let calls take turns, and return what they return."""
    results: list[Any] = [None] * len(calls)

    def keep(place: int, call: Callable[[], Any]) -> None:
        results[place] = call()

    Turns([lambda p=p, c=c: keep(p, c) for p, c in enumerate(calls)], enter).take()
    return results


def test_what_all_ask_is_answered_at_once_and_who_has_ended_is_not_waited_for() -> None:
    def run(first: int, questions: int) -> list[int]:
        return [together(first + i, doubled) for i in range(questions)]

    answers = taken(lambda: run(0, 3), lambda: run(10, 1), lambda: run(20, 2))
    assert answers == [[0, 2, 4], [20], [40, 42]]
    assert ASKED == [[0, 10, 20], [1, 21], [2]]


def test_a_run_alone_is_answered_in_place() -> None:
    assert together(4, doubled) == 8 and companions() == 1
    assert taken(lambda: (together(1, doubled), companions())) == [(2, 1)]
    tensor = torch.ones(2)
    assert shared(tensor) is tensor


def test_each_run_has_its_own_random_numbers_and_threads() -> None:
    def draw(seed: int) -> list[float]:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.set_num_threads(1 + seed % 2)
        drawn = []
        for _ in range(3):
            drawn += [random.random(), np.random.rand(), float(torch.rand(()))]
            together(0, doubled)
            drawn.append(torch.get_num_threads())
        return drawn

    before, threads = torch.get_rng_state(), torch.get_num_threads()
    ours = taken(lambda: draw(1), lambda: draw(2))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert ours == [draw(1), draw(2)]
    torch.set_num_threads(threads)


def test_each_run_reads_its_own_seed() -> None:
    def read(seed: int) -> str:
        seed_everything(seed)
        together(0, doubled)
        return os.environ["PL_GLOBAL_SEED"]

    before = os.environ.get("PL_GLOBAL_SEED")
    assert taken(lambda: read(1), lambda: read(2)) == ["1", "2"]
    assert os.environ.get("PL_GLOBAL_SEED") == before


def test_a_run_is_entered_whenever_it_acts() -> None:
    places: list[int] = []
    taken(lambda: together(1, doubled), lambda: None, enter=places.append)
    assert places == [0, 1, 0]


def test_an_error_of_the_answer_reaches_all_who_have_asked() -> None:
    def run() -> str:
        with pytest.raises(ValueError, match="2 at once") as caught:
            together(1, failing)
        return str(caught.value)

    assert taken(run, run) == ["2 at once"] * 2


def test_an_error_of_a_run_ends_no_other_run() -> None:
    ended: list[int] = []

    def run() -> None:
        ended.append(together(1, doubled) + together(2, doubled))

    def fails() -> None:
        together(1, doubled)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        taken(fails, run)
    assert ended == [6] and ASKED == [[1, 1], [2]]


@pytest.mark.parametrize("is_acting", [True, False])
def test_an_interrupt_reaches_every_run(is_acting: bool) -> None:
    ended: list[str] = []

    def run(name: str) -> None:
        try:
            together(0, doubled)
            if is_acting:
                while True:
                    time.sleep(0.01)
            together(0, interrupted)
        except KeyboardInterrupt:
            ended.append(name)

    def interrupted(questions: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    def enter(place: int) -> None:
        entered.append(place)
        if is_acting and len(entered) == 3:  # the first run acts again, without an end
            threading.Timer(0.2, interrupt).start()

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    entered: list[int] = []
    # A shell's background processes ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            taken(lambda: run("a"), lambda: run("b"), enter=enter)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == ["a", "b"]


def test_equal_tensors_are_one() -> None:
    def run(value: float) -> torch.Tensor:
        mine = shared(torch.full((3,), value))
        together(0, doubled)
        return mine

    a, b, c = taken(lambda: run(1.0), lambda: run(1.0), lambda: run(2.0))
    assert a is b and c is not a and c.tolist() == [2.0] * 3
