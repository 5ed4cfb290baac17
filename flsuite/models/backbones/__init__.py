"""Backbones: recipes for networks that are built for the data's shape."""

from flsuite.models.backbones.base import Backbone, make_norm
from flsuite.models.backbones.cnn import CNN, StridedCNN
from flsuite.models.backbones.lenet import LeNet5
from flsuite.models.backbones.mlp import MLP
from flsuite.models.backbones.resnet18 import ResNet18
from flsuite.models.backbones.resnet20 import ResNet20

__all__ = [
    "CNN",
    "MLP",
    "Backbone",
    "LeNet5",
    "ResNet18",
    "ResNet20",
    "StridedCNN",
    "make_norm",
]
