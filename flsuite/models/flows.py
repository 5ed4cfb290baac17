"""Normalizing flows, and Gaussians.

Flows are conditional: they give class-conditional densities and samples. The arguments are float32.
Under mixed precision, the caller converts them.

Dinh et al. 2017, Density Estimation using Real NVP, arXiv:1605.08803. The change of variables is
eq. 3 of Wuerkaixi et al. 2024, Accurate Forgetting for Heterogeneous Federated Continual Learning.
"""

import math

import normflows as nf
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class ConditionalCoupling(nf.flows.Flow):
    """An affine coupling ``z2 -> z2 exp(s) + t``, where s and t depend on z1 and on a context.

    z1 and z2 are the halves of z. The coupling starts as the identity. The affine coupling of
    normflows has no context, and its layers with a context are autoregressive or splines.

    Args:
        features: Dimension of z, at least 2.
        context: Dimension of the context.
        width: Hidden units of the residual network of two blocks that computes s and t.
        limit: Bound on every absolute log scale s: one coupling scales by at most ``exp(limit)``.
    """

    def __init__(self, features: int, context: int, width: int, limit: float = 2.0) -> None:
        super().__init__()
        self.halves = features // 2, features - features // 2
        self.limit = limit

        self.conditioner = nf.nets.ResidualNet(
            self.halves[0],
            2 * self.halves[1],
            width,
            context_features=context,
            num_blocks=2,
            activation=F.leaky_relu,
        )
        # Zero log scales and shifts, so the coupling starts as the identity.
        nn.init.zeros_(self.conditioner.final_layer.weight)
        nn.init.zeros_(self.conditioner.final_layer.bias)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Map toward the data.

        Returns:
            ``(n, features)`` and the log-determinant ``(n,)``.
        """
        kept, moved = z.split(self.halves, dim=1)
        log_scale, shift = self._affine(kept, context)
        return torch.cat((kept, moved * log_scale.exp() + shift), dim=1), log_scale.sum(1)

    def inverse(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Map toward the base distribution.

        Returns:
            ``(n, features)`` and the log-determinant ``(n,)``.
        """
        kept, moved = z.split(self.halves, dim=1)
        log_scale, shift = self._affine(kept, context)
        return torch.cat((kept, (moved - shift) * (-log_scale).exp()), dim=1), -log_scale.sum(1)

    def _affine(self, kept: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log scale and the shift, both ``(n, features - features // 2)``."""
        raw, shift = self.conditioner(kept, context=context).chunk(2, dim=1)
        # Linear near zero, and bounded.
        return self.limit * torch.tanh(raw / self.limit), shift


class ConditionalFlow(nf.ConditionalNormalizingFlow):
    """A density p(z | y): couplings and permutations transform a standard normal u.

    The flow starts as a standard normal. Density and sampling take one pass each, in float32 at any
    precision.

    Every other permutation exchanges the halves, so two couplings transform all features. The
    others are random. With four random permutations, one sixteenth of the features would never be
    transformed.

    Args:
        features: Dimension of z.
        classes: Values of y. The context is y one-hot.
        couplings: Number of couplings.
        width: Hidden units of the couplings' networks.
    """

    def __init__(self, features: int, classes: int, couplings: int = 4, width: int = 512) -> None:
        layers: list[nn.Module] = []
        for i in range(couplings):
            permutation = nf.flows.Permute(features, mode="shuffle" if i % 2 else "swap")
            layers += [ConditionalCoupling(features, classes, width), permutation]
        super().__init__(nf.distributions.DiagGaussian(features, trainable=False), layers)
        self.features = features
        self.classes = classes

    def density(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes u of z, ``(n, features)``, and the log-density of z, ``(n,)``.

        With ``u = g^-1(z; y)``, it is ``log p(z | y) = log N(u; 0, I) + log |det du/dz|``, in nats.
        """
        # bfloat16 is too coarse for log-determinants, which are sums over all couplings.
        with torch.autocast(z.device.type, enabled=False):
            u, context = z.float(), self._one_hot(y)
            log_density = torch.zeros_like(u[:, 0])
            for flow in reversed(self.flows):
                u, log_determinant = flow.inverse(u, context=context)
                # Not in place, which torch.func cannot vectorize.
                log_density = log_density + log_determinant
            return u, log_density + self.q0.log_prob(u)

    def generate(self, u: Tensor, y: Tensor) -> Tensor:
        """Return ``g(u; y)``, ``(n, features)``.

        This is a sample of p(z | y) if u is standard normal.
        """
        with torch.autocast(u.device.type, enabled=False):
            return self(u.float(), context=self._one_hot(y))

    def _one_hot(self, y: Tensor) -> Tensor:
        return (y[:, None] == torch.arange(self.classes, device=y.device)).float()
