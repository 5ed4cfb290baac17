"""The clipping of a client's change to a given norm, on the client and again on the server."""

import math

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.messages import ClientContext
from flsuite.state import State, clone, load_

__all__ = ["WITHIN_CLIP", "ClipChange", "clipped_model", "wide"]

WITHIN_CLIP = "within_clip"
"""Name of the extra that says whether a change was within the norm: 1.0 or 0.0."""


class ClipChange(Callback):
    """The client half, which clips the change that a fit has made to the shared entries.

    The norm comes from the server, as ``client.received["clip"]``. The norm of the change before
    clipping is logged as ``update_norm``.

    Args:
        client: The fit.
        tells: Whether the update says if the change was within the norm.
    """

    def __init__(self, client: ClientContext, tells: bool) -> None:
        self.client = client
        self.tells = tells

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the very end: nothing may move the weights afterwards.
        base, clip = self.client.global_state, self.client.received["clip"]
        resident = pl_module.state_dict()
        trained = clone({name: resident[name] for name in base})
        clipped, norm = clipped_model(wide(trained), base, clip)

        # All at once, because tied weights have several names.
        if norm > clip:
            load_(resident, clipped)
        self.client.metrics["update_norm"] = norm
        if self.tells:
            self.client.extras[WITHIN_CLIP] = float(norm <= clip)


def clipped_model(model: State, base: State, clip: float) -> tuple[State, float]:
    """Return ``base + change * min(1, clip / ||change||)``, and the norm before clipping.

    A model whose change is within the norm is returned as it is.

    Args:
        model: The trained model, in float64.
        base: The model that it started from.
        clip: Largest L2 norm of the change, over all entries together.
    """
    change = {name: value - base[name] for name, value in model.items()}
    squares = [float(value.square().sum()) for value in change.values()]
    norm = math.sqrt(math.fsum(squares))
    if norm <= clip:
        return model, norm
    scaled = {k: torch.add(base[k].double(), v, alpha=clip / norm) for k, v in change.items()}
    return scaled, norm


def wide(state: State) -> State:
    """Return a copy in float64."""
    return {name: value.to(torch.float64, copy=True) for name, value in state.items()}
