"""The other side: federated averaging as one writes it by hand, with nothing that is not needed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["HandWrittenLoop"]


class HandWrittenLoop:
    """Rounds of FedAvg on data in memory: index, cast, step; then a running mean of the clients' states.

    Args:
        network: Trained in place; starts every client from the global state.
        x: uint8 ``(n, h, w, c)``; batches are channels_last, as flsuite's are.
        y: int64 ``(n,)``.
        clients: Rows of each client.
        scale: Bytes to floats, ``x * scale + shift``.
        shift: See there.
    """

    def __init__(
        self, network: nn.Module, x: Tensor, y: Tensor, clients: Sequence[Tensor], scale: Tensor, shift: Tensor, batch: int = 64
    ) -> None:
        self.network = network.to(memory_format=torch.channels_last)
        self.x, self.y, self.clients, self.scale, self.shift, self.batch = x, y, clients, scale, shift, batch
        self.state = {k: v.clone() for k, v in network.state_dict().items()}

    def round(self, cohort: Sequence[int]) -> None:
        total = {k: torch.zeros_like(v) for k, v in self.state.items()}
        samples = sum(len(self.clients[c]) for c in cohort)
        for client in cohort:
            self.network.load_state_dict(self.state)
            self.fit(self.clients[client])
            share = len(self.clients[client]) / samples
            for k, v in self.network.state_dict().items():
                if v.is_floating_point():
                    total[k].add_(v, alpha=share)
                else:
                    total[k] = torch.maximum(total[k], v)
        self.state = total

    def fit(self, rows: Tensor) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05)
        for index in rows[torch.randperm(len(rows))].split(self.batch):
            x = self.x[index].to(torch.float32).mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)
            loss = F.cross_entropy(self.network(x), self.y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
