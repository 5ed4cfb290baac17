"""Scores of a federation: of the global model, and of every client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flsuite.data.federated import FederatedData, Ragged
from flsuite.data.spec import DataSplit
from flsuite.errors import FlsuiteError
from flsuite.metrics import HIGHER_IS_BETTER, class_accuracy, scores, summary
from flsuite.models.base import ClientModel, LatentModel
from flsuite.state import State, load_

__all__ = ["GLOBAL", "Evaluator", "OwnScores", "Scores", "Split", "gathered"]

GLOBAL = "global"
Split = Literal["val", "test"]
Scores = dict[str, dict[str, float]]
"""Scope (``global`` or a client's number) to metric to value."""


class OwnScores(NamedTuple):
    """What a client's own model scores on one split.

    Attributes:
        whole: On the whole split.
        part: On the client's part of it; empty where it has none.
        classes: Accuracy of each class, if asked for.
    """

    whole: dict[str, float]
    part: dict[str, float]
    classes: dict[str, float]


class Evaluator:
    """Scores models in big batches, off the clients' path.

    Args:
        model: The resident model that states are swapped into.
        precision: Makes the context that the forward pass runs in, e.g. autocast.
        batch_size: Samples a forward pass.
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

    def arrays(self, split: Split) -> DataSplit | None:
        return self.data.test if split == "test" else self.data.validation()

    def shared(
        self, state: State, split: Split, clients: Sequence[int], details: bool = False
    ) -> Scores:
        """Scores of one model that all clients share.

        A client's own score is the model's on its part of the split, which has its own class mix; the forward pass is done
        once. ``details`` adds the accuracy of each class.
        """
        arrays = self.arrays(split)
        if arrays is None:
            return {}
        self.load(state)
        outputs = self.outputs(arrays)
        found: Scores = {GLOBAL: scores(outputs, arrays.y, self.data.spec)}
        if details:
            found[GLOBAL] |= self._class_rows(outputs, arrays.y)
        rows = self._rows(split)
        if rows is not None:
            found |= self._local(outputs, arrays.y, rows, clients)
            found[GLOBAL] |= _spread({c: s for c, s in found.items() if c != GLOBAL}, "client_")
        return found

    def personal(
        self, states: Mapping[int, Callable[[], State]], split: Split, details: bool = False
    ) -> Scores:
        """Scores of models with private parts, one a client.

        ``global`` is the mean over clients of their own models' scores on the whole split, with worst and spread, and as
        ``accuracy_first_five`` the mean over the first five clients, which some published tables report; a client's row has
        ``accuracy`` on its own part of the split, and ``accuracy_all`` on the whole of it.
        """
        found = {
            client: self.own(client, state(), split, details) for client, state in states.items()
        }
        return gathered({client: scores for client, scores in found.items() if scores is not None})

    def own(
        self, client: int, state: State, split: Split, details: bool = False
    ) -> OwnScores | None:
        """Scores of one client's own model; ``None`` where there is no such split."""
        arrays = self.arrays(split)
        if arrays is None:
            return None
        self.load(state)
        outputs = self.outputs(arrays)
        rows = self._rows(split)
        part = (
            {}
            if rows is None
            else self._local(outputs, arrays.y, rows, [client]).get(str(client), {})
        )
        classes = self._class_rows(outputs, arrays.y) if details else {}
        return OwnScores(scores(outputs, arrays.y, self.data.spec), part, classes)

    def outputs(self, arrays: DataSplit) -> dict[str, Tensor]:
        """The model's evaluation columns for every sample, on the CPU; leaves the model's modes as they are."""
        with self.scoring():
            return self._outputs(arrays)

    def latents(self, x: Tensor) -> Tensor:
        """The latent variables of stored samples ``(n, latent)``, on the CPU.

        Raises:
            FlsuiteError: If the model has none.
        """
        if not isinstance(self.model, LatentModel):
            raise FlsuiteError(
                f"{type(self.model).__name__} has no latent space: it has no method latent(x); use e.g. ACVAE"
            )
        with self.scoring(), torch.inference_mode(), self.precision():
            parts = [
                self.model.latent(self.data.scaling(part).to(self.device))
                for part in x.split(self.batch_size)
            ]
            return torch.cat([part.float().cpu() for part in parts])

    def pictures(self, arrays: DataSplit) -> dict[str, Tensor]:
        """The model's pictures of these samples, on the CPU."""
        with self.scoring(), torch.inference_mode(), self.precision():
            found = self.model.pictures(self.data.scaling(arrays.x).to(self.device))
            return {name: grid.float().cpu() for name, grid in found.items()}

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The model on its device and in evaluation mode; its modes as they were behind that."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.to(
            self.device
        ).eval()  # outside inference mode, which would mark moved parameters for ever
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @torch.inference_mode()
    def _outputs(self, arrays: DataSplit) -> dict[str, Tensor]:
        parts: list[dict[str, Tensor]] = []
        for x, y in zip(
            arrays.x.split(self.batch_size), arrays.y.split(self.batch_size), strict=True
        ):
            batch = self.data.scaling(x).to(self.device), y.to(self.device)
            with self.precision():
                columns = self.model.evaluation_step(batch)
            parts.append({name: column.float().cpu() for name, column in columns.items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def load(self, state: State) -> None:
        """Make the resident model the one of this state."""
        load_(self.model.state_dict(), state)

    def _rows(self, split: Split) -> Ragged | None:
        """Each client's rows of the split's arrays, or ``None`` where the clients have no part of their own."""
        if split == "test":
            return self.data.test_index
        if self.data.val is not None:
            return None
        return Ragged(torch.arange(len(self.data.val_index.values)), self.data.val_index.offsets)

    def _local(
        self, outputs: Mapping[str, Tensor], y: Tensor, rows: Ragged, clients: Sequence[int]
    ) -> Scores:
        found: Scores = {}
        for client in clients:
            own = rows[client]
            if len(own):
                part = {name: column[own] for name, column in outputs.items()}
                found[str(client)] = scores(part, y[own], self.data.spec, auroc=False) | {
                    "samples": float(len(own))
                }
        return found

    def _class_rows(self, outputs: Mapping[str, Tensor], y: Tensor) -> dict[str, float]:
        by_class = class_accuracy(outputs["scores"], y, self.data.spec)
        return {f"accuracy/{name}": value for name, value in by_class.items()}


def gathered(clients: Mapping[int, OwnScores]) -> Scores:
    """What the clients' own models come to together: see :meth:`Evaluator.personal`."""
    if not clients:
        return {}
    found = {
        str(c): row.part | {f"{k}_all": v for k, v in row.whole.items()}
        for c, row in clients.items()
    }
    whole = {str(c): row.whole for c, row in clients.items()}
    parts = {str(c): row.part for c, row in clients.items() if row.part}
    classes = [row.classes for row in clients.values() if row.classes]
    found[GLOBAL] = (
        _means(list(whole.values())) | _means(classes) | _spread(whole, "") | _first_five(whole)
    )
    found[GLOBAL] |= _spread(parts, "client_")
    return found


def _spread(clients: Scores, prefix: str) -> dict[str, float]:
    if not clients:
        return {}
    found: dict[str, float] = {}
    for metric in ("accuracy", "f1_macro", "balanced_accuracy", "loss"):
        values = [row[metric] for row in clients.values() if metric in row]
        for name, value in summary(values, metric, HIGHER_IS_BETTER[metric]).items():
            stem, statistic = name.rsplit("_", 1)
            if prefix or statistic != "mean":
                found[f"{stem}_{prefix}{statistic}"] = value
    return found


def _first_five(clients: Scores) -> dict[str, float]:
    first = [clients[str(c)]["accuracy"] for c in range(5) if "accuracy" in clients.get(str(c), {})]
    return {"accuracy_first_five": sum(first) / 5} if len(first) == 5 else {}


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    if not rows:
        return {}
    return {
        name: sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
        if all(name in row for row in rows)
    }
