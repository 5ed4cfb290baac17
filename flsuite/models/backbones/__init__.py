"""Networks that the models are built from: a backbone is a recipe, built once the data's shape is known."""

from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import CNN
from flsuite.models.backbones.lenet import LeNet5
from flsuite.models.backbones.mlp import MLP
from flsuite.models.backbones.norms import make_norm
from flsuite.models.backbones.resnet18 import ResNet18
from flsuite.models.backbones.resnet20 import PreActResNet, ResNet20
from flsuite.models.backbones.strided import StridedCNN

__all__ = [
    "CNN",
    "MLP",
    "Backbone",
    "LeNet5",
    "PreActResNet",
    "ResNet18",
    "ResNet20",
    "StridedCNN",
    "make_norm",
]
