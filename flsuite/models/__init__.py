"""The client models, and the backbones that they are built from."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.models.acvae import ACVAE
    from flsuite.models.backbones.base import CNN, MLP, Backbone, LeNet5, StridedCNN
    from flsuite.models.backbones.resnets import ResNet3D, ResNet18, ResNet20
    from flsuite.models.base import ClientModel
    from flsuite.models.classifier import Classifier
    from flsuite.models.fusedspacefed import FusedSpaceFed
    from flsuite.models.nfclassifier import NFClassifier

__all__ = [
    "ACVAE",
    "CNN",
    "MLP",
    "Backbone",
    "Classifier",
    "ClientModel",
    "FusedSpaceFed",
    "LeNet5",
    "NFClassifier",
    "ResNet3D",
    "ResNet18",
    "ResNet20",
    "StridedCNN",
]

__getattr__, __dir__ = on_first_use(__name__)
