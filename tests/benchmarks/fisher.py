"""The predictive Fisher of LeNet-5 at the end of a fit, in local epochs."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback

from flsuite.metrics.fisher import gram_matrices, kfac_factors, measuring, predictive_diagonal
from flsuite.models.layers import read_layers

SAMPLES = 12_000


class PredictivePasses(Callback):
    """Measures a fit's one epoch, and passes for the diagonal and for K-FAC.

    It also measures the pass for Gram matrices, which has no gradients.
    """

    seconds: ClassVar[dict[str, list[float]]] = {}  # of all fits' copies

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._add("epoch", time.perf_counter() - self.began)
        names = [name for name, _ in pl_module.named_parameters()]
        layers, _ = read_layers(pl_module, names)
        batches = trainer.train_dataloader.plain_batches
        task = trainer.train_dataloader.data.spec.task

        def kfac(samples: int | None, expectation: Any) -> Callable[[], Any]:
            return lambda: kfac_factors(pl_module, layers, batches(samples), task, expectation)

        passes = {
            "diagonal_all": lambda: predictive_diagonal(pl_module, names, batches(None), task),
            "kfac_all": kfac(None, "exact"),
            "kfac_2000": kfac(2000, "exact"),
            "kfac_sampled": kfac(None, "sampled"),
            "gram_all": lambda: gram_matrices(pl_module, layers, batches(None)),
        }
        for name, measure in passes.items():
            began = time.perf_counter()
            with measuring(pl_module):
                measure()
            self._add(name, time.perf_counter() - began)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)
