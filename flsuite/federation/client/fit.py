"""A client's fit as its algorithm sees it, and the steps that the algorithm changes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from flsuite.aggregators.halves import Halves
from flsuite.aggregators.losses import loss_and_gradient, mean_loss, random_state
from flsuite.aggregators.objectives.checks import no_change_in_place
from flsuite.common.client import ClientContext, Evaluation, Taken
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import scaler_of
from flsuite.common.state import State, load_
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.algorithm_steps import AlgorithmSteps
from flsuite.federation.client.tensor_optimizer import TensorOptimizer
from flsuite.federation.client.term_hooks import TermHooks
from flsuite.models.abilities import extra_epochs
from flsuite.models.layers import entry_names


class Batch(NamedTuple):
    """A batch, its number in the epoch, and the random state of the model's own step."""

    samples: Any
    number: int
    draws: Any


class OneFit:
    """The fit of one client, see :class:`~flsuite.common.client.ClientFit`.

    Args:
        trainer: The Trainer of the fit.
        module: The model.
        loader: The client's batches.
        state: All entries of the client's model. Default: they are the module's own.
        continues: Whether the optimizers continue from the client's last fit.
        optimizers: The model's optimizers. Default: they are the Trainer's.

    Attributes:
        state: All entries of the client's model, or empty if they are the module's own.
        trained: The trainable parameters, also those that rest in some epochs.
        is_private: Whether the client trains by DP-SGD.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        loader: TrainLoader,
        state: State | None = None,
        continues: bool = False,
        optimizers: Sequence[Optimizer] | None = None,
    ) -> None:
        self.trainer, self.module, self.loader = trainer, module, loader
        self.state = state or {}
        own = dict(module.named_parameters())
        self.trained = {name: p for name, p in own.items() if p.requires_grad}
        names = self.state or entry_names(module)
        self.buffers: Sequence[str] = [name for name in names if name not in own]
        self.optimizers: Sequence[Optimizer] = optimizers or trainer.optimizers
        self.clips, self.continues = bool(trainer.gradient_clip_val), continues
        self.is_private = is_private(module)
        self.taken: list[Taken] = []
        self._index = 0

    @property
    def batch_size(self) -> int:
        return self.loader.data.batch_size

    @property
    def rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def evaluate(self, at: State, batch: Any, in_full: bool = False) -> Evaluation:
        here = {name: value.to(self.module.device) for name, value in at.items()}
        return self.evaluate_again(here, Batch(batch, self._index, None), in_full)

    def evaluate_again(self, at: State, batch: Batch, in_full: bool) -> Evaluation:
        """Return the loss at some weights, with the random numbers of the model's own step."""
        given = {**self.state, **at}
        own = {name: value for name, value in at.items() if name in self.trained}
        others = {name: value.clone() for name, value in given.items() if name in self.buffers}
        rest = {k: v for k, v in given.items() if k not in own and k not in others}
        step = self.trainer, self.module, own, batch.samples, batch.number
        loss, gradient = loss_and_gradient(*step, others | rest, in_full, batch.draws)
        return Evaluation(loss, gradient, {k: v for k, v in others.items() if k in at})

    def mean_loss(self, at: State) -> float:
        return mean_loss(self.trainer, self.module, {**self.state, **at}, self.batches())

    def batches(self, samples: int | None = None, batch_size: int = 500) -> Iterator[Any]:
        if self.is_private:
            raise FlsuiteError(
                "this aggregator reads samples of the client without the noise of DPSGD; choose "
                "another trainer.aggregator, or leave out DPSGD"
            )
        for index, batch in enumerate(self.loader.plain_batches(samples, batch_size)):
            self._index = index
            moved = self.module.transfer_batch_to_device(batch, self.module.device, 0)
            yield self.module.on_after_batch_transfer(moved, 0)

    def steps(self, name: str) -> int:
        return sum(taken.steps for taken in self.taken if name in taken.names)

    def record(self, step: Taken) -> None:
        """Record a step of an optimizer."""
        if self.taken and self.taken[-1][:3] == step[:3]:
            step = Taken(*step[:3], self.taken.pop().steps + 1)
        self.taken.append(step)


def one_step(optimizer: Optimizer, names: frozenset[str]) -> Taken:
    """Return one step of an optimizer for parameters of these names."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return Taken(optimizer, options, names, 1)


class OneSteps:
    """The steps of one client's fit, as an algorithm changes them.

    Args:
        halves: The parts of the algorithm.
        client: The client's view of the round.
        fit: The fit.
    """

    def __init__(self, halves: Halves, client: ClientContext, fit: OneFit) -> None:
        self.halves, self.client, self.fit = halves, client, fit
        client.fit = fit
        trainer, module = fit.trainer, fit.module
        if halves.batches_per_step > 1:
            _require_plain_steps(trainer, halves.batches_per_step)

        own = module.state_dict()
        state = {name: own[name] for name in entry_names(module)}
        w, helds = halves.start(client, state)
        # Before the model takes w, because what is held may be its tensors of before.
        kept = self._kept()
        self.algorithm = AlgorithmSteps(halves, self, [tree_map(kept, held) for held in helds])
        load_(own, {name: value for name, value in w.items() if value is not state[name]})
        self._warmup = extra_epochs(module)
        self._stepping: dict[int, list[tuple[str, Tensor]]] = {}
        self._second: dict[str, list[TensorOptimizer]] = {}
        self._batch = Batch((), 0, None)
        self._w: State = {}  # the present weights, while the model has other ones
        self._term = TermHooks(halves.term, trainer, module) if halves.term else None

    @property
    def weights(self) -> State:
        return {name: p.detach() for name, p in self.fit.trained.items()}

    @property
    def rate(self) -> float:
        return self.fit.rate

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def of_all(self, at: State) -> State:
        return at

    def evaluate(self, at: State, batch: Batch, in_full: bool) -> Evaluation:
        if self.fit.trainer.accumulate_grad_batches != 1:
            raise FlsuiteError(
                "this aggregator computes gradients at other weights batch by batch; leave out "
                "trainer.accumulate_grad_batches"
            )
        with no_change_in_place(self.fit.module, batch.samples):
            return self.fit.evaluate_again(at, batch, in_full)

    def step_other(self, name: str, v: State, gradient: State) -> State:
        trainer, trained = self.fit.trainer, self.fit.trained
        if name not in self._second:
            names = {id(p): name for name, p in trained.items()}
            own = {name: torch.empty_like(p) for name, p in trained.items() if name in v}
            self._second[name] = [TensorOptimizer(one, names, own) for one in trainer.optimizers]
        clipped = _clipped({k: gradient[k] for k in trained if k in v and k in gradient}, trainer)
        for optimizer in self._second[name]:
            v = optimizer.step_from(v, clipped)
        return v

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: some parameters may rest in it."""
        if not self.halves.has_phases:
            return
        trained = self.fit.trained
        names = self.halves.trains(epoch - self._warmup, trained.keys())
        # A frozen parameter has no gradient, so the optimizer leaves it. The worker restores this.
        for name, parameter in trained.items():
            parameter.requires_grad_(name in names)

    def begin_step(self, batch: Any, index: int) -> None:
        """Begin a step on a batch."""
        self._return_to_w()  # the model may have skipped a batch
        changes = self.halves.changes_gradients
        draws = random_state(self.fit.module.device) if changes else None
        self._batch = Batch(batch, index, draws)
        if not self.fit.is_private and (at := self.algorithm.ahead()):
            for name, parameter in self.fit.trained.items():
                self._w[name], parameter.data = parameter.data, at[name]
        if self._term:
            self._term.begin_step(batch, index, self.algorithm.held)

    def change(self, optimizer: Optimizer, is_last: bool) -> None:
        """Change the gradients of a step, which are unscaled and not yet clipped.

        Args:
            optimizer: The optimizer that is about to step.
            is_last: Whether this is the last step of the fit.
        """
        self._return_to_w()
        stepping = self._about_to_step(optimizer)
        own = {name: p.grad for name, p in stepping if p.grad is not None}
        gradient = self.algorithm.gradient(own, self._batch, is_last)
        if gradient is None:
            gradient = {}
        else:
            names = frozenset(name for name, _ in stepping if name in gradient)
            self.fit.record(one_step(optimizer, names))
        for name, parameter in stepping:
            parameter.grad = gradient.get(name)  # the optimizer leaves those without one

    def end_step(self) -> None:
        """End a step."""
        self._return_to_w()  # a step without a loss has changed nothing
        if self._term:
            self._term.end_step()

    def end(self) -> None:
        """End the fit."""
        self.close()
        if self._term:
            self._term.require_called()
        own = self.fit.module.state_dict()
        w = {name: own[name] for name in entry_names(self.fit.module)}
        self.halves.end(self.client, w, self.algorithm.helds)

    def close(self) -> None:
        """Leave the model at its present weights and without hooks."""
        self._return_to_w()
        if self._term:
            self._term.close()

    def _return_to_w(self) -> None:
        """Return to the present weights after a step at other ones."""
        for name, value in self._w.items():
            self.fit.trained[name].data = value
        self._w = {}

    def _kept(self) -> Callable[[Tensor], Tensor]:
        """Return a function that gives tensors to hold: apart from the model's, on its device."""
        module = self.fit.module
        tensors = chain(module.parameters(), module.buffers())
        own = {value.untyped_storage().data_ptr() for value in tensors}

        def kept(value: Tensor) -> Tensor:
            is_own = value.untyped_storage().data_ptr() in own
            return value.detach().clone() if is_own else value.to(module.device)

        return kept

    def _about_to_step(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer by name."""
        if id(optimizer) not in self._stepping:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = self.fit.trained.items()
            self._stepping[id(optimizer)] = [(name, p) for name, p in own if id(p) in ids]
        return self._stepping[id(optimizer)]


def _clipped(gradient: State, trainer: Trainer) -> State:
    """Return a gradient clipped as the Trainer does. The given one stays: it may be held."""
    if not (limit := trainer.gradient_clip_val) or not gradient:
        return gradient
    like = {name: torch.empty_like(value) for name, value in gradient.items()}
    for name, value in gradient.items():
        like[name].grad = value.clone()
    by_value = trainer.gradient_clip_algorithm == "value"
    (clip_grad_value_ if by_value else clip_grad_norm_)(like.values(), float(limit))
    return {name: one.grad for name, one in like.items() if one.grad is not None}


def is_private(module: LightningModule) -> bool:
    """Return whether DP-SGD trains a model: Opacus keeps the gradients of its samples."""
    return hasattr(module, "autograd_grad_sample_hooks")


def _require_plain_steps(trainer: Trainer, batches: int) -> None:
    is_simple = trainer.lightning_module.automatic_optimization and len(trainer.optimizers) == 1
    is_simple = is_simple and not isinstance(trainer.optimizers[0], LBFGS)  # more than one a batch
    if not is_simple or scaler_of(trainer) or trainer.accumulate_grad_batches != 1:
        raise FlsuiteError(
            f"this aggregator steps once per {batches} batches, with one optimizer, not LBFGS, and "
            "no scaler; set precision to bf16-mixed, leave out accumulate_grad_batches, or change "
            "the model"
        )
