"""How well a client's images can be reconstructed from what the server knows."""

from flsuite.analysis.inversion.attack import Inversion, Reconstructions, share_recognised
from flsuite.analysis.inversion.figure import reconstruction_figure
from flsuite.analysis.inversion.gan import GAN, GANTraining
from flsuite.analysis.inversion.knowledge import (
    Knowledge,
    kept_models,
    known_to_server,
    mean_model,
    sent_factors,
)
from flsuite.analysis.inversion.scenario import public_images
from flsuite.analysis.inversion.target import Target

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
