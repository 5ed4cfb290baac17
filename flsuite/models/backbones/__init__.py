"""Backbones: recipes for networks that are built for the data's shape."""

from flsuite.models.backbones.base import Backbone, make_norm
from flsuite.models.backbones.resnets import ResNet18, ResNet20
from flsuite.models.backbones.small import CNN, MLP, LeNet5, StridedCNN

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
