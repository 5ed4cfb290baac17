"""The dissimilarity of the clients' gradients, round by round."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback, is_due
from flsuite.common.arguments import PositiveInt, Settings, at_least
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import attached, loss_of
from flsuite.common.random import numpy_generator, seed_for, torch_generator
from flsuite.common.state import clone, load_
from flsuite.data.federated import Batch, FederatedData
from flsuite.data.loader import batch_bounds
from flsuite.metrics.dissimilarity import RunningDissimilarity
from flsuite.models.abilities import FusedModel
from flsuite.models.modes import kept_modes
from flsuite.runs.run import Run


@dataclass(eq=False)
class GradientDissimilarity(FederationCallback, Settings):
    """Logs ``gamma = mean_i ||g_i - m||^2`` over clients, and its decomposition for fused models.

    Take it to measure how much the clients' gradients differ.

    g_i is the gradient of client i's classification loss with respect to the parameters that all
    clients share, at the new global model, with the client's own private part. In a
    :class:`~flsuite.models.abilities.FusedModel` only the classifier's parameters count. The
    gradient is taken in float32, without augmentation, on training samples. Weights, statistics and
    random numbers of the run are the same with and without this callback.

    Logged as ``train/<name>``:

    - ``gamma``;
    - ``gamma_relative``: ``gamma / ||m||^2``;
    - ``gamma_seconds``: the time of the measurement;
    - for a fused model, ``gamma_orig``, ``R``, ``Phi`` and ``calibrated`` (1 or 0).

    Args:
        every: Rounds between two measurements. The last round is always measured.
        batches: Batches per client, of its training batch size, drawn anew in every round. The
            default matches the reference runs. ``None`` uses all samples.
        batch_norm: ``train`` normalizes with the statistics of each batch, as training and the
            reference do. ``eval`` normalizes with the running ones.
        clients: Clients to measure, drawn once for the whole run. Default: all.
    """

    affects: ClassVar[Affects] = "nothing"

    every: PositiveInt = 10
    batches: PositiveInt | None = 1
    batch_norm: Literal["train", "eval"] = "train"
    clients: Annotated[int, at_least(2)] | None = None

    def on_federation_start(self, run: Run) -> None:
        model = run.evaluator.model
        if not (model.automatic_optimization or isinstance(model, FusedModel)):
            raise FlsuiteError(
                f"GradientDissimilarity: {type(model).__name__} optimizes by hand, so its "
                "training_step returns no loss to differentiate; give it head and head_losses "
                "(flsuite.models.abilities.FusedModel), or remove the callback"
            )
        head_parameters(model, run.federation.state)  # refused before a round has trained

    def on_round_end(self, run: Run, round: int) -> None:
        if not is_due(run, self.every):
            return
        started = time.perf_counter()
        measured = self.measure(run, round)
        seconds = time.perf_counter() - started
        for name, value in {**measured, "gamma_seconds": seconds}.items():
            run.log_metric(name, value)

    def measure(self, run: Run, round: int) -> dict[str, float]:
        """Return the numbers of a round, at the federation as it is now."""
        federation, evaluator, seed = run.federation, run.evaluator, run.options.seed
        data = federation.data.at(run.round)
        model = evaluator.model.to(evaluator.device)
        parameters = head_parameters(model, federation.state)
        dissimilarity = RunningDissimilarity()

        with isolate_rng(), _untouched(model), torch.enable_grad():
            model.train(self.batch_norm == "train")
            for client in self._measured(federation.present(), seed):
                # Not the client's own model, which may differ in shared entries.
                private = federation.clients.private(client)
                evaluator.load({**federation.client_state(None), **private})
                # Dropout and sampling must not depend on what was measured before.
                torch.manual_seed(seed_for(seed, "dissimilarity", round, client))
                batches = gradient_batches(data, client, seed, round, self.batches)
                gradients = head_gradients(model, parameters, batches, evaluator.device)
                dissimilarity.add(*gradients)

        return dissimilarity.summary()

    def _measured(self, clients: Sequence[int], seed: int) -> Sequence[int]:
        if self.clients is None or self.clients >= len(clients):
            return clients
        rng = numpy_generator(seed, "dissimilarity/clients")
        places = rng.choice(len(clients), self.clients, replace=False)
        return sorted(clients[place] for place in places.tolist())


def head_parameters(model: LightningModule, shared: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients are compared.

    They are the classifier's parameters that all clients share.

    Raises:
        FlsuiteError: If there are no such parameters.
    """
    head = model.head if isinstance(model, FusedModel) else ""
    parameters: list[Tensor] = [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith(head) and name in shared and parameter.requires_grad
    ]

    if not parameters:
        raise FlsuiteError(
            f"GradientDissimilarity: {type(model).__name__} shares no trainable parameters of its "
            "classifier in this federation; remove the callback, or change model.private or "
            "trainer.aggregator"
        )
    return parameters


def gradient_batches(
    data: FederatedData, client: int, seed: int, round: int, batches: int | None
) -> Iterator[Batch]:
    """Return a client's training samples, shuffled and without augmentation.

    They are split into batches like an epoch.
    """
    rows = data.train_rows(client)
    order = torch.randperm(
        len(rows), generator=torch_generator(seed, "dissimilarity", round, client)
    )
    rows = rows[order]
    if len(rows) == 1:  # as in training: BatchNorm needs two
        rows = rows.repeat(2)
    bounds = batch_bounds(len(rows), data.batch_size)[:batches]
    return data.batches_of(data.train, [rows[start:stop] for start, stop in bounds])


def head_gradients(
    model: LightningModule,
    parameters: Sequence[Tensor],
    batches: Iterator[Batch],
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Return gradients of the mean loss over all samples, float64 ``(d,)`` on the CPU.

    The first is taken at the input that the model trains on. A fused model has a second one, taken
    at the plain input.
    """
    sums: list[Tensor] = []
    samples = 0
    for x, y in batches:
        gradients = []
        for loss in _losses(model, (x.to(device), y.to(device))):
            parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            # Weighted by samples: the last batch is smaller, and its loss is a mean too.
            flat = torch.cat([part.reshape(-1) for part in parts]).to("cpu").double()
            gradients.append(flat * len(y))

        sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        samples += len(y)

    return tuple(total / samples for total in sums)


def _losses(model: LightningModule, batch: Batch) -> tuple[Tensor, ...]:
    if isinstance(model, FusedModel):
        plain, fused = model.head_losses(batch)
        return fused, plain

    loss = loss_of(model.training_step(batch, 0))
    if not isinstance(loss, Tensor):
        raise FlsuiteError(
            f"GradientDissimilarity: training_step of {type(model).__name__} returns no loss; give "
            "the model head and head_losses (flsuite.models.abilities.FusedModel), or remove the "
            "callback"
        )
    return (loss,)


@contextmanager
def _untouched(model: LightningModule) -> Iterator[None]:
    """Restore weights, buffers and modes at the end.

    Inside, the model has no Trainer, so that it cannot log.
    """
    state = clone(model.state_dict())
    with attached(model, None), kept_modes(model):
        try:
            yield
        finally:
            load_(model.state_dict(), state)
