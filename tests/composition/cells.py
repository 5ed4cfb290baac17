"""The choices of a federation's parts, and a tiny federation of any of their combinations."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import (
    CMGA,
    DENSE,
    PFNM,
    AdaptiveAdagrad,
    AdaptiveAdam,
    AdaptiveYogi,
    Aggregator,
    Bucketing,
    CenteredClipping,
    ClipUpdates,
    ControlVariates,
    CoordinateMedian,
    FedFisher,
    FisherAveraging,
    FisherMerge,
    FLTrust,
    GaussianMechanism,
    GeometricMedian,
    Krum,
    LowRank,
    Mean,
    MixedMean,
    Mixing,
    MultiKrum,
    NormClipping,
    OTFusion,
    PairwiseMasks,
    Proximal,
    Quantize,
    RegMean,
    TopK,
    TrimmedMean,
)
from flsuite.aggregators.ditto import PulledModel
from flsuite.aggregators.fedexp import ExtrapolatedMean
from flsuite.aggregators.fednova import NormalizedMean
from flsuite.aggregators.part import Named, name_of, named, refuse_conflicts, withheld_from_codecs
from flsuite.aggregators.qfedavg import FairMean
from flsuite.common.state import Layer, State, StateLayout
from flsuite.data import Dirichlet, FederatedDataModule, Synthetic
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.federation import Asynchronous, Engine, Stragglers, Synchronous
from flsuite.models import ACVAE, MLP, Classifier
from flsuite.models.backbones import Backbone
from flsuite.models.classifier import classification_loss

Cell = Mapping[str, str]
"""The choice of each dimension, by its name."""

CHOICES: dict[str, dict[str, Callable[[], Any]]] = {
    "objective": {
        "none": lambda: None,
        "Proximal": lambda: Proximal(0.1),
        "ControlVariates": lambda: ControlVariates("mean_gradient"),
        "PulledModel": lambda: PulledModel(0.1),
    },
    "transforms": {
        "none": list,
        "ClipUpdates": lambda: [ClipUpdates(0.5)],
        "GaussianMechanism": lambda: [GaussianMechanism(0.5, noise_multiplier=0.3, delta=1e-2)],
        "Quantize": lambda: [Quantize(8)],
        "TopK": lambda: [TopK(0.3)],
        "TopK, Quantize": lambda: [TopK(0.3), Quantize(8)],
        "LowRank": lambda: [LowRank(rank=2)],
    },
    "rule": {
        "Mean by samples": Mean,
        "Mean": lambda: Mean("uniform"),
        "MixedMean": MixedMean,
        "Mixing": Mixing,
        "NormalizedMean": NormalizedMean,
        "ExtrapolatedMean": ExtrapolatedMean,
        "FairMean": FairMean,
        "CoordinateMedian": CoordinateMedian,
        "TrimmedMean": lambda: TrimmedMean(1),
        "Krum": lambda: Krum(1),
        "MultiKrum": lambda: MultiKrum(1),
        "GeometricMedian": GeometricMedian,
        "NormClipping": NormClipping,
        "CenteredClipping": CenteredClipping,
        "FLTrust": FLTrust,
        "Bucketing of Mean": lambda: Bucketing(Mean("uniform")),
        "Bucketing of CoordinateMedian": lambda: Bucketing(CoordinateMedian()),
        "CMGA": CMGA,
        "FisherAveraging": lambda: FisherAveraging(groups=None),
        "FisherMerge": FisherMerge,
        "FedFisher diag": lambda: FedFisher("diag", "cg", steps=3),
        "FedFisher kfac": lambda: FedFisher("kfac", "cg", steps=3),
        "RegMean": lambda: RegMean(0.5),
        "OTFusion": OTFusion,
        "PFNM": PFNM,
        "DENSE": lambda: DENSE(epochs=1, generator_steps=1, batch_size=4, latent=4, width=0.1),
    },
    "server_optimizer": {
        "none": lambda: None,
        "SGD": lambda: partial(SGD, lr=0.5, momentum=0.5),
        "Adam": lambda: partial(Adam, lr=0.01),
        "AdaptiveAdam": lambda: partial(AdaptiveAdam, lr=0.01),
        "AdaptiveYogi": lambda: partial(AdaptiveYogi, lr=0.01),
        "AdaptiveAdagrad": lambda: partial(AdaptiveAdagrad, lr=0.01),
    },
    "schedule": {
        "Synchronous": lambda: Synchronous(),
        "Poisson": lambda: Synchronous(0.8, sampling="poisson"),
        "Asynchronous": lambda: Asynchronous(concurrency=6, buffer_size=5, speeds=Stragglers()),
    },
    "secure_sum": {"none": lambda: None, "PairwiseMasks": PairwiseMasks},
}

PLAIN: dict[str, str] = {
    "objective": "none",
    "transforms": "none",
    "rule": "Mean",
    "server_optimizer": "none",
    "schedule": "Synchronous",
    "secure_sum": "none",
}

STATE: State = {"0.weight": torch.zeros(3, 2)}
LAYOUT = StateLayout(tuple(STATE), 6, layers=(Layer("0", "linear", bias=False),))
"""A model of one layer, for what the clients of a rule send."""

DECLARED = re.compile(r"^\S.* needs [a-z ]+, but .+; change trainer\.\S+ or \S+( \(.+\))?$")
"""The form of a declared refusal: both parts, the reason, and what to change."""

_WHOLE = ("FedFisher kfac", "RegMean", "OTFusion", "PFNM")


class Private(Backbone):
    """A network with BatchNorm, whose last layer stays with the client."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Linear(6, 4),
            nn.Linear(4, outputs),
        )


class Likely(Classifier):
    """A classifier with the likelihood of its samples."""

    def log_likelihood(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return -classification_loss(self.logits(batch[0]), batch[1])


class TinyImages(FederatedDataModule):
    """Images of noise, in three classes."""

    def load(self) -> PublishedSplits:
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(256, (90, 1, 8, 8), generator=rng, dtype=torch.uint8)
        y = torch.arange(90) % 3
        return PublishedSplits(
            DataSpec((1, 8, 8), 3), DataSplit(x[:72], y[:72]), DataSplit(x[72:], y[72:])
        )


def pairs() -> Iterator[dict[str, str]]:
    """Yield a cell for each pair of choices of two dimensions, the other parts plain."""
    for one, other in combinations(CHOICES, 2):
        for first, second in product(CHOICES[one], CHOICES[other]):
            yield pair(one, first, other, second)


def pair(one: str, first: str, other: str, second: str) -> dict[str, str]:
    """Return the cell of two choices, the other parts plain."""
    chosen = {one: first, other: second}
    # LowRank packs matrices, which the plain rule has none of.
    rule = "RegMean" if "LowRank" in chosen.values() else PLAIN["rule"]
    return {**PLAIN, "rule": rule, **chosen}


def covering() -> list[Cell]:
    """Return combinations of which each pair that runs is part of at least one.

    Each pair that is still missing starts a combination. Each other dimension then takes the
    choice that adds most missing pairs, and that is refused with none of the choices before it.
    """
    of_two = [
        (frozenset({(one, first), (other, second)}), conflict(pair(one, first, other, second)))
        for one, other in combinations(CHOICES, 2)
        for first, second in product(CHOICES[one], CHOICES[other])
    ]
    running = {two for two, reason in of_two if reason is None}
    missing = dict.fromkeys(sorted(running, key=sorted))  # a set that keeps its order

    cells: list[Cell] = []
    while missing:
        cell = dict(next(iter(missing)))
        for dimension in (other for other in CHOICES if other not in tuple(cell)):
            cell[dimension] = max(
                (c for c in CHOICES[dimension] if _pairs_of(cell, dimension, c) <= running),
                key=lambda choice: len(_pairs_of(cell, dimension, choice) & missing.keys()),
            )
        cells.append({dimension: cell[dimension] for dimension in CHOICES})
        for one, other in combinations(cell.items(), 2):
            missing.pop(frozenset({one, other}), None)
    return cells


def _pairs_of(cell: Cell, dimension: str, choice: str) -> set[frozenset[tuple[str, str]]]:
    """Return the pairs that a further choice adds to a cell."""
    return {frozenset({chosen, (dimension, choice)}) for chosen in cell.items()}


def name(cell: Cell) -> str:
    """Return the choices of a cell that are not plain."""
    return ", ".join(v for k, v in cell.items() if v != PLAIN[k]) or "plain"


def trainer_of(
    cell: Cell, rounds: int = 3, engine: Engine | None = None, folder: Path | None = None
) -> FederatedTrainer:
    """Return a silent federation of a cell."""
    made = {dimension: CHOICES[dimension][choice]() for dimension, choice in cell.items()}
    parts = {key: made.pop(key) for key in ("rule", "objective", "transforms", "server_optimizer")}
    return FederatedTrainer(
        rounds,
        Aggregator(**parts),
        **made,
        engine=engine,
        # Noise would spoil running statistics, so that a run with noise keeps them with clients.
        batchnorm="local" if "Gaussian" in cell["transforms"] else "average",
        run_dir=None if folder is None else str(folder),
        evaluate_every=1000,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        accelerator="cpu",
        seed=3,
    )


def problem(cell: Cell) -> tuple[Any, FederatedDataModule]:
    """Return the model and the data: a private entry and a buffer, where the rule can have them."""
    optimizer = partial(SGD, lr=0.05)
    rule = cell["rule"]
    partition = Dirichlet(5.0, min_samples=4)
    images = TinyImages(
        clients=6, partition=partition, batch_size=16, val_fraction=0.0, standardize=rule != "CMGA"
    )
    if rule == "DENSE":
        return Classifier(MLP(hidden=(6,)), optimizer=optimizer), images
    server = 12 if rule == "FLTrust" else 0
    data = Synthetic(
        features=5,
        classes=3,
        samples=120,
        clients=6,
        partition=partition,
        batch_size=16,
        server_samples=server,
    )
    if rule == "CMGA":
        return ACVAE(latent_dim=2, optimizer=optimizer), images
    if rule in _WHOLE or rule == "FLTrust":
        return Classifier(MLP(hidden=(6,)), optimizer=optimizer), data
    private = [] if rule in ("FisherAveraging", "FisherMerge", "FedFisher diag") else ["network.4"]
    kind = Likely if rule == "FisherAveraging" else Classifier
    return kind(Private(), optimizer=optimizer, private=private), data


def conflict(cell: Cell) -> str | None:
    """Return the refusal that the parts of a cell declare, without a model, or ``None``."""
    made = {dimension: CHOICES[dimension][choice]() for dimension, choice in cell.items()}
    schedule, secure_sum = made.pop("schedule"), made.pop("secure_sum")
    schedule.configure([20] * 6, seed=3)
    aggregator = Aggregator(**made)
    parts = [named("trainer.schedule", schedule), *aggregator.named_parts()]
    if secure_sum is not None:
        parts.append(named("trainer.secure_sum", secure_sum))
    try:
        refuse_conflicts(parts)
        withheld = withheld_from_codecs(aggregator.statistics(LAYOUT, STATE))
        sent = Named("trainer.aggregator.rule", name_of(aggregator.rule), withholds=withheld)
        refuse_conflicts([sent, *parts])
    except FlsuiteError as error:
        return str(error)
    return None


def outcome(cell: Cell, **options: Any) -> State | str:
    """Run a cell, and return the final global state, or the reason of a declared refusal.

    Raises:
        AssertionError: If it is refused late, or in words that say neither why nor what to change.
    """
    trainer = trainer_of(cell, **options)
    refusal = None
    try:
        trainer.fit(*problem(cell))
    except FlsuiteError as error:
        refusal = str(error)
    if refusal is not None:
        # The federation is made after the checks, so that nobody has trained without one.
        assert trainer.federation is None, f"refused late, after round {trainer.round}: {refusal}"
        assert DECLARED.match(refusal), f"not a declared refusal: {refusal}"
        return refusal
    assert trainer.federation is not None
    state = trainer.federation.state
    assert trainer.round == trainer.options.budget.rounds
    assert all(bool(torch.isfinite(value.double()).all()) for value in state.values())
    return state
