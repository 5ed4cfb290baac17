"""What an objective is, what it keeps, and the proximal term.

The proximal term of FedProx: Li et al. 2020, algorithm 2. Federated Optimization in Heterogeneous
Networks, arXiv:1812.06127.
"""

from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.part import ClientHalf, Server, Statistic
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.state import State, StateLayout, Tree


class Objective(ClientHalf):
    """A term that clients minimize in addition to their own loss.

    The client half changes the gradient of each step, may keep notes in ``client.memory``, and
    sends statistics in ``client.extras``.
    """

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


def second_start(client: ClientContext, w: State, kept: State | None) -> State:
    """Return the initial weights of a second model: the ones of the last fit, if any.

    Buffers that stay with the client are the second model's own. Buffers that the fit has reset
    stay reset.

    Args:
        client: The client's view of the round.
        w: All entries of the model at the start of the fit.
        kept: The second model after the client's last fit.
    """
    own = {name: w[name] for name in client.fit.buffers}
    reset = {name: w[name] for name in client.layout.reset}
    return {**own, **(kept or client.global_state), **reset}


def pulled(gradient: State, pull: State, weight: float) -> State:
    """Return ``gradient + weight pull``. An entry without a gradient is pulled alone."""
    return {
        name: gradient[name].add(own, alpha=weight) if name in gradient else weight * own
        for name, own in pull.items()
    }


@dataclass(frozen=True)
class Proximal(Objective, Settings):
    """Clients minimize ``F_i(w) + mu / 2 ||w - w_global||^2`` (eq. 2).

    Take it to combine FedProx's term with other parts.

    The term leaves out private parameters, and in a step those without a gradient.
    ``trainer.gradient_clip_val`` bounds the sum, as it would for a loss with this term.

    Args:
        mu: Weight of the proximal term. 0 disables it.
    """

    mu: NonNegativeFloat = 0.01

    @property
    def half(self) -> ClientHalf:
        return self if self.mu else Objective()  # FedAvg bit for bit, at no cost

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return w, {name: client.global_state[name] for name in client.layout.parameters}

    def gradient(self, oracle: Oracle, w: State, held: State, batch: Any) -> tuple[State, State]:
        g = oracle(w, batch)
        return g | {k: g[k].add(w[k] - held[k], alpha=self.mu) for k in g.keys() & held}, held
