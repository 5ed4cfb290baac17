"""Reuse of the clients' trained models of one run in another run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors, make_folder, parse_yaml, replace_tensors
from flsuite.common.messages import ClientContext, ClientResult, FitRequest, TrainedFit
from flsuite.common.state import plain
from flsuite.federation.server.federation import Federation
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import read_settings
from flsuite.runs.settings import WEIGHTS, refuse_mismatch

UPDATES = "updates"
"""Subfolder of a run with its clients' trained models."""

FROM_TRAINING = ("model", "optimizers")
"""Parts of a client's memory that come from training, whatever the algorithm."""

# They determine the result of local training in the first round.
_DECIDE_TRAINING = (
    "seed",
    "model",
    *WEIGHTS,
    "data",
    "client",
    "callbacks",
    "lr_decay",
    "batchnorm",
    "keep_optimizers",
    "channels_last",
)


class UpdateStore:
    """Stores one file per fit: ``round-0001/client-00003.pt``.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, result: ClientResult) -> None:
        """Store the result of a client's training, the first one from a version of the model."""
        update, memory = result.update, result.memory
        path = self._path(update.round, update.client)
        if path.exists():  # without rounds, a client may train from one version several times
            return
        content = {
            "state": update.state,
            "memory": {k: v for k, v in memory.items() if k in FROM_TRAINING},
            "steps": update.steps,
            "metrics": result.training,
            "seconds": update.seconds - update.metrics.get("after_fit_seconds", 0.0),
        }
        make_folder(path.parent)
        replace_tensors(plain(content, f"the update of client {update.client}"), path)

    def clients(self, round: int) -> list[int]:
        """Return the clients whose results of a round are stored, in order."""
        paths = self._path(round, 0).parent.glob("client-*.pt")
        return sorted(int(path.stem.removeprefix("client-")) for path in paths)

    def read(self, round: int, client: int) -> TrainedFit | None:
        """Return the result of a client's training, or ``None`` if it was not stored.

        Raises:
            FlsuiteError: If the file is damaged, or another kind of file.
            OSError: If the file cannot be opened.
        """
        path = self._path(round, client)
        if not path.exists():
            return None
        remedy = "delete it, so that the client trains again"
        try:
            return TrainedFit(**load_tensors(path, remedy))
        except TypeError as error:  # other fields
            raise FlsuiteError(
                f"{path} cannot be read: it is not a client's trained model; {remedy}"
            ) from error

    def _path(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:04d}" / f"client-{client:05d}.pt"


class Reuse:
    """Keeps a run's trained client models, and reads the models of another run to start from.

    Args:
        federation: The federation before its first round.
        folder: The folder of the run.
        keep: Whether the run keeps its clients' models.
        source: Folder of the other run. It is read just before the first round.
        attack: The attack on the run, if any.

    Attributes:
        kept: The store of this run's models, if they are kept.
        source: Folder of the other run, if there is one.
        trained: The models of the other run, once they are read. They replace training in the first
            round.

    Raises:
        FlsuiteError: If the algorithm changes local training, or nothing is written.
    """

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        keep: bool,
        source: str | None,
        attack: Attack | None,
    ) -> None:
        self.source = None if source is None else Path(source)
        self.trained: UpdateStore | None = None
        self.kept = UpdateStore(folder.path / UPDATES) if keep and folder.path else None
        _require_plain_training(federation)
        if attack is not None:
            raise FlsuiteError(
                "keep_updates and from_updates need models as clients train them, but "
                "trainer.attack changes them; leave out one of these"
            )
        uplink = federation.uplink
        if keep and (uplink.masks or uplink.pipeline.transforms):
            raise FlsuiteError(
                "keep_updates stores the clients' models unchanged, but a transform or secure_sum "
                "changes what the server receives; set trainer.keep_updates to false"
            )
        if keep and self.kept is None:
            raise FlsuiteError(
                "keep_updates needs the run's folder, but this run writes none; set "
                "trainer.enable_checkpointing to true, or trainer.keep_updates to false"
            )

    def read(self, settings: Mapping[str, Any]) -> None:
        """Find the trained models of the other run, if there is one.

        Args:
            settings: Settings of the run that will start from them.

        Raises:
            FlsuiteError: If the other run has kept none, or its clients train differently.
        """
        if self.source is not None:
            self.trained = trained_updates(self.source, settings)

    def with_trained(self, request: FitRequest) -> FitRequest:
        """Return the request, with the result of the same fit in the other run if there is one."""
        # Later rounds start from the model of this run.
        if self.trained is None or request.broadcast.round > 1 or request.repeat:
            return request
        return replace(request, trained=self.trained.read(1, request.client))


def trained_updates(run_dir: Path, settings: Mapping[str, Any]) -> UpdateStore:
    """Return the trained models of a run.

    Args:
        run_dir: The folder of the run.
        settings: Settings of the run that will start from them.

    Raises:
        FlsuiteError: If the run has kept none, or its clients train differently.
    """
    if not (run_dir / "settings.yaml").is_file():
        raise FlsuiteError(f"from_updates: {run_dir} is not the folder of a run")
    if not (run_dir / UPDATES).is_dir():
        raise FlsuiteError(
            f"from_updates: {run_dir} has not kept its clients' models; fit it with "
            "--trainer.keep_updates true, or delete the folder if a sweep made it, which then fits "
            "it again"
        )
    theirs = read_settings(run_dir)
    ours = parse_yaml(yaml.safe_dump(dict(settings)))  # tuples become lists, as in a file
    refuse_other_training(ours, theirs, run_dir)
    return UpdateStore(run_dir / UPDATES)


def refuse_other_training(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], run_dir: Path
) -> None:
    """Refuse settings under which clients would train other models than in another run."""
    now, then = ({name: s.get(name) for name in _DECIDE_TRAINING} for s in (ours, theirs))
    refuse_mismatch(now, then, run_dir)


def _require_plain_training(federation: Federation) -> None:
    """Refuse an algorithm that changes local training."""
    aggregator, data = federation.aggregator, federation.data.at(1)
    client = ClientContext(
        id=0,
        round=1,
        samples=data.samples(0),
        class_counts=data.class_counts(0),
        global_state=federation.state,
        received={},
        memory={},
        layout=federation.server.layout,
    )
    if aggregator.pools or aggregator.private:
        fault = "does not train one model per client, so there are none to reuse"
    elif not all(isinstance(c, AfterFit) for c in aggregator.callbacks(client)):
        fault = "changes how clients train, so other aggregators cannot reuse their models"
    else:
        return
    raise FlsuiteError(
        f"{aggregator.name} {fault}; set trainer.keep_updates to false, and leave out "
        "from_updates; in a sweep, leave out this method, or name another one in updates_from"
    )
