"""Diagonal Gaussians, given by mean and log variance.

The arguments are float32. Under mixed precision, the caller converts them.
"""

import math

import torch
from torch import Tensor

_LOG_2PI = math.log(2 * math.pi)


def sample(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Draw one sample from each Gaussian, by the reparameterization trick.

    Kingma and Welling 2014, Auto-Encoding Variational Bayes, arXiv:1312.6114.
    """
    return mean + (0.5 * log_variance).exp() * torch.randn_like(mean)


def log_density(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return ``log N(x; mean, exp(log_variance))`` in nats, summed over the last dimension.

    The arguments broadcast.
    """
    return -0.5 * (_LOG_2PI + log_variance + (x - mean).square() * (-log_variance).exp()).sum(-1)


def kl_divergence(
    mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
) -> Tensor:
    """Return ``KL(N(mean, .) || N(prior_mean, .))`` in nats, summed over the last dimension.

    The arguments broadcast.
    """
    ratio = log_variance - prior_log_variance
    distance = (mean - prior_mean).square() * (-prior_log_variance).exp()
    return 0.5 * (ratio.exp() - ratio + distance - 1).sum(-1)
