"""The link from a run to Weights & Biases: one W&B run per run, also after a resume."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from flsuite.callbacks.logger_links import (
    LAST_NUMBER,
    LIGHTNING_NAME,
    NOTHING,
    PROJECT,
    LoggerLink,
    RoundNumbers,
    group_name,
    run_name,
    tags,
)
from flsuite.callbacks.stopping import StopAt
from flsuite.common.errors import log, one_line, refused_as
from flsuite.runs.run import Run
from flsuite.runs.settings import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Arguments of wandb.init, and the equivalent environment variables.
_VARIABLES = {
    "group": "WANDB_RUN_GROUP",
    "name": "WANDB_NAME",
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",
}


_BLOCK = 32768  # bytes
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_ENDS_RECORD = (1, 4)  # kinds of parts: a whole record, and the last part of a record


class WandbLink(LoggerLink):
    """Sends a run to W&B.

    W&B's own process writes and sends the rows. A kill of both loses rows in transit, so a resume
    reads back which rounds the local files or the server have.

    It sends the numbers of each round, the settings, group, name and tags, a table of the clients'
    scores per evaluation, pictures, and a summary of the last and the picked round.

    Args:
        logger: A WandbLogger. With its ``log_model``, the final model is uploaded.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__(logger)
        self._id: str | None = None
        self._step = 0  # the next free step
        self._offsets: list[tuple[int, int]] = []  # (first round, W&B's step minus the round)
        self._has_warned = False

    def start(self, run: Run, state: dict[str, Any]) -> None:
        self._id, self._step = state.get("id"), state.get("step", 0)
        self._offsets = [(first, offset) for first, offset in state.get("offsets", ())]

        experiment = self._open(run)
        self._id = experiment.id
        experiment.define_metric("round")
        experiment.define_metric("*", step_metric="round")
        super().start(run, state)
        experiment.config.update({"engine": describe(run.engine)}, allow_val_change=True)
        if state:
            self._resume(run, experiment)

    def log(self, run: Run, row: RoundNumbers) -> None:
        super().log(run, row)
        self.logger.experiment.summary.update(_summary(run))

        # The pictures at the end take one more step. An extended run continues after them.
        self._step = _next_step(self.logger.experiment) + int(run.finished)

    def send(self, run: Run, row: RoundNumbers) -> None:
        # In one row: W&B counts rows, and a resume finds out from their number which rounds it has.
        more = _client_table(run, row) | self._images(row.pictures)
        self._send(row.round, row.numbers, more)

    def show(self, round: int, pictures: Mapping[str, "Figure"]) -> None:
        if pictures:
            self._send(round, {}, self._images(pictures))

    def finish(self, run: Run) -> None:
        import wandb

        experiment, folder = self.logger.experiment, run.folder.checkpoints
        if self.logger._log_model and folder is not None and (folder / "model.ckpt").exists():
            artifact = wandb.Artifact(f"model-{experiment.id}", type="model")
            artifact.add_file(str(folder / "model.ckpt"))
            experiment.log_artifact(artifact)

        # The next run in this process must not continue this one.
        experiment.finish(exit_code=0 if run.status == "success" else 1)
        self.logger._experiment = None
        super().finish(run)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "id": self._id,
            "step": self._step,
            "offsets": self._offsets,
        }

    def _images(self, pictures: Mapping[str, "Figure"]) -> dict[str, Any]:
        """Return pictures for a row, or none if one fails: the row then has its numbers alone."""
        import wandb

        try:
            return {name: wandb.Image(figure) for name, figure in pictures.items()}
        except Exception as error:  # from matplotlib or PIL
            self.warn_of(pictures, error)
            return {}

    def _resume(self, run: Run, experiment: Any) -> None:
        """Find out which rounds of the resumed run W&B already has.

        Online, the server has all rows before its starting step. Offline, the earlier parts of the
        run are files next to this one, unless they have been moved.
        """
        if experiment.disabled:
            return
        if not experiment.offline:
            self.last = self._last_on_server(run, experiment)
            return

        own = Path(experiment.dir).parent
        parts = own.parent.glob(f"*run-*-{self._id}/run-{self._id}.wandb")
        if earlier := [path for path in parts if path.parent != own]:
            rows = [row for path in earlier for row in logged_rows(path)]
            whole = [row for _, row in rows if LAST_NUMBER in row or row.get("round") == 0]
            self.last = max((int(row["round"]) for row in whole), default=NOTHING)
            self._step = max((step for step, _ in rows), default=-1) + 1
        # Offline, W&B does not know the steps before a resume. Later rows are merged into this one.
        if self._step > _next_step(experiment):
            experiment.log({"round": run.round}, step=self._step, commit=False)

    def _last_on_server(self, run: Run, experiment: Any) -> int:
        """Return the last round whose row the server has.

        It may be later than the checkpoint. The summary holds the number of the latest row.
        """
        next_step = _next_step(experiment)
        latest = experiment.summary.get("round")
        end = max(run.round, int(latest)) if isinstance(latest, int | float) else run.round
        last = NOTHING
        for first, offset in self._offsets:  # in the order of the rounds
            reached = min(next_step - offset - 1, end)
            last = reached if reached >= first else min(last, first - 1)
        return last

    def _open(self, run: Run) -> Any:
        """Open the run in W&B, with the id :attr:`_id` if it is set.

        A run that the user has already opened is left unchanged.

        Raises:
            FlsuiteError: If W&B refuses it.
        """
        import wandb

        if self.logger._experiment is None and wandb.run is None:
            self._complete(self.logger._wandb_init, run)
        # W&B or its service process may refuse it, such as a run id in use.
        remedy = "log in with wandb login, or set trainer.logger.init_args.offline to true"
        with refused_as("trainer.logger: W&B cannot open a run", remedy):
            return self.logger.experiment

    def _complete(self, arguments: dict[str, Any], run: Run) -> None:
        """Fill in the arguments of wandb.init that the user has not set."""
        # The command passes None for every omitted argument, but W&B starts a new run if resume is
        # None.
        for name in [name for name, value in arguments.items() if value is None]:
            del arguments[name]

        if arguments.get("project") == LIGHTNING_NAME:
            arguments["project"] = self.logger._project = PROJECT
        usual = {
            "group": group_name(run.settings),
            "name": run_name(run.settings),
            "job_type": "fit",
            "tags": tags(run.settings),
        }
        for name, value in usual.items():
            if not os.environ.get(_VARIABLES[name]):
                arguments.setdefault(name, value)

        if self._id is not None:
            arguments["id"] = self.logger._id = self._id
        if self.logger._offline:
            arguments.pop("resume", None)  # W&B warns that it has no effect
        else:
            arguments.setdefault("resume", "allow")

    def _send(self, round: int, numbers: Mapping[str, float], media: dict[str, Any]) -> None:
        """Send a row of numbers, with tables and pictures if W&B accepts them now.

        W&B contacts its server to send a table, and raises if there is no answer. The run must not
        end because of that.
        """
        offset = _next_step(self.logger.experiment) - round
        self._offsets = [known for known in self._offsets if known[0] < round]
        if not self._offsets or self._offsets[-1][1] != offset:
            self._offsets.append((round, offset))

        row = {**numbers, "round": round}
        try:  # never with step=, which would bind rows to W&B's own counter
            self.logger.log_metrics({**row, **media})
        except Exception as error:  # from W&B's client, its transport or its server
            if not media:
                raise
            if not self._has_warned:
                missing = f"no {', '.join(media)} from round {round} on, while this lasts"
                log.warning("W&B: %s (%s)", missing, one_line(error, 200))
                self._has_warned = True
            self.logger.log_metrics(row)


def _summary(run: Run) -> dict[str, float]:
    """Return the test scores of the last and of the picked round, and the guarantees.

    W&B's own summary rules would turn a value into a mapping.
    """
    named: dict[str, float] = {}
    for title, scores in (("last", run.summary.last), ("picked", run.summary.best)):
        for name, value in scores.items():
            if name == "round":
                named[f"{title}/round"] = value
            elif "/" not in name or name.startswith("all_clients/"):  # no per-class scores
                named[f"{title}/test/{name}"] = value
    named |= {f"last/{name}": value for name, value in run.summary.privacy.items()}
    stop = next((callback for callback in run.callbacks if isinstance(callback, StopAt)), None)
    if stop and stop.round and stop.has_stopped():  # not if the target is now harder
        named["rounds_to_target"] = stop.round
    return named


def _client_table(run: Run, row: RoundNumbers) -> dict[str, Any]:
    """Return a table with one row per evaluated client: client, training samples, scores.

    The mapping is empty in rounds that are not scored.
    """
    scores: dict[int, dict[str, float]] = {}
    for name, value in row.of_clients.items():
        _, client, split, metric = name.split("/", 3)
        if split != "train" and metric != "samples":
            scores.setdefault(int(client), {})[f"{split}/{metric}"] = value
    if not scores:
        return {}

    import wandb

    data = run.federation.data.at(row.round)
    names = list(dict.fromkeys(name for of_client in scores.values() for name in of_client))
    rows = [
        [client, data.samples(client), *(of_client.get(name) for name in names)]
        for client, of_client in sorted(scores.items())
    ]
    return {"clients": wandb.Table(columns=["client", "samples", *names], data=rows)}


def _next_step(experiment: Any) -> int:
    """Return the step of the next row, or 0 if W&B is disabled."""
    # Just after a resume, W&B's own counter has not yet reached the starting step.
    return 0 if experiment.disabled else max(int(experiment.step), int(experiment.starting_step))


def logged_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield W&B's step and the content of each row in a file ``run-ID.wandb``.

    The file of a killed run may end in the middle of a row.
    """
    from wandb.proto import wandb_internal_pb2

    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            yield record.history.step.num, {name: json.loads(text) for name, text in row.items()}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file with W&B's header and the framing of LevelDB's log."""
    position, parts = _HEADER.size, b""
    while position + _HEADER.size <= len(data):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        start, position = position + _HEADER.size, position + _HEADER.size + length
        if position > len(data):
            return
        parts += data[start:position]
        if kind in _ENDS_RECORD:
            yield parts
            parts = b""
