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
from typing import Any

import psutil
import torch

from flsuite import aggregators as methods
from flsuite.federation import (
    Asynchronous,
    Bernoulli,
    InProcess,
    Processes,
    Schedule,
    Stragglers,
    Synchronous,
)
from flsuite.models import ACVAE, CNN, MLP, FusedSpaceFed, LeNet5, ResNet20
from flsuite.models.backbones import Backbone
from tests.benchmarks import sides
from tests.benchmarks.cifar import chart, cifar
from tests.benchmarks.fisher import fisher
from tests.benchmarks.loop import FusedLoop, HandWrittenLoop, TwoProcessLoop
from tests.benchmarks.robust import robust
from tests.benchmarks.sides import (
    BATCH,
    Clock,
    RandomImages,
    alternating,
    federation,
    loop_for,
    ratio,
    report,
)
from tests.benchmarks.soak import soak
from tests.benchmarks.stacks import stacks, vectorized


def with_threads(
    threads: int, round: Callable[[Sequence[int]], None]
) -> Callable[[Sequence[int]], None]:
    """Return rounds of a loop with so many threads."""

    def between(cohort: Sequence[int]) -> None:
        torch.set_num_threads(threads)
        round(cohort)

    return between


def compare(title: str, clock: Clock) -> None:
    """Print the seconds of both sides."""
    report(title, flsuite=clock.seconds, loop=clock.other)
    print(f"    flsuite is {ratio(clock.seconds, clock.other):.3f} x the loop")


def beside_loop(
    name: str, module: RandomImages, net: Backbone, rounds: int, part: int | float = 1.0
) -> None:
    """Compare rounds in this process, and in two workers, with as many threads of the loop."""
    for threads in (1, 2):
        between = with_threads(threads, loop_for(module, net).round)
        schedule = Synchronous(part)
        clock = federation(module, net, rounds, InProcess(threads), between, schedule=schedule)
        compare(f"{name}, {threads} thread(s)", clock)
        cohort = part if isinstance(part, int) else module.clients
        pairs = zip(clock.seconds, clock.other, strict=True)
        extra = statistics.median(a - b for a, b in pairs) / cohort * 1e3
        print(f"    {extra:+.2f} ms per client")
    loop = TwoProcessLoop(loop_for(module, net))
    clock = federation(module, net, rounds, Processes(2), loop.round, schedule=Synchronous(part))
    loop.close()
    compare(f"{name}, two workers", clock)


def workers(
    name: str, module: RandomImages, net: Backbone, rounds: int, part: int | float = 1.0
) -> None:
    """Compare one worker with two, of one thread each, in alternating blocks of rounds."""

    def seconds(number: int) -> list[float]:
        schedule = Synchronous(part)
        return federation(module, net, rounds // 2, Processes(number), schedule=schedule).seconds

    both = alternating({"one": partial(seconds, 1), "two": partial(seconds, 2)})
    report(f"{name}, workers", **both)
    print(f"    two workers are {ratio(both['one'], both['two']):.2f} x as fast as one")


def lenet(rounds: int) -> None:
    name, module = "LeNet-5, 20 clients x 600", RandomImages(12000, (1, 28, 28), clients=20)
    beside_loop(name, module, LeNet5(), rounds)
    workers(name, module, LeNet5(), rounds)


def resnet(rounds: int) -> None:
    module = RandomImages(2560, (3, 32, 32), clients=10)
    beside_loop("ResNet-20, 10 clients x 256", module, ResNet20(), max(4, rounds // 3))


def many(rounds: int) -> None:
    name = "LeNet-5, 1000 clients x 60, 100 a round"
    module = RandomImages(60000, (1, 28, 28), clients=1000)
    beside_loop(name, module, LeNet5(), rounds, 100)
    workers(name, module, LeNet5(), rounds, 100)


def precision(rounds: int) -> None:
    """Compare bf16-mixed with float32, in alternating blocks of rounds."""
    module, rounds = RandomImages(2560, (3, 32, 32), clients=10), max(3, rounds // 5)

    def seconds(kind: Any) -> list[float]:
        return federation(module, ResNet20(), rounds, InProcess(2), precision=kind).seconds

    both = alternating(
        {"float32": partial(seconds, "32-true"), "bf16": partial(seconds, "bf16-mixed")}
    )
    report(f"ResNet-20, 10 clients x 256, two threads, AMX: {has_amx()}", **both)
    times = ratio(both["float32"], both["bf16"])
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
        aggregator=methods.FedBuff(),
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
        kwargs["schedule"] = schedule()
        seconds[clients] += federation(module, MLP((32,)), rounds, InProcess(), **kwargs).seconds
        megabytes[clients] = process.memory_info().rss / 1e6
        del module, data, split

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
        engine, between = InProcess(threads), with_threads(threads, loop.round)
        clock = federation(module, model(), rounds, engine, between, gradient_clip_val=0.5)
        compare(f"ACVAE, 10 clients x 600, {threads} thread(s)", clock)


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

    def round(cohort: Sequence[int]) -> None:
        for client in cohort:
            rows = data.train_rows(client)
            loop.fit(images[rows], data.train.y[rows], epochs, module.batch_size)

    clock = federation(
        module, model(), max(4, rounds // 3), Processes(2), with_threads(2, round),
        precision="bf16-mixed", max_epochs=epochs,
    )  # fmt: skip
    compare("FusedSpaceFed, U-Net, 10 clients x 102, 1 + 3 epochs", clock)
    both = (clock.seconds, clock.other)
    ours, loops = (samples * epochs / statistics.median(side) for side in both)
    print(f"    {ours:.0f} samples/s of joint epochs, the loop {loops:.0f}: {ours / loops:.2f} x")


PERSONAL = (
    "FedAvg", "FedPer", "LGFedAvg", "FedBABU", "FedRoD", "FedALA", "FedProto", "Ditto", "APFL",
    "PFedMe", "PerFedAvg", "FedDyn", "FedNova", "MOON", "FedExP", "QFedAvg", "IFCA", "FedRep",
)  # fmt: skip


def personal(rounds: int) -> None:
    """Compare the personal and corrected methods with FedAvg, in alternating blocks of rounds."""
    module = RandomImages(3200, (1, 28, 28), clients=16)
    module.batch_size = 20

    def seconds(method: str) -> list[float]:
        net = CNN(channels=(8, 16), hidden=(64,), padding=False)
        # One of FedRep's two epochs trains the head alone.
        return federation(
            module, net, max(4, rounds // 3), InProcess(),
            aggregator=getattr(methods, method)(), max_epochs=1 + (method == "FedRep"),
        ).seconds  # fmt: skip

    found = alternating({method: partial(seconds, method) for method in PERSONAL})
    report("CNN, 16 clients x 200, batches of 20", **found)
    for name, times in found.items():
        print(f"    {name} takes {ratio(times, found['FedAvg']):.2f} x as long as FedAvg")


def has_amx() -> bool:
    return os.path.exists("/proc/cpuinfo") and "amx_bf16" in open("/proc/cpuinfo").read()


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case
    for case in (
        lenet, resnet, many, cifar, precision, registered, in_flight, acvae, fused, fisher,
        robust, personal, vectorized, stacks,
    )
}  # fmt: skip
LONG = {"soak": soak, "chart": chart}  # only by name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"of {', '.join(CASES)}; default: all; and {', '.join(LONG)}, which measure no speed",
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
