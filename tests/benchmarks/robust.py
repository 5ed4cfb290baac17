"""Robust aggregation of a hundred clients of a million parameters: seconds and memory per rule."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import torch

from flsuite import aggregators as methods
from flsuite.aggregators.part import ServerTools
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout

__all__ = ["robust"]

CLIENTS, PARAMETERS = 100, 1_000_000

RULES: dict[str, Callable[[], methods.Rule]] = {
    "Mean": methods.Mean,
    "CoordinateMedian": methods.CoordinateMedian,
    "TrimmedMean": lambda: methods.TrimmedMean(0.2),
    "Krum": lambda: methods.Krum(0.2),
    "MultiKrum": lambda: methods.MultiKrum(0.2),
    "GeometricMedian": methods.GeometricMedian,
    "NormClipping": methods.NormClipping,
    "CenteredClipping": lambda: methods.CenteredClipping(iterations=3),
    "Bucketing(Krum)": lambda: methods.Bucketing(methods.Krum(0.2)),
    "Bucketing(CoordinateMedian)": lambda: methods.Bucketing(methods.CoordinateMedian()),
    "FLTrust": methods.FLTrust,
}


def robust(rounds: int) -> None:
    """Print the seconds of each rule and the memory that it takes beside the updates."""
    repeats, generator = max(3, rounds // 3), torch.Generator().manual_seed(0)
    start = {"w": torch.randn(PARAMETERS, generator=generator)}
    states = [
        {"w": start["w"] + 0.1 * torch.randn(PARAMETERS, generator=generator)}
        for _ in range(CLIENTS)
    ]
    # The server's own training is no part of the rule.
    tools = ServerTools(train=lambda *_: states[0])

    print(f"{CLIENTS} clients x {PARAMETERS:,} parameters, {torch.get_num_threads()} thread(s)")
    for name, make in RULES.items():
        aggregator, layout = methods.Aggregator(make()), StateLayout(("w",), CLIENTS)
        seconds, began_cpu = [], time.process_time()
        with _Peak() as peak:
            for _ in range(repeats):
                began = time.perf_counter()
                aggregator.aggregate(methods.Server(start, layout, tools), _updates(states))
                seconds.append(time.perf_counter() - began)
        cpu = (time.process_time() - began_cpu) / repeats
        low, middle = min(seconds), sorted(seconds)[len(seconds) // 2]
        times = f"{middle:.2f} s (best {low:.2f}, CPU {cpu:.2f})"
        print(f"    {name:<28} {times}  {peak.extra:4.0f} MB", flush=True)


def _updates(states: list[State]) -> Iterator[ClientUpdate]:
    empty = ClientUpdate(0, 1, 1, 1, torch.ones(1), {})
    for client, state in enumerate(states):
        yield replace(empty, client=client, state=state, metrics={})


def _give_back() -> None:
    """Give freed memory back to the system, so that a rule does not use what another one took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Peak:
    """The largest memory of this process in a while, beyond what it had before, in MB."""

    extra = 0.0

    def __enter__(self) -> "_Peak":
        self._process = psutil.Process()
        _give_back()
        self._before, self._is_over = self._process.memory_info().rss, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            now = self._process.memory_info().rss
            self.extra = max(self.extra, (now - self._before) / 1e6)
