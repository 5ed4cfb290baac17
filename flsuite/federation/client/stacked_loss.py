"""The losses of many clients' training steps as one program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.losses import Draws, step_loss
from flsuite.aggregators.objectives.checks import no_change_in_place
from flsuite.aggregators.objectives.feature_term import (
    FeatureTerm,
    compared_of,
    features_at,
    inputs_of,
    logits_of,
    outputs_of,
    term_of,
)
from flsuite.common.state import State
from flsuite.federation.client.logs import logged_values
from flsuite.federation.client.recorded import Recorder
from flsuite.federation.client.trainer import ClientTrainer

Numbers = dict[tuple[str, bool], Tensor]


@dataclass
class StackGroup:
    """Clients of a stack that take a step together.

    Attributes:
        places: Their places in the stack.
        at: The same as an index of the first axis.
        batch: Their batches, ``(clients, batch, ...)``.
        index: The number of the batch in its epoch, or one per client, int64 ``(clients,)``.
        sizes: How many samples of a batch count, ``(clients,)``. The others fill up smaller
            batches. Default: all.
        draws: The random state of their own step, to compute it again at other weights.
    """

    places: Sequence[int]
    at: Any
    batch: Any
    index: int | Tensor
    sizes: Tensor | None = None
    draws: Draws | None = None

    def samples(self) -> list[int]:
        """Return how many samples of each batch count."""
        size = tree_leaves(self.batch)[0].shape[1]
        return [size] * len(self.places) if self.sizes is None else self.sizes.tolist()


@dataclass
class StackedStep:
    """What one training step of a group of clients gives, with one row per client.

    Attributes:
        losses: ``(clients,)``, without the term of the features.
        gradients: By name of the parameter, ``(clients, ...)``, or ``(clients, batch, ...)`` by
            sample. Those that the loss does not depend on are left out.
        buffers: Buffers after the step.
        logged: What the model logs, by its name and whether it is the value of a step. The rest are
            means over an epoch.
    """

    losses: Tensor
    gradients: State
    buffers: State
    logged: Numbers


class StackedLoss:
    """Computes the losses of many clients' training steps, and their gradients.

    Args:
        model: The structure. Its weights are not used.
        trainer: Gives the precision.
        term: A term of the features in each loss.
        recorder: Replays steps that have been recorded.
    """

    def __init__(
        self,
        model: LightningModule,
        trainer: ClientTrainer,
        term: FeatureTerm | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.trainer, self.term, self._recorder = model, trainer, term, recorder
        self.head = term.head_in(model) if term else ""
        self.buffers = [name for name, _ in model.named_buffers()]
        self._in_full = False
        on_cpu = trainer.strategy.root_device.type == "cpu"  # a GPU copies in any order
        is_large = on_cpu and any(_is_large(parameter) for parameter in model.parameters())
        self._layers: AbstractContextManager[Any] = _WeightsFirst() if is_large else nullcontext()

    def step(
        self,
        parameters: State,
        others: State,
        batch: Any,
        index: int | Tensor,
        held: Any,
        sizes: Tensor | None = None,
        by_sample: bool = False,
        in_full: bool = False,
    ) -> StackedStep:
        """Return what a step of a group of clients gives. Nothing changes in place.

        Args:
            parameters: What the gradients are with respect to, each ``(clients, ...)``.
            others: The other tensors of the models.
            batch: ``(clients, batch, ...)``.
            index: See :class:`StackGroup`. A step that decides by it what to compute can only run
                for clients with the same one.
            held: What the term reads of each client.
            sizes: See :class:`StackGroup`. Then a loss is the mean over samples, and buffers stay.
            by_sample: Whether to return the gradients of the samples' losses. It needs ``sizes``.
            in_full: Whether to compute in the precision of the weights, without autocast.
        """
        given = parameters, others, batch, held, sizes
        step = partial(self._step, by_sample, in_full)
        if self._recorder is None:
            return StackedStep(*step(index, *given))
        kind = by_sample, in_full, self.term is None
        return StackedStep(*self._recorder.step(step, index, given, kind))

    def _step(
        self,
        by_sample: bool,
        in_full: bool,
        index: int | Tensor,
        parameters: State,
        others: State,
        batch: Any,
        held: Any,
        sizes: Tensor | None,
    ) -> tuple[Tensor, State, State, Numbers]:
        """Return the parts of a :class:`StackedStep`."""
        leaves = {name: value.detach() for name, value in parameters.items()}
        if by_sample:
            size = tree_leaves(batch)[0].shape[1]
            leaves = {k: v[:, None].expand(-1, size, *v.shape[1:]) for k, v in leaves.items()}
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        loss: Callable[..., Any] = self._loss
        parts: tuple[Tensor, ...] = ()
        if sizes is not None:
            loss, parts = partial(self._mean_loss, by_sample=by_sample), (sizes,)
        self._in_full = in_full
        with _uncached_casts():
            axes = (0, 0, 0, 0, 0 if isinstance(index, Tensor) else None, *(0 for _ in parts))
            together = torch.vmap(loss, axes, randomness="different")
            with self._layers:
                ends = together(leaves, others, batch, held, index, *parts)
        totals, losses, buffers, logged = ends

        # A client's loss depends on its own parameters alone, so these are its gradients.
        gradients = torch.autograd.grad(totals.sum(), list(leaves.values()), allow_unused=True)
        used = {k: g for k, g in zip(leaves, gradients, strict=True) if g is not None}
        return losses.float(), _apart(used), buffers, logged

    def _mean_loss(
        self,
        parameters: State,
        others: State,
        batch: Any,
        held: Any,
        index: int | Tensor,
        size: Tensor,
        by_sample: bool,
    ) -> tuple[Tensor, Tensor, State, Numbers]:
        """Return what :meth:`_loss` returns, as means over the first samples of a batch.

        By sample, each has parameters of its own, and the losses to differentiate are its own.
        """

        def of_one(own: State, sample: Any) -> tuple[Tensor, Tensor, Numbers]:
            alone = tree_map(lambda part: part[None], sample)
            total, loss, _, logged = self._loss(own, others, alone, held, index)
            return total, loss, logged

        def mean(values: Tensor) -> Tensor:
            counts = torch.arange(len(values), device=values.device) < size
            return (counts * values).sum() / size

        axes = (0 if by_sample else None, 0)
        of_all = torch.vmap(of_one, in_dims=axes, randomness="different")
        totals, losses, logged = of_all(parameters, batch)
        buffers = {name: others[name] for name in self.buffers}
        total = totals if by_sample else mean(totals)
        return total, mean(losses), buffers, {k: mean(v) for k, v in logged.items()}

    def _loss(
        self, parameters: State, others: State, batch: Any, held: Any, index: int | Tensor
    ) -> tuple[Tensor, Tensor, State, Numbers]:
        """Return one client's loss with and without the term, its buffers, and what it logs."""
        buffers = {name: others[name].clone() for name in self.buffers}
        tensors = {**others, **buffers, **parameters}
        logged: Numbers = {}

        def features_of(weights: State) -> Tensor:
            at = {**tensors, **weights}
            return features_at(self.trainer, self.model, self.head, at, batch, index)

        term, seen, ends = self.term, list[Tensor](), dict[str, Tensor]()
        with no_change_in_place(term, held):  # without a term, nothing is held
            compared = compared_of(term, features_of, held) if term else []
            # As in Lightning, the backward pass is outside.
            with ExitStack() as entered:
                if term:
                    seen = entered.enter_context(inputs_of(self.model, self.head))
                    entered.enter_context(
                        outputs_of(self.model, self.head, lambda z: logits_of(term, z, batch, held))
                    )
                if not self._in_full:
                    entered.enter_context(self.trainer.precision_plugin.train_step_context())
                log = partial(self._log, logged, tree_leaves(batch)[0].shape[0])
                loss = step_loss(self.model, tensors, batch, index, log, ends)

            if term and not seen:
                raise RuntimeError(f"a step does not call {self.head}")
            terms = [term_of(term, z, compared, batch, held) for z in seen] if term else []
        total = sum((added for added in terms if added is not None), loss)
        after = {name: ends[name].detach() for name in self.buffers}
        return total, loss.detach(), after, logged

    def _log(
        self, logged: Numbers, size: int, name: str, value: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Add what a step logs on a batch of so many samples to the values by name."""
        for one in logged_values(size, name, value, *args, **kwargs):
            place = one.name, one.is_of_step
            logged[place] = one.value.to(self.trainer.strategy.root_device)


def with_rows(whole: State, group: StackGroup, rows: State, like: State) -> State:
    """Return one tensor per name for all clients of a stack, with a group's rows put in.

    Args:
        whole: The rows of other groups. Missing ones are zero.
        group: The group. One of all clients needs no copy.
        rows: Its rows.
        like: Tensors of all clients, for the shapes.
    """
    if isinstance(group.at, slice):
        return rows
    for name, value in rows.items():
        if name not in whole:
            whole[name] = torch.zeros_like(like[name])
        whole[name][group.at] = value
    return whole


def _apart(gradients: State) -> State:
    """Return gradients that may be changed in place: none shares memory with another."""
    seen = set[int]()
    own: State = {}
    for name, gradient in gradients.items():
        place = gradient.untyped_storage().data_ptr()
        is_own = place not in seen and gradient.is_contiguous()
        own[name] = gradient if is_own else gradient.clone(memory_format=torch.contiguous_format)
        seen.add(place)
    return own


def clipped(trainer: ClientTrainer, gradients: State) -> State:
    """Return each client's gradients clipped by their own norm or value, as the Trainer does.

    Args:
        trainer: Gives the limit.
        gradients: Each ``(clients, ...)``. They stay, because the algorithm may hold them.
    """
    if not (limit := trainer.gradient_clip_val) or not gradients:
        return gradients
    if trainer.gradient_clip_algorithm == "value":
        return {name: g.clamp(-float(limit), float(limit)) for name, g in gradients.items()}
    norms = [gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients.values()]
    factors = (float(limit) / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1.0)
    return {k: g * factors.view(-1, *[1] * (g.ndim - 1)) for k, g in gradients.items()}


def _is_large(weight: Tensor) -> bool:
    """Return whether the memory order of a weight's gradient matters."""
    return weight.ndim == 2 and weight.numel() > 4096


class _WeightsFirst(TorchFunctionMode):
    """Computes large linear layers as weights times inputs.

    The gradients of a stack's weights then have the memory order of the weights. The gradients of
    inputs times weights do not, and copying them is slow.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            # The outputs are copied instead, because a model may view them. They are smaller.
            if _is_large(weight) and x.ndim == 2 and 1 < x.shape[0] < x.shape[1]:
                if bias is None:
                    return torch.mm(weight, x.mT).mT.contiguous()
                if bias.ndim == 1:
                    return torch.addmm(bias[:, None], weight, x.mT).mT.contiguous()
        return func(*args, **(kwargs or {}))


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Turn off autocast's cache, because a cached cast would belong to one level of ``vmap``."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
