"""The callbacks of a run. The run calls the federation's hooks, clients call Lightning's."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback

from flsuite.common.errors import refused_as
from flsuite.common.lightning_internals import hooks_of_callback, hooks_with

_BASE = "flsuite.callbacks.base"  # whose hooks do nothing


class Hooks:
    """The callbacks of a run.

    Args:
        callbacks: Callbacks with the federation's hooks (see
            :class:`~flsuite.callbacks.FederationCallback`), Lightning's own, or both.

    Attributes:
        federation: The callbacks with a federation hook.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._all = list(callbacks)
        self.federation = [
            c for c in self._all if any(hasattr(c, hook) for hook in hooks_with("run"))
        ]

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def notify(self, hook: str, *args: Any) -> None:
        """Call a hook of the federation on every callback that has it."""
        for callback in self.federation:
            method = getattr(callback, hook, None)
            if method and getattr(method, "__module__", "") != _BASE:
                method(*args)

    def for_clients(self) -> tuple[Callback, ...]:
        """Return copies of the callbacks with Lightning hooks, in their current state.

        With copies, no client of a round sees changes that the run makes during the round.
        """
        return tuple(_copied(callback) for callback in self._all if hooks_of_callback(callback))

    @property
    def read_updates(self) -> bool:
        """Return whether any callback may read the models of clients."""
        return any(map(_reads_updates, self.federation))


def _reads_updates(callback: Callback) -> bool:
    """Return whether a callback may read the models of clients."""
    if "on_client_end" in vars(callback):
        return True
    for kind in type(callback).__mro__:
        # A subclass that overrides the hook must set reads_updates itself.
        if "on_client_end" in vars(kind) or "reads_updates" in vars(kind):
            return kind.__module__ != _BASE and vars(kind).get("reads_updates", True)
    return False


def _copied(callback: Callback) -> Callback:
    what = f"trainer.callbacks: {type(callback).__name__} cannot be copied for a client's fit"
    remedy = "open files and connections in its hooks, or give it __deepcopy__"
    with refused_as(what, remedy):
        return copy.deepcopy(callback)
