"""``python -m tests.benchmarks [CASE ...]``: the speed of flsuite and of a hand-written loop.

Every case alternates its sides round by round in one run. It reports medians, quartiles in
brackets, and the ratio of the medians. Seconds depend on the machine and its load, ratios less so.
"""

import argparse
import gc
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import psutil
import torch
from lightning.pytorch import Callback

from flsuite.aggregators import (
    APFL,
    IFCA,
    MOON,
    Aggregator,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedBuff,
    FedDyn,
    FedExP,
    FedNova,
    FedPer,
    FedProto,
    FedRep,
    FedRoD,
    LGFedAvg,
    PerFedAvg,
    PFedMe,
    QFedAvg,
)
from flsuite.engines import InProcess, Processes
from flsuite.metrics.fisher import fisher_diagonal, measuring
from flsuite.models import (
    ACVAE,
    CNN,
    MLP,
    FusedSpaceFed,
    LeNet5,
    NFClassifier,
    ResNet20,
)
from flsuite.models.backbones import Backbone
from flsuite.schedules import Asynchronous, Bernoulli, Schedule, Stragglers, Synchronous
from tests.benchmarks import sides
from tests.benchmarks.cifar import cifar
from tests.benchmarks.fisher import SAMPLES, PredictivePasses
from tests.benchmarks.loop import FusedLoop, HandWrittenLoop, TwoProcessLoop
from tests.benchmarks.robust import measure_rules
from tests.benchmarks.sides import BATCH, Clock, RandomImages, federation, loop_for, ratio, report
from tests.benchmarks.soak import soak
from tests.benchmarks.stacks import stacks, vectorized

FISHER_SAMPLES = 1920


def beside_loop(
    name: str,
    module: RandomImages,
    backbone: Backbone,
    rounds: int,
    threads: int,
    participation: int | float = 1.0,
) -> None:
    """Compare rounds in this process with the loop's, with the same threads."""
    loop = loop_for(module, backbone)

    def between(cohort: Sequence[int]) -> None:
        torch.set_num_threads(threads)
        loop.round(cohort)

    clock = Clock(between)
    federation(
        module, backbone, rounds, InProcess(threads), clock, schedule=Synchronous(participation)
    )
    cohort = participation if isinstance(participation, int) else module.clients
    ours, theirs = clock.seconds[1:], clock.other[1:]
    extra = statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) / cohort * 1e3
    report(f"{name}, {threads} thread(s)", flsuite=ours, loop=theirs)
    print(f"    flsuite is {ratio(ours, theirs):.3f} x the loop; {extra:+.2f} ms per client")


def workers(
    name: str,
    module: RandomImages,
    backbone: Backbone,
    rounds: int,
    participation: int | float = 1.0,
) -> None:
    """Compare one worker with two, of one thread each, in alternating blocks of rounds."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for number in seconds:
            clock = Clock()
            federation(
                module,
                backbone,
                rounds // 2,
                Processes(number),
                clock,
                schedule=Synchronous(participation),
            )
            seconds[number] += clock.seconds[1:]
    report(name, one=seconds[1], two=seconds[2])
    print(f"    two workers are {ratio(seconds[1], seconds[2]):.2f} x as fast as one")


def beside_processes(
    name: str,
    module: RandomImages,
    backbone: Backbone,
    rounds: int,
    participation: int | float = 1.0,
) -> None:
    """Compare rounds in two workers with those of a hand-written loop in two processes."""
    loop = TwoProcessLoop(loop_for(module, backbone))
    clock = Clock(loop.round)
    federation(module, backbone, rounds, Processes(2), clock, schedule=Synchronous(participation))
    loop.close()
    ours, theirs = clock.seconds[1:], clock.other[1:]
    report(f"{name}, two workers", flsuite=ours, loop=theirs)
    print(f"    flsuite is {ratio(ours, theirs):.3f} x the loop in two processes")


def lenet(rounds: int) -> None:
    module = RandomImages(12000, (1, 28, 28), clients=20)
    for threads in (1, 2):
        beside_loop("LeNet-5, 20 clients x 600", module, LeNet5(), rounds, threads)
    beside_processes("LeNet-5, 20 clients x 600", module, LeNet5(), rounds)
    workers("LeNet-5, 20 clients x 600, workers", module, LeNet5(), rounds)


def resnet(rounds: int) -> None:
    module = RandomImages(2560, (3, 32, 32), clients=10)
    for threads in (1, 2):
        beside_loop("ResNet-20, 10 clients x 256", module, ResNet20(), max(4, rounds // 3), threads)
    beside_processes("ResNet-20, 10 clients x 256", module, ResNet20(), max(4, rounds // 3))


def many(rounds: int) -> None:
    module = RandomImages(60000, (1, 28, 28), clients=1000)
    for threads in (1, 2):
        beside_loop(
            "LeNet-5, 1000 clients x 60, 100 a round", module, LeNet5(), rounds, threads, 100
        )
    name = "LeNet-5, 1000 clients x 60, 100 a round"
    beside_processes(name, module, LeNet5(), rounds, 100)
    workers(f"{name}, workers", module, LeNet5(), rounds, 100)


def precision(rounds: int) -> None:
    """Compare bf16-mixed with float32, in alternating blocks of rounds."""
    module = RandomImages(2560, (3, 32, 32), clients=10)
    seconds: dict[str, list[float]] = {"32-true": [], "bf16-mixed": []}
    for _ in range(3):
        for kind in seconds:
            clock = Clock()
            federation(module, ResNet20(), max(3, rounds // 5), InProcess(2), clock, precision=kind)
            seconds[kind] += clock.seconds[1:]
    report(
        f"ResNet-20, 10 clients x 256, two threads, AMX: {has_amx()}",
        float32=seconds["32-true"],
        bf16=seconds["bf16-mixed"],
    )
    times = ratio(seconds["32-true"], seconds["bf16-mixed"])
    print(f"    bf16-mixed is {times:.2f} x as fast as float32")


def registered(rounds: int) -> None:
    """Compare the same cohorts out of few and out of very many clients."""
    by_registered(
        "10 clients per round", (10, 10_000), 60, rounds, schedule=lambda: Synchronous(10)
    )
    # Two classes, because partition.csv has a row per client, split and class.
    by_registered(
        "100 clients per round",
        (1_000, 1_000_000),
        5,
        rounds,
        classes=2,
        schedule=lambda: Synchronous(100),
    )


def in_flight(rounds: int) -> None:
    """Compare 100 clients in flight out of 1,000 and out of 100,000, with a buffer of ten."""
    by_registered(
        "100 clients in flight, 10 per aggregation",
        (1_000, 100_000),
        6,
        10 * rounds,
        schedule=lambda: Asynchronous(100, 10, speeds=Stragglers(), availability=Bernoulli()),
        aggregator=FedBuff(),
    )


def by_registered(
    name: str,
    registered: tuple[int, int],
    samples: int,
    rounds: int,
    schedule: Callable[[], Schedule],
    classes: int = 10,
    **kwargs: Any,
) -> None:
    """Compare rounds and memory of few and of many registered clients, in alternating blocks."""
    process, (few, many) = psutil.Process(), registered
    seconds: dict[int, list[float]] = {few: [], many: []}
    megabytes: dict[int, float] = {}
    for clients in (few, many, few, many):
        # The same tensors on both sides: the data of the others stays unused.
        module = RandomImages(samples * many, (1, 8, 8), classes, clients=many)
        began, before = time.perf_counter(), process.memory_info().rss
        module.setup()
        setup, data = time.perf_counter() - began, module.federated
        of_samples = sum(part.nbytes for part in (data.train.x, data.train.y))
        per_client = (process.memory_info().rss - before - of_samples) / many
        for split in filter(None, (data.train, data.val, data.test)):
            split.rows.offsets = split.rows.offsets[: clients + 1]
        clock = Clock()
        made = federation(
            module, MLP((32,)), rounds, InProcess(), clock, schedule=schedule(), **kwargs
        )
        seconds[clients] += clock.seconds[1:]
        megabytes[clients] = process.memory_info().rss / 1e6
        del made, module, data, split

    report(f"{name}, registered", few=seconds[few], many=seconds[many])
    print(
        f"    {ratio(seconds[many], seconds[few]):.2f} x the time with {many:,} clients instead of "
        f"{few:,}; memory of the process {megabytes[many] - megabytes[few]:+.0f} MB\n"
        f"    splitting the data over {many:,} clients takes {setup:.1f} s, and {per_client:.0f} "
        f"bytes per client beside its {samples} samples"
    )


def acvae(rounds: int) -> None:
    """Compare a model with a private encoder, Adam and clipping in this process with the loop."""

    def model() -> ACVAE:
        return ACVAE(cls_weight=10.0, optimizer=partial(torch.optim.AdamW, lr=1e-3))

    module = RandomImages(6000, (1, 28, 28), clients=10, standardize=False)
    module.setup()
    data, theirs = module.federated, model()
    theirs.ensure_built(data.spec)
    loop = HandWrittenLoop(
        theirs,
        data.train.x,
        data.train.y,
        [data.train_rows(c) for c in range(10)],
        data.scaling.scale,
        data.scaling.shift,
        BATCH,
        private="encoder.",
        loss=lambda x, y: theirs.training_step((x, y), 0),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        clip=0.5,
    )
    for threads in (1, 2):

        def between(cohort: Sequence[int], threads: int = threads) -> None:
            torch.set_num_threads(threads)
            loop.round(cohort)

        clock = Clock(between)
        federation(module, model(), rounds, InProcess(threads), clock, gradient_clip_val=0.5)
        report(
            f"ACVAE, 10 clients x 600, {threads} thread(s)",
            flsuite=clock.seconds[1:],
            loop=clock.other[1:],
        )
        print(f"    flsuite is {ratio(clock.seconds[1:], clock.other[1:]):.3f} x the loop")


def fused(rounds: int) -> None:
    """Compare two workers and bf16 with the public code's way and two threads.

    The measure is samples of the joint epochs per second.
    """
    clients, samples, epochs = 10, 1024, 3
    module = RandomImages(samples, (3, 32, 32), clients=clients, standardize=False)
    module.batch_size = 256
    module.setup()
    data = module.federated

    def model(**kwargs: Any) -> FusedSpaceFed:
        return FusedSpaceFed(autoencoder="unet", task_aware=False, **kwargs)

    theirs = model()
    theirs.ensure_built(data.spec)
    loop = FusedLoop(theirs.encoder, theirs.decoder, theirs.classifier)
    images = data.scaling(data.train.x).contiguous()

    def between(cohort: Sequence[int]) -> None:
        torch.set_num_threads(2)
        for client in cohort:
            rows = data.train_rows(client)
            loop.fit(images[rows], data.train.y[rows], epochs, module.batch_size)

    clock = Clock(between)
    federation(
        module,
        model(),
        max(4, rounds // 3),
        Processes(2),
        clock,
        precision="bf16-mixed",
        max_epochs=epochs,
    )
    report(
        "FusedSpaceFed, U-Net, 10 clients x 102, 1 + 3 epochs",
        flsuite=clock.seconds[1:],
        loop=clock.other[1:],
    )
    ours, loops = (
        samples * epochs / statistics.median(side[1:]) for side in (clock.seconds, clock.other)
    )
    print(f"    {ours:.0f} samples/s of joint epochs, the loop {loops:.0f}: {ours / loops:.2f} x")


class FisherPasses(Callback):
    """Measures a fit's one epoch, a pass of either estimator, and a plain loop over samples."""

    seconds: ClassVar[dict[str, list[float]]] = {}  # of all fits' copies

    def __init__(self, task: int) -> None:
        self.task = task

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.begin_task(self.task, range(10), range(10) if self.task else ())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds["epoch"].append(time.perf_counter() - self.began)
        names = [f"flow.{name}" for name, _ in pl_module.flow.named_parameters()]
        for estimator in ("exact", "batch"):
            began = time.perf_counter()
            with measuring(pl_module):
                fisher_diagonal(pl_module, names, trainer.train_dataloader, estimator)
            self.seconds[estimator].append(time.perf_counter() - began)
        with measuring(pl_module):
            self.seconds["loop"].append(
                self._loop(pl_module, names, next(iter(trainer.train_dataloader)))
            )

    @staticmethod
    def _loop(model: Any, names: Sequence[str], batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Return the seconds of an epoch's squared gradients, estimated from those of one batch."""
        parameters = [p for name, p in model.named_parameters() if name in names]
        totals = [torch.zeros_like(p) for p in parameters]
        began = time.perf_counter()
        for x, y in zip(*batch, strict=True):
            gradients = torch.autograd.grad(
                model.log_likelihood((x[None], y[None])).sum(), parameters
            )
            for total, gradient in zip(totals, gradients, strict=True):
                total.addcmul_(gradient, gradient)
        return (time.perf_counter() - began) / len(batch[1]) * FISHER_SAMPLES


def flow_fisher(rounds: int) -> None:
    """Measure the Fisher of NFClassifier's flow, in local epochs."""
    module = RandomImages(FISHER_SAMPLES, (1, 28, 28), clients=1)
    for task in (0, 1):
        seconds: dict[str, list[float]] = {"epoch": [], "exact": [], "batch": [], "loop": []}
        FisherPasses.seconds = seconds
        federation(
            module,
            NFClassifier(),
            rounds,
            InProcess(2),
            Clock(),
            user_callbacks=[FisherPasses(task)],
        )
        title = f"NFClassifier, 1 client x {FISHER_SAMPLES}, 2 threads, task {task}"
        report(title, **{name: times[1:] for name, times in seconds.items()})
        for estimator in ("exact", "batch"):
            share = ratio(seconds[estimator][1:], seconds["epoch"][1:])
            print(f"    {estimator} is {share:.2f} of an epoch")
        times = ratio(seconds["loop"][1:], seconds["exact"][1:])
        print(f"    exact is {times:.1f} x as fast as the loop over samples")


def predictive_fisher(rounds: int) -> None:
    """Measure the diagonal and K-FAC Fisher of LeNet-5's prediction, in local epochs."""
    module = RandomImages(SAMPLES, (1, 28, 28), clients=1)
    for threads in (1, 2):
        PredictivePasses.seconds = seconds = {}
        federation(
            module,
            LeNet5(bias=False),
            max(3, rounds // 3),
            InProcess(threads),
            Clock(),
            user_callbacks=[PredictivePasses()],
        )
        title = f"LeNet-5 without bias, 1 client x {SAMPLES}, {threads} thread(s)"
        report(title, **{name: times[1:] for name, times in seconds.items()})
        for name, times in seconds.items():
            if name != "epoch":
                print(f"    {name} is {ratio(times[1:], seconds['epoch'][1:]):.2f} epochs")


def fisher(rounds: int) -> None:
    predictive_fisher(rounds)
    flow_fisher(rounds)


def robust(rounds: int) -> None:
    """Measure the robust rules: 100 clients of a million parameters."""
    measure_rules(max(3, rounds // 3))


PERSONAL: tuple[type[Aggregator], ...] = (
    FedAvg, FedPer, LGFedAvg, FedBABU, FedRoD, FedALA, FedProto, Ditto, APFL, PFedMe, PerFedAvg,
    FedDyn, FedNova, MOON, FedExP, QFedAvg, IFCA, FedRep,
)  # fmt: skip


def personal(rounds: int) -> None:
    """Compare the personal and corrected methods with FedAvg, in alternating blocks of rounds."""
    module = RandomImages(3200, (1, 28, 28), clients=16)
    module.batch_size = 20
    seconds: dict[str, list[float]] = {method.__name__: [] for method in PERSONAL}
    for _ in range(3):
        for method in PERSONAL:
            clock = Clock()
            # One of FedRep's two epochs trains the head alone.
            epochs = 2 if method is FedRep else 1
            federation(
                module, CNN(channels=(8, 16), hidden=(64,), padding=False), max(4, rounds // 3),
                InProcess(), clock, aggregator=method(), max_epochs=epochs,
            )  # fmt: skip
            seconds[method.__name__] += clock.seconds[1:]
    report("CNN, 16 clients x 200, batches of 20", **seconds)
    for name, times in seconds.items():
        print(f"    {name} takes {ratio(times, seconds['FedAvg']):.2f} x as long as FedAvg")


def has_amx() -> bool:
    return os.path.exists("/proc/cpuinfo") and "amx_bf16" in open("/proc/cpuinfo").read()


CASES = {
    "lenet": lenet,
    "resnet": resnet,
    "many": many,
    "cifar": cifar,
    "precision": precision,
    "registered": registered,
    "in_flight": in_flight,
    "acvae": acvae,
    "fused": fused,
    "fisher": fisher,
    "robust": robust,
    "personal": personal,
    "vectorized": vectorized,
    "stacks": stacks,
}
LONG = {"soak": soak}  # only by name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"of {', '.join(CASES)}; default: all; and {', '.join(LONG)}, which is no measure of "
        "speed",
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds per side, more for the small cases"
    )
    parser.add_argument("--device", default="cpu", help="where both sides train: cpu or cuda")
    options = parser.parse_args()
    sides.device = options.device
    cases = {**CASES, **LONG}
    if unknown := set(options.cases) - set(cases):
        sys.exit(f"unknown case {', '.join(unknown)}; there are {', '.join(cases)}")
    warnings.filterwarnings("ignore")
    logging.getLogger("flsuite").setLevel(logging.ERROR)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}")
    gc.freeze()  # as the command flsuite does: a full collection would look at all that is imported
    for name in options.cases or CASES:
        cases[name](options.rounds)


if __name__ == "__main__":
    main()
