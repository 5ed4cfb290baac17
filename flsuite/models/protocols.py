"""Protocols of the optional abilities of a model.

A model implements a protocol by having its members, without inheritance. Code that needs an ability
checks it with ``isinstance``, which compares the members' names but not their signatures.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


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
