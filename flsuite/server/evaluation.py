"""Scores of the global model and of every client."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flsuite.data.federated import FederatedData
from flsuite.data.ragged import RaggedIndex
from flsuite.data.spec import DataSplit
from flsuite.errors import FlsuiteError
from flsuite.metrics import HIGHER_IS_BETTER, class_accuracy, scores, summary
from flsuite.models.base import ClientModel
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.models.modes import evaluating
from flsuite.models.protocols import LatentModel
from flsuite.server.federation import Federation
from flsuite.state import State, load_

__all__ = ["GLOBAL", "Evaluator", "OwnScores", "Scores", "Split", "combine"]

GLOBAL = "global"
Split = Literal["val", "test"]
Scores = dict[str, dict[str, float]]
"""Scope (``global`` or a client's number) to metric to value."""


class OwnScores(NamedTuple):
    """Scores of a client's own model on one split.

    Attributes:
        whole: Scores on the whole split.
        part: Scores on the client's part of the split. It is empty where the client has none.
        classes: Accuracy per class, if asked for.
    """

    whole: dict[str, float]
    part: dict[str, float]
    classes: dict[str, float]


class Evaluator:
    """Scores models in big batches, off the clients' path.

    Args:
        model: The resident model that states are copied into.
        data: The samples. They may change from task to task.
        device: Where the model is scored.
        precision: Returns the context that the forward pass runs in, for example autocast.
        batch_size: Samples per forward pass.
    """

    def __init__(
        self,
        model: ClientModel,
        data: FederatedData,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        batch_size: int = 1024,
    ) -> None:
        self.model = model
        self.data = data
        self.device = device
        self.precision = precision
        self.batch_size = batch_size

    def scores(
        self, federation: Federation, split: Split, clients: Sequence[int], details: bool = False
    ) -> Scores:
        """Score a federation as it is, and these clients.

        There are no scores where there is no such split.

        Args:
            federation: Its models are scored.
            split: ``val`` or ``test``.
            clients: Clients to score one by one.
            details: Add the accuracy per class.
        """
        self.data = federation.current
        if not federation.personal:
            return self.shared(federation.client_state(None), split, clients, details)
        # Functions and not states: only one client's model is in memory at a time.
        states = {client: partial(federation.client_state, client) for client in clients}
        return self.personal(states, split, details)

    def shared(
        self, state: State, split: Split, clients: Sequence[int], details: bool = False
    ) -> Scores:
        """Score one model that all clients share.

        A client's own score is that of the model on the client's part of the split, which has the
        class mix of the client. The forward pass is done once for all clients.
        """
        samples = self.split(split)
        if samples is None:
            return {}

        self.load(state)
        outputs = self.outputs(samples)
        by_scope: Scores = {GLOBAL: scores(outputs, samples.y, self.data.spec)}
        if details:
            by_scope[GLOBAL] |= self._class_rows(outputs, samples.y)

        rows = self._rows(split)
        if rows is not None:
            of_clients = self._local(outputs, samples.y, rows, clients)
            by_scope |= of_clients
            by_scope[GLOBAL] |= _spread(of_clients, "client_")
        return by_scope

    def personal(
        self, states: Mapping[int, Callable[[], State]], split: Split, details: bool = False
    ) -> Scores:
        """Score models with private parts, one per client.

        See :func:`combine` for the scores of the federation.
        """
        rows = {
            client: self.own(client, state(), split, details) for client, state in states.items()
        }
        return combine({client: row for client, row in rows.items() if row is not None})

    def own(
        self, client: int, state: State, split: Split, details: bool = False
    ) -> OwnScores | None:
        """Score one client's own model.

        The result is ``None`` where there is no such split.
        """
        samples = self.split(split)
        if samples is None:
            return None

        self.load(state)
        outputs = self.outputs(samples)
        rows = self._rows(split)
        local = {} if rows is None else self._local(outputs, samples.y, rows, [client])
        classes = self._class_rows(outputs, samples.y) if details else {}
        whole = scores(outputs, samples.y, self.data.spec)
        return OwnScores(whole, local.get(str(client), {}), classes)

    def of_module(self, module: nn.Module, samples: DataSplit) -> dict[str, float]:
        """Score a module of its own, which maps inputs to logits, by what logits alone show."""
        device = next(module.parameters()).device
        with evaluating(module), torch.inference_mode():
            parts = samples.x.split(self.batch_size)
            logits = torch.cat([module(self.data.scaling(x).to(device)).cpu() for x in parts])

        y = samples.y
        outputs = {
            "scores": class_probabilities(logits, y),
            "loss": classification_loss(logits, y),
        }
        return scores(outputs, y, self.data.spec)

    def split(self, split: Split) -> DataSplit | None:
        """Return the samples of a split, or ``None`` where there is no validation data."""
        return self.data.test if split == "test" else self.data.validation()

    def load(self, state: State) -> None:
        """Make the resident model the one of this state."""
        load_(self.model.state_dict(), state)

    def outputs(self, samples: DataSplit) -> dict[str, Tensor]:
        """Return the model's evaluation columns for every sample, on the CPU."""
        self.model.to(self.device)  # parameters moved in inference mode cannot be trained
        with evaluating(self.model), torch.inference_mode():
            return self._outputs(samples)

    def latents(self, x: Tensor) -> Tensor:
        """Return the latent variables of stored samples ``(n, latent)``, on the CPU.

        Raises:
            FlsuiteError: If the model has none.
        """
        if not isinstance(self.model, LatentModel):
            raise FlsuiteError(
                f"{type(self.model).__name__} has no latent space: it has no method latent(x); use "
                "a model that has one, such as ACVAE"
            )

        self.model.to(self.device)
        with evaluating(self.model), torch.inference_mode(), self.precision():
            parts = [
                self.model.latent(self.data.scaling(part).to(self.device))
                for part in x.split(self.batch_size)
            ]
            return torch.cat([part.float().cpu() for part in parts])

    def pictures(self, samples: DataSplit) -> dict[str, Tensor]:
        """Return the model's pictures of these samples, on the CPU."""
        self.model.to(self.device)
        with evaluating(self.model), torch.inference_mode(), self.precision():
            pictures = self.model.pictures(self.data.scaling(samples.x).to(self.device))
            return {name: grid.float().cpu() for name, grid in pictures.items()}

    def _outputs(self, samples: DataSplit) -> dict[str, Tensor]:
        parts: list[dict[str, Tensor]] = []
        chunks = zip(
            samples.x.split(self.batch_size), samples.y.split(self.batch_size), strict=True
        )

        for x, y in chunks:
            batch = self.data.scaling(x).to(self.device), y.to(self.device)
            with self.precision():
                columns = self.model.evaluation_step(batch)
            # On the CPU batch by batch, so that the outputs of a large split need no room on the
            # device.
            parts.append({name: column.float().cpu() for name, column in columns.items()})

        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _rows(self, split: Split) -> RaggedIndex | None:
        """Return each client's rows of a split, or ``None`` where clients have no part of it."""
        if split == "test":
            return self.data.test_index
        if self.data.val is not None:  # the publisher's validation split has no owners
            return None
        return RaggedIndex(
            torch.arange(len(self.data.val_index.values)), self.data.val_index.offsets
        )

    def _local(
        self, outputs: Mapping[str, Tensor], y: Tensor, rows: RaggedIndex, clients: Sequence[int]
    ) -> Scores:
        by_client: Scores = {}
        for client in clients:
            own = rows[client]
            if len(own):
                part = {name: column[own] for name, column in outputs.items()}
                # No AUROC: it is the costly score, and a client's part often lacks a class.
                values = scores(part, y[own], self.data.spec, auroc=False)
                by_client[str(client)] = values | {"samples": float(len(own))}
        return by_client

    def _class_rows(self, outputs: Mapping[str, Tensor], y: Tensor) -> dict[str, float]:
        by_class = class_accuracy(outputs["scores"], y, self.data.spec)
        return {f"accuracy/{name}": value for name, value in by_class.items()}


def combine(clients: Mapping[int, OwnScores]) -> Scores:
    """Combine the scores of the clients' own models.

    ``global`` is the mean over clients of their models' scores on the whole split, with worst and
    spread. ``accuracy_first_five`` is the mean over the first five clients, which some published
    tables report. A client's row has ``accuracy`` on its own part of the split, and
    ``accuracy_all`` on the whole split.
    """
    if not clients:
        return {}

    by_scope = {
        str(client): row.part | {f"{name}_all": value for name, value in row.whole.items()}
        for client, row in clients.items()
    }

    whole = {str(client): row.whole for client, row in clients.items()}
    parts = {str(client): row.part for client, row in clients.items() if row.part}
    classes = [row.classes for row in clients.values() if row.classes]

    by_scope[GLOBAL] = (
        _means(list(whole.values()))
        | _means(classes)
        | _spread(whole, "")
        | _first_five(whole)
        | _spread(parts, "client_")
    )
    return by_scope


def _spread(clients: Scores, prefix: str) -> dict[str, float]:
    """Return mean, worst and standard deviation over clients of the main scores."""
    if not clients:
        return {}
    spread: dict[str, float] = {}
    for metric in ("accuracy", "f1_macro", "balanced_accuracy", "loss"):
        values = [row[metric] for row in clients.values() if metric in row]
        for name, value in summary(values, metric, HIGHER_IS_BETTER[metric]).items():
            stem, statistic = name.rsplit("_", 1)
            if prefix or statistic != "mean":  # the mean of whole splits is the score itself
                spread[f"{stem}_{prefix}{statistic}"] = value
    return spread


def _first_five(clients: Scores) -> dict[str, float]:
    # Only if all five are scored: a mean over fewer would be another number.
    first = [clients[str(c)]["accuracy"] for c in range(5) if "accuracy" in clients.get(str(c), {})]
    return {"accuracy_first_five": sum(first) / 5} if len(first) == 5 else {}


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    if not rows:
        return {}
    # A score that is undefined for some client has no mean over clients.
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}
