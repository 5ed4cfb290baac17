"""Runs of one process that take turns, so that they can do some of their work together.

Each run is a call in a thread of its own, and only one of them acts at a time. A run acts until it
asks a question or ends. When all runs have asked, their questions are answered together.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

_Q = TypeVar("_Q")
_A = TypeVar("_A")

_SEED = "PL_GLOBAL_SEED"  # where Lightning keeps the seed of a run
_PATIENCE = 20.0  # seconds for a run to end after an interrupt


class Turns:
    """Several runs in this process.

    What is global in a process, such as torch's random state, is each run's own.

    Args:
        calls: The runs.
        enter: Called with the place of a run whenever it begins to act.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], enter: Callable[[int], None]) -> None:
        self.tensors: list[Tensor] = []
        self.runs = [_Run(self, place, call, enter) for place, call in enumerate(calls)]

    def take(self) -> None:
        """Let the runs act until all have ended. An error of a run is raised then.

        Raises:
            KeyboardInterrupt: After Ctrl-C or SIGTERM. All runs have been interrupted.
        """
        try:
            living = self.runs
            while living:
                for run in living:
                    with _isolated():
                        run.act()
                living = [run for run in living if run.asked]
                with _isolated():
                    _answer(living)
        except BaseException:
            for run in sorted(self.runs, key=lambda run: not run.is_acting):
                run.stop()
            raise
        for run in self.runs:
            if run.error is not None:
                raise run.error


class _Run:
    """One run, in its thread."""

    def __init__(
        self, turns: Turns, place: int, call: Callable[[], object], enter: Callable[[int], None]
    ) -> None:
        self.turns = turns
        self.asked: tuple[Any, Callable[[Sequence[Any]], Sequence[Any]]] | None = None
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_acting = False
        self._is_stopped = False
        self._place, self._call, self._enter = place, call, enter
        self._turn, self._back = SimpleQueue[None](), SimpleQueue[None]()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def act(self) -> None:
        """Wait until the run has asked a question or ended."""
        self._enter(self._place)
        self.is_acting = True
        if self._thread.ident is None:
            self._thread.start()
        self._turn.put(None)
        self._back.get()  # without a limit: a round takes as long as it does
        self.is_acting = False

    def stop(self) -> None:
        """Interrupt the run as Ctrl-C would, and wait for its end."""
        if not self._thread.is_alive():
            return
        self._enter(self._place)
        self._is_stopped = True
        if self.is_acting and self._back.empty():
            interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
            interrupt(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
        else:
            self._turn.put(None)
        self._thread.join(_PATIENCE)

    def ask(self, question: _Q, answers: Callable[[Sequence[_Q]], Sequence[_A]]) -> _A:
        """Let the other runs act, and return the answer."""
        self.asked = question, answers
        with _isolated():
            self._back.put(None)
            self._turn.get()
        self.asked, answer, self.answer = None, self.answer, None
        if self._is_stopped:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _main(self) -> None:
        _RUN.set(self)
        self._turn.get()
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._back.put(None)


_RUN: ContextVar[_Run | None] = ContextVar("run", default=None)


def together(question: _Q, answers: Callable[[Sequence[_Q]], Sequence[_A]]) -> _A:
    """Return the answer to a question of this run.

    Args:
        question: The question.
        answers: Returns one answer per question. It is called once for the runs that take turns,
            and at once for a run alone.
    """
    run = _RUN.get()
    return answers([question])[0] if run is None else run.ask(question, answers)


def companions() -> int:
    """Return the number of runs that take turns with this one, itself included."""
    run = _RUN.get()
    return 1 if run is None else len(run.turns.runs)


def shared(tensor: Tensor) -> Tensor:
    """Return the equal tensor of a run that takes turns with this one, if there is one."""
    if (run := _RUN.get()) is None:
        return tensor
    own = tensor.shape, tensor.dtype, tensor.device
    for other in run.turns.tensors:
        if (other.shape, other.dtype, other.device) == own and torch.equal(other, tensor):
            return other
    run.turns.tensors.append(tensor)
    return tensor


def _answer(runs: Sequence[_Run]) -> None:
    """Answer the questions of runs, all those that one function answers at once."""
    for function in dict.fromkeys(run.asked[1] for run in runs if run.asked):
        asking = [run for run in runs if run.asked and run.asked[1] == function]
        questions = [run.asked[0] for run in asking if run.asked]
        try:
            answers = function(questions)
        except Exception as error:  # it ends the runs as if each had been alone
            answers = [error] * len(asking)
        for run, answer in zip(asking, answers, strict=True):
            run.answer = answer


@contextmanager
def _isolated() -> Iterator[None]:
    """Restore on exit what is global in a process, or in a thread of torch."""
    threads, seed = torch.get_num_threads(), os.environ.get(_SEED)
    with isolate_rng():
        yield
    torch.set_num_threads(threads)
    os.environ.pop(_SEED, None)
    if seed is not None:
        os.environ[_SEED] = seed
