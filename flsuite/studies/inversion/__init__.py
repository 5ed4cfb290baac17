"""Model inversion: reconstruction of a client's images from the server's knowledge."""

from flsuite.studies.inversion.attack import (
    GAN,
    GANTraining,
    Inversion,
    Reconstructions,
    reconstruction_figure,
    share_recognised,
)
from flsuite.studies.inversion.target import (
    Knowledge,
    Target,
    kept_models,
    known_to_server,
    mean_model,
    public_images,
    sent_factors,
)

__all__ = [
    "GAN",
    "GANTraining",
    "Inversion",
    "Knowledge",
    "Reconstructions",
    "Target",
    "kept_models",
    "known_to_server",
    "mean_model",
    "public_images",
    "reconstruction_figure",
    "sent_factors",
    "share_recognised",
]
