"""What an objective that is stated in functions of tensors reads of a client."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.objectives.base import Objective
from flsuite.errors import FlsuiteError


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


def own_tensors(objective: Objective, method: str, held: Any, module: LightningModule) -> Any:
    """Return what a function has read of a client, apart from the tensors of its model.

    Raises:
        FlsuiteError: If it does not consist of tensors.
    """
    for leaf in tree_leaves(held):
        if not isinstance(leaf, Tensor):
            raise wrong(objective, method, leaf, "tensors, in dictionaries")
    # The model's own tensors would change in its steps.
    own = {value.untyped_storage().data_ptr() for value in module.state_dict().values()}

    def kept(value: Tensor) -> Tensor:
        # Others stay the same objects: a stack holds what its clients share once.
        is_own = value.untyped_storage().data_ptr() in own
        return value.detach().clone() if is_own else value

    return tree_map(kept, held)


@contextmanager
def no_change_in_place(objective: Objective | None, held: Any) -> Iterator[None]:
    """Refuse changes of what is held, which may be the global model, or a copy in a stack.

    Raises:
        FlsuiteError: If a tensor has changed in place.
    """
    before = [leaf._version for leaf in tree_leaves(held)]
    yield
    if [leaf._version for leaf in tree_leaves(held)] != before:
        raise FlsuiteError(
            f"{type(objective).__name__} changes in place what it has read of the client; make "
            "new tensors"
        )
