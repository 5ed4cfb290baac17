"""Fisher information at the end of a fit, in local epochs."""

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback

from flsuite.federation import InProcess
from flsuite.metrics.fisher import (
    estimates as measuring,
    fisher_diagonal,
    gram_matrices,
    kfac_factors,
    predictive_diagonal,
)
from flsuite.models import LeNet5, NFClassifier
from flsuite.models.layers import read_layers
from tests.benchmarks.sides import BATCH, RandomImages, federation, ratio, report

SAMPLES, FLOW_SAMPLES = 12_000, 1920


class Passes(Callback):
    """Measures a fit's one epoch, and passes over the trained model."""

    seconds: ClassVar[dict[str, list[float]]] = {}  # of all fits' copies

    @abstractmethod
    def passes(self, loader: Any, module: Any) -> Mapping[str, Callable[[], Any]]:
        """Return what is measured, by its name."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._add("epoch")
        for name, measure in self.passes(trainer.train_dataloader, pl_module).items():
            self.began = time.perf_counter()
            with measuring(pl_module):
                measure()
            self._add(name)

    def _add(self, name: str) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - self.began)


class PredictivePasses(Passes):
    """Passes for the diagonal, for K-FAC, and for Gram matrices, which have no gradients."""

    def passes(self, loader: Any, module: Any) -> Mapping[str, Callable[[], Any]]:
        names = [name for name, _ in module.named_parameters()]
        layers, _ = read_layers(module, names)
        batches, task = loader.plain_batches, loader.data.spec.task

        def kfac(samples: int | None, expectation: Any) -> Callable[[], Any]:
            return lambda: kfac_factors(module, layers, batches(samples), task, expectation)

        return {
            "diagonal_all": lambda: predictive_diagonal(module, names, batches(None), task),
            "kfac_all": kfac(None, "exact"),
            "kfac_2000": kfac(2000, "exact"),
            "kfac_sampled": kfac(None, "sampled"),
            "gram_all": lambda: gram_matrices(module, layers, batches(None)),
        }


class FlowPasses(Passes):
    """Passes of either estimator of a flow, and a plain loop over the samples of one batch."""

    def __init__(self, task: int) -> None:
        self.task = task

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.begin_task(self.task, range(10), range(10) if self.task else ())

    def passes(self, loader: Any, module: Any) -> Mapping[str, Callable[[], Any]]:
        names = [f"flow.{name}" for name, _ in module.flow.named_parameters()]
        return {
            "exact": lambda: fisher_diagonal(module, names, loader, "exact"),
            "batch": lambda: fisher_diagonal(module, names, loader, "batch"),
            "loop_of_64": lambda: _loop(module, names, next(iter(loader))),
        }


def _loop(model: Any, names: Sequence[str], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Add up the squared gradients of a batch, sample by sample."""
    parameters = [p for name, p in model.named_parameters() if name in names]
    totals = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(*batch, strict=True):
        gradients = torch.autograd.grad(model.log_likelihood((x[None], y[None])).sum(), parameters)
        for total, gradient in zip(totals, gradients, strict=True):
            total.addcmul_(gradient, gradient)


def fisher(rounds: int) -> None:
    """Measure the Fisher of LeNet-5's prediction, and of NFClassifier's flow."""
    for threads in (1, 2):
        title = f"LeNet-5 without bias, 1 client x {SAMPLES}, {threads} thread(s)"
        model, passes = LeNet5(bias=False), PredictivePasses()
        _measure(title, model, SAMPLES, max(3, rounds // 3), threads, passes)
    for task in (0, 1):
        title = f"NFClassifier, 1 client x {FLOW_SAMPLES}, 2 threads, task {task}"
        seconds = _measure(title, NFClassifier(), FLOW_SAMPLES, rounds, 2, FlowPasses(task))
        loop = statistics.median(seconds["loop_of_64"]) * FLOW_SAMPLES / BATCH
        times = loop / statistics.median(seconds["exact"])
        print(f"    exact is {times:.1f} x as fast as the loop over samples")


def _measure(
    title: str, net: Any, samples: int, rounds: int, threads: int, passes: Passes
) -> dict[str, list[float]]:
    Passes.seconds.clear()
    module = RandomImages(samples, (1, 28, 28), clients=1)
    federation(module, net, rounds, InProcess(threads), user_callbacks=[passes])
    seconds = {name: times[1:] for name, times in Passes.seconds.items()}
    report(title, **seconds)
    for name, times in seconds.items():
        print(f"    {name} is {ratio(times, seconds['epoch']):.2f} epochs")
    return seconds
