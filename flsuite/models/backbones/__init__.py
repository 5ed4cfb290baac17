"""Backbones: recipes for networks that are built for the data's shape."""

from flsuite.models.backbones.base import CNN, MLP, Backbone, LeNet5, StridedCNN, make_norm
from flsuite.models.backbones.resnets import ResNet3D, ResNet18, ResNet20

__all__ = [
    "CNN",
    "MLP",
    "Backbone",
    "LeNet5",
    "ResNet3D",
    "ResNet18",
    "ResNet20",
    "StridedCNN",
    "make_norm",
]
