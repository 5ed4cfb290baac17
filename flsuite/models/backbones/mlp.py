"""The multilayer perceptron."""

from dataclasses import dataclass
from math import prod

from torch import nn

from flsuite.common.arguments import BelowOne, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.models.backbones.base import Backbone, Widths, dense_layers


@dataclass(frozen=True)
class MLP(Backbone, Settings):
    """Fully connected layers with ReLU, for tables and flattened images.

    ``MLP(hidden=())`` is multinomial logistic regression. ``MLP(hidden=(200, 200))`` is the 2NN of
    McMahan et al. 2017.

    Args:
        hidden: Widths of the hidden layers.
        bias: Whether the layers have a bias.
        dropout: Probability of dropping a hidden unit in training, in [0, 1).
    """

    hidden: Widths = (64,)
    bias: bool = True
    dropout: BelowOne = 0.0

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from ``(n, *shape)``, a shape of any rank, to ``(n, outputs)``."""
        features = prod(shape)
        if features < 1:
            raise FlsuiteError(
                f"MLP takes samples of at least one number, not data of shape {tuple(shape)}"
            )

        dense = dense_layers(features, self.hidden, outputs, self.bias, self.dropout)
        return nn.Sequential(nn.Flatten(), *dense)
