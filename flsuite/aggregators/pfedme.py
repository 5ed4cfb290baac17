"""pFedMe: Dinh et al. 2020, algorithm 1.

Personalized Federated Learning with Moreau Envelopes, arXiv:2006.08848.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import SGD

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective, pulled, second_start
from flsuite.common.arguments import PositiveFloat, PositiveInt, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, Tree, clone


class PFedMe(FedAvg):
    """Clients minimize the Moreau envelope of their loss, and predict with its proximal point.

    Take it for personal models if fits of several times the cost are acceptable.

    For each batch, ``steps`` steps of gradient descent at ``personal_lr`` approach ``theta``, the
    minimizer of ``F_k(theta) + lam / 2 ||theta - w_k||^2`` (eq. 3). Then the model's optimizer
    takes one step with the gradient of the envelope, ``lam (w_k - theta)`` (line 8). The server
    moves to ``(1 - beta) w + beta mean(w_k)`` (line 12). A client is scored by its last ``theta``.

    ``theta`` starts at the received model, and each batch goes on from the ``theta`` of the batch
    before, because the paper does not say where the steps on a batch start. The paper weights all
    clients equally: set ``weighting`` to ``uniform`` for this. The Trainer's gradient clipping
    applies to the optimizer's step, and not to the steps that approach ``theta``.

    A fit costs ``steps + 1`` fits of FedAvg. The bytes are the same.

    Args:
        lam: Weight of the proximal term, ``lambda``. The optimizer's rate times ``lam`` should be
            below 1.
        steps: Steps per batch, ``K``.
        personal_lr: Learning rate of these steps.
        beta: The server's step.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        lam: PositiveFloat = 15.0,
        steps: PositiveInt = 5,
        personal_lr: PositiveFloat = 0.05,
        beta: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        self.lam, self.steps, self.personal_lr, self.beta = lam, steps, personal_lr, beta
        if beta != 1.0:
            if kwargs.get("server_optimizer") is not None:
                raise FlsuiteError(
                    "PFedMe: beta is the step of plain averaging; leave out beta or "
                    "server_optimizer"
                )
            kwargs["server_optimizer"] = partial(SGD, lr=beta)
        super().__init__(objective=MoreauEnvelope(lam, steps, personal_lr), **kwargs)


@dataclass(frozen=True)
class MoreauEnvelope(Objective, Settings):
    """The gradient of the Moreau envelope, in place of the loss's own. See :class:`PFedMe`."""

    lam: PositiveFloat = 15.0
    steps: PositiveInt = 5
    personal_lr: PositiveFloat = 0.05

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        return w, {"theta": second_start(client, w, None)}

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        theta = held["theta"]
        for _ in range(self.steps):  # eq. 3
            _, g, buffers = oracle.evaluate(theta, batch)
            g = pulled(g, {k: theta[k] - w[k] for k in w if k in theta}, self.lam)
            theta = theta | {k: theta[k].sub(g[k], alpha=self.personal_lr) for k in g} | buffers

        g = oracle(w, batch)  # stays where there is no theta: in private parameters
        g |= {k: self.lam * (w[k] - theta[k]) for k in g if k in theta}  # line 8
        return g, {"theta": theta}

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        client.memory["personal"] = clone(held["theta"])

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("personal", {})
