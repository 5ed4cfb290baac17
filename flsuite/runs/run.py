"""One run of a federation: the federation, its scores, its folder and its clock."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flsuite.runs.checkpoint import export_model, load_checkpoint, refuse_mismatch, save_checkpoint
from flsuite.errors import FlsuiteError
from flsuite.server.evaluation import GLOBAL, Evaluator, Scores, Split
from flsuite.server.federation import Federation
from flsuite.random import seed_process
from flsuite.runs.folder import RunFolder, write_pictures, write_predictions
from flsuite.runs.summary import RunSummary

__all__ = ["Run"]

log = logging.getLogger("flsuite")

_PICTURED = 10
_PARTS: tuple[Split, ...] = ("val", "test")

Notify = Callable[..., None]


class Run:
    """What a federation is on its way through the rounds, beside itself: scored, recorded, saved, and found again.

    Args:
        federation: As it is before the first round.
        evaluator: Scores its models.
        folder: Where it is recorded.
        monitor: The score on validation data that picks the best round.
    """

    def __init__(self, federation: Federation, evaluator: Evaluator, folder: RunFolder, monitor: str) -> None:
        self.federation = federation
        self.evaluator = evaluator
        self.folder = folder
        self.summary = RunSummary(monitor)
        self._wall_before, self._began = 0.0, time.monotonic()
        self._best_clients: dict[int, int] = {}

    @property
    def wall_seconds(self) -> float:
        """Seconds this run has taken, those before a resume included."""
        return self._wall_before + time.monotonic() - self._began

    # Scores

    def scores(self, part: Split, clients: int, details: bool = False) -> Scores:
        """Of the federation as it is, and of its first ``clients`` clients."""
        self.evaluator.data = self.federation.current
        chosen = range(min(clients, self.federation.data.clients))
        if not self.federation.personal:
            return self.evaluator.shared(self.federation.client_state(None), part, chosen, details)
        return self.evaluator.personal({c: partial(self.federation.client_state, c) for c in chosen}, part, details)

    def evaluate(
        self, is_last: Callable[[], bool], score_clients: int, notify: Notify, scores: Callable[..., Scores] | None = None
    ) -> bool:
        """Score on validation data, then on test data; whether the round is the best so far on the former.

        Args:
            is_last: Whether the run ends with this round; asked again after the validation, which may stop it early.
            score_clients: Clients scored one by one, unless it is the last round, which scores all.
            notify: Calls the federation's hooks.
            scores: Takes the place of :meth:`scores` where models are scored elsewhere.
        """
        improved = False
        for part in _PARTS:
            clients = self.federation.data.clients if is_last() else score_clients
            found = (scores or self.scores)(part, clients, details=is_last() and part == "test")
            if not found:
                continue
            for scope, row in found.items():
                self.folder.table.note(scope, part, row)
            if part == "val":
                stage = self.federation.current.stage
                improved = self.summary.consider(found[GLOBAL], stage.task if stage else None)
            else:
                self.summary.score(self.federation.round, found[GLOBAL], improved)
            notify("on_evaluation_end", self.federation.round, part, found)
        return improved

    def predict(self) -> tuple[torch.Tensor, list[Path]]:
        """Class probabilities on the test split, ``(n, classes)``, and the files written.

        They are the mean over clients where each has a model of its own.
        """
        federation = self.federation
        clients = range(federation.data.clients) if federation.personal else [None]
        total = torch.zeros(())
        for client in clients:
            self.evaluator.load(federation.client_state(client))
            total = total + self.evaluator.outputs(federation.data.test)["scores"]
        probabilities = total / len(clients)
        if self.folder.path is None:
            return probabilities, []
        table = write_predictions(self.folder.path, probabilities, federation.data)
        return probabilities, [table, *write_pictures(self.folder.path, self.pictures())]

    def pictures(self) -> dict[str, torch.Tensor]:
        """What the model shows of the first test samples; the first client's where each has a model of its own."""
        federation = self.federation
        seed_process(0, "pictures", federation.round)  # the same draws for every run, to compare them by
        self.evaluator.load(federation.client_state(0 if federation.personal else None))
        return self.evaluator.pictures(federation.data.test.take(torch.arange(min(_PICTURED, len(federation.data.test)))))

    # Records

    def record(self, notify: Notify) -> None:
        """All that is known of the round goes into the table and to the loggers."""
        federation, table = self.federation, self.folder.table
        for scope, numbers in federation.log.metrics():
            table.note(scope, "train", numbers)
        if stage := federation.current.stage:
            table.note(GLOBAL, "train", {"task": stage.task})
        self.summary.transfer(federation.log.updates)
        named = table.close_round(federation.round, federation.virtual_seconds, self.wall_seconds)
        self.summary.note(federation.round, {k.removeprefix("test/"): v for k, v in named.items() if k.startswith("test/")})
        notify("on_round_recorded", federation.round, named)

    def save(self, best: bool, **beside: Any) -> None:
        """Write the checkpoint, and with it what clients keep.

        Args:
            best: Whether this is the best round so far.
            beside: What else to keep: ``settings`` and whatever :meth:`restore` is to give back.
        """
        federation, folder = self.federation, self.folder.checkpoints
        federation.memories.commit(federation.round)
        table = self.folder.table.flush()
        if folder is None:
            return
        if best:
            self._best_clients = dict(federation.memories.versions)
        content = {
            **beside,
            "federation": federation.state_dict(),
            "summary": self.summary.state_dict(),
            "best_clients": self._best_clients,
            "wall_seconds": self.wall_seconds,
            "table": table,
        }
        save_checkpoint(content, folder, best)
        federation.memories.collect(federation.memories.versions, self._best_clients)

    def export(self, path: Path) -> None:
        """Write the global model as an ordinary Lightning checkpoint."""
        self.evaluator.load(self.federation.client_state(None))
        export_model(self.evaluator.model, path)

    def find(self, ckpt_path: str | None) -> Path | None:
        """The file that a request means; ``None`` if there is nothing to go on from."""
        if ckpt_path not in ("last", "best"):
            return None if ckpt_path is None else Path(ckpt_path)
        folder = self.folder.checkpoints
        if folder is None:
            raise FlsuiteError(f"ckpt_path {ckpt_path} is looked for in the run's folder, but enable_checkpointing is false")
        path = folder / f"{ckpt_path}.ckpt"
        if path.exists() or ckpt_path == "best":
            return path
        log.info("no checkpoint in %s yet: starting with the first round", folder)
        return None

    def restore(self, checkpoint: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Become what the checkpoint says; gives back all it holds.

        Raises:
            FlsuiteError: If it cannot be read, or was written with other settings, which the message names.
        """
        content = load_checkpoint(checkpoint)
        refuse_mismatch(settings, content["settings"], checkpoint)
        self.federation.load_state_dict(content["federation"])
        self.summary.load_state_dict(content["summary"])
        self._wall_before, self._began = content["wall_seconds"], time.monotonic()
        self._best_clients = content["best_clients"]
        return content

    def resume(self, checkpoint: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Restore, and go on in this folder."""
        home, own = checkpoint.resolve().parent, self.folder.checkpoints
        if checkpoint.is_file() and (own is None or home != own.resolve()):
            raise FlsuiteError(f"{checkpoint} belongs to another run; resume it there, with run_dir {home.parent}")
        content = self.restore(checkpoint, settings)
        self.folder.table.resume(content["table"])
        log.info("resumed after round %d from %s", self.federation.round, checkpoint)
        return content
