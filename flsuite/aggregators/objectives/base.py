"""What an objective is, what it keeps, and the proximal term.

The proximal term of FedProx: Li et al. 2020, algorithm 2. Federated Optimization in Heterogeneous
Networks, arXiv:1812.06127.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.optimizers import about_to_step
from flsuite.aggregators.part import ClientHalf, Part, Server, Statistic
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, StateLayout, Tree


class Objective(Part):
    """A term that clients minimize in addition to their own loss.

    The client half consists of callbacks for the client's fit. They change the gradient, may keep
    notes in ``client.memory``, and send statistics in ``client.extras``.
    """

    def check(self, model: LightningModule) -> None:
        """Refuse a model that this objective cannot work with, before round 1.

        Raises:
            FlsuiteError: If it cannot.
        """
        return

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the callbacks of the client half."""
        return []

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return the statistics that every client sends, by name. All of them are summed."""
        return {}

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        """Return the entries in which a client's own model differs from the global model.

        Overridden by algorithms whose clients predict with a model of their own.

        Args:
            state: The shared part of the global model. It must not be changed.
            received: What :meth:`broadcast` sends with it.
            memory: The client's notes. Empty before its first fit.
        """
        return {}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update the server's memory at the end of a round.

        Args:
            server: Its memory is the objective's.
            means: The weighted means of the statistics, float64. Empty if there are no updates.
            updates: Number of averaged updates.
        """
        return


class StatedCallback(Callback):
    """Applies an objective's functions of tensors in a fit of one client.

    A stack calls the functions for all clients at once, without this callback.

    Args:
        client: The client's view of the round.
        objective: States the functions.
    """

    def __init__(self, client: ClientContext, objective: Objective) -> None:
        self.client, self.objective = client, objective

    @abstractmethod
    def begin(self, module: LightningModule) -> Any:
        """Return what the functions read of the client, at the start of its fit."""


def wrong(objective: Objective, method: str, returned: Any, wanted: str) -> FlsuiteError:
    """Return the error of a function that has returned something else than it should.

    Args:
        objective: The objective.
        method: Name of its function.
        returned: What it has returned.
        wanted: What it should return.
    """
    shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
    kind = "None" if returned is None else type(returned).__name__
    return FlsuiteError(
        f"{type(objective).__name__}.{method} returned {kind}{shape}; return {wanted}"
    )


def require_tensors(objective: Objective, method: str, returned: Any) -> None:
    """Refuse what a function has returned if it does not consist of tensors.

    Raises:
        FlsuiteError: If it contains anything else.
    """
    for leaf in tree_leaves(returned):
        if not isinstance(leaf, Tensor):
            wanted = "tensors in dictionaries, and leave out what a client does not have"
            raise wrong(objective, method, leaf, wanted)


def own_tensors(objective: Objective, method: str, held: Any, module: LightningModule) -> Any:
    """Return what a function has read of a client, apart from the tensors of its model.

    Raises:
        FlsuiteError: If it does not consist of tensors.
    """
    require_tensors(objective, method, held)
    # The model's own tensors would change in its steps.
    tensors = chain(module.parameters(), module.buffers())
    own = {value.untyped_storage().data_ptr() for value in tensors}

    def kept(value: Tensor) -> Tensor:
        # Others stay the same objects: a stack holds what its clients share once.
        is_own = value.untyped_storage().data_ptr() in own
        return value.detach().clone() if is_own else value

    return tree_map(kept, held)


@contextmanager
def no_change_in_place(objective: Objective | None, held: Any) -> Iterator[None]:
    """Refuse changes of what is held, which may be the global model, or a copy in a stack.

    Raises:
        FlsuiteError: If a tensor has changed in place, or has been replaced in its dictionary.
    """
    before = [(leaf, leaf._version) for leaf in tree_leaves(held)]
    yield
    after = tree_leaves(held)
    if len(after) != len(before) or any(
        new is not old or new._version != version
        for new, (old, version) in zip(after, before, strict=True)
    ):
        raise FlsuiteError(
            f"{type(objective).__name__} changes what it reads of the client; make new tensors, "
            "and leave the dictionaries as they are"
        )


@dataclass(frozen=True)
class Proximal(Objective, Settings):
    """Clients minimize ``F_i(w) + mu / 2 ||w - w_global||^2`` (eq. 2).

    The gradient ``mu (w - w_global)`` is added once per step, after mixed precision has unscaled
    the gradient and micro-batches have accumulated. ``trainer.gradient_clip_val`` then bounds the
    sum, as it would for a loss with this term. Private parameters have no global value, so the term
    does not apply to them.

    Args:
        mu: Weight of the proximal term. 0 disables it.
    """

    mu: NonNegativeFloat = 0.01

    def callbacks(self, client: ClientContext) -> list[Callback]:
        # Without a callback, mu = 0 costs nothing and is FedAvg bit for bit.
        return [_ProximalTerm(client, self)] if self.mu else []


class _ProximalTerm(ClientHalf):
    """The client half. It adds the term's gradient to the parameters that are about to step."""

    part: Proximal

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Move to the parameters' device once per fit, not once per step.
        start, parameters = self.client.global_state, pl_module.named_parameters()
        self.anchors = {k: start[k].to(p.device) for k, p in parameters if k in start}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        for name, parameter, gradient in about_to_step(optimizer, pl_module.named_parameters()):
            if name in self.anchors:
                gradient.add_(parameter.detach() - self.anchors[name], alpha=self.part.mu)
