"""The accuracy on each task after each task."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError, log
from flsuite.data.federated import FederatedData
from flsuite.metrics.scores import average_accuracy, backward_transfer, forgetting, forward_transfer
from flsuite.runs.run import Run


@dataclass(eq=False)
class TaskMatrix(FederationCallback, Settings):
    """Scores each task after each task of a :class:`~flsuite.data.TaskSequence`.

    Take it to measure forgetting over tasks.

    Without tasks it does nothing. After the last round of a task, the model is scored on the test
    samples of every client's groups of classes, including future groups, against all classes. This
    gives one matrix per client (for its own model, if it has one), and their mean. Logged in that
    round as ``test/<name>``:

    - ``task_accuracy/<j>``: the row of the matrix, for the federation and each client;
    - ``task_accuracy``: the mean over clients and over the tasks done;
    - ``forgetting``, ``backward_transfer`` and ``forward_transfer``: means over clients, see
      :mod:`flsuite.metrics.scores`.

    The picture is ``tasks.png`` in the run's folder.

    Every run has this callback. Name it in ``trainer.callbacks`` to choose the clients.

    Args:
        clients: Number of clients with a matrix. Default: all.

    Attributes:
        matrix: float64 ``(clients, 1 + tasks done, tasks)``. The first row precedes all training.
    """

    affects: ClassVar[Affects] = "nothing"

    clients: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.matrix: Tensor | None = None

    def on_federation_start(self, run: Run) -> None:
        data = run.federation.data
        if not data.sequences:
            return

        if self.clients is not None and not run.federation.present(self.clients):
            raise FlsuiteError(
                f"TaskMatrix: all of its {self.clients} clients are in trainer.without; raise "
                "TaskMatrix.clients"
            )
        if run.round == 0:
            self.matrix = self._row(run, data)[:, None]

        rounds = run.options.budget.rounds
        if rounds is not None and rounds < data.starts[-1]:
            log.warning(
                "trainer.rounds is %d, but the last task starts in round %d: it is never learned",
                rounds,
                data.starts[-1],
            )

    def on_round_end(self, run: Run, round: int) -> None:
        data = run.federation.data  # with tasks, if there is a matrix
        if self.matrix is None:
            return
        if run.finished or data.task(round + 1) != data.task(round):
            self._score(run, data, round)

    def _score(self, run: Run, data: FederatedData, round: int) -> None:
        assert self.matrix is not None
        if not run.federation.clients.is_local:
            log.warning("no accuracy by task: private parts of the models stay with the clients")
            self.matrix = None
            return

        # An extended run scores its last task a second time.
        row, before = self._row(run, data), data.task(round) + 1
        self.matrix = torch.cat([self.matrix[:, :before], row[:, None]], dim=1)
        present = list(run.federation.present(len(row)))
        for task, accuracy in enumerate(row[present].mean(0).tolist()):
            run.log_metric(f"task_accuracy/{task}", accuracy, split="test")
        for client in present:
            for task, accuracy in enumerate(row[client].tolist()):
                run.log_metric(f"task_accuracy/{task}", accuracy, client, "test")
        for name, value in _summarize(self.matrix[present]).items():
            run.log_metric(name, value, split="test")
        if run.folder.path is not None:
            from flsuite.analysis.partition import task_figure

            figure = task_figure(self.matrix[present].mean(0)[1:].numpy())
            figure.savefig(run.folder.path / "tasks.png")

    def _row(self, run: Run, data: FederatedData) -> Tensor:
        """Return the accuracy of each client's model on each of its tasks, ``(clients, tasks)``."""
        federation, evaluator = run.federation, run.evaluator
        by_class: tuple[Tensor, Tensor] | None = None
        rows = []
        for client in range(min(self.clients or data.clients, data.clients)):
            # A shared model is scored once for all clients.
            if by_class is None or federation.entries.personal:
                one = client if federation.entries.personal else None
                evaluator.load(federation.client_state(one))
                predicted = evaluator.outputs(data.test)["scores"].argmax(1)
                by_class = _by_class(predicted == data.test.y, data.test.y, data.spec.num_classes)
            hits, samples = by_class
            # A task is a group of classes. Clients have different groups.
            groups = [list(group) for group in data.sequences[client]]
            rows.append(torch.stack([hits[group].sum() / samples[group].sum() for group in groups]))

        return torch.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.matrix is None else {"matrix": self.matrix}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.matrix = state_dict.get("matrix")


def _summarize(matrix: Tensor) -> dict[str, float]:
    """Return means over clients, without the numbers that need more than one task."""
    numbers = {
        "task_accuracy": average_accuracy(matrix),
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
        "forward_transfer": forward_transfer(matrix),
    }
    return {
        name: float(values.mean()) for name, values in numbers.items() if not values.isnan().any()
    }


def _by_class(right: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the number of hits and of samples, by class."""
    hits = torch.bincount(y, right.double(), minlength=classes)
    return hits, torch.bincount(y, minlength=classes)
