"""Base of an algorithm's parts: declared needs, the server's view, and typed statistics."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, StateLayout
from flsuite.metrics.privacy import RandomDraw, Release

Capability = Literal[
    "each update",
    "current models",
    "plain updates",
    "a cohort of known size",
    "random cohorts",
    "equal chances",
    "a plain sum",
    "only parameters",
    "only changes",
    "rounded matrices",
    "matrices",
    "dense changes",
    "exact changes",
    "secure aggregation",
    "clients",
    "shared parameters",
    "a chain of layers",
]
"""A property that one part of a run needs and another part may withhold."""

_REMEDIES: Mapping[str, str] = {
    "clients": "set trainer.aggregator to FedAvg",
    "current models": "set trainer.schedule to Synchronous, or trainer.aggregator to FedBuff",
    "a cohort of known size": "set trainer.schedule.sampling to uniform",
    "equal chances": "set trainer.aggregator.weighting or trainer.schedule.sampling to uniform",
    "only parameters": "set trainer.batchnorm to local, or take a model with GroupNorm",
    "rounded matrices": "set trainer.compression to LowRank",
    "matrices": "set trainer.compression to Quantize",
    "shared parameters": "name fewer entries in model.private, or set trainer.aggregator to FedAvg",
    "secure aggregation": "set trainer.secure_sum to PairwiseMasks",
    "random cohorts": "set trainer.schedule to Synchronous with sampling uniform or poisson, "
    "without over_selection, deadline and availability",
}


@dataclass(frozen=True)
class Statistic:
    """Tensors that a client sends in addition to its change.

    Attributes:
        template: Nested dicts of tensors and numbers. Keys, shapes and dtypes count.
        is_sum: Whether the server needs only their sum over clients.
        is_psd: Whether the matrices are symmetric positive semidefinite, and must stay so.
        from_steps: Whether they depend only on the trained model and the optimizer's steps. Noise
            on the steps then covers them.
        release: What one statistic of a client with this many samples reveals about a sample, if
            it has noise of its own.
    """

    template: Any
    is_sum: bool = True
    is_psd: bool = False
    from_steps: bool = False
    release: Callable[[int], Release] | None = None


@dataclass(frozen=True)
class ServerTools:
    """The tools of the server. A tool that the model or data does not support is ``None``.

    Attributes:
        score: Returns the accuracy of a shared state on the server's own samples, which are neither
            training samples of a client nor test samples. It is in [0, 1].
        score_module: Returns the accuracy of a module on the same samples. Its layers may have
            other widths than the model's.
        module: Returns a new module that holds a shared state, in evaluation mode. It maps inputs
            ``(n, *shape)`` to logits ``(n, outputs)``. Modules never share tensors.
        to_inputs: Returns images ``(n, channels, height, width)`` in [0, 1] as the clients' models
            receive them.
        train: Returns the shared state after a fit on the server's own samples, given the initial
            state and the round, counted from 1. It trains like a client with these samples.
        shape: Shape of a sample as the model receives it.
        outputs: Number of the model's outputs.
        task: The kind of classification, see :class:`~flsuite.data.DataSpec`.
        seed: The run's seed.
        rounds: Rounds of the run, or ``None`` if another limit ends it.
        sampling: How cohorts are drawn, if the draw does not depend on data, times or availability.
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
        """Return the error of an aggregator that lacks a tool.

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
    """The server as seen by a part in one round.

    Attributes:
        state: The shared part of the global model. It must not be changed.
        layout: Names and groups of the shared entries.
        tools: Tools for scoring and training on the server.
        round: The current round, counted from 1.
        memory: The part's state between rounds: nested dicts of tensors and plain data. The
            checkpoint stores it.
        metrics: Metrics of the round, for the log.
        artifacts: Networks that a part has built in addition to the global model, by name. The run
            scores them and writes them to disk.
    """

    state: State
    layout: StateLayout
    tools: ServerTools
    round: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)

    def of(self, part: str) -> "Server":
        """Return the same view, with the memory of one part only."""
        return replace(self, memory=self.memory.setdefault(part, {}))


class Part:
    """One part of an algorithm: settings and functions, without state.

    Its state is in ``server.memory`` and ``client.memory``. One object can therefore serve several
    runs, and be sent to workers.

    Attributes:
        needs: What it requires of the other parts of a run.
        withholds: What it denies to the other parts, each with the reason.
    """

    needs: frozenset[Capability] = frozenset()
    withholds: Mapping[Capability, str] = {}

    def prepare(self, server: Server) -> None:
        """Refuse a model or a server that this part cannot work with.

        Called once, before the first round.

        Raises:
            FlsuiteError: If it cannot work with it. The message says what to change.
        """
        return

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what every client of the round receives for this part.

        The client half has it as ``client.received``, and a transform as ``fit.received``.
        """
        return {}


@dataclass(frozen=True)
class Sent:
    """The statistics that clients send, as declared to the other parts of a run.

    Attributes:
        name: Name of the rule.
        statistics: The statistics, by name.
    """

    name: str
    statistics: Mapping[str, Statistic]

    @property
    def withholds(self) -> Mapping[Capability, str]:
        """Return what the statistics deny to codecs."""
        for name, statistic in self.statistics.items():
            if statistic.is_psd:
                return {"rounded matrices": f"sends {name}, which rounding would make indefinite"}
        return {"matrices": "sends none"}


class Named(NamedTuple):
    """A part of a run with its config key.

    Attributes:
        key: The config key, such as ``trainer.aggregator.rule``.
        part: An object that may have ``needs`` and ``withholds``, like a :class:`Part`.
    """

    key: str
    part: Any

    @property
    def name(self) -> str:
        """Return the part's class name."""
        return str(getattr(self.part, "name", type(self.part).__name__))


def refuse_conflicts(parts: Iterable[Named]) -> None:
    """Refuse parts if one needs what another one withholds.

    Raises:
        FlsuiteError: If there is such a pair. The message names both, the reason, and what to
            change.
    """
    parts = list(parts)
    for place, one in enumerate(parts):
        for capability in sorted(getattr(one.part, "needs", ())):
            # A codec withholds dense changes only from the transforms after it.
            others = parts[:place] if capability == "dense changes" else parts
            for other in others:
                reason = getattr(other.part, "withholds", {}).get(capability)
                if reason is None or other.part is one.part:
                    continue
                remedy = _REMEDIES.get(capability)
                remedy = f" ({remedy})" if remedy else ""
                raise FlsuiteError(
                    f"{one.name} needs {capability}, but {other.name} {reason}; "
                    f"change {' or '.join(dict.fromkeys((one.key, other.key)))}{remedy}"
                )
