"""What flsuite is compared with: federated averaging written by hand, without overhead."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor, multiprocessing as mp, nn
from torch.nn import functional as F

__all__ = ["FusedLoop", "HandWrittenLoop", "TwoProcessLoop"]


class HandWrittenLoop:
    """Rounds of FedAvg on data in memory.

    A step is an index, a cast and an update. The clients' states are summed as they come.

    Args:
        network: Trained in place. Every client starts from the global state.
        x: uint8 ``(n, h, w, c)``; batches are channels_last, as flsuite's are.
        y: int64 ``(n,)``.
        clients: Rows of each client.
        scale: Factor from bytes to floats: ``x * scale + shift``.
        shift: Shift from bytes to floats.
        batch: Samples per batch.
        private: Prefix of entries that stay with a client; default none.
        loss: Loss of one batch; default the cross-entropy of the network's output.
        optimizer: Makes the optimizer of a fit; default SGD.
        clip: Norm that gradients are clipped at; default no clipping.
    """

    def __init__(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        clients: Sequence[Tensor],
        scale: Tensor,
        shift: Tensor,
        batch: int = 64,
        private: str = "no entry",
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        clip: float | None = None,
    ) -> None:
        self.network = network.to(memory_format=torch.channels_last)
        self.x, self.y, self.clients, self.batch = x, y, clients, batch
        self.scale, self.shift = scale, shift
        self.state = {k: v.clone() for k, v in network.state_dict().items()}
        self.private, self.own = private, {}  # type: str, dict[int, dict[str, Tensor]]
        self.loss, self.optimizer = loss or self._cross_entropy, optimizer or _sgd
        self.clip = clip

    def round(self, cohort: Sequence[int]) -> None:
        total = {k: torch.zeros_like(v) for k, v in self.state.items()}
        samples = sum(len(self.clients[c]) for c in cohort)
        for client in cohort:
            self.network.load_state_dict({**self.state, **self.own.get(client, {})})
            self.fit(self.clients[client])
            share = len(self.clients[client]) / samples
            trained = self.network.state_dict()
            self.own[client] = {
                k: v.clone() for k, v in trained.items() if k.startswith(self.private)
            }
            for k, v in trained.items():
                if k.startswith(self.private):
                    total[k] = self.state[k]
                elif v.is_floating_point():
                    total[k].add_(v, alpha=share)
                else:
                    total[k] = torch.maximum(total[k], v)
        self.state = total

    def fit(self, rows: Tensor) -> None:
        parameters = list(self.network.parameters())
        optimizer = self.optimizer(parameters)
        for index in rows[torch.randperm(len(rows))].split(self.batch):
            x = (
                self.x[index]
                .to(torch.float32)
                .mul_(self.scale)
                .add_(self.shift)
                .permute(0, 3, 1, 2)
            )
            loss = self.loss(x, self.y[index])
            optimizer.zero_grad()
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(parameters, self.clip)
            optimizer.step()

    def _cross_entropy(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.network(x), y)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class TwoProcessLoop:
    """The hand-written loop in processes of one thread each, which share the global weights.

    Every process adds up the models of its share of the cohort, and this one takes the mean.

    Args:
        loop: The loop that each process has a copy of.
        processes: Their number.
    """

    def __init__(self, loop: HandWrittenLoop, processes: int = 2) -> None:
        self.loop, context = loop, mp.get_context("spawn")
        for value in loop.state.values():
            value.share_memory_()
        self.pipes = []
        for _ in range(processes):
            here, there = context.Pipe()
            total = {k: torch.zeros_like(v).share_memory_() for k, v in loop.state.items()}
            context.Process(target=_serve, args=(there, loop, total), daemon=True).start()
            self.pipes.append((here, total))
        for pipe, _ in self.pipes:
            pipe.recv()

    def round(self, cohort: Sequence[int]) -> None:
        for n, (pipe, _) in enumerate(self.pipes):
            pipe.send(list(cohort[n :: len(self.pipes)]))
        samples = sum(pipe.recv() for pipe, _ in self.pipes)
        for name, value in self.loop.state.items():
            value.copy_(sum(total[name] for _, total in self.pipes) / samples)

    def close(self) -> None:
        for pipe, _ in self.pipes:
            pipe.send(None)


def _serve(pipe: Connection, loop: HandWrittenLoop, total: dict[str, Tensor]) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    while (cohort := pipe.recv()) is not None:
        for value in total.values():
            value.zero_()
        samples = 0
        for client in cohort:
            loop.network.load_state_dict(loop.state)
            loop.fit(loop.clients[client])
            samples += (own := len(loop.clients[client]))
            for name, value in loop.network.state_dict().items():
                total[name].add_(value, alpha=own)
        pipe.send(samples)


class FusedLoop:
    """FusedSpaceFed in the way of its public code.

    It trains in float32, with one step for the autoencoder and then one for the classifier. The
    networks are flsuite's. There is a warm-up epoch and no aggregation. Batches come from memory.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, classifier: nn.Module) -> None:
        self.encoder, self.decoder, self.classifier = encoder, decoder, classifier

    def fit(self, x: Tensor, y: Tensor, epochs: int, batch: int) -> None:
        """Fit one client on float images ``(n, c, h, w)``."""
        both = [*self.encoder.parameters(), *self.decoder.parameters()]
        settings = {"momentum": 0.9, "weight_decay": 5e-4}
        first = torch.optim.SGD(both, lr=0.01, **settings)
        second = torch.optim.SGD(self.classifier.parameters(), lr=0.1, **settings)
        for epoch in range(1 + epochs):
            for index in torch.randperm(len(x)).split(batch):
                seen = x[index]
                first.zero_grad()
                F.mse_loss(self.decoder(self.encoder(seen)), seen).backward()
                first.step()
                if epoch == 0:
                    continue
                with torch.no_grad():
                    reconstruction = self.decoder(self.encoder(seen))
                second.zero_grad()
                F.cross_entropy(self.classifier(seen + reconstruction), y[index]).backward()
                second.step()
