"""How far the clients' gradients lie apart, round by round."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from flsuite.callbacks.base import FederationCallback
from flsuite.data.federated import Batch, FederatedData, batch_bounds
from flsuite.errors import FlsuiteError, require_at_least, require_one_of
from flsuite.metrics.dissimilarity import FusedModel, RunningDissimilarity
from flsuite.models.base import ClientModel
from flsuite.random import numpy_generator, seed_for, torch_generator
from flsuite.state import clone, load_

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

__all__ = ["GradientDissimilarity"]

BatchNorm = Literal["train", "eval"]


class GradientDissimilarity(FederationCallback):
    """Logs ``gamma = mean_i ||g_i - m||^2`` over clients, and for a fused model its decomposition.

    g_i is the gradient of client i's classification loss with respect to the parameters that all clients share, at the new
    global model, with the client's own private part; of a :class:`~flsuite.metrics.FusedModel` only the classifier's
    parameters count. It is taken in float32, without augmentation, on training samples. Nothing of it stays: weights,
    statistics and random numbers of the run are the same with and without this callback.

    Logged, as ``train/<name>``: ``gamma``; ``gamma_relative``, which is ``gamma / ||m||^2``; ``gamma_seconds``, what this
    cost; for a fused model ``gamma_orig``, ``R``, ``Phi`` and ``calibrated`` (1 or 0).

    Args:
        every: Rounds between two measurements; the last round is always measured.
        batches: Batches of each client, of the size it trains with, drawn anew in each round; ``None`` takes all its
            samples. The reference runs take one.
        batch_norm: ``train`` normalises with each batch's own statistics, as training does (the reference); ``eval``
            with the running ones.
        clients: Measure this many clients, drawn once for the whole run; default all.
    """

    def __init__(
        self,
        every: int = 10,
        batches: int | None = 1,
        batch_norm: BatchNorm = "train",
        clients: int | None = None,
    ) -> None:
        require_at_least("GradientDissimilarity", 1, every=every, batches=batches)
        require_at_least("GradientDissimilarity", 2, clients=clients)
        require_one_of("GradientDissimilarity", get_args(BatchNorm), batch_norm=batch_norm)
        self.every = every
        self.batches = batches
        self.batch_norm: BatchNorm = batch_norm
        self.clients = clients

    def on_round_end(self, trainer: "FederatedTrainer", round: int) -> None:
        if round % self.every and round != trainer.rounds:
            return
        started = time.perf_counter()
        found = self.measure(trainer, round)
        for name, value in {**found, "gamma_seconds": time.perf_counter() - started}.items():
            trainer.log_metric(name, value, split="train")

    def measure(self, trainer: "FederatedTrainer", round: int) -> dict[str, float]:
        """The numbers of a round, at the federation as it is now."""
        federation, evaluator = trainer.federation, trainer.evaluator
        assert federation is not None
        model, data = evaluator.model.to(evaluator.device), federation.current
        parameters = head_parameters(model, federation.state)
        running = RunningDissimilarity()
        with isolate_rng(), _untouched(model), torch.enable_grad():
            model.train(self.batch_norm == "train")
            for client in self._measured(data.clients, trainer.seed):
                evaluator.load(federation.client_state(client))
                torch.manual_seed(seed_for(trainer.seed, "dissimilarity", round, client))
                batches = gradient_batches(data, client, trainer.seed, round, self.batches)
                running.add(*head_gradients(model, parameters, batches, evaluator.device))
        return running.summary()

    def _measured(self, clients: int, seed: int) -> Sequence[int]:
        if self.clients is None or self.clients >= clients:
            return range(clients)
        drawn = numpy_generator(seed, "dissimilarity/clients").choice(
            clients, self.clients, replace=False
        )
        return sorted(drawn.tolist())


def head_parameters(model: ClientModel, shared: Mapping[str, Tensor]) -> list[Tensor]:
    """The parameters that gradients are compared on: the classifier's, as far as all clients have the same.

    Raises:
        FlsuiteError: If there are none.
    """
    head = model.head if isinstance(model, FusedModel) else ""
    named = model.named_parameters()
    found: list[Tensor] = [
        p for name, p in named if name.startswith(head) and name in shared and p.requires_grad
    ]
    if not found:
        raise FlsuiteError(
            f"GradientDissimilarity: {type(model).__name__} shares no trainable parameters of its classifier; "
            "remove the callback"
        )
    return found


def gradient_batches(
    data: FederatedData, client: int, seed: int, round: int, batches: int | None
) -> Iterator[Batch]:
    """The training samples of a client in a random order of its own, not augmented, cut as an epoch is."""
    rows = data.train_rows(client)
    rows = rows[
        torch.randperm(len(rows), generator=torch_generator(seed, "dissimilarity", round, client))
    ]
    if len(rows) == 1:  # as in training: BatchNorm needs two
        rows = rows.repeat(2)
    for start, stop in batch_bounds(len(rows), data.batch_size)[:batches]:
        own = rows[start:stop]
        yield data.scaling(data.train.x[own]), data.train.y[own]


def head_gradients(
    model: ClientModel, parameters: Sequence[Tensor], batches: Iterator[Batch], device: torch.device
) -> tuple[Tensor, ...]:
    """Gradients of the mean loss over all samples, float64 ``(d,)`` on the CPU.

    Returns:
        The gradient at the input that the model trains on; for a fused model, that at the plain input behind it.
    """
    sums: list[Tensor] = []
    samples = 0
    for x, y in batches:
        samples += len(y)
        for k, loss in enumerate(_losses(model, (x.to(device), y.to(device)))):
            parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            gradient = torch.cat([part.reshape(-1) for part in parts]).to("cpu").double() * len(y)
            sums[k : k + 1] = [sums[k] + gradient if k < len(sums) else gradient]
    return tuple(total / samples for total in sums)


def _losses(model: ClientModel, batch: Batch) -> tuple[Tensor, ...]:
    if isinstance(model, FusedModel):
        plain, fused = model.head_losses(batch)
        return fused, plain
    loss = model.training_step(batch, 0)
    loss = loss.get("loss") if isinstance(loss, Mapping) else loss
    if not isinstance(loss, Tensor):
        raise FlsuiteError(
            f"GradientDissimilarity: training_step of {type(model).__name__} returns no loss; "
            "give the model head and head_losses (flsuite.metrics.FusedModel), or remove the callback"
        )
    return (loss,)


@contextmanager
def _untouched(model: ClientModel) -> Iterator[None]:
    """Give back weights, buffers and modes as they were; inside, the model has no Trainer that it could log to."""
    state, modes, trainer = (
        clone(model.state_dict()),
        [(m, m.training) for m in model.modules()],
        model._trainer,
    )
    model.trainer = None
    try:
        yield
    finally:
        model._trainer = trainer
        load_(model.state_dict(), state)
        for module, training in modes:
            module.training = training
