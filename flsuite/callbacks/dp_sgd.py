"""DP-SGD on every client: Abadi et al. 2016, algorithm 1, with per-sample gradients from Opacus.

Deep Learning with Differential Privacy, arXiv:1607.00133.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from flsuite.aggregators.objectives.feature_term import FeatureTerm
from flsuite.aggregators.part import Capability, Statistic, named, refuse_conflicts
from flsuite.callbacks.base import FederationCallback
from flsuite.common.arguments import PositiveFloat, Settings, SmallProbability
from flsuite.common.errors import FlsuiteError, one_line, require_extra
from flsuite.common.lightning_internals import scaler_of
from flsuite.common.messages import Outcome
from flsuite.common.random import torch_generator
from flsuite.common.state import State
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.callbacks import SampleGradients
from flsuite.federation.server.federation import Federation
from flsuite.metrics.privacy import (
    RandomDraw,
    Release,
    epsilon,
    epsilon_of,
    kept_logging,
    require_small_delta,
)
from flsuite.models.layers import batchnorm_layers
from flsuite.models.modes import kept_modes
from flsuite.runs.run import Run

_LEFT_OVER = {"activations", "max_batch_len"}


@dataclass(eq=False)
class DPSGD(FederationCallback, SampleGradients, Settings):
    """Sample-level differential privacy of every client against the server.

    Take it to hide from the server whether a client has a sample.

    Each sample's gradient, over all trainable parameters, is clipped to the L2 norm
    ``max_grad_norm``. Gaussian noise is added to the sum, which is divided by the mean batch size.
    Each sample is drawn for a batch independently, with a mean batch size of ``data.batch_size``.
    The number of steps per epoch does not change, but an epoch no longer visits every sample once.
    The terms of an algorithm, such as FedProx's, are added after the noise.

    The guarantee protects one sample of a client against anyone who sees all of the client's
    updates. It does not cover numbers about a fit, such as its loss, or the client's class counts.
    The model's loss and a term of features must be means over the samples of a batch, and nothing
    else may depend on them.

    Every round logs ``sample_epsilon`` per client, the maximum over all clients so far as a global
    number, and ``sample_delta``. An update that the server refuses, or that arrives late, counts
    too, because it was sent. A client that fails before sending reveals nothing.

    Args:
        noise_multiplier: Standard deviation of the noise, in multiples of ``max_grad_norm``.
        max_grad_norm: Largest L2 norm of a sample's gradient.
        delta: Delta of the guarantee, below one over the mean number of a client's samples. It
            should be well below one over the largest client's.
    """

    reads_updates: ClassVar[bool] = False
    needs: ClassVar[frozenset[Capability]] = frozenset({"only noisy gradients"})

    noise_multiplier: PositiveFloat = 1.0
    max_grad_norm: PositiveFloat = 1.0
    delta: SmallProbability = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps: dict[int, int] = {}  # of each client, over all its rounds
        self._sent: dict[int, int] = {}  # updates of each client
        self._spent: dict[int, float] = {}
        self._undo = ExitStack()  # what a fit has changed in the resident model

    # One client's fit

    def begin(self, loader: TrainLoader) -> None:
        loader.is_poisson = True
        self._loader = loader
        self._mean_size = min(loader.data.batch_size, len(loader.data.train_rows(loader.client)))
        stream = f"dp_sgd/{loader.repeat}"
        self._generator = torch_generator(loader.seed, stream, loader.round, loader.client)

    def gradient(self, samples: State, parameters: State, index: int) -> State:
        # A bfloat16 norm is off by half a percent, so clipped gradients would be too long.
        wide = {k: g.to(torch.promote_types(g.dtype, torch.float32)) for k, g in samples.items()}
        norms = [g.reshape(len(g), -1).norm(dim=1) for g in wide.values()]
        lengths = torch.stack(norms).norm(dim=0).clamp(min=1e-12)
        factors = (self.max_grad_norm / lengths).clamp(max=1.0)
        if not self._loader.drawn[index]:
            factors = torch.zeros_like(factors)  # no sample was drawn: the step is pure noise

        deviation, gradient = self.noise_multiplier * self.max_grad_norm, State()
        for name, parameter in parameters.items():
            noise = torch.randn(parameter.shape, generator=self._generator, dtype=torch.float64)
            total = (deviation * noise).to(parameter)
            if name in wide:
                total += torch.einsum("n,n...->...", factors, wide[name])
            gradient[name] = total / self._mean_size
        return gradient

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1 or scaler_of(trainer) is not None:
            raise FlsuiteError(
                "DPSGD clips the gradients of each batch separately and unscaled; leave out "
                "trainer.accumulate_grad_batches, and set trainer.precision to 32-true"
            )
        self.begin(trainer.train_dataloader)  # type: ignore[arg-type]
        self._batch = 0
        named = pl_module.named_parameters()
        self._trained: dict[str, Any] = {name: p for name, p in named if p.requires_grad}
        self._add_hooks(pl_module)

    def _add_hooks(self, module: LightningModule) -> None:
        """Let the resident model keep per-sample gradients, until the end of the fit."""
        for part in module.modules():
            # The hooks of Opacus read a layer's output, which must not be overwritten.
            if vars(part).get("inplace"):
                self._undo.callback(setattr, part, "inplace", True)
                part.inplace = False  # type: ignore[assignment]
            # Opacus reads a convolution's input as if its memory were contiguous. Where it is not,
            # as with images in color, it returns other gradients of the weights, without an error.
            if isinstance(part, _ConvNd):
                self._undo.callback(part.register_forward_pre_hook(_contiguous).remove)
        self._undo.callback(_remove_left_over, module)
        self._undo.callback(_opacus().GradSampleHooks(module).cleanup)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch_idx
        if not all(p.requires_grad for p in self._trained.values()):
            raise FlsuiteError(
                "DPSGD: the aggregator freezes layers in some epochs, as FedRep and FedBABU do; "
                "choose another trainer.aggregator, or leave out DPSGD"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # Opacus stores the per-sample gradients as an attribute of the parameter.
        own = {name: p.grad_sample for name, p in self._trained.items()}
        samples = {name: gradient for name, gradient in own.items() if gradient is not None}
        for name, gradient in self.gradient(samples, self._trained, self._batch).items():
            self._trained[name].grad, self._trained[name].grad_sample = gradient, None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo.close()

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        self._undo.close()

    # The federation

    def on_federation_start(self, run: Run) -> None:
        if run.round == 0:
            self._steps, self._sent, self._spent = {}, {}, {}
        if run.federation.data.at(run.round).stage is not None:
            raise FlsuiteError(
                "DPSGD: tasks in sequence change a client's samples, which epsilon takes as fixed; "
                "leave out TaskSequence"
            )
        if run.federation.schedule.sees_updates:
            raise FlsuiteError(
                "DPSGD: losses of clients, which have no noise, decide who takes part; set "
                "trainer.schedule.sampling to uniform"
            )
        layout = run.federation.server.layout
        mean = layout.samples // layout.clients
        require_small_delta("DPSGD", self.delta, mean, "the mean number of a client's samples")
        refuse_conflicts(
            [*run.federation.aggregator.named_parts(), named("trainer.callbacks", self)]
        )
        _refuse_algorithm(run.federation)
        _refuse_unsupported(run.evaluator.model)
        epsilon(RandomDraw(2, 1.0, True), 1.0, 1, self.delta)  # fails now if its package is missing

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        sent = outcome if outcome.failed else outcome.update
        if not sent.steps:
            return

        client, data = sent.client, run.federation.data
        samples = data.samples(client)
        self._steps[client] = self._steps.get(client, 0) + sent.steps
        self._sent[client] = self._sent.get(client, 0) + 1

        batches = RandomDraw(samples, float(min(data.batch_size, samples)), is_poisson=True)
        releases = [Release(batches, self.noise_multiplier, self._steps[client])]
        for statistic in _statistics(run.federation).values():
            if statistic.release is not None:
                own = statistic.release(samples)
                releases.append(own._replace(times=own.times * self._sent[client]))

        spent = epsilon_of(releases, self.delta)
        self._spent[client] = spent
        run.log_metric("sample_epsilon", spent, scope=client)

    def on_round_end(self, run: Run, round: int) -> None:
        run.log_metric("sample_epsilon", max(self._spent.values(), default=0.0))
        run.log_metric("sample_delta", self.delta)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": dict(self._steps), "sent": dict(self._sent), "spent": dict(self._spent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps, self._sent = dict(state_dict["steps"]), dict(state_dict["sent"])
        self._spent = dict(state_dict["spent"])


def _remove_left_over(module: nn.Module) -> None:
    """Remove what Opacus leaves after an error: data that the backward pass had not consumed."""
    for part in module.modules():
        for name in _LEFT_OVER & vars(part).keys():
            delattr(part, name)


def _contiguous(part: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.contiguous() for value in inputs)


def _opacus() -> Any:
    # The first layer needs no gradient of its inputs.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    require_extra("DPSGD", ("opacus",), "privacy")
    with kept_logging():
        from opacus.grad_sample import grad_sample_module
    return grad_sample_module


def _statistics(federation: Federation) -> Mapping[str, Statistic]:
    return federation.aggregator.statistics(federation.server.layout, federation.state)


def _refuse_algorithm(federation: Federation) -> None:
    """Refuse an algorithm that reveals samples of the clients without noise.

    Its clients may send measurements, or a user's objective may change the logits. Objectives that
    compute gradients at other weights, or read samples when a fit starts, are refused there.

    Raises:
        FlsuiteError: If it does. The message names the statistic or the objective.
    """
    statistics = _statistics(federation).items()
    if measured := [n for n, s in statistics if not s.from_steps and s.release is None]:
        raise FlsuiteError(
            f"DPSGD: clients of {federation.aggregator.name} also send {', '.join(measured)} "
            "without noise; choose another trainer.aggregator, or leave out DPSGD"
        )
    objective = federation.aggregator.objective
    kind: Any = type(objective)
    has_logits = isinstance(objective, FeatureTerm) and kind.logits is not FeatureTerm.logits
    # A term is clipped, and no other function of a client half sees a sample.
    if has_logits and not kind.__module__.startswith("flsuite."):
        raise FlsuiteError(
            f"DPSGD: {kind.__name__}.logits sees samples, which its change of the "
            "logits would reveal without noise; leave the method out, state it as the term of the "
            "features, or leave out DPSGD"
        )


def _refuse_unsupported(model: LightningModule) -> None:
    """Refuse a model whose gradients are not a sum over samples.

    Raises:
        FlsuiteError: If a layer mixes samples, or the model steps its optimizers by hand.
    """
    name = type(model).__name__
    if not model.automatic_optimization:
        raise FlsuiteError(f"DPSGD: {name} optimizes by hand; use another model")
    for path, layer in batchnorm_layers(model).items():
        raise FlsuiteError(
            f"DPSGD: {path} of {name} is a {type(layer).__name__}, whose output for one sample "
            "depends on the rest of the batch; use a model with GroupNorm or without BatchNorm"
        )
    hooks = _opacus().GradSampleHooks
    with kept_logging():
        from opacus.validators import ModuleValidator

    with kept_modes(model):
        model.train()
        errors: Sequence[Exception] = [*ModuleValidator.validate(model), *hooks.validate(model)]
    if errors:
        raise FlsuiteError(f"DPSGD: Opacus does not support {name}: {one_line(errors[0], 200)}")
