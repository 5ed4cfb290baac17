"""The entries of a model's state: who has them, and how those that travel are laid out."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from lightning.pytorch import LightningModule

from flsuite.aggregators import Aggregator
from flsuite.models.declarations import (
    frozen_entries,
    own_entries,
    parameter_groups,
    refuse_unused,
    training_only,
)
from flsuite.models.layers import read_chain, read_layers
from flsuite.state import StateLayout, matches

BatchNorm = Literal["average", "local", "reset"]


class Entries(NamedTuple):
    """The entries of a model's state dict, by who has them.

    Attributes:
        shared: They travel between the server and the clients.
        private: Each client has its own.
        frozen: Nobody trains them, so that they are the same everywhere and never travel.
        buffers: The entries that are not parameters: running statistics and counters.
        reset: The buffers that every fit starts from their initial values.
        personal: The private entries that predictions read. Without them, the model is the same for
            all clients.
    """

    shared: tuple[str, ...]
    private: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    reset: tuple[str, ...]
    personal: tuple[str, ...]


def entries_of(model: LightningModule, aggregator: Aggregator, batchnorm: BatchNorm) -> Entries:
    """Return who has which entry, as the model, the algorithm and ``batchnorm`` say.

    An entry that the model itself calls private is so even if it is frozen: it may change by other
    means than gradients.

    Args:
        model: The model.
        aggregator: The algorithm.
        batchnorm: What happens to buffers, see :class:`~flsuite.client.setup.WorkerSetup`.
    """
    names = list(model.state_dict())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unlearned = tuple(name for name in names if name not in parameters)

    private: set[str] = set()
    own = own_entries(model)
    # The pooled fit is not a client, so there is nowhere to keep an entry.
    if not aggregator.pools:
        private = {*own, *(unlearned if batchnorm == "local" else ())}
        refuse_unused(model, "trainer.aggregator.private", aggregator.private, names)
        private |= {name for name in names if matches(name, aggregator.private)}

    # What nobody trains is not kept once per client, unless the model says that it is private.
    frozen = set(frozen_entries(model))
    private -= frozen

    kept = tuple(name for name in names if name in private)
    return Entries(
        shared=tuple(name for name in names if name not in private | frozen),
        private=kept,
        frozen=tuple(name for name in names if name in frozen),
        buffers=unlearned,
        reset=unlearned if batchnorm == "reset" else (),
        personal=tuple(name for name in kept if not matches(name, training_only(model))),
    )


def layout_of(
    model: LightningModule, shared: Collection[str], shape: tuple[int, ...], sizes: Sequence[int]
) -> StateLayout:
    """Return names and groups of the entries that travel.

    Args:
        model: The model.
        shared: Names of the entries that travel.
        shape: The shape of a sample.
        sizes: Training samples of each client.
    """
    # Tied weights travel under each of their names, as the state dict has them.
    named = model.named_parameters(remove_duplicate=False)
    parameters = tuple(name for name, _ in named if name in shared)
    groups = {
        group: tuple(name for name in parameters if matches(name, patterns))
        for group, patterns in parameter_groups(model).items()
    }
    layers, others = read_layers(model, shared)
    chain, no_chain = read_chain(model, shape)
    if not {layer.name for layer in chain} <= {layer.name for layer in layers}:
        chain, no_chain = (), "a part of it stays with the clients, or two layers share weights"
    buffers = tuple(name for name in shared if name not in parameters)
    return StateLayout(
        parameters, len(sizes), groups, sum(sizes), layers, others, chain, no_chain, buffers
    )
