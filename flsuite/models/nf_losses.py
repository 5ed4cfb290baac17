"""The losses of :class:`~flsuite.models.NFClassifier`: tensors in, a scalar out."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["credibility", "distillation_loss", "flow_loss", "replay_loss", "soft_cross_entropy"]

# The least variance of a Gaussian fitted to few codes. Without it, one dimension in which the codes
# happen to agree would outweigh all the others.
_LEAST_VARIANCE = 1e-4
_TEMPERATURE = 2.0


def flow_loss(log_density: Tensor) -> Tensor:
    """Return the mean negative log-density, in nats, of samples ``(n,)``."""
    return -log_density.mean()


def replay_loss(logits: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Return the mean weighted cross-entropy of generated samples.

    Args:
        logits: Logits of the classifier, ``(m, classes)``.
        classes: Classes that the samples were generated for, int64 ``(m,)``.
        weights: The :func:`credibility` of each sample ``(m,)``.
    """
    losses = F.cross_entropy(logits.float(), classes, reduction="none")
    return (weights * losses).mean()


def credibility(
    codes: Tensor, y: Tensor, drawn: Tensor, classes: Tensor, otherwise: Tensor
) -> Tensor:
    """Return how much each generated sample resembles the batch's samples of its class, ``(m,)``.

    It is the density of the sample's code under the diagonal Gaussian of the codes of that class,
    averaged over the dimensions. It is computed in float32 under any precision, because bfloat16
    rounds away the small differences in a density.

    Args:
        codes: Codes of the batch, ``(n, features)``.
        y: Classes of the batch, int64 ``(n,)``.
        drawn: Codes of the generated samples, ``(m, features)``.
        classes: Classes of the generated samples, int64 ``(m,)``.
        otherwise: Value ``()`` for a class with fewer than two samples in the batch, which
            determine no Gaussian.
    """
    with torch.autocast(codes.device.type, enabled=False):
        codes, drawn = codes.float(), drawn.float()
        same = (classes[:, None] == y).to(codes.dtype)
        # Statistics by generated sample, as products with a mask: no loop over classes.
        count = same.sum(1, keepdim=True)
        share = same / count.clamp(min=1)
        mean = share @ codes
        # Around each sample's own class mean: a mean of squares less a squared mean would cancel.
        variance = (share @ (codes - _class_means(codes, y)).square()).clamp(min=_LEAST_VARIANCE)

        exponent = -0.5 * (drawn - mean).square() / variance
        density = exponent.exp() / (2 * torch.pi * variance).sqrt()
        return torch.where(count.squeeze(1) >= 2, density.mean(1), otherwise)


def distillation_loss(
    z: Tensor,
    logits: Tensor,
    teacher_z: Tensor,
    teacher_logits: Tensor,
    k_feature: float,
    k_output: float,
) -> Tensor:
    """Return the weighted distance of a classifier to a teacher, by features and by outputs.

    Args:
        z, teacher_z: Features ``(n, feature_dim)``.
        logits, teacher_logits: Outputs ``(n, classes)``.
        k_feature: Weight of the features' mean squared distance.
        k_output: Weight of the outputs' :func:`soft_cross_entropy`.
    """
    features = (z.float() - teacher_z.float()).square().mean()
    return k_feature * features + k_output * soft_cross_entropy(logits, teacher_logits)


def soft_cross_entropy(
    logits: Tensor, teacher: Tensor, temperature: float = _TEMPERATURE
) -> Tensor:
    """Return the mean cross-entropy of softened logits to a teacher's, ``(n, classes)`` each.

    Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    # Softening shows how the teacher ranks the wrong classes.
    targets = (teacher.float() / temperature).softmax(1)
    return F.cross_entropy(logits.float() / temperature, targets)


def _class_means(codes: Tensor, y: Tensor) -> Tensor:
    """Return for each sample the mean over the samples of its class, ``(n, features)``."""
    same = (y[:, None] == y).to(codes.dtype)
    return same @ codes / same.sum(1, keepdim=True)
