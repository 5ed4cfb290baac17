"""The things beside the updates that a server can offer to an aggregator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from flsuite.errors import FlsuiteError
from flsuite.metrics.privacy import RandomDraw
from flsuite.state import State

__all__ = ["ServerTools"]


@dataclass(frozen=True)
class ServerTools:
    """The tools of the server. One that model or data cannot give is ``None``.

    Attributes:
        score: Returns the accuracy of a shared state on the server's own samples, which no client
            trains on and no test uses. It is within [0, 1].
        score_module: Returns the accuracy of such a module on the same samples. Its layers may have
            other widths than the model's.
        module: Returns a new module that holds a shared state, in evaluation mode. It maps inputs
            ``(n, *shape)`` to logits ``(n, outputs)``. No two of them share tensors.
        to_inputs: Returns images ``(n, channels, height, width)`` within [0, 1] as the clients'
            models see them.
        train: Returns the shared state after a fit on the server's own samples, given the one that
            it starts from and the round, counted from 1. The fit is that of a client with these
            samples.
        shape: Shape of a sample as the model receives it.
        outputs: Number of the model's outputs.
        task: The kind of classification, see :class:`~flsuite.data.DataSpec`.
        seed: The run's seed.
        rounds: Rounds of the run, or ``None`` where another limit ends it.
        sampling: How cohorts are drawn, if neither data nor times nor availability decide about
            them.
        missing: The reason why a tool is missing, by the tool's name.
    """

    score: Callable[[State], float] | None = None
    score_module: Callable[[nn.Module], float] | None = None
    module: Callable[[State], nn.Module] | None = None
    to_inputs: Callable[[Tensor], Tensor] | None = None
    train: Callable[[State, int], State] | None = None
    shape: tuple[int, ...] = ()
    outputs: int = 0
    task: str = "multiclass"
    seed: int = 0
    rounds: int | None = None
    sampling: RandomDraw | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, owner: str, tool: str, purpose: str) -> FlsuiteError:
        """Return the error of an aggregator whose tool is missing.

        Args:
            owner: Name of the aggregator.
            tool: Name of the tool.
            purpose: What the aggregator needs it for, such as "picks alpha by its score on the
                server's samples".
        """
        why = self.missing.get(tool, f"nothing offers {tool} here")
        return FlsuiteError(f"{owner} {purpose}, and {why}")
