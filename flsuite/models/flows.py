"""Normalizing flows, Gaussians, and the replay of earlier classes.

Flows are conditional: they give class-conditional densities and samples. The arguments are float32.
Under mixed precision, the caller converts them.

Dinh et al. 2017, Density Estimation using Real NVP, arXiv:1605.08803. The change of variables is
eq. 3 of Wuerkaixi et al. 2024, Accurate Forgetting for Heterogeneous Federated Continual Learning.
The replay is that of :class:`~flsuite.models.NFClassifier`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy

import normflows as nf
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.state import load_

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


class _ConditionalCoupling(nf.flows.Flow):
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
            layers += [_ConditionalCoupling(features, classes, width), permutation]
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


class Previous(nn.Module):
    """The state that a client keeps from one task to the next.

    All of it is stored as untrained parameters, not as buffers, because a buffer policy must not
    reset it.

    Attributes:
        task: int64 ``()``, the number of the client's task.
        met: uint8 ``(classes,)``, 1 for classes that the client has met.
        past: uint8 ``(classes,)``, 1 for classes met before the task began: the client's own, and
            those passed to :meth:`take`.
        tasks: Whether the client has completed a task.
        classes: Whether any class is marked in ``past``.
    """

    def __init__(self, classes: int, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.met = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        self.past = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        # Plain flags, because reading tensors in a training step would synchronize.
        self.tasks = self.classes = False
        # In training mode, as a fit expects. :class:`NFClassifier` sets the mode of a fit.
        for name, module in modules.items():
            self.add_module(name, frozen_copy(module).train())

    def meet(self, y: Tensor) -> None:
        """Mark the classes of a batch as met."""
        self.met[y] = 1

    def take(self, task: int, classes: Sequence[int], model: nn.Module) -> None:
        """Begin a task: keep the model's modules, and mark the classes that any client has met."""
        self.past.copy_(self.met)
        self.past[list(classes)] = 1
        self.task.fill_(task)
        # Copy into the existing tensors, because the client's state refers to them.
        for name, copy in self.named_children():
            load_(copy.state_dict(), model.get_submodule(name).state_dict())
        self.look()

    def look(self) -> None:
        """Update the flags.

        Called once per fit, after the client's state has been loaded, and after :meth:`take`.
        """
        self.tasks, self.classes = bool(self.task > 0), bool(self.past.any())


def draw_classes(among: Tensor, n: int) -> Tensor:
    """Draw n classes, int64 ``(n,)``, uniformly among the marked classes ``(classes,)``."""
    return torch.multinomial(among.float(), n, replacement=True)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose parameters and buffers are frozen parameters."""
    copy = deepcopy(module).requires_grad_(False).eval()
    for part in list(copy.modules()):
        # Buffers follow the run's policy, which may reset them, but parameters stay.
        for name, buffer in list(part.named_buffers(recurse=False)):
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return copy


# Minimum variance of a Gaussian fitted to few codes. Without it, one dimension in which the codes
# happen to agree would outweigh all others.
_LEAST_VARIANCE = 1e-4
_TEMPERATURE = 2.0


def credibility(
    codes: Tensor, y: Tensor, drawn: Tensor, classes: Tensor, otherwise: Tensor
) -> Tensor:
    """Return how much each generated sample resembles the batch's samples of its class, ``(m,)``.

    It is the density of the sample's code under the diagonal Gaussian of that class's codes,
    averaged over the dimensions. It is computed in float32 at any precision, because bfloat16
    rounds away small differences in density.

    Args:
        codes: Codes of the batch, ``(n, features)``.
        y: Classes of the batch, int64 ``(n,)``.
        drawn: Codes of the generated samples, ``(m, features)``.
        classes: Classes of the generated samples, int64 ``(m,)``.
        otherwise: Value ``()`` for a class with fewer than two samples in the batch, which do not
            determine a Gaussian.
    """
    with torch.autocast(codes.device.type, enabled=False):
        codes, drawn = codes.float(), drawn.float()
        same = (classes[:, None] == y).to(codes.dtype)
        # Statistics per generated sample as products with a mask, without a loop over classes.
        count = same.sum(1, keepdim=True)
        share = same / count.clamp(min=1)
        mean = share @ codes
        # Centered on class means, because mean squares minus squared means would cancel.
        variance = (share @ (codes - _class_means(codes, y)).square()).clamp(min=_LEAST_VARIANCE)

        exponent = -0.5 * (drawn - mean).square() / variance
        density = exponent.exp() / (2 * torch.pi * variance).sqrt()
        return torch.where(count.squeeze(1) >= 2, density.mean(1), otherwise)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy of softened logits to a teacher's, ``(n, classes)`` each.

    Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    # Softening shows how the teacher ranks the wrong classes.
    targets = (teacher.float() / _TEMPERATURE).softmax(1)
    return F.cross_entropy(logits.float() / _TEMPERATURE, targets)


def _class_means(codes: Tensor, y: Tensor) -> Tensor:
    """Return for each sample the mean over the samples of its class, ``(n, features)``."""
    same = (y[:, None] == y).to(codes.dtype)
    return same @ codes / same.sum(1, keepdim=True)
