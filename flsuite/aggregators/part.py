"""What the parts of an algorithm have in common: what they need, what they see, what they send."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from flsuite.errors import FlsuiteError
from flsuite.metrics.privacy import RandomDraw
from flsuite.state import State, StateLayout

Capability = Literal[
    "each update",
    "current models",
    "plain updates",
    "a cohort of known size",
    "random cohorts",
    "a plain sum",
    "parameters alone",
    "changes alone",
    "rounded matrices",
    "matrices",
    "dense changes",
    "secure aggregation",
    "clients",
    "shared parameters",
]
"""Something that one part of a run needs and that another part may withhold."""

_REMEDIES: Mapping[str, str] = {
    "clients": "set trainer.aggregator to FedAvg",
    "current models": "set trainer.schedule to Synchronous, or trainer.aggregator to FedBuff",
    "a cohort of known size": "set trainer.schedule.sampling to uniform",
    "parameters alone": "set trainer.batchnorm to local, or take a model with GroupNorm",
    "rounded matrices": "set trainer.compression to LowRank",
    "matrices": "set trainer.compression to Quantize",
    "shared parameters": "name fewer entries in model.private, or set trainer.aggregator to FedAvg",
    "secure aggregation": "set trainer.secure_sum to PairwiseMasks",
    "random cohorts": "set trainer.schedule to Synchronous with sampling uniform or poisson, "
    "without over_selection, deadline and availability",
}


@dataclass(frozen=True)
class Statistic:
    """Tensors that a client sends beside its change.

    Attributes:
        template: Nested dicts of tensors and numbers, of which keys, shapes and dtypes count.
        is_sum: Whether the server needs their sum over clients alone.
        is_psd: Whether the matrices are symmetric positive semidefinite, and must stay so.
        from_steps: Whether they follow from the trained model and the optimizer's steps alone.
            Noise on the steps then covers them.
    """

    template: Any
    is_sum: bool = True
    is_psd: bool = False
    from_steps: bool = False


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


@dataclass(frozen=True)
class Server:
    """What a part sees on the server in one round.

    Attributes:
        state: The shared part of the global model. It must not be changed.
        layout: Names and groups of the entries that travel.
        tools: What the server offers beside the updates.
        round: The round in progress, counted from 1.
        memory: What the part keeps from one round to the next: nested dicts of tensors and plain
            data. The checkpoint stores it.
        metrics: Numbers about the round, for the log.
        artifacts: Networks that a part has built beside the global model, by name. The run scores
            them and writes them to disk.
    """

    state: State
    layout: StateLayout
    tools: ServerTools
    round: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)

    def of(self, part: str) -> "Server":
        """Return the same with the memory of one part alone."""
        return replace(self, memory=self.memory.setdefault(part, {}))


class Part:
    """One part of an algorithm: settings and functions, and no state of its own.

    What it keeps lies in ``server.memory`` and ``client.memory``. One object may therefore serve
    several runs, and be sent to workers as it is.

    Attributes:
        needs: What it needs of the other parts of a run.
        withholds: What the other parts do not get where it takes part, each with the reason.
    """

    needs: frozenset[Capability] = frozenset()
    withholds: Mapping[Capability, str] = {}

    def prepare(self, server: Server) -> None:
        """Refuse a model or a server on which it cannot work.

        It is called once, before the first round.

        Raises:
            FlsuiteError: If it cannot. The message says what to change.
        """
        return


class Named(NamedTuple):
    """A part of a run, and where a config names it.

    Attributes:
        key: The key of the config, such as ``trainer.aggregator.rule``.
        part: It may have ``needs`` and ``withholds``, as a :class:`Part` has them.
    """

    key: str
    part: Any

    @property
    def name(self) -> str:
        """Return the name of its class."""
        return str(getattr(self.part, "name", type(self.part).__name__))


def refuse_conflicts(parts: Iterable[Named]) -> None:
    """Refuse parts of which one needs what another one withholds.

    Raises:
        FlsuiteError: If there are two. The message names both, the reason, and what to change.
    """
    parts = list(parts)
    for place, one in enumerate(parts):
        for capability in sorted(getattr(one.part, "needs", ())):
            # A codec packs a change for the transforms behind it alone.
            others = parts[:place] if capability == "dense changes" else parts
            for other in others:
                reason = getattr(other.part, "withholds", {}).get(capability)
                if reason is None or other.part is one.part:
                    continue
                remedy = _REMEDIES.get(capability)
                remedy = f" ({remedy})" if remedy else ""
                raise FlsuiteError(
                    f"{one.name} needs {capability}, and {other.name} {reason}; "
                    f"change {' or '.join(dict.fromkeys((one.key, other.key)))}{remedy}"
                )
