"""The CIFAR-10 setting of pfl-research's benchmarks, with random bytes of CIFAR-10's shape.

1,000 clients have 50 images each. A round trains 50 of them, for 5 steps of 10 images each, with
SGD at rate 0.1. Their whole run has 1,500 rounds, with an evaluation every 10 rounds, which
``rounds`` of other cases leave out too. It is meant for a GPU, where it has not been measured yet.
On a GPU, worker processes share the card.
"""

from torch import nn

from flsuite.models.backbones import Backbone

__all__ = ["TwoConvs"]


class TwoConvs(Backbone):
    """Two 3x3 convolutions, one max-pool and one hidden layer: 1.6 million parameters."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, height, width = shape
        network = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, outputs),
        )
        for module in network:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        return network
