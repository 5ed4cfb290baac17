"""The entries of a state, and the resident model that they are copied into."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import StateLayout, matches
from flsuite.models.abilities import (
    frozen_entries,
    own_entries,
    parameter_groups,
    refuse_unused,
    training_only,
)
from flsuite.models.layers import entry_names, read_chain, read_layers
from flsuite.models.modes import PlainAttributes

BatchNorm = Literal["average", "local", "reset"]


class Entries(NamedTuple):
    """The entries of a model's state dict, by ownership. Tied weights have their first name only.

    Attributes:
        shared: Sent between the server and the clients.
        private: Each client has its own.
        frozen: Not trained by anyone, so they are the same everywhere and never sent.
        buffers: Entries that are not parameters: running statistics and counters.
        reset: Buffers that every fit starts from their initial values.
        personal: Entries that predictions read and that differ between clients. Without them, the
            model is the same for all clients.
        has_own_models: Whether a client's model may differ from the global one in shared entries.
    """

    shared: tuple[str, ...]
    private: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    reset: tuple[str, ...]
    personal: tuple[str, ...]
    has_own_models: bool = False


def entries_of(model: LightningModule, aggregator: Aggregator, batchnorm: BatchNorm) -> Entries:
    """Return the ownership of entries, as defined by the model, the algorithm and ``batchnorm``.

    An entry that the model declares private is private even if it is frozen, because it may change
    by other means than gradients.

    Args:
        model: The model.
        aggregator: The algorithm.
        batchnorm: The treatment of buffers, see ``WorkerSetup`` in ``client/setup.py``.
    """
    names = entry_names(model)
    parameters = {name for name, _ in model.named_parameters()}
    unlearned = tuple(name for name in names if name not in parameters)

    private: set[str] = set()
    own = own_entries(model)
    # The pooled fit is not a client, so it has no memory for private entries.
    if not aggregator.pools:
        private = {*own, *(unlearned if batchnorm == "local" else ())}
        every_name = list(model.state_dict())
        refuse_unused(model, "trainer.aggregator.private", aggregator.private, every_name)
        private |= {name for name in every_name if matches(name, aggregator.private)}

    # Untrained entries are not stored per client, unless the model declares them private.
    frozen = set(frozen_entries(model))
    private -= frozen

    _refuse_half_private(model, private)
    kept = tuple(name for name in names if name in private)
    shared = tuple(name for name in names if name not in private | frozen)
    has_own = type(aggregator.objective).own_entries is not Objective.own_entries
    read = tuple(name for name in kept if not matches(name, training_only(model)))
    return Entries(
        shared=shared,
        private=kept,
        frozen=tuple(name for name in names if name in frozen),
        buffers=unlearned,
        reset=unlearned if batchnorm == "reset" else (),
        personal=(*read, *shared) if has_own else read,
        has_own_models=has_own,
    )


def _refuse_half_private(model: LightningModule, private: Collection[str]) -> None:
    """Refuse tied weights that are private under one of their names alone."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len({name in private for name in tied}) > 1:
            raise FlsuiteError(
                f"model: {' and '.join(tied)} are the same weights; name all or none in private"
            )


def layout_of(
    model: LightningModule,
    entries: Entries,
    shape: tuple[int, ...],
    sizes: Sequence[int],
    needs_chain: bool,
) -> StateLayout:
    """Return the names and groups of the shared entries.

    Args:
        model: The model.
        entries: The ownership of its entries.
        shape: The shape of a sample.
        sizes: Training samples of each client.
        needs_chain: Whether to read the chain of layers, which takes a pass through the model.
    """
    shared = entries.shared
    parameters = tuple(name for name, _ in model.named_parameters() if name in shared)
    groups = {
        group: tuple(name for name in parameters if matches(name, patterns))
        for group, patterns in parameter_groups(model).items()
    }
    layers, others = read_layers(model, shared)
    buffers = tuple(name for name in shared if name not in parameters)
    layout = StateLayout(
        parameters,
        len(sizes),
        groups,
        sum(sizes),
        layers,
        others,
        buffers=buffers,
        reset=tuple(name for name in entries.reset if name in shared),
    )
    if not needs_chain:
        return layout
    chain, no_chain = read_chain(model, shape)
    if not {layer.name for layer in chain} <= {layer.name for layer in layers}:
        chain, no_chain = (), "a part of it stays with the clients, or two layers share weights"
    return replace(layout, chain=chain, no_chain=no_chain)


@dataclass
class _Buffer:
    """A buffer that is not in the state dict, and its initial value."""

    part: nn.Module
    name: str
    start: Tensor
    seen: tuple[Tensor, int] | None = None  # the present one, with its count of changes

    def restore(self) -> None:
        """Restore it where a fit has changed or replaced it."""
        now = self.part._buffers[self.name]
        if self.seen is not None and now is self.seen[0] and now._version == self.seen[1]:
            return
        device = self.start.device if now is None else now.device
        own = self.part._buffers[self.name] = self.start.to(device, copy=True)
        self.seen = own, own._version


class ResidentModel:
    """The model state outside the state dict, which must not leak from one client to the next.

    Args:
        model: The model, before its first use.
        frozen: Names of the parameters that no client trains.
    """

    def __init__(self, model: LightningModule, frozen: Collection[str] = ()) -> None:
        self.model = model
        self._trainable = [(p, p.requires_grad) for p in model.parameters()]
        self._modes = [(part, part.training) for part in model.modules()]  # before a fit
        self._attributes = PlainAttributes(model)
        self._buffers = [
            _Buffer(part, name, value.clone())
            for part in model.modules()
            for name, value in part.named_buffers(recurse=False)
            if name in part._non_persistent_buffers_set
        ]
        self._metrics = [part for part in model.modules() if isinstance(part, Metric)]
        self._parameters = _parameter_ids(model)
        self._frozen = [(name, p) for name, p in model.named_parameters() if name in frozen]
        self._versions: list[int] = []

    def restore(self) -> None:
        """Restore the model's plain attributes and unsaved buffers to their initial values.

        A model may collect numbers in a list or in a metric over the steps of a fit. They must not
        leak into the next client, nor into a fit that restarts in Lightning's loop.
        """
        self._attributes.restore()
        for buffer in self._buffers:
            buffer.restore()
        for metric in self._metrics:
            metric.reset()
        self._modes = [(part, part.training) for part, _ in self._modes]

    def release(self) -> None:
        """Clear gradients, and restore which parameters are frozen, and the mode of each layer."""
        # Iterate over stored lists, because walking through the module costs as much as a layer.
        for parameter, is_trainable in self._trainable:
            parameter.grad = None
            parameter.requires_grad_(is_trainable)
        for part, is_training in self._modes:
            if part.training is not is_training:  # a module is slow to set
                part.training = is_training

    def mark(self) -> None:
        """Store the frozen parameters at the start of a fit."""
        self._versions = [parameter._version for _, parameter in self._frozen]

    def check(self) -> None:
        """Refuse a fit whose training would be lost.

        Raises:
            FlsuiteError: If it created new layers, or trained entries that are not sent.
        """
        kind = type(self.model).__name__
        if _parameter_ids(self.model) != self._parameters:
            raise FlsuiteError(
                f"model: a fit of {kind} makes new layers, whose training would be lost; make them "
                "in __init__, or once in configure_model"
            )
        for (name, parameter), version in zip(self._frozen, self._versions, strict=True):
            if parameter.requires_grad or parameter._version != version:
                raise FlsuiteError(
                    f"model: {name} of {kind} is frozen at the start and changes in a fit, but "
                    "frozen parameters are not sent; leave it trainable in __init__, or name it "
                    "in private"
                )


def _parameter_ids(model: LightningModule) -> list[int]:
    """Return the ids of all parameters. ``parameters()`` takes several times as long."""
    return [id(one) for part in model.modules() for one in part._parameters.values()]
