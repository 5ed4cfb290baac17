"""Free riders: clients that send what they have not learned."""

from dataclasses import dataclass

from flsuite.aggregators.transforms.base import FitView
from flsuite.arguments import NonNegativeFloat
from flsuite.attacks.base import Attack
from flsuite.attacks.noise import noisy
from flsuite.state import State, add, difference


@dataclass(eq=False)
class FreeRider(Attack):
    """Attackers return the model that they have received (Lin et al. 2019; Fraboni et al. 2021).

    With ``last_change`` they send ``w_t + (w_t - w_s)``, where ``w_s`` is the model that they
    received the time before: the delta-weights attack of Lin et al. With ``noise`` too
    it is their advanced attack. The fit takes place, because an algorithm may need more than the
    model of it, and its parameters are thrown away.

    Args:
        clients: Numbers of the attackers.
        fraction: Share of the clients that attack, instead of ``clients``.
        last_change: Whether to repeat the last change of the global model. There is none in the
            first round of a client.
        noise: Standard deviation of Gaussian noise on every parameter, as a disguise.
    """

    last_change: bool = False
    noise: NonNegativeFloat = 0.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        sent = received
        if self.last_change:
            before: State = fit.memory.get("received", received)
            sent = add(received, difference(received, before))
            # Clones, because what is received may live on in memory that is used again.
            fit.memory["received"] = {name: value.clone() for name, value in received.items()}
        return noisy(sent, self.noise, fit)
