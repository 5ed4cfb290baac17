"""Base of an algorithm's parts: declared needs, the server's view, and typed statistics."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.common.client import ClientContext, Oracle
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, StateLayout, Tree
from flsuite.data.loader import TrainLoader
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
    "only noisy gradients",
    "rounded matrices",
    "matrices",
    "dense changes",
    "exact changes",
    "secure aggregation",
    "clients",
    "shared parameters",
    "a chain of Conv2d and Linear",
    "classes or labels",
    "worker processes",
    "a timeout of fits",
    "rounds",
    "durations known in advance",
]
"""A property that one part of a run needs and another part may withhold."""


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
        withholds: What it denies to the other parts, each with the reason, and after a semicolon
            what to change, if more can be said than to change one of the two parts.
    """

    needs: frozenset[Capability] = frozenset()
    withholds: Mapping[Capability, str] = {}

    def prepare(self, server: Server) -> None:
        """Refuse a model or a server that this part cannot work with.

        Called once, before the first round.

        Raises:
            FlsuiteError: If this part cannot work with the model or the server. The message says
                what to change.
        """
        return

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what every client of the round receives for this part.

        The client half has it as ``client.received``, and a transform as ``fit.received``.
        """
        return {}


class ClientHalf(Part):
    """A part that acts in a client's fit, by pure functions of the client's tensors.

    :meth:`gradient` and :meth:`trains` serve one client, or a stack of clients along a first axis:
    they must not look at numbers or change tensors in place. :meth:`start`, :meth:`end` and
    :meth:`measure` are called for each client, and may read numbers. The fit takes care of devices,
    precision, scaling, skipped steps, clipping and the optimizer.

    Attributes:
        batches_per_step: Batches per step of the optimizer.
    """

    batches_per_step: ClassVar[int] = 1

    @property
    def half(self) -> "ClientHalf":
        """Return the part that acts in a client's fit. Default: this one."""
        return self

    def check(self, model: LightningModule) -> None:
        """Refuse a model that this part cannot work with, before round 1.

        Raises:
            FlsuiteError: If it cannot.
        """
        return

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        """Return the weights that a fit starts from, and what its steps read (``held``).

        Args:
            client: The client's view of the round.
            w: All entries of the model. A changed entry is a new tensor.

        Returns:
            The entries, and tensors in dictionaries, with the same names for every client.
        """
        return w, {}

    def gradient(self, oracle: Oracle, w: State, held: Any, batch: Any) -> tuple[State, Any]:
        """Return the gradient of a step, and the ``held`` of the next step.

        Args:
            oracle: Returns gradients of the model's own loss at any weights.
            w: The model's trainable parameters.
            held: What :meth:`start` or the step before has returned.
            batch: It stands for the batch, to hand to the oracle. A pair, if ``batches_per_step``
                is 2.

        Returns:
            Entries of ``w``, where a missing entry takes no step, and tensors in the same
            dictionaries as ``held``.
        """
        return oracle(w, batch), held

    def trains(self, epoch: int, names: Collection[str]) -> Collection[str]:
        """Return the parameters that train in an epoch. The others rest.

        Args:
            epoch: The epoch of the fit, counted from 0. In a model's warm-up, it is negative.
            names: All trainable parameters.
        """
        return names

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        """Keep notes in ``client.memory``, and send statistics in ``client.extras``.

        Args:
            client: The client's view of the round.
            w: All entries of the trained model. They change in the next fit.
            held: What the last step has returned.
        """
        return

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        """Measure the trained model, without changing it, and send the result.

        A fit with known weights can be measured without training again: the result depends only on
        the weights, the client's samples, the seed and the round.

        Args:
            client: The client's view of the round.
            module: The trained model.
            loader: The client's training batches, see
                :meth:`~flsuite.data.loader.TrainLoader.plain_batches`.
        """
        return


class Named(NamedTuple):
    """What a part of a run declares to the other parts.

    Attributes:
        key: The part's config key, such as ``trainer.aggregator.rule``.
        name: Its name in messages.
        needs: What it requires of the other parts.
        withholds: What it denies to them, as in :class:`Part`.
        part: The part itself, if it is an object.
    """

    key: str
    name: str
    needs: Collection[Capability] = ()
    withholds: Mapping[Capability, str] = MappingProxyType({})
    part: Any = None


def name_of(part: Any) -> str:
    """Return a part's name in messages: its ``name``, or the name of its class."""
    return str(getattr(part, "name", type(part).__name__))


def named(key: str, part: Any) -> Named:
    """Return what an object declares, which may have ``needs`` and ``withholds``."""
    needs, withholds = getattr(part, "needs", ()), getattr(part, "withholds", {})
    return Named(key, name_of(part), needs, withholds, part)


def withheld_from_codecs(statistics: Mapping[str, Statistic]) -> Mapping[Capability, str]:
    """Return what the statistics that clients send deny to codecs."""
    for name, statistic in statistics.items():
        if statistic.is_psd:
            why = f"sends {name}, which rounding would make indefinite"
            return {"rounded matrices": f"{why}; set trainer.compression to LowRank"}
    return {"matrices": "sends none; set trainer.compression to Quantize"}


def model_and_data(server: Server) -> list[Named]:
    """Return what the shared part of the model and the data declare."""
    layout, of_model = server.layout, dict[Capability, str]()
    if not layout.parameters:
        of_model["shared parameters"] = (
            "keeps all of them with the clients; name fewer entries in model.private, or set "
            "trainer.aggregator to FedAvg"
        )
    if layout.buffers:
        of_model["only parameters"] = (
            f"sends {layout.buffers[0]}, which is a buffer, and noise would spoil it; set "
            "trainer.batchnorm to local, or take a model with GroupNorm"
        )
    if not layout.chain:
        of_model["a chain of Conv2d and Linear"] = f"has none: {layout.no_chain}"
    of_data: dict[Capability, str] = {}
    if server.tools.task == "other":
        of_data["classes or labels"] = "has other targets; choose another trainer.aggregator"
    return [
        Named("model", "the model", withholds=of_model),
        Named("data", "the data", withholds=of_data),
    ]


def refuse_conflicts(parts: Iterable[Named]) -> None:
    """Refuse parts if one needs what another one withholds.

    Raises:
        FlsuiteError: If there is such a pair. The message names both, the reason, and what to
            change.
    """
    parts = list(parts)
    for place, one in enumerate(parts):
        for capability in sorted(one.needs):
            # A codec withholds dense changes only from the transforms after it.
            others = parts[:place] if capability == "dense changes" else parts
            for other in others:
                if other is one or capability not in other.withholds:
                    continue
                why, _, remedy = other.withholds[capability].partition("; ")
                remedy = f" ({remedy})" if remedy else ""
                raise FlsuiteError(
                    f"{one.name} needs {capability}, but {other.name} {why}; "
                    f"change {' or '.join(dict.fromkeys((one.key, other.key)))}{remedy}"
                )
