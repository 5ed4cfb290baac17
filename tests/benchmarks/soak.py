"""A long run of tiny clients that fail on purpose: what it takes of the machine must not grow."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from flsuite.callbacks import FederationCallback
from flsuite.data import Digits
from flsuite.federation import Faults, Processes, Synchronous
from flsuite.models import MLP, Classifier
from flsuite.trainer import FederatedTrainer

__all__ = ["FIVE_PERCENT", "Taken", "Watch", "soak", "soaking_run"]

FIVE_PERCENT = {
    "raises": 0.01,
    "nan": 0.01,
    "shapes": 0.01,
    "hangs": 0.001,
    "dies": 0.004,
    "late": 0.0075,
    "twice": 0.0075,
}


class Taken(NamedTuple):
    """What a group of processes has of the machine.

    Attributes:
        processes: Their number.
        megabytes: Their own memory (USS).
        descriptors: Open file descriptors.
        threads: Their threads.
    """

    processes: int
    megabytes: float
    descriptors: int
    threads: int


class Watch(FederationCallback):
    """Measures the server and its children at the end of some rounds.

    Attributes:
        taken: By round and group.
        failed: Fits that failed so far.
    """

    affects = "nothing"
    reads_updates = False

    def __init__(self, rounds: Collection[int]) -> None:
        self.rounds = set(rounds)
        self.taken: dict[int, dict[str, Taken]] = {}
        self.failed = 0

    def on_round_recorded(self, run: Any, round: int, named: dict[str, float]) -> None:
        self.failed += int(named["train/failed"])
        if round in self.rounds:
            server = psutil.Process()
            # A worker that has just been replaced may still be ending.
            children = [c for c in server.children(recursive=True) if c.is_running()]
            self.taken[round] = {"server": _taken([server]), "children": _taken(children)}


def _taken(processes: list[psutil.Process]) -> Taken:
    return Taken(
        len(processes),
        sum(process.memory_full_info().uss for process in processes) / 1e6,
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
    )


def soaking_run(
    rounds: int, folder: Path, watch: Watch, timeout: float = 4.0, **faults: float
) -> FederatedTrainer:
    """Fit ten clients of twenty samples, which fail with these probabilities, on two workers."""
    made = FederatedTrainer(
        rounds=rounds,
        schedule=Faults(Synchronous(), **faults),
        engine=Processes(workers=2, timeout=timeout),
        evaluate_every=100,
        callbacks=[watch],
        run_dir=str(folder),
        seed=1,
        accelerator="cpu",
        enable_progress_bar=False,
    )
    made.fit(
        Classifier(MLP(hidden=(16,)), private=["network.3"]),
        Digits(clients=10, train_samples=200, batch_size=10, val_fraction=0.0),
    )
    return made


def soak(rounds: int) -> None:
    """Print what a run of at least 1,000 rounds takes at round 100 and at its last one."""
    rounds = max(rounds, 1000)
    watch = Watch([100, rounds // 2, rounds])
    with tempfile.TemporaryDirectory() as folder:
        soaking_run(rounds, Path(folder), watch, **FIVE_PERCENT)
    print(f"{rounds} rounds of ten clients, {watch.failed} of {10 * rounds} fits failed")
    for round, groups in watch.taken.items():
        for name, taken in groups.items():
            print(
                f"    round {round:<6} {name:<9} {taken.processes} processes  "
                f"{taken.megabytes:7.1f} MB  {taken.descriptors} descriptors  "
                f"{taken.threads} threads"
            )
