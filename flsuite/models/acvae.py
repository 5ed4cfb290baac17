"""ACVAE: a VAE with one Gaussian per class in its latent space, also used for classification.

Source: the adaptive conditional variational autoencoder of F-ACVAE, the model that CMGA aggregates.
The conditional prior follows Sohn et al. 2015, "Learning Structured Output Representation using
Deep Conditional Generative Models".
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.arguments import (
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    check_init,
)
from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.models.autoencoders import (
    SMALLEST,
    BottleneckDecoder,
    BottleneckEncoder,
    table_decoder,
    table_encoder,
)
from flsuite.models.backbones.base import Norm, Widths
from flsuite.models.base import ClientModel, require_classes
from flsuite.models.flows import kl_divergence, log_density, sample

_Prior = Annotated[
    Sequence[float], Range("positive for every class", lambda prior: all(p > 0 for p in prior))
]


class ACVAE(ClientModel):
    """A private encoder q(z|x), and a shared mapper H, decoder D and class priors.

    Take it to classify by Gaussians in a latent space, with ``CMGA``.

    The prior of class c is N(mu_c, sigma_c^2). The loss of a sample, in nats, with z drawn from
    q(z|x), is the sum of

    - ``reconstruction_weight E(D(H(z)), x)``, where E is a sum over the features: half the squared
      error, or the binary cross-entropy;
    - ``kl_weight KL(q(z|x) || N(mu_y, sigma_y^2))``;
    - ``cls_weight CE(posterior(H(z)), y)``, where
      ``log posterior_c(h) = log N(h; mu_c, sigma_c^2) + log pi_c`` up to a constant.

    A prediction takes the mean of q(z|x) and needs no label.

    H is a residual network, ``H(z) = z + h(z)``, and starts as the identity, because both z in the
    KL term and H(z) in the posterior refer to the same priors. H maps the latent spaces of the
    private encoders to a common one.

    With ``negatives: present``, the cross-entropy in training covers only the classes in the batch
    and does not affect classes that a client lacks (Li and Zhan 2021, FedRS, the limit of its
    restricted softmax). With ``all``, each client pushes its samples away from the priors of
    classes that it lacks.

    Inputs must be in [0, 1]: set ``data.standardize: false`` for images. Multi-label data is
    refused.

    Args:
        latent_dim: Dimension of z.
        hidden: Widths of the encoder for tables, mirrored by the decoder. Images have three strided
            convolutions instead.
        width: Channels of the first convolution. The others have twice and four times as many.
        mapper_width: Hidden units of H.
        reconstruction: ``mse`` or ``bce``.
        reconstruction_weight: Weight of the reconstruction.
        kl_weight: Weight of the KL term.
        cls_weight: Weight of the classification.
        negatives: Classes that the cross-entropy covers in training: ``all``, or those ``present``
            in the batch.
        prior_scale: Standard deviation of the initial class centres.
        log_variance_limit: Bound on the absolute log variances of q and of the priors. It keeps the
            exponentials of the KL term finite.
        class_prior: pi, one positive number per class, normalized to a sum of one. Default:
            uniform.
        dropout: Probability of dropping a hidden unit in the networks for tables.
        norm: Normalization in the networks for images.
        private: Entries that stay with the client. ``[]`` shares the encoder too.
        optimizer: Optimizer of a fit.

    Attributes:
        parameter_groups: The class priors, for an aggregator that treats them separately.
    """

    parameter_groups = {
        "prior_mean": ("prior_mean",),
        "prior_log_variance": ("prior_log_variance",),
    }

    def __init__(
        self,
        latent_dim: PositiveInt = 20,
        hidden: Widths = (128, 64, 32),
        width: PositiveInt = 16,
        mapper_width: PositiveInt = 64,
        reconstruction: Literal["mse", "bce"] = "mse",
        reconstruction_weight: NonNegativeFloat = 1.0,
        kl_weight: NonNegativeFloat = 0.5,
        cls_weight: NonNegativeFloat = 1.0,
        negatives: Literal["all", "present"] = "all",
        prior_scale: NonNegativeFloat = 1.0,
        log_variance_limit: PositiveFloat = 6.0,
        class_prior: _Prior | None = None,
        dropout: BelowOne = 0.2,
        norm: Norm = "batch",
        private: Sequence[str] = ("encoder.",),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=2e-4),
    ) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.hidden = tuple(hidden)
        self.width = width
        self.mapper_width = mapper_width
        self.reconstruction = reconstruction
        self.reconstruction_weight = reconstruction_weight
        self.kl_weight = kl_weight
        self.cls_weight = cls_weight
        self.negatives = negatives
        self.prior_scale = prior_scale
        self.log_variance_limit = log_variance_limit
        self.class_prior = class_prior
        self.dropout = dropout
        self.norm = norm
        self.private = tuple(private)
        self.optimizer = optimizer
        check_init(self, ACVAE)

    def build(self, spec: DataSpec) -> None:
        require_classes("ACVAE", spec, one_per_sample=True)

        self.encoder, self.decoder = self._networks(spec.shape)
        # Zero weights, so H starts as the identity.
        last = nn.Linear(self.mapper_width, self.latent_dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mapper = nn.Sequential(
            nn.Linear(self.latent_dim, self.mapper_width), nn.LeakyReLU(0.2), last
        )

        # Random centres, so the classes start apart.
        self.prior_mean = nn.Parameter(
            self.prior_scale * torch.randn(spec.num_classes, self.latent_dim)
        )
        self.prior_log_variance = nn.Parameter(torch.zeros(spec.num_classes, self.latent_dim))

        prior = self.class_prior
        pi = torch.ones(spec.num_classes) if prior is None else torch.tensor(prior)
        if len(pi) != spec.num_classes:
            raise FlsuiteError(
                f"ACVAE: class_prior has {len(pi)} numbers for {spec.num_classes} classes; "
                "give one number per class"
            )
        # Not persistent, because pi comes from the config and is not averaged.
        self.register_buffer("log_pi", (pi / pi.sum()).log(), persistent=False)

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the log variance of q(z|x), float32 ``(n, latent_dim)`` each."""
        # float32, because the squares and exponentials of the KL term are too coarse in bfloat16.
        mean, log_variance = self.encoder(x).float().chunk(2, dim=1)
        return mean, self._limited(log_variance)

    def map(self, z: Tensor) -> Tensor:
        """Return H(z), float32 ``(n, latent_dim)``."""
        return z + self.mapper(z).float()

    def priors(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the log variance of each class, ``(classes, latent_dim)`` each."""
        return self.prior_mean, self._limited(self.prior_log_variance)

    def class_logits(self, h: Tensor) -> Tensor:
        """Return the log joint density of h = H(z) and each class, float32 ``(n, classes)``.

        It is ``log N(h; mu_c, sigma_c^2) + log pi_c``.
        """
        # bfloat16 is too coarse for a sum of squares over all latent dimensions.
        with torch.autocast(h.device.type, enabled=False):
            means, log_variances = self.priors()
            return log_density(h.float()[:, None], means, log_variances) + self.get_buffer("log_pi")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, classes)``, from the mean of q(z|x)."""
        return self.class_logits(self.latent(x))

    def latent(self, x: Tensor) -> Tensor:
        """Return H at the mean of q(z|x), ``(n, latent_dim)``."""
        return self.map(self.posterior(x)[0])

    def reconstruct(self, x: Tensor) -> Tensor:
        """Decode H at the mean of q(z|x), in the shape of ``x``, within [0, 1]."""
        return self.decoder(self.latent(x)).float().sigmoid()

    def sample(self, classes: Tensor) -> Tensor:
        """Draw from the priors of classes ``(n,)`` and decode to ``(n, *shape)``, within [0, 1]."""
        means, log_variances = self.priors()
        # Use z, not H(z), because the KL term fits q(z|x) to the priors.
        z = sample(means[classes], log_variances[classes])
        return self.decoder(self.map(z)).float().sigmoid()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss, the mean over the batch."""
        x, y = batch
        # Only one batch per epoch, because the check synchronizes with the device. In a stack,
        # clients may be at different batches.
        is_later = isinstance(batch_idx, int) and batch_idx > 0
        valid = None if is_later else _within_unit_range(x)

        mean, log_variance = self.posterior(x)
        h = self.map(sample(mean, log_variance))
        loss = self.reconstruction_weight * self.reconstruction_error(h, x).mean()
        loss = loss + self.kl_weight * self.kl(mean, log_variance, y).mean()

        logits = self.class_logits(h)
        if self.negatives == "present":
            # Minus infinity removes a class from the softmax and from its gradient.
            absent = torch.ones_like(logits[0], dtype=torch.bool).index_fill(0, y, False)
            logits = logits.masked_fill(absent, -torch.inf)
        loss = loss + self.cls_weight * F.cross_entropy(logits, y)
        return loss if valid is None else loss.masked_fill(~valid, torch.nan)

    def reconstruction_error(self, h: Tensor, x: Tensor) -> Tensor:
        """Return E(D(h), x) of each sample, in nats ``(n,)``."""
        logits = self.decoder(h).float()
        # Sums over the features, not means, so the loss is in nats like the KL term.
        if self.reconstruction == "bce":
            return F.binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1)
        return 0.5 * (logits.sigmoid() - x).square().flatten(1).sum(1)

    def kl(self, mean: Tensor, log_variance: Tensor, y: Tensor) -> Tensor:
        """Return ``KL(q(z|x) || N(mu_y, sigma_y^2))`` of each sample, in nats ``(n,)``."""
        means, log_variances = self.priors()
        return kl_divergence(mean, log_variance, means[y], log_variances[y])

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the classification ``loss``, ``scores``, ``reconstruction`` and ``kl``, in nats.

        Only ``loss`` and ``kl`` depend on the label.
        """
        x, y = batch
        mean, log_variance = self.posterior(x)
        # Use the mean of q(z|x) instead of a sample, so scores are deterministic.
        h = self.map(mean)
        logits = self.class_logits(h)
        return {
            "loss": F.cross_entropy(logits, y, reduction="none"),
            "scores": logits.softmax(1),
            "reconstruction": self.reconstruction_error(h, x),
            "kl": self.kl(mean, log_variance, y),
        }

    def pictures(self, x: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return ``reconstructions`` below their originals, and ``samples``, one row per class.

        Tables have no pictures.
        """
        assert self.spec is not None
        if len(self.spec.shape) != 3:
            return {}

        classes = torch.arange(self.spec.num_classes, device=x.device)
        drawn = self.sample(classes.repeat_interleave(len(x))).split(len(x))
        return {
            "reconstructions": {"image": x, "reconstruction": self.reconstruct(x)},
            "samples": dict(zip(self.spec.names, drawn, strict=True)),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def _limited(self, log_variance: Tensor) -> Tensor:
        return log_variance.clamp(-self.log_variance_limit, self.log_variance_limit)

    def _networks(self, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
        # The encoder outputs mean and log variance of q(z|x), so it has twice as many outputs.
        # Smaller images use the networks for tables.
        if len(shape) == 3 and min(shape[1:]) >= SMALLEST:
            return (
                BottleneckEncoder(shape, 2 * self.latent_dim, self.norm, self.width),
                BottleneckDecoder(shape, self.latent_dim, self.norm, self.width),
            )

        return (
            table_encoder(prod(shape), self.hidden, 2 * self.latent_dim, self.dropout),
            table_decoder(shape, self.hidden, self.latent_dim, self.dropout),
        )


def _within_unit_range(x: Tensor) -> Tensor:
    """Return whether all numbers are within [0, 1], as the decoder's sigmoid reconstructs them.

    Raises:
        FlsuiteError: If they are not. Under ``vmap``, where no number can be read, it returns false
            instead.
    """
    smallest, largest = x.min(), x.max()
    valid = (smallest >= 0) & (largest <= 1)
    try:
        is_valid = bool(valid)
    except RuntimeError:  # vmap
        return valid
    if not is_valid:
        raise FlsuiteError(
            "ACVAE reconstructs data within [0, 1], but this lies within "
            f"[{float(smallest):.3g}, {float(largest):.3g}]; set data.standardize to false for "
            "images, or data.scale to minmax for a table"
        )
    return valid
