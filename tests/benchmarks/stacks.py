"""Stacks of clients beside the loop, one client at a time, and two workers."""

import resource
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from flsuite.aggregators import MOON, Ditto, FedAvg
from flsuite.federation import Engine, InProcess, Processes, Synchronous, Vectorized
from flsuite.models import MLP, LeNet5
from flsuite.models.backbones import Backbone
from tests.benchmarks.sides import (
    Clock,
    RandomImages,
    alternating,
    federation,
    loop_for,
    ratio,
    report,
)

SIZES = (1, 2, 5, 10, 25, 50)  # clients per stack, in the figure


@dataclass
class Work:
    """Rounds to measure: data, a network, samples per batch, local epochs and clients a round."""

    module: RandomImages
    backbone: Backbone
    batch: int
    epochs: int
    cohort: int

    def clock(self, rounds: int, engine: Engine, *between: Any, **kwargs: Any) -> Clock:
        torch.set_num_threads(1)
        self.module.batch_size = self.batch
        kwargs |= {"schedule": Synchronous(self.cohort), "max_epochs": self.epochs}
        return federation(self.module, self.backbone, rounds, engine, *between, **kwargs)

    def seconds(self, rounds: int, engine: Engine, **kwargs: Any) -> list[float]:
        """Return the seconds of each round after the first."""
        return self.clock(rounds, engine, **kwargs).seconds


def works() -> dict[str, Work]:
    digits, images = RandomImages(1400, (1, 8, 8), clients=50), (1, 28, 28)
    return {
        "MLP 64-64-10, 50 clients x 28, batches of 16, 5 epochs": Work(
            digits, MLP((64,)), 16, 5, 50
        ),
        "MLP 784-64-10, 1000 clients x 60, 100 a round, batches of 20": Work(
            RandomImages(60_000, images, clients=1000), MLP((64,)), 20, 1, 100
        ),
        "linear, 784-10, 1000 clients x 60, 100 a round, batches of 20": Work(
            RandomImages(60_000, images, clients=1000), MLP(()), 20, 1, 100
        ),
        "LeNet-5, 20 clients x 600, batches of 64": Work(
            RandomImages(12_000, images, clients=20), LeNet5(), 64, 1, 20
        ),
    }


def vectorized(rounds: int) -> None:
    """Compare stacks of clients with the loop, one client at a time and two workers."""
    rounds = max(4, rounds // 3)
    for name, work in works().items():
        loop = loop_for(work.module, work.backbone)
        loop.batch = work.batch
        # As many steps as in so many epochs.
        loop.clients = [rows.repeat(work.epochs) for rows in loop.clients]
        sides: dict[str, Engine] = {
            "alone": InProcess(),
            "two_workers": Processes(2),
            "stack": Vectorized(clients=work.cohort),
            "recorded": Vectorized(clients=work.cohort, graph=True),
            "stack_two": Vectorized(threads=2, clients=work.cohort),
            "stacks_two": Vectorized(workers=2, clients=work.cohort // 2),
        }
        seconds: dict[str, list[float]] = {side: [] for side in (*sides, "loop")}
        for _ in range(3):
            for side, engine in sides.items():
                clock = work.clock(rounds, engine, loop.round if side == "alone" else None)
                seconds[side] += clock.seconds
                seconds["loop"] += clock.other
        report(name, **seconds)
        for side in sides:
            print(f"    {side} takes {ratio(seconds[side], seconds['loop']):.2f} x the loop")
    _methods(rounds)
    _memory()


def _methods(rounds: int) -> None:
    """Compare a stack with one client at a time where a method trains more than the model."""
    digits, *_ = works().values()
    for method in (FedAvg, Ditto, MOON):
        one = partial(digits.seconds, rounds, aggregator=method())
        sides = {"alone": InProcess(), "stack": Vectorized(clients=50)}
        seconds = alternating({side: partial(one, engine) for side, engine in sides.items()})
        taken = ratio(seconds["stack"], seconds["alone"])
        print(f"{method.__name__}, MLP 64-64-10: a stack takes {taken:.2f} x one client at a time")


def _memory() -> None:
    """Print the peak memory with a growing cohort and stacks of 64, each in a new process."""
    for cohort in (100, 1_000, 10_000):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            seconds, peak = pool.submit(_seconds_and_peak, cohort).result()
        print(f"linear, {cohort} of 10000 clients a round: {seconds:.2f} s, peak {peak:.0f} MB")


def _seconds_and_peak(cohort: int) -> tuple[float, float]:
    work = Work(RandomImages(100_000, (1, 28, 28), clients=10_000), MLP(()), 10, 1, cohort)
    seconds = statistics.median(work.seconds(3, Vectorized(clients=64)))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stacks(rounds: int) -> None:
    """Draw the time of a round over the number of clients in a stack, as ``stacks.png``."""
    rounds = max(4, rounds // 3)
    times: dict[str, list[float]] = {}
    for name, work in works().items():
        work.cohort = min(work.cohort, max(SIZES))
        title = name.split(", ")[0]
        sizes = [size for size in SIZES if size <= work.cohort]
        alone = statistics.median(work.seconds(rounds, InProcess()))
        times[title] = [1.0] + [
            statistics.median(work.seconds(rounds, Vectorized(clients=size))) / alone
            for size in sizes[1:]
        ]
        print(title, *(f"{size}: {t:.2f}" for size, t in zip(sizes, times[title], strict=True)))
    _draw(times)


def _draw(times: dict[str, Sequence[float]]) -> None:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for title, relative in times.items():
        axis.plot(SIZES[: len(relative)], relative, marker="o", label=title)
    axis.axhline(1, color="0.6", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="clients per stack")
    axis.set_ylabel("time of a round,\nrelative to one client at a time")
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    ticks = (0.2, 0.5, 1.0, 2.0)
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.savefig("stacks.png", dpi=120)
    plt.close(figure)
    print("stacks.png")
