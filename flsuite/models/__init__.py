"""The client models, and the backbones that they are built from."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.models.acvae import ACVAE as ACVAE
    from flsuite.models.backbones.base import (
        CNN as CNN,
        MLP as MLP,
        Backbone as Backbone,
        LeNet5 as LeNet5,
        StridedCNN as StridedCNN,
    )
    from flsuite.models.backbones.resnets import (
        ResNet3D as ResNet3D,
        ResNet18 as ResNet18,
        ResNet20 as ResNet20,
    )
    from flsuite.models.base import ClientModel as ClientModel
    from flsuite.models.classifier import Classifier as Classifier
    from flsuite.models.fusedspacefed import FusedSpaceFed as FusedSpaceFed
    from flsuite.models.nfclassifier import NFClassifier as NFClassifier


__getattr__, __dir__ = on_first_use(__name__)
