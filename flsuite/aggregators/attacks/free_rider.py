"""Free riders: clients that send fake updates instead of training."""

from dataclasses import dataclass

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.attacks.noise import noisy
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State, add, difference


@dataclass(eq=False)
class FreeRider(Attack):
    """Returns the received model instead of a trained one (Lin et al. 2019; Fraboni et al. 2021).

    With ``last_change``, attackers send ``w_t + (w_t - w_s)``, where ``w_s`` is the model that they
    received the previous time: the delta-weights attack of Lin et al. Adding ``noise`` gives their
    advanced attack. The fit still runs, because an algorithm may need its other results, but its
    parameters are discarded.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        last_change: Whether to repeat the last change of the global model. A client's first round
            has none.
        noise: Standard deviation of Gaussian noise on every parameter, as a disguise.
    """

    last_change: bool = False
    noise: NonNegativeFloat = 0.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        sent = received
        if self.last_change:
            before: State = fit.memory.get("received", received)
            sent = add(received, difference(received, before))
            # Clones, because the received tensors may be in reused memory.
            fit.memory["received"] = {name: value.clone() for name, value in received.items()}
        return noisy(sent, self.noise, fit)
