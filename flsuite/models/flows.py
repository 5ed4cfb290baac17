"""Conditional normalizing flows, on normflows: densities and samples of vectors given their class.

Dinh et al. 2017, Density Estimation using Real NVP, arXiv:1605.08803; the change of variables is eq. 3 of Wuerkaixi et al.
2024, Accurate Forgetting for Heterogeneous Federated Continual Learning.
"""

import normflows as nf
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ConditionalCoupling", "ConditionalFlow"]


class ConditionalCoupling(nf.flows.Flow):
    """An affine coupling that sees a context: ``z2 -> z2 exp(s) + t``, with s and t made of the first half and the context.

    normflows' own coupling takes no context, and its layers that do are autoregressive, or splines. Starts as the identity.

    Args:
        features: Numbers in z, at least 2.
        context: Numbers in the context.
        width: Hidden units of the residual network of two blocks that makes s and t.
        limit: Bound on every log scale s: the factor ``exp(s)`` of one coupling lies within ``exp(-limit)`` and ``exp(limit)``.
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
        nn.init.zeros_(self.conditioner.final_layer.weight)
        nn.init.zeros_(self.conditioner.final_layer.bias)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Towards the data ``(n, features)``, and the log-determinant ``(n,)``."""
        kept, moved = z.split(self.halves, dim=1)
        log_scale, shift = self._affine(kept, context)
        return torch.cat((kept, moved * log_scale.exp() + shift), dim=1), log_scale.sum(1)

    def inverse(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Towards the base ``(n, features)``, and the log-determinant ``(n,)``."""
        kept, moved = z.split(self.halves, dim=1)
        log_scale, shift = self._affine(kept, context)
        return torch.cat((kept, (moved - shift) * (-log_scale).exp()), dim=1), -log_scale.sum(1)

    def _affine(self, kept: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.conditioner(kept, context=context).chunk(2, dim=1)
        return self.limit * torch.tanh(raw / self.limit), shift


class ConditionalFlow(nf.ConditionalNormalizingFlow):
    """p(z | y): a standard normal u, sent through couplings, each after a permutation on the way from z to u.

    Every other permutation is drawn at random; those between exchange the halves, so that two couplings move all numbers.
    With four random ones, a sixteenth of the numbers would never be moved, and the flow could not even learn their scale.

    Density and sampling take one pass each, in float32 whatever the precision around them. Starts as a standard normal.

    Args:
        features: Numbers in z.
        classes: Values of y; the context is y one-hot.
        couplings: How many.
        width: Hidden units of their networks.
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
        """The codes ``u = g^-1(z; y)`` ``(n, features)``, and ``log p(z | y) = log N(u; 0, I) + log |det du/dz|`` ``(n,)``."""
        with torch.autocast(z.device.type, enabled=False):
            u, context = z.float(), self._one_hot(y)
            log_density = torch.zeros_like(u[:, 0])
            for flow in reversed(self.flows):
                u, log_determinant = flow.inverse(u, context=context)
                log_density = (
                    log_density + log_determinant
                )  # not in place: torch.func cannot vectorise that
            return u, log_density + self.q0.log_prob(u)

    def generate(self, u: Tensor, y: Tensor) -> Tensor:
        """``g(u; y)``, ``(n, features)``: a sample of p(z | y) where u is standard normal."""
        with torch.autocast(u.device.type, enabled=False):
            return self(u.float(), context=self._one_hot(y))

    def _one_hot(self, y: Tensor) -> Tensor:
        return (y[:, None] == torch.arange(self.classes, device=y.device)).float()
