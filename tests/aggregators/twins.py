"""Federated methods in plain PyTorch, for comparison: no Lightning, no parts, one class a method.

A twin shares with flsuite only the data, the order of the batches and the cohorts of the rounds.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from flsuite.aggregators import FedAvg
from flsuite.common.state import State, clone
from flsuite.data.loader import TrainLoader
from tests.aggregators.federations import federation, table_data, table_model

OPTIMIZER = {"lr": 0.05, "momentum": 0.9}
CLIP = 0.5
HEAD = "network.3."


class Twin:
    """FedAvg. Each subclass changes what its method changes."""

    weighting = "samples"

    def __init__(self, private: str | tuple[str, ...] = (), epochs: int = 2, seed: int = 3) -> None:
        self.private = private
        run = federation(FedAvg(), 1).prepare(table_model(**OPTIMIZER), table_data())
        self.model: Any = copy.deepcopy(run.evaluator.model)
        self.data, self.epochs, self.seed = run.federation.data, epochs, seed
        self.w = clone(self.model.state_dict())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.shared = [k for k in self.names if not k.startswith(self.private)]
        self.own: dict[int, State] = {c: {} for c in range(self.data.clients)}
        self.notes: dict[int, dict[str, Any]] = {c: {} for c in range(self.data.clients)}

    def rounds(self, cohorts: Iterable[Sequence[int]]) -> None:
        for number, cohort in enumerate(cohorts, start=1):
            ends = [self.fit(client, number) for client in cohort]
            samples = [self.data.samples(client) for client in cohort]
            if self.weighting == "uniform":
                samples = [1] * len(cohort)
            self.cohort, self.weights = cohort, [n / sum(samples) for n in samples]
            new = self.mean(ends)
            new |= self.server(ends, new)
            self.w = {
                k: v if k.startswith(self.private) else new[k].to(v.dtype)
                for k, v in self.w.items()
            }

    def fit(self, client: int, number: int) -> State:
        self.client, self.start = client, {**self.w, **self.own[client]}
        self.model.load_state_dict(self.start)
        self.model.train()
        self.begin()
        optimizer = SGD(self.model.parameters(), **OPTIMIZER)
        loader = TrainLoader(self.data, client, self.seed, number)
        for epoch in range(self.epochs):
            self.phase(epoch)
            for x, y in loader:
                self.before(x, y)
                optimizer.zero_grad(set_to_none=True)
                self.loss(x, y).backward()
                self.correct()
                self.clip(self.model.parameters())
                optimizer.step()
        self.model.requires_grad_(True)
        end = clone(self.model.state_dict())
        self.own[client] = {k: v for k, v in end.items() if k.startswith(self.private)}
        self.end(end)
        return end

    def mean(self, ends: Sequence[State]) -> State:
        def of(key: str) -> Tensor:
            values = [end[key] for end in ends]
            if not values[0].is_floating_point():
                return torch.stack(values).amax(0)
            pairs = zip(self.weights, values, strict=True)
            return sum(p * v.double() for p, v in pairs)  # type: ignore

        return {key: of(key) for key in self.w}

    def changes(self, ends: Sequence[State], key: str) -> list[Tensor]:
        return [end[key].double() - self.w[key].double() for end in ends]

    def clip(self, parameters: Iterable[Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], CLIP)

    def state_of(self, client: int) -> State:
        """Return the model that the client is scored by."""
        return {**self.w, **self.own[client]}

    # What methods change

    def begin(self) -> None: ...
    def phase(self, epoch: int) -> None: ...
    def before(self, x: Tensor, y: Tensor) -> None: ...
    def correct(self) -> None: ...
    def end(self, end: State) -> None: ...

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def server(self, ends: Sequence[State], mean: State) -> State:
        return {}


class FedRepTwin(Twin):
    def phase(self, epoch: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(HEAD) == (epoch < 1))


class FedBABUTwin(Twin):
    def phase(self, epoch: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(HEAD))


class FedRoDTwin(Twin):
    def begin(self) -> None:
        kept = self.notes[self.client].get("head")
        self.head = torch.nn.Linear(8, 3)
        for name, value in self.head.named_parameters():
            value.data.copy_(kept[name] if kept else torch.zeros_like(value))
        self.of_head = SGD(self.head.parameters(), **OPTIMIZER)
        self.counts = self.data.class_counts(self.client)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.model.network[:3](x)
        generic = self.model.network[3](z)
        self.of_head.zero_grad()
        F.cross_entropy(generic.detach() + self.head(z.detach()), y).backward()
        self.clip(self.head.parameters())
        self.of_head.step()
        own = self.counts > 0  # eq. 6 is a softmax over the client's classes, weighted by counts
        places = own.cumsum(0) - 1
        return F.cross_entropy(generic[:, own] + self.counts[own].log(), places[y])

    def end(self, end: State) -> None:
        self.notes[self.client]["head"] = clone(self.head.state_dict())

    def state_of(self, client: int) -> State:
        kept = self.notes[client].get("head", {})
        own = {HEAD + name: self.w[HEAD + name] + value for name, value in kept.items()}
        return {**self.w, **own}


class FedALATwin(Twin):
    """One upper layer, and all samples of a client."""

    def begin(self) -> None:
        notes = self.notes[self.client]
        if "last" not in notes:
            return
        upper = [HEAD + "weight", HEAD + "bias"]
        v, most = notes["last"], 1 if "weights" in notes else 100
        weights = notes.get("weights", {k: torch.ones_like(v[k]) for k in upper})
        model, losses = copy.deepcopy(self.model), list[float]()
        own = dict(model.named_parameters())
        loader = TrainLoader(self.data, self.client, self.seed, 1)
        samples, size = self.data.samples(self.client), self.data.batch_size
        while len(losses) < most:
            for x, y in loader.plain_batches(samples, size):
                for k in upper:
                    own[k].data.copy_(v[k] + (self.w[k] - v[k]) * weights[k])
                model.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                weights = {
                    k: (weights[k] - own[k].grad * (self.w[k] - v[k])).clamp(0, 1) for k in upper
                }
            losses.append(loss.item())
            if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
                break
        notes["weights"] = weights
        start = {k: v[k] + (self.w[k] - v[k]) * weights[k] for k in upper}
        self.model.load_state_dict({**self.w, **start})

    def end(self, end: State) -> None:
        self.notes[self.client]["last"] = end

    def state_of(self, client: int) -> State:
        return {**self.w, **self.notes[client].get("last", {})}


class DittoTwin(Twin):
    lam = 0.7

    def begin(self) -> None:
        self.v = copy.deepcopy(self.model)
        self.v.load_state_dict(self.notes[self.client].get("v", self.w))
        self.of_v = SGD(self.v.parameters(), **OPTIMIZER)

    def before(self, x: Tensor, y: Tensor) -> None:
        self.of_v.zero_grad()
        F.cross_entropy(self.v(x), y).backward()
        for k, p in self.v.named_parameters():
            p.grad += self.lam * (p.detach() - self.w[k])
        self.clip(self.v.parameters())
        self.of_v.step()

    def end(self, end: State) -> None:
        self.notes[self.client]["v"] = clone(self.v.state_dict())

    def state_of(self, client: int) -> State:
        return {**self.w, **self.notes[client].get("v", {})}


class APFLTwin(DittoTwin):
    alpha = 0.4

    def before(self, x: Tensor, y: Tensor) -> None:
        a = self.notes[self.client].setdefault("alpha", self.alpha)
        mixture = copy.deepcopy(self.v)
        three = zip(mixture.parameters(), self.v.parameters(), self.model.parameters(), strict=True)
        for m, v, w in three:
            m.data.copy_(a * v + (1 - a) * w)
        mixture.zero_grad()
        F.cross_entropy(mixture(x), y).backward()
        # The statistics of BatchNorm are the local model's.
        self.v.load_state_dict({**mixture.state_dict(), **dict(self.v.named_parameters())})

        slope = 0.0
        pairs = zip(self.v.parameters(), self.model.parameters(), mixture.parameters(), strict=True)
        for v, w, m in pairs:
            slope += float(((v - w).detach() * m.grad).sum())
            v.grad = a * m.grad
        self.clip(self.v.parameters())
        self.of_v.step()
        self.notes[self.client]["alpha"] = min(max(a - OPTIMIZER["lr"] * slope, 0.0), 1.0)

    def state_of(self, client: int) -> State:
        if "v" not in (notes := self.notes[client]):
            return self.w
        v, a = notes["v"], notes["alpha"]
        return {
            k: a * v[k] + (1 - a) * w if w.is_floating_point() else v[k] for k, w in self.w.items()
        }


class PFedMeTwin(DittoTwin):
    lam, steps, personal_lr = 5.0, 3, 0.05

    def begin(self) -> None:
        self.v = copy.deepcopy(self.model)

    def before(self, x: Tensor, y: Tensor) -> None:
        for _ in range(self.steps):
            self.v.zero_grad()
            F.cross_entropy(self.v(x), y).backward()
            for t, w in zip(self.v.parameters(), self.model.parameters(), strict=True):
                t.data -= self.personal_lr * (t.grad + self.lam * (t - w).detach())

    def correct(self) -> None:
        for w, t in zip(self.model.parameters(), self.v.parameters(), strict=True):
            w.grad = self.lam * (w - t).detach()


class PerFedAvgTwin(Twin):
    """Epochs may have an odd number of batches, so that a pair crosses the end of an epoch."""

    alpha = 0.1

    def begin(self) -> None:
        loader = TrainLoader(self.data, self.client, self.seed, 1)
        self.left, self.first, self.w_k = self.epochs * len(loader), None, None

    def before(self, x: Tensor, y: Tensor) -> None:
        self.batch, self.left = (x, y), self.left - 1
        if self.first is not None:
            self._move(self.first)

    def correct(self) -> None:
        own = list(self.model.parameters())
        if self.first is not None:  # the second of a pair
            self._back()
            self.first = None
        elif self.left:
            self.first = [p.grad for p in own]
            self.model.zero_grad(set_to_none=True)  # no step
        else:  # the last batch alone serves as both
            self._move([p.grad for p in own])
            buffers = clone(dict(self.model.named_buffers()))
            self.model.zero_grad()
            super().loss(*self.batch).backward()
            self.model.load_state_dict({**self.model.state_dict(), **buffers})
            self._back()

    def _move(self, gradient: Sequence[Tensor]) -> None:
        self.w_k = [p.detach().clone() for p in self.model.parameters()]
        for p, g in zip(self.model.parameters(), gradient, strict=True):
            p.data -= self.alpha * g

    def _back(self) -> None:
        for p, w in zip(self.model.parameters(), self.w_k, strict=True):
            p.data.copy_(w)


class FedDynTwin(Twin):
    weighting, alpha = "uniform", 0.1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        zeros = {k: torch.zeros_like(self.w[k]) for k in self.names}
        self.g = {client: dict(zeros) for client in self.own}
        self.h = {k: v.double() for k, v in zeros.items()}

    def correct(self) -> None:
        for k, p in self.model.named_parameters():
            if k in self.shared:
                p.grad += self.alpha * (p.detach() - self.w[k]) - self.g[self.client][k]

    def end(self, end: State) -> None:
        g = self.g[self.client]
        self.g[self.client] = {k: g[k] - self.alpha * (end[k] - self.w[k]) for k in g}

    def server(self, ends: Sequence[State], mean: State) -> State:
        clients = self.data.clients
        self.h = {
            k: h - self.alpha / clients * sum(self.changes(ends, k)) for k, h in self.h.items()
        }
        return {k: mean[k] - h / self.alpha for k, h in self.h.items()}


class FedNovaTwin(Twin):
    def begin(self) -> None:
        self.number = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.counter = SGD([self.number], **OPTIMIZER)

    def correct(self) -> None:
        self.number.grad = torch.ones_like(self.number)
        self.counter.step()

    def end(self, end: State) -> None:
        self.notes[self.client]["a"] = -float(self.number.detach()) / OPTIMIZER["lr"]

    def server(self, ends: Sequence[State], mean: State) -> State:
        a = [self.notes[client]["a"] for client in self.cohort]
        tau = sum(p * one for p, one in zip(self.weights, a, strict=True))
        per_step = [tau * p / one for p, one in zip(self.weights, a, strict=True)]
        return {
            k: self.w[k].double()
            + sum(q * d for q, d in zip(per_step, self.changes(ends, k), strict=True))
            for k in self.names
        }


class FedExPTwin(Twin):
    weighting = "uniform"

    def server(self, ends: Sequence[State], mean: State) -> State:
        each = {k: torch.stack(self.changes(ends, k)) for k in self.shared}
        squares = sum(float(d.square().sum()) for d in each.values())
        square = sum(float(d.mean(0).square().sum()) for d in each.values())
        step = max(1.0, squares / (2 * len(self.cohort) * (square + 1e-3)))
        return {k: self.w[k].double() + step * d.mean(0) for k, d in each.items()}


class MOONTwin(Twin):
    mu, temperature = 2.0, 0.5

    def begin(self) -> None:
        last = self.notes[self.client].get("last")
        self.others = []
        for state in (self.w, last) if last else ():
            other = copy.deepcopy(self.model)
            other.load_state_dict(state)
            self.others.append(other.train())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.model.network[:3](x)
        loss = F.cross_entropy(self.model.network[3](z), y)
        if not self.others:
            return loss
        with torch.no_grad():
            anchors = [other.network[:3](x) for other in self.others]
        near, far = (F.cosine_similarity(z, a, dim=1) / self.temperature for a in anchors)
        share = near.exp() / (near.exp() + far.exp())
        return loss - self.mu * share.log().mean()

    def end(self, end: State) -> None:
        self.notes[self.client]["last"] = end
