"""Model inversion: reconstruction of a client's images from the server's knowledge."""

from flsuite.studies.inversion.attack import Inversion, Reconstructions, share_recognised
from flsuite.studies.inversion.figure import reconstruction_figure
from flsuite.studies.inversion.gan import GAN, GANTraining
from flsuite.studies.inversion.knowledge import (
    Knowledge,
    kept_models,
    known_to_server,
    mean_model,
    public_images,
    sent_factors,
)
from flsuite.studies.inversion.target import Target

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
