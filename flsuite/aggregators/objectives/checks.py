"""Checks of what the functions of a client half return and leave unchanged."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.utils._pytree import tree_leaves

from flsuite.aggregators.part import ClientHalf
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State


def wrong(part: ClientHalf, method: str, returned: Any, wanted: str) -> FlsuiteError:
    """Return the error of a function that has returned something else than it should.

    Args:
        part: The part.
        method: Name of its function.
        returned: What it has returned.
        wanted: What it should return.
    """
    shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
    kind = "None" if returned is None else type(returned).__name__
    return FlsuiteError(f"{type(part).__name__}.{method} returned {kind}{shape}; return {wanted}")


def require_tensors(part: ClientHalf, method: str, held: Any) -> None:
    """Refuse what a function has returned if it does not consist of tensors.

    Raises:
        FlsuiteError: If it contains anything else.
    """
    for leaf in tree_leaves(held):
        if not isinstance(leaf, Tensor):
            wanted = "tensors in dictionaries, and leave out what a client does not have"
            raise wrong(part, method, leaf, wanted)


def is_part_of(gradient: Any, w: State) -> bool:
    """Return whether a gradient has entries of the weights, of their shapes and dtypes."""
    return isinstance(gradient, Mapping) and all(
        name in w and (value.shape, value.dtype) == (w[name].shape, w[name].dtype)
        for name, value in gradient.items()
    )


@contextmanager
def no_change_in_place(part: ClientHalf | None, held: Any) -> Iterator[None]:
    """Refuse changes of what a part reads, which may be the global model, or a copy in a stack.

    Raises:
        FlsuiteError: If a tensor has changed in place, or has been replaced in its dictionary.
    """
    before = [(leaf, _version(leaf)) for leaf in tree_leaves(held)]
    yield
    after = tree_leaves(held)
    if len(after) != len(before) or any(
        new is not old or _version(new) != version
        for new, (old, version) in zip(after, before, strict=True)
    ):
        raise FlsuiteError(
            f"{type(part).__name__} changes what it reads of the client; make new tensors, "
            "and leave the dictionaries as they are"
        )


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place, also of a tensor under ``torch.vmap``."""
    while is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor._version
