"""The client models, and the backbones that they are built from."""

from flsuite.models.acvae import ACVAE
from flsuite.models.backbones import CNN, MLP, Backbone, LeNet5, ResNet18, ResNet20, StridedCNN
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
    "ResNet18",
    "ResNet20",
    "StridedCNN",
]
