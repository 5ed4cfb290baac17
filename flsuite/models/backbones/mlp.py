"""The multilayer perceptron."""

from dataclasses import dataclass
from math import prod

from torch import nn

from flsuite.arguments import BelowOne, Settings
from flsuite.errors import FlsuiteError
from flsuite.models.backbones.base import Backbone, Widths


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

        layers: list[nn.Module] = [nn.Flatten()]
        for units in self.hidden:
            layers += [nn.Linear(features, units, bias=self.bias), nn.ReLU()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            features = units
        return nn.Sequential(*layers, nn.Linear(features, outputs, bias=self.bias))
