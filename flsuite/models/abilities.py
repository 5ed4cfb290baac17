"""What a model offers to a federation: protocols, and declarations with a default for each.

Any LightningModule can be trained by clients. It offers an ability by having its members, without
inheritance. :class:`~flsuite.models.ClientModel` has all of the declarations. Code that needs a
protocol checks it with ``isinstance``, which compares the members' names but not their signatures.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parameter import is_lazy

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import matches
from flsuite.data.federated import DataSpec, Stage
from flsuite.models.base import ClientModel

Step = TypeVar("Step", bound=Callable[..., Any])

_OVERRIDES = ("training_step", "configure_optimizers")
_STEPS = ("validation_step", "test_step")


@runtime_checkable
class LatentModel(Protocol):
    """A model with a latent space."""

    def latent(self, x: Tensor) -> Tensor:
        """Encode samples ``(n, *shape)`` to ``(n, latent)``, without their labels."""
        ...


@runtime_checkable
class PriorModel(LatentModel, Protocol):
    """A model with one Gaussian per class in its latent space."""

    def priors(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the log variance of each class, ``(classes, latent)`` each."""
        ...


@runtime_checkable
class LikelihoodModel(Protocol):
    """A model that assigns each sample a log-likelihood or log-density."""

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the log-likelihood of each sample of ``(x, y)``, in nats: float32 ``(n,)``.

        It is differentiable with respect to the modeled parameters. A sample's value depends only
        on that sample. For vectorization by torch.func, the method must not modify its own tensors
        in place, and must not use value-dependent control flow.
        """
        ...


@runtime_checkable
class LogitModel(Protocol):
    """A model whose prediction depends only on its logits.

    With logits z, the probabilities are ``softmax(z)`` for classes and ``sigmoid(z)`` per label.
    """

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of samples ``(n, *shape)``, ``(n, outputs)``, with gradients."""
        ...


def require_logits(owner: str, model: Any) -> None:
    """Refuse a model without a method ``logits``.

    Args:
        owner: The part of the run that needs the logits, for the message.
        model: The model.

    Raises:
        FlsuiteError: If the model is not a :class:`LogitModel`.
    """
    if not isinstance(model, LogitModel):
        raise FlsuiteError(
            f"{owner} needs the logits of the model, but {type(model).__name__} has none: add a "
            "method logits(x) -> (n, outputs)"
        )


@runtime_checkable
class FlowModel(Protocol):
    """A model with a density of its features given the class.

    Its ``evaluation_step`` returns ``nll`` ``(n,)``, the negative log-density per dimension, in
    nats.
    """

    def sampled_logits(self, y: Tensor) -> Tensor:
        """Classify one sample of the flow for each class of y ``(n,)``.

        Returns logits ``(n, classes)``.
        """
        ...


@runtime_checkable
class FusedModel(Protocol):
    """A model whose classifier can be evaluated with and without the fusion of its input.

    Attributes:
        head: Prefix of the classifier's entries in the state dict.
    """

    head: str

    def head_losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean classification loss at the plain and at the fused input.

        Both are scalars over the batch, with gradients.
        """
        ...


def own_entries(model: LightningModule) -> list[str]:
    """Return the entries of the state dict that stay with each client.

    A model names them as ``private``, or the others as ``shared``.

    Raises:
        FlsuiteError: If it has both, or a pattern matches no entry.
    """
    shared, private = _patterns(model, "shared"), _patterns(model, "private")
    names = list(model.state_dict())
    if shared and private:
        raise FlsuiteError(
            f"{type(model).__name__} has both shared and private; keep one of them: it also "
            "defines the other"
        )
    refuse_unused(model, "model.shared", shared, names)
    refuse_unused(model, "model.private", private, names)
    if shared:
        return [name for name in names if not matches(name, shared)]
    return [name for name in names if matches(name, private)]


def frozen_entries(model: LightningModule) -> list[str]:
    """Return the parameters that are not trained and not declared private."""
    private = _patterns(model, "private")
    entries = set(model.state_dict())
    return [
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name in entries and not matches(name, private)
    ]


def training_only(model: LightningModule) -> Sequence[str]:
    """Return the patterns of private entries that predictions do not read."""
    return _patterns(model, "training_only")


def parameter_groups(model: LightningModule) -> Mapping[str, Sequence[str]]:
    """Return the parameter groups that an aggregator may treat separately, name to prefixes."""
    return _declared(model, "parameter_groups", Mapping, {})


def extra_epochs(model: LightningModule) -> int:
    """Return the warm-up epochs of a client's fit."""
    return _declared(model, "extra_epochs", int, 0)


def head_of(
    model: LightningModule, given: str | None = None, key: str = "trainer.aggregator.head"
) -> str:
    """Return the prefix of the head's entries in the state dict, such as ``classifier.``.

    Args:
        model: The model. Its attribute ``head`` is the prefix of the head, or the module itself.
        given: The prefix in the config. Without one, or with ``head.``, the attribute counts.
        key: The key of ``given`` in the config, for messages.

    Raises:
        FlsuiteError: If neither names a head, the model has no such module, or the module has all
            parameters of the model.
    """
    is_own = given is None or given.rstrip(".") == "head"
    head = getattr(model, "head", None) if is_own else given
    kind, modules = type(model).__name__, dict(model.named_modules())
    name = next((name for name, module in modules.items() if module is head), head)
    if not isinstance(name, str):
        raise FlsuiteError(
            f"model: {kind} does not name its head; set {key} to the prefix of its "
            "entries, or add head = 'classifier.' to the model"
        )
    name = name.rstrip(".")
    if not name or name not in modules:
        raise FlsuiteError(
            f"{key}: {kind} has no module {name!r}; it has {', '.join(list(modules)[1:])[:300]}"
        )
    if all(entry.startswith(f"{name}.") for entry, _ in model.named_parameters()):
        raise FlsuiteError(f"{key}: {name} has all parameters of {kind}; name a part of it")
    return f"{name}."


def begin_task(model: LightningModule, stage: Stage | None) -> None:
    """Call the model's method ``begin_task``, if it has one and the clients learn tasks.

    This happens before every fit. The model has the weights that the fit starts from.

    Args:
        model: The model.
        stage: The position in the sequence of tasks. ``None`` without tasks.
    """
    method = getattr(model, "begin_task", None)
    if stage is not None and callable(method):
        method(stage.task, stage.seen, stage.past)


def pictures(model: LightningModule, x: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return pictures of samples ``(n, *shape)`` by a flsuite model, if it supports them.

    They are grids by name: the label of a row to its images ``(n, channels, height, width)`` within
    [0, 1].
    """
    method = getattr(model, "pictures", None)
    # A user's module may have a layer of this name.
    return method(x) if method is not None and isinstance(model, ClientModel) else {}


def mean_over_samples(step: Step) -> Step:
    """Declare that the loss of a training step is the mean of one loss per sample.

    The loss of a sample depends on that sample alone. The declaration belongs to the function, so
    a model that overrides the step must declare it again.
    """
    vars(step)["is_mean_over_samples"] = True
    return step


def is_mean_over_samples(model: LightningModule) -> bool:
    """Return whether the model's training step is declared by :func:`mean_over_samples`."""
    return getattr(model.training_step, "is_mean_over_samples", False)


def has_step(model: LightningModule, name: str) -> bool:
    """Return whether a model overrides a step of its base class."""
    method = getattr(model, name, None)
    function = getattr(method, "__func__", method)
    bases = (LightningModule, ClientModel)
    return function is not None and all(function is not getattr(base, name, None) for base in bases)


def scores_by_columns(model: LightningModule) -> bool:
    """Return whether the model's evaluation step returns one row per sample."""
    return has_step(model, "evaluation_step")


def scores_by_steps(model: LightningModule) -> bool:
    """Return whether the model is scored by the values that its own steps log."""
    return not scores_by_columns(model) and any(has_step(model, step) for step in _STEPS)


def class_outputs(model: LightningModule, spec: DataSpec) -> Callable[[Any], Tensor] | None:
    """Return the model's method ``logits`` if flsuite can score classes with it."""
    method: Callable[[Any], Tensor] | None = getattr(model, "logits", None)
    return method if callable(method) and spec.task != "other" else None


def require_trainable(model: LightningModule) -> None:
    """Refuse a model that lacks something that a federation requires, before training.

    Raises:
        FlsuiteError: If something is missing. The message says what to add.
    """
    kind = type(model).__name__
    for name in _OVERRIDES:
        if not has_step(model, name):
            raise FlsuiteError(f"model: {kind} has no {name}; add one, as for Lightning's Trainer")
    parameters, fault = list(model.parameters()), ""
    if not parameters:
        fault = (
            f"{kind} has no parameters yet; make its layers in __init__ or in configure_model, "
            "not in setup"
        )
    elif any(map(is_lazy, parameters)):
        fault = (
            f"{kind} has lazy layers without sizes yet; give the sizes, or call the model with a "
            "batch in __init__"
        )
    elif not any(parameter.requires_grad for parameter in parameters):
        fault = f"all parameters of {kind} are frozen; leave some to train"
    if fault:
        raise FlsuiteError(f"model: {fault}")


def _patterns(model: LightningModule, name: str) -> tuple[str, ...]:
    """Return the patterns of a declaration."""
    value = _declared(model, name, (str, list, tuple), ())
    patterns = (value,) if isinstance(value, str) else tuple(value)
    return patterns if all(isinstance(one, str) for one in patterns) else ()


def _declared(model: LightningModule, name: str, kind: Any, default: Any) -> Any:
    """Return a declaration. A user's module may have a layer or another method of this name."""
    value = getattr(model, name, default)
    return value if isinstance(value, kind) else default


def refuse_unused(
    model: LightningModule, key: str, patterns: Sequence[str], names: Sequence[str]
) -> None:
    """Refuse a pattern that matches nothing.

    A mistyped pattern would silently change the method.

    Args:
        model: The model.
        key: The config key of the patterns.
        patterns: Prefixes and wildcards.
        names: The entries of the model.

    Raises:
        FlsuiteError: If a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            prefixes = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
            raise FlsuiteError(
                f"{key}: {pattern!r} matches no entry of {type(model).__name__}; it has "
                f"{prefixes[:300]}"
            )
