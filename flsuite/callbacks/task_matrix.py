"""How well each task is known after each of the others."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flsuite.callbacks.base import FederationCallback
from flsuite.data.tasks import TaskData
from flsuite.errors import require_at_least
from flsuite.metrics import average_accuracy, backward_transfer, forgetting, forward_transfer

if TYPE_CHECKING:
    from flsuite.server.evaluation import Scores
    from flsuite.trainer import FederatedTrainer

__all__ = ["TaskMatrix", "task_figure"]

log = logging.getLogger("flsuite")


class TaskMatrix(FederationCallback):
    """With a :class:`~flsuite.data.TaskSequence`: the accuracy on each task, after each task. Without one it does nothing.

    After the last round of a task the model is scored on the test samples of every client's groups of classes, those still to
    come included, against all classes: a matrix a client (its own model's, where it has one), and their mean. Logged as
    ``test/task_accuracy/<j>`` in that round, the row of the matrix, for the federation and each client; and as means over
    clients ``test/task_accuracy`` (over the tasks done), ``test/forgetting``, ``test/backward_transfer`` and
    ``test/forward_transfer``, see :mod:`flsuite.metrics.continual`. The picture is ``tasks.png`` in the run's folder.

    On without being asked for; name it in ``trainer.callbacks`` to choose the clients.

    Args:
        clients: How many clients have a matrix; default all.

    Attributes:
        matrix: float64 ``(clients, 1 + tasks done, tasks)``; the first row is that before any training.
    """

    def __init__(self, clients: int | None = None) -> None:
        require_at_least("TaskMatrix", 1, clients=clients)
        self.clients = clients
        self.matrix: Tensor | None = None

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        data = _tasks(trainer)
        if data is None:
            return
        if trainer.round == 0:
            self.matrix = self.row(trainer, data)[:, None]
        if trainer.rounds < data.starts[-1]:
            log.warning(
                "trainer.rounds is %d, and the last task begins with round %d: it is never learned",
                trainer.rounds,
                data.starts[-1],
            )

    def on_round_end(self, trainer: "FederatedTrainer", round: int) -> None:
        data = _tasks(trainer)
        if data is not None and self.matrix is not None and _is_end(data, round, trainer.rounds):
            self._score(trainer, data, round)

    def on_evaluation_end(
        self, trainer: "FederatedTrainer", round: int, split: str, scores: "Scores"
    ) -> None:
        """A run that is stopped early may end within a task, which shows only now."""
        data = _tasks(trainer)
        if split != "test" or data is None or self.matrix is None:
            return
        if trainer.should_stop and not _is_end(data, round, trainer.rounds):
            self._score(trainer, data, round)

    def _score(self, trainer: "FederatedTrainer", data: TaskData, round: int) -> None:
        assert self.matrix is not None and trainer.federation is not None
        if not trainer.federation.memories.at_hand:
            log.warning(
                "no accuracy by task: what the clients' models keep to themselves lies with them"
            )
            self.matrix = None
            return
        row, before = (
            self.row(trainer, data),
            data.task(round) + 1,
        )  # a run that is extended scores its last task again
        self.matrix = torch.cat([self.matrix[:, :before], row[:, None]], dim=1)
        for task, accuracy in enumerate(row.mean(0).tolist()):
            trainer.log_metric(f"task_accuracy/{task}", accuracy, split="test")
        for client, own in enumerate(row.tolist()):
            for task, accuracy in enumerate(own):
                trainer.log_metric(f"task_accuracy/{task}", accuracy, client, "test")
        for name, value in summarised(self.matrix).items():
            trainer.log_metric(name, value, split="test")
        if trainer.run_folder.path is not None:
            task_figure(self.matrix.mean(0)[1:]).savefig(
                trainer.run_folder.path / "tasks.png", dpi=150
            )

    def row(self, trainer: "FederatedTrainer", data: TaskData) -> Tensor:
        """Accuracy of each client's model on each of its tasks, ``(clients, tasks)``."""
        federation, evaluator = trainer.federation, trainer.evaluator
        assert federation is not None
        chosen = range(min(self.clients or data.clients, data.clients))
        by_class: tuple[Tensor, Tensor] | None = None
        rows = []
        for client in chosen:
            if by_class is None or federation.personal:
                evaluator.load(federation.client_state(client if federation.personal else None))
                predicted = evaluator.outputs(data.test)["scores"].argmax(1)
                by_class = _by_class(predicted == data.test.y, data.test.y, data.spec.num_classes)
            hits, samples = by_class
            groups = [list(group) for group in data.sequences[client]]
            rows.append(torch.stack([hits[group].sum() / samples[group].sum() for group in groups]))
        return torch.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.matrix is None else {"matrix": self.matrix}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.matrix = state_dict.get("matrix")


def summarised(matrix: Tensor) -> dict[str, float]:
    """Means over clients; what one task does not define is left out."""
    found = {
        "task_accuracy": average_accuracy(matrix),
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
        "forward_transfer": forward_transfer(matrix),
    }
    return {
        name: float(values.mean()) for name, values in found.items() if not values.isnan().any()
    }


def task_figure(matrix: Tensor) -> Figure:
    """The matrix as a picture: rows are tasks trained on, columns are tasks scored ``(tasks done, tasks)``."""
    done, tasks = matrix.shape
    figure = Figure(figsize=(1.6 + 0.62 * tasks, 1.3 + 0.5 * done), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            weight = "bold" if i == j else "normal"
            panel.text(
                j,
                i,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="white" if value > 0.6 else "black",
                weight=weight,
            )
    panel.set_xticks(range(tasks), [str(task) for task in range(tasks)])
    panel.set_yticks(range(done), [str(task) for task in range(done)])
    panel.set_xlabel("accuracy on a client's task")
    panel.set_ylabel("after its task")
    figure.colorbar(image, ax=panel)
    return figure


def _tasks(trainer: "FederatedTrainer") -> TaskData | None:
    federation = trainer.federation
    return (
        federation.data
        if federation is not None and isinstance(federation.data, TaskData)
        else None
    )


def _is_end(data: TaskData, round: int, rounds: int) -> bool:
    return round == rounds or data.task(round + 1) != data.task(round)


def _by_class(right: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Hits and samples of each class."""
    return torch.bincount(y, right.double(), minlength=classes), torch.bincount(
        y, minlength=classes
    ).double()
