"""The callbacks of a run. The run calls the federation's hooks, clients call Lightning's."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.federation.client.loop import implements

_BASE = "flsuite.callbacks.base"  # whose hooks do nothing
_OF_LIGHTNING = tuple(n for n in vars(Callback) if n.startswith(("on_", "setup", "teardown")))
_HOOKS = (
    "on_federation_start",
    "on_round_start",
    "on_client_end",
    "on_evaluation_end",
    "on_round_end",
    "on_round_recorded",
    "on_federation_end",
)


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
        self.federation = [c for c in self._all if any(hasattr(c, hook) for hook in _HOOKS)]

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
        return tuple(
            _copied(callback)
            for callback in self._all
            if any(implements(callback, Callback, hook) for hook in _OF_LIGHTNING)
        )

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
    try:
        return copy.deepcopy(callback)
    except Exception as error:
        raise FlsuiteError(
            f"trainer.callbacks: {type(callback).__name__} cannot be copied ({one_line(error)}), "
            "but every client's fit works on a copy; open files and connections in its hooks, or "
            "give it __deepcopy__"
        ) from error
