"""A client's view of its fit: what an algorithm can read, compute and keep there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, StateLayout


class Evaluation(NamedTuple):
    """The loss of a training step at some weights.

    Attributes:
        loss: A scalar.
        gradient: Its gradient with respect to the given parameters. Parameters that the loss does
            not depend on are left out.
        buffers: The given buffers after the step, such as BatchNorm statistics.
    """

    loss: Tensor
    gradient: State
    buffers: State


class BatchHandle(int):
    """Stands for a batch of the present step, to hand to the oracle."""

    def _refuse(self, *args: Any) -> Any:
        raise FlsuiteError(
            "gradient cannot read the batch, which only stands for its samples: hand it to the "
            "oracle, or state a term of the samples as a FeatureTerm"
        )

    __iter__ = __getitem__ = __len__ = _refuse


class Oracle(Protocol):
    """Gradients of the model's own ``training_step``, at any weights.

    Called at ``w``, it returns the gradient that the fit has already computed: unscaled, before
    clipping, with the term and the logits of the objective, and the BatchNorm statistics of the
    model are updated once. At other weights, the loss is the one of the model alone, the model's
    statistics stay, and the step draws the same random numbers again, as for dropout. Of two
    batches per step, the fit has computed the second one where it is asked for first.
    """

    @property
    def rate(self) -> float:
        """Return the learning rate of the model's first optimizer."""

    def __call__(self, at: State, batch: Any, in_full: bool = False) -> State:
        """Return the gradient of the loss on a batch.

        Args:
            at: Values of parameters. Other entries have the model's values and no gradient.
            batch: A batch that the objective has received.
            in_full: Whether to compute in the precision of the weights, without autocast.
        """

    def evaluate(self, at: State, batch: Any, in_full: bool = False) -> Evaluation:
        """Return the loss, its gradient, and the buffers among ``at`` after the step."""

    def step(self, name: str, v: State, gradient: State) -> State:
        """Take a step with a copy of the model's optimizer, and return the new weights.

        The copy starts anew in every fit. The Trainer's clipping applies.

        Args:
            name: A name for the weights. Each has its own optimizer state.
            v: The weights, by names of the model's parameters. Other entries stay.
            gradient: Their gradient. An entry that is missing takes no step.
        """


class Taken(NamedTuple):
    """Consecutive steps of one optimizer with the same settings, for the same parameters.

    Attributes:
        optimizer: The optimizer.
        settings: The options of its parameter groups, without the parameters.
        names: Names of the parameters that stepped.
        steps: The number of steps.
    """

    optimizer: Optimizer
    settings: list[dict[str, Any]]
    names: frozenset[str]
    steps: int


class ClientFit(Protocol):
    """A client's fit, while its algorithm starts or ends it. Numbers may be read here.

    Attributes:
        buffers: Names of the model's entries that are not parameters.
        optimizers: The model's optimizers, at the start of the fit.
        clips: Whether the Trainer clips gradients.
        continues: Whether the optimizers continue from the client's last fit.
        taken: The steps so far, without those that a gradient scaler skipped.
    """

    buffers: Sequence[str]
    optimizers: Sequence[Optimizer]
    clips: bool
    continues: bool
    taken: list[Taken]

    def evaluate(self, at: State, batch: Any) -> Evaluation:
        """Return the loss on a batch at some weights, see :meth:`Oracle.evaluate`."""

    def mean_loss(self, at: State) -> float:
        """Return the mean loss over the client's samples at some weights, in evaluation mode."""

    def batches(self, samples: int | None = None, batch_size: int = 500) -> Iterator[Any]:
        """Yield the client's samples in order, without augmentation, on the model's device.

        Args:
            samples: Maximum number of samples, a random subset. Default: all.
            batch_size: Samples per batch. Default: large batches.
        """

    @property
    def batch_size(self) -> int:
        """Return the samples per training batch."""

    def steps(self, name: str) -> int:
        """Return the number of steps that a parameter has taken."""


@dataclass
class ClientContext:
    """The part of a fit that the client half of an algorithm can see and change.

    Attributes:
        id: The client's number.
        round: The round, counted from 1.
        samples: Number of training samples.
        class_counts: Training samples per class (per label in a multi-label task), int64
            ``(classes,)``.
        global_state: The shared model as received. It must not be changed.
        received: What the objective and the rule broadcast in addition to the model. It must not be
            changed.
        memory: The client's own notes, plain data. The objective and the rule share them. They
            persist between the client's rounds and are never sent.
        extras: What to send with the update: nested dicts of tensors and numbers.
        metrics: Metrics of this fit, for the log.
        layout: Names and groups of the shared entries.
        fit: The running fit, at its start and its end.
    """

    id: int
    round: int
    samples: int
    class_counts: Tensor
    global_state: State
    received: dict[str, Any]
    memory: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    layout: StateLayout = field(default_factory=lambda: StateLayout((), 0))
    fit: ClientFit = None  # type: ignore[assignment]  # set by the fit
