"""Shared helpers of the aggregator tests: small federations, some with a known optimum."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from flsuite import FederatedTrainer
from flsuite.aggregators import Aggregator, FedAvg, FedProto, LocalOnly, Rule, Server
from flsuite.aggregators.part import ServerTools
from flsuite.callbacks import FederationCallback
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Sums
from flsuite.data import DataSpec, Dirichlet, FederatedDataModule, Synthetic
from flsuite.data.federated import DataSplit, PublishedSplits
from flsuite.data.partitions import Natural
from flsuite.models import Classifier
from flsuite.models.backbones import Backbone
from flsuite.models.base import ClientModel

CURVATURES, MINIMA = (1.0, 10.0), (0.0, 1.0)


class Quadratic(ClientModel):
    """One number ``w``; client i minimizes ``a_i / 2 (w - m_i)^2``.

    A batch ``(n, 2)`` holds curvatures and minima. A curvature below zero raises an error, and an
    infinite one gives an update that is not finite.
    """

    def __init__(self, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer or partial(SGD, lr=0.05)

    def build(self, spec: DataSpec) -> None:
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        a, m = batch[0].unbind(1)
        if (a < 0).any():
            raise RuntimeError("no minimum")
        return (a / 2 * (self.w - m).square()).mean()

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {
            "loss": batch[1] * 0.0,
            "scores": torch.full((len(batch[1]), self.spec.num_classes), 0.5),
        }

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters())


class Quadratics(FederatedDataModule):
    """One client per row of the table of curvatures and minima."""

    def __init__(
        self,
        curvatures: Sequence[float],
        minima: Sequence[float],
        samples: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            clients=len(curvatures), partition=Natural(), batch_size=1000, val_fraction=0.0
        )
        self.curvatures = tuple(curvatures)
        self.minima = tuple(minima)
        self.samples = tuple(samples or [1] * len(curvatures))

    def load(self) -> PublishedSplits:
        table = torch.tensor([self.curvatures, self.minima]).T
        owners = torch.arange(self.clients)
        rows = owners.repeat_interleave(torch.tensor(self.samples))
        spec = DataSpec((2,), max(2, self.clients))
        return PublishedSplits(spec, DataSplit(table[rows], rows, rows), DataSplit(table, owners))


def federation(aggregator: Aggregator | Rule, rounds: int, **kwargs: Any) -> FederatedTrainer:
    """Return a silent trainer that writes nothing without a folder."""
    defaults = {
        "evaluate_every": 1000,
        "enable_checkpointing": "run_dir" in kwargs,
        "enable_progress_bar": False,
    }
    return FederatedTrainer(
        rounds, aggregator, **{"accelerator": "cpu", "seed": 3, **defaults, **kwargs}
    )


def optimum(
    aggregator: Aggregator, data: Quadratics, rounds: int, steps: int = 10, **kwargs: Any
) -> float:
    """Return the number that a federation reaches with ``steps`` steps per client and round."""
    model = kwargs.pop("model", None) or Quadratic()
    trainer = federation(aggregator, rounds, max_epochs=steps, **kwargs)
    trainer.fit(model, data)
    return float(trainer.federation.state["w"])


class Normalised(Backbone):
    """A network with BatchNorm, for tables."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)
        )


def table_data(clients: int = 4, samples: int = 150) -> FederatedDataModule:
    return Synthetic(
        features=5,
        classes=3,
        samples=samples,
        clients=clients,
        partition=Dirichlet(0.5, min_samples=4),
        batch_size=16,
    )


def table_model(kind: type[Classifier] = Classifier, **settings: Any) -> Classifier:
    return kind(Normalised(), optimizer=partial(SGD, **{"lr": 0.05, **settings}))


def run(
    aggregator: Aggregator | Rule,
    rounds: int = 2,
    data: FederatedDataModule | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """Fit a model, by default one with BatchNorm for tables, and return its trainer."""
    model = kwargs.pop("model", None) or table_model()
    trainer = federation(aggregator, rounds, **kwargs)
    trainer.fit(model, data or table_data())
    return trainer


def observed(
    aggregator: Aggregator | Rule, rounds: int = 1, *args: Any, **kwargs: Any
) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    """Return what :func:`run` returns, and all its updates."""
    seen, others = Updates(), kwargs.pop("callbacks", [])
    return run(aggregator, rounds, *args, callbacks=[seen, *others], **kwargs), seen.all


@cache
def reference(make: Callable[..., Aggregator], *args: Any) -> FederatedTrainer:
    """Return two rounds on the table, fitted once for all tests that compare others with it."""
    return run(make(*args))


def assert_equal(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def models_of(made: FederatedTrainer) -> list[State]:
    """Return each client's whole model."""
    assert made.federation is not None
    return [made.federation.client_state(c) for c in range(made.federation.data.clients)]


def assert_same_models(a: FederatedTrainer, b: FederatedTrainer) -> None:
    """Compare bit for bit the global model, the server's memory and each client's whole model."""
    assert a.federation is not None
    assert b.federation is not None
    assert a.round == b.round
    assert a.federation.state or isinstance(a.aggregator, (FedProto, LocalOnly))
    assert_equal(a.federation.client_state(None), b.federation.client_state(None))
    assert_same_tree(models_of(a), models_of(b))
    assert_same_tree(a.federation.server.memory, b.federation.server.memory)


def assert_same_tree(a: Any, b: Any) -> None:
    """Compare nested data bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_tree(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same_tree(one, other)
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def update(client: int, state: State, samples: int = 1, **extras: Any) -> ClientUpdate:
    return ClientUpdate(client, 1, samples, 1, torch.tensor([samples]), state, extras)


def server_of(state: State, layout: StateLayout | None = None, **fields: Any) -> Server:
    """Return a server view. By default, all entries are parameters of two clients."""
    return Server(
        state, layout or StateLayout(tuple(state), 2), **{"tools": ServerTools(), **fields}
    )


class ServerHalf:
    """The server half of an algorithm over several rounds, for a model without private entries.

    Attributes:
        memory: The memories of its parts.
        metrics: The metrics of the last round.
    """

    def __init__(self, part: Aggregator | Rule, layout: StateLayout, **fields: Any) -> None:
        self.aggregator = Aggregator(rule=part) if isinstance(part, Rule) else part
        self.layout = layout
        self.fields = fields
        self.memory: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}

    def server(self, state: State) -> Server:
        fields = {"memory": self.memory, "metrics": self.metrics, **self.fields}
        return server_of(state, self.layout, **fields)

    def broadcast(self, state: State) -> dict[str, Any]:
        return self.aggregator.broadcast(self.server(state))

    def aggregate(self, state: State, updates: Iterable[ClientUpdate]) -> State:
        self.metrics.clear()
        return self.aggregator.aggregate(self.server(state), iter(updates))

    def aggregate_sums(
        self, state: State, updates: Iterable[ClientUpdate], single: Sequence[str] = ()
    ) -> State:
        """Return the next global state from the sums of the clients' contributions.

        Args:
            state: The global state.
            updates: The updates.
            single: Names of the statistics that are not sums. The rest of an update is dropped.
        """
        sums, bare = Sums(), list[ClientUpdate]()
        own = self.aggregator.rule.statistics(self.layout, state)
        for one in updates:
            sums.add(self.aggregator.contribution(one, self.layout, own))
            extras = {name: one.extras[name] for name in single}
            bare.append(replace(one, state={}, extras=extras, partial=Sums()))
        bare[-1].partial = sums
        return self.aggregate(state, bare)


def configured(
    part: Aggregator | Rule, *parameters: str, clients: int = 2, **fields: Any
) -> ServerHalf:
    return ServerHalf(part, StateLayout(parameters=parameters, clients=clients), **fields)


def fold(
    part: Aggregator | Rule,
    state: State,
    updates: Sequence[ClientUpdate],
    layout: StateLayout | None = None,
    server: Server | None = None,
) -> State:
    """Return the next global state from these updates, as a federation computes it.

    Args:
        part: An algorithm, or only a rule.
        state: The global state.
        updates: The updates.
        layout: The shared entries. Default: all entries of the state are parameters.
        server: The server's state from earlier rounds. Default: none.
    """
    aggregator = Aggregator(rule=part) if isinstance(part, Rule) else part
    server = replace(server, state=state) if server else server_of(state, layout)
    return aggregator.aggregate(server, iter(updates))


def fedavg(updates: Sequence[ClientUpdate]) -> State:
    """Return the mean by samples of these models."""
    return fold(FedAvg(), updates[0].state, [replace(one, base={}) for one in updates])


class Updates(FederationCallback):
    """Keeps every update of a run."""

    def __init__(self) -> None:
        self.all: list[ClientUpdate] = []

    def on_client_end(self, trainer: Any, outcome: Any) -> None:
        self.all.append(outcome.update)


def signature(tree: Any) -> Any:
    """Return the keys, shapes and dtypes of nested dicts of tensors and numbers."""
    if isinstance(tree, dict):
        return {key: signature(value) for key, value in tree.items()}
    return (tree.shape, tree.dtype) if isinstance(tree, Tensor) else type(tree)
