"""Scores of a model, on a whole split and on a client's part of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from flsuite.data.federated import FederatedData
from flsuite.data.ragged import RaggedIndex
from flsuite.data.spec import DataSplit
from flsuite.messages import OwnScores, Scores, Split
from flsuite.metrics import class_accuracy, scores
from flsuite.models.base import ClientModel
from flsuite.models.modes import evaluating
from flsuite.random import seed_process
from flsuite.state import State, load_

__all__ = ["Scorer"]


class Scorer:
    """Scores models in big batches, off the clients' path.

    Args:
        model: The resident model that states are copied into.
        data: The samples. They may change from task to task.
        device: Where the model is scored.
        precision: Returns the context that the forward pass runs in, for example autocast.
        batch_size: Samples per forward pass.
        seed: The run's seed, of what an evaluation draws.
    """

    def __init__(
        self,
        model: ClientModel,
        data: FederatedData,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        batch_size: int = 1024,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.data = data
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.seed = seed

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
        with isolate_rng():
            # An evaluation may draw. It must not depend on what its process has drawn before.
            seed_process(self.seed, f"score/{split}", client=client)
            outputs = self.outputs(samples)
        rows = self._rows(split)
        local = {} if rows is None else self._local(outputs, samples.y, rows, [client])
        classes = self._class_rows(outputs, samples.y) if details else {}
        whole = scores(outputs, samples.y, self.data.spec)
        return OwnScores(whole, local.get(str(client), {}), classes)

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
