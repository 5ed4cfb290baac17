"""Model inversion: reconstruction of a client's images from the server's knowledge."""

from flsuite.studies.inversion.attack import (
    GAN as GAN,
    GANTraining as GANTraining,
    Inversion as Inversion,
    Reconstructions as Reconstructions,
    reconstruction_figure as reconstruction_figure,
    share_recognised as share_recognised,
)
from flsuite.studies.inversion.target import (
    Knowledge as Knowledge,
    Target as Target,
    kept_models as kept_models,
    known_to_server as known_to_server,
    mean_model as mean_model,
    public_images as public_images,
    sent_factors as sent_factors,
)
