"""The CIFAR-10 setting of pfl-research's benchmarks, with random bytes of CIFAR-10's shape.

1,000 clients have 50 images each. A round trains 50 of them, for 5 steps of 10 images each, with
SGD at rate 0.1. Their whole run has 1,500 rounds, with an evaluation every 10 rounds, which
``rounds`` of other cases leave out too. It is meant for a GPU. On a GPU, worker processes share
the card.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.federation import Engine, InProcess, Processes, Synchronous, Vectorized
from flsuite.models.backbones import Backbone
from tests.benchmarks import sides
from tests.benchmarks.gpu import Gpu
from tests.benchmarks.loop import HandWrittenLoop
from tests.benchmarks.sides import RandomImages, federation, loop_for, ratio, report

__all__ = ["StackedLoop", "TwoConvs", "chart", "cifar"]

COHORT, BATCH, RATE = 50, 10, 0.1
WORKERS, STACKS = (1, 2, 3, 4, 5), (10, 25, 50)


class TwoConvs(Backbone):
    """Two 3x3 convolutions, one max-pool and one hidden layer: 1.6 million parameters."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, height, width = shape
        network = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, outputs),
        )
        for module in network:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        return network


class StackedLoop:
    """The hand-written loop for a stack of clients of one size: ``vmap(grad)`` and an update.

    Args:
        loop: Gives the data, the network and the global weights.
        clients: Clients per stack.
        is_recorded: Whether a step is recorded once as a CUDA graph, and replayed.
    """

    def __init__(self, loop: HandWrittenLoop, clients: int, is_recorded: bool = False) -> None:
        self.loop, self.clients, self.is_recorded = loop, clients, is_recorded
        self.weights = {k: torch.stack([v] * clients) for k, v in loop.state.items()}
        self.gradient = torch.vmap(torch.func.grad(self._loss), randomness="different")
        rows = loop.clients[0][: loop.batch].repeat(clients, 1)
        self.rows = rows.to(loop.x.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def round(self, cohort: Sequence[int]) -> None:
        total = {k: torch.zeros_like(v) for k, v in self.loop.state.items()}
        for start in range(0, len(cohort), self.clients):
            for name, value in self.weights.items():
                value.copy_(self.loop.state[name])
            own = [self.loop.clients[c] for c in cohort[start : start + self.clients]]
            order = torch.stack([rows[torch.randperm(len(rows))] for rows in own])
            for rows in order.split(self.loop.batch, dim=1):
                self.rows.copy_(rows)
                self._replay() if self.is_recorded else self._step()
            for name, value in self.weights.items():
                total[name] += value.sum(0) / len(cohort)
        self.loop.state = total

    def _step(self) -> None:
        loop, index = self.loop, self.rows.flatten()
        x = loop.x[index].float().mul_(loop.scale).add_(loop.shift).permute(0, 3, 1, 2)
        batch = x.unflatten(0, self.rows.shape), loop.y[self.rows]
        for name, gradient in self.gradient(self.weights, *batch).items():
            self.weights[name].sub_(gradient, alpha=RATE)

    def _loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(self.loop.network, weights, (x,)), y)

    def _replay(self) -> None:
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries choose their kernels before the recording
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        self.graph.replay()


def cifar(rounds: int) -> None:
    """Compare loops, workers and stacks of clients."""
    where = torch.cuda.get_device_name() if sides.device == "cuda" else "CPU"
    print(f"two convolutions, 1000 clients x 50, {COHORT} a round, 5 steps each, {where}")
    module = RandomImages(50_000, (3, 32, 32), clients=1000)
    module.batch_size = BATCH
    measured: dict[str, list[float]] = {}

    def show(side: str, seconds: list[float], gpu: Gpu) -> None:
        measured[side] = seconds
        report("", **{side: seconds})
        times = ratio(seconds, measured["loop"])
        print(f"    {side} takes {times:.2f} x the loop{gpu.summary()}", flush=True)

    loop = loop_for(module, TwoConvs())
    loop.batch, loop.optimizer = BATCH, lambda p: torch.optim.SGD(p, lr=RATE)
    for side, run in _loops(loop).items():
        run(range(COHORT))  # the first round starts the libraries
        with Gpu() as gpu:
            seconds = [_timed(run) for _ in range(rounds)]
        show(side, seconds, gpu)
    for side, engine in _engines().items():
        with Gpu() as gpu:
            schedule = Synchronous(COHORT)
            clock = federation(module, TwoConvs(), rounds + 1, engine, lr=RATE, schedule=schedule)
        show(side, clock.seconds, gpu)


def _loops(loop: HandWrittenLoop) -> dict[str, Callable[[Sequence[int]], None]]:
    found = {"loop": loop.round}
    for clients in STACKS:
        found[f"loop_of_stacks_{clients}"] = StackedLoop(loop, clients).round
        if sides.device == "cuda":
            found[f"recorded_{clients}"] = StackedLoop(loop, clients, is_recorded=True).round
    return found


def _engines() -> dict[str, Engine]:
    return {
        "in_process": InProcess(),
        **{f"processes_{n}": Processes(n) for n in WORKERS},
        **{f"vectorized_{n}": Vectorized(clients=n) for n in STACKS},
        "vectorized_50_recorded": Vectorized(clients=50, graph=True),
    }


def chart(rounds: int) -> None:
    """Draw ``clients.png``: clients per second of each system, from the seconds of ``gpu.csv``."""
    import pandas as pd
    from matplotlib import pyplot as plt

    folder = Path(__file__).parents[2] / "configs" / "benchmarks"
    table = pd.read_csv(folder / "gpu.csv").sort_values("seconds", ascending=False)
    is_limit = table["system"].str.startswith("limit")
    limit, shown = COHORT / table[is_limit]["seconds"].item(), table[~is_limit]
    clients, names = COHORT / shown["seconds"], shown["system"].tolist()
    is_elsewhere = shown["gpu"] != shown["gpu"].mode().item()
    names = [
        f"{name} (on an {gpu})" if other else name
        for name, gpu, other in zip(names, shown["gpu"], is_elsewhere, strict=True)
    ]
    colors = ["C0" if name.startswith("flsuite") else "0.7" for name in names]
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    axis.bar_label(axis.barh(names, clients, color=colors), fmt="%.0f", padding=3)
    axis.axvline(limit, color="C3", linestyle="--")
    axis.text(limit, -0.3, "limit: a recorded \nstack of 50 ", color="C3", ha="right", va="bottom")
    axis.set(xlabel="clients trained per second", xlim=(0, 1.05 * limit))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "clients.png", dpi=120)
    plt.close(figure)


def _timed(run: Callable[[Sequence[int]], None]) -> float:
    started = time.perf_counter()
    run(torch.randperm(1000)[:COHORT].tolist())
    if sides.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
