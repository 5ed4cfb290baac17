"""Checks of objectives that are stated in functions of tensors."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.objectives.base import Objective
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext


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
