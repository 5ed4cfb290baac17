"""What the benchmarks compare: federations on random data, and their clocks."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback

from flsuite.aggregators import FedAvg
from flsuite.callbacks import FederationCallback
from flsuite.callbacks.base import Affects
from flsuite.data import IID, DataSpec, DataSplit, FederatedDataModule, PublishedSplits
from flsuite.federation import Engine
from flsuite.models import Classifier, ClientModel
from flsuite.models.backbones import Backbone
from flsuite.trainer import FederatedTrainer
from tests.benchmarks.loop import HandWrittenLoop

BATCH = 64
device = "cpu"  # where both sides train; --device sets it


class RandomImages(FederatedDataModule):
    """Random bytes of the right shape; speed does not depend on what they show."""

    def __init__(
        self, samples: int, shape: tuple[int, int, int], classes: int = 10, **kwargs: Any
    ) -> None:
        super().__init__(partition=IID(), batch_size=BATCH, val_fraction=0.0, **kwargs)
        self.samples, self.shape, self.classes = samples, shape, classes

    def load(self) -> PublishedSplits:
        channels, height, width = self.shape
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(
            0, 256, (self.samples, height, width, channels), dtype=torch.uint8, generator=generator
        )
        y = torch.randint(0, self.classes, (self.samples,), generator=generator)
        spec = DataSpec(self.shape, self.classes)
        return PublishedSplits(spec, DataSplit(x, y), DataSplit(x[:64], y[:64]))


class Clock(FederationCallback):
    """Measures each whole round: training, aggregation, table and checkpoint.

    Args:
        between: Called before each round with its cohort, and measured apart.

    Attributes:
        seconds: Seconds of each round.
        other: Seconds of each call of ``between``.
    """

    affects: ClassVar[Affects] = "nothing"

    def __init__(self, between: Callable[[Sequence[int]], None] | None = None) -> None:
        self.between = between
        self.seconds: list[float] = []
        self.other: list[float] = []
        self._mark: float | None = None

    def on_round_start(self, run: Any, round: int, cohort: Sequence[int]) -> None:
        self._stop()
        if self.between is not None:
            started = time.perf_counter()
            self.between(cohort)
            self.other.append(time.perf_counter() - started)
        self._mark = time.perf_counter()

    def on_federation_end(self, run: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        if self._mark is not None:
            self.seconds.append(time.perf_counter() - self._mark)


def federation(
    module: FederatedDataModule,
    net: Backbone | ClientModel,
    rounds: int,
    engine: Engine,
    between: Callable[[Sequence[int]], None] | None = None,
    user_callbacks: Sequence[Callback] = (),
    lr: float = 0.05,
    **kwargs: Any,
) -> Clock:
    """Fit a federation, and return the seconds of its rounds after the first.

    It is scored only at its end, because the loop is not scored either.
    """
    clock = Clock(between)
    trainer = FederatedTrainer(
        rounds=rounds,
        engine=engine,
        aggregator=kwargs.pop("aggregator", None) or FedAvg(),
        callbacks=[clock, *user_callbacks],
        evaluate_every=10**9,
        run_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
        accelerator=kwargs.pop("accelerator", device),
        seed=0,
        **kwargs,
    )
    model = (
        net
        if isinstance(net, ClientModel)
        else Classifier(net, lambda p: torch.optim.SGD(p, lr=lr))
    )
    trainer.fit(model, module)
    del clock.seconds[:1], clock.other[:1]
    return clock


def loop_for(module: RandomImages, backbone: Backbone) -> HandWrittenLoop:
    module.setup()
    data = module.federated
    rows = [data.train_rows(c) for c in range(data.clients)]
    network = backbone.build(data.spec.shape, 10).to(device)
    tensors = (data.train.x, data.train.y, data.scaling.scale, data.scaling.shift)
    x, y, scale, shift = (tensor.to(device) for tensor in tensors)
    return HandWrittenLoop(network, x, y, rows, scale, shift, BATCH)


def alternating(sides: Mapping[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of each side, measured in three blocks by turns."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(3):
        for side, measure in sides.items():
            seconds[side] += measure()
    return seconds


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(a) / statistics.median(b)


def report(title: str, **sides: Sequence[float]) -> None:
    print(title)
    for side, seconds in sides.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        spread = f"[{low:.4f}, {high:.4f}]"
        print(
            f"    {side:<12} {middle:.4f} s per round  {spread}  {len(seconds)} rounds", flush=True
        )
