"""``flsuite fit | validate | test | predict``: a LightningCLI around the federated trainer."""

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flsuite.commands.parsing import OneLineParser, config_name, plain_errors, refuse_nulls
from flsuite.common.errors import FlsuiteError, log, one_line, require_extra
from flsuite.common.exports import import_names
from flsuite.common.files import parse_yaml
from flsuite.runs.folder import new_run_dir
from flsuite.runs.record import read_sweep_record, rows_of
from flsuite.trainer import FederatedTrainer

_ROOMS = ("aggregators", "callbacks", "data", "federation", "models")
# A config may use any of their names.
import_names(*(f"flsuite.{room}" for room in _ROOMS))

_NOWHERE = (None, "", ".", "./mlruns")  # defaults of Lightning's loggers
# Class: (packages, one of which must be installed; the extra that installs it).
_EXTRAS = {
    "MLFlowLogger": (("mlflow",), "mlflow"),
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "tensorboard"),
}


def _complete_loggers(config: Any, run_dir: Path) -> None:
    """Set the folder of loggers that have none to the run's, and give MLflow a database.

    MLflow compares runs within one database: ``mlflow.db`` in the working folder, or in the
    ``save_dir`` of the config. The pictures go to ``mlruns`` next to it.

    Args:
        config: ``trainer.logger`` of the config. It is changed in place.
        run_dir: The run's folder.

    Raises:
        FlsuiteError: If a package is not installed.
    """
    loggers = config if isinstance(config, list) else [config]
    for logger in (logger for logger in loggers if hasattr(logger, "get")):
        name = str(logger.class_path).rsplit(".", 1)[-1]
        if name in _EXTRAS:
            require_extra(f"trainer.logger: {name}", *_EXTRAS[name])

        arguments = logger.get("init_args")
        if arguments is None:
            continue
        is_open = arguments.get("save_dir", "") in _NOWHERE
        if name == "MLFlowLogger":
            folder = Path.cwd() if is_open else Path(arguments.save_dir).resolve()
            if not arguments.tracking_uri:  # a server stores files itself
                arguments.tracking_uri = f"sqlite:///{folder}/mlflow.db"
                arguments.artifact_location = arguments.artifact_location or f"{folder}/mlruns"
        elif is_open:
            arguments.save_dir = str(run_dir.resolve())


def run(command: str, args: list[str]) -> dict[str, Any]:
    """Parse the arguments, build trainer, model and data, and call the trainer's method.

    Returns:
        The run and its results, for other programs.
    """
    _speak()
    made = _FederatedCLI(command, args).trainer.run
    if made is None:
        return {}
    summary = made.summary
    return {
        "run": made.folder.path,
        "monitor": summary.monitor,
        "last": summary.last,
        "picked": summary.best or None,
        "privacy": summary.privacy,
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
    }


def build(args: list[str]) -> tuple[FederatedTrainer, LightningModule, LightningDataModule]:
    """Build what ``flsuite fit`` would fit with these arguments, without fitting it.

    Raises:
        FlsuiteError: If the request cannot be met.
    """
    _speak()
    cli = _FederatedCLI("fit", args, runs=False)
    return cli.trainer, cli.model, cli.datamodule


class _FederatedCLI(LightningCLI):
    trainer: FederatedTrainer

    def __init__(self, command: str, args: list[str], runs: bool = True) -> None:
        _FederatedCLI._command, self._runs = command, runs
        super().__init__(
            args=[command, *args],
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            trainer_class=FederatedTrainer,
            save_config_callback=None,
            seed_everything_default=1,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            # The trainer exports models. The hook would tie each optimizer to the CLI.
            load_from_checkpoint_support=False,
        )

    _command = "fit"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return only the subcommand in use, because each costs a parser of its own."""
        return {_FederatedCLI._command: {"model", "datamodule"}}

    # Lightning's version warns if the arguments differ from sys.argv.
    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parser.parse_command(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="The run's folder; default runs/NAME/TIME-SEED.",
        )
        parser.add_argument(
            "--plugins", type=list[str] | str | None, default=None, help="Modules to import first."
        )

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is None or not 0 <= int(seed) < 1 << 32:
            raise FlsuiteError(f"seed_everything must be from 0 to {(1 << 32) - 1}, got {seed}")
        super()._set_seed()

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the model is built from the config, not from the run's checkpoint."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if config.trainer is None:
            raise FlsuiteError("trainer: expected keys, got null; leave the key out for defaults")
        content = parse_yaml(self._parser(self.subcommand).dump(config, skip_unset=True))
        resolved = {k: v for k, v in content.items() if k not in ("config", "run_dir", "ckpt_path")}
        self._resolved = yaml.safe_dump(resolved, sort_keys=False)

        run_dir = config.run_dir or config.trainer.run_dir or str(self._default_run_dir(config))
        config.run_dir = config.trainer.run_dir = run_dir

        _complete_loggers(config.trainer.logger, Path(run_dir))
        request = self.config[self.subcommand].as_dict()
        trainer = {"class_path": "flsuite.FederatedTrainer", "init_args": request["trainer"]}
        for name, chosen in {**request, "trainer": trainer}.items():
            refuse_nulls(chosen, name)

    def instantiate_classes(self) -> None:
        with plain_errors():
            super().instantiate_classes()

    def after_instantiate_classes(self) -> None:
        self.trainer.config = self._resolved

    def _run_subcommand(self, subcommand: str) -> None:
        if not self._runs:
            return
        try:
            super()._run_subcommand(subcommand)
        except BaseException as error:
            run = self.trainer.run
            if run and run.folder.path and run.folder.path.is_dir():
                error.result = {"run": run.folder.path}  # type: ignore[attr-defined]
            raise

    def after_fit(self) -> None:
        """Write pictures of the curves, partition and timeline, and print what may come next."""
        # Imported late: pandas and matplotlib are not needed earlier.
        from flsuite.analysis.curves import run_figure
        from flsuite.analysis.partition import partition_figure
        from flsuite.analysis.runs import read_partition
        from flsuite.analysis.timeline import read_timeline, timeline_figure

        folder = self.trainer.run.folder.path if self.trainer.run else None
        if folder is None:
            return
        # Measured times depend on this machine more than on the federation.
        is_virtual = self.trainer.schedule.is_virtual
        axis = "virtual_s" if is_virtual else "round"
        pictures: dict[str, Callable[[], Any]] = {
            "curves.png": lambda: run_figure(folder, axis),
            "partition.png": lambda: partition_figure(read_partition(folder)),
        }
        if is_virtual:
            pictures["timeline.png"] = lambda: timeline_figure(read_timeline(folder))
        for name, draw in pictures.items():
            try:
                draw().savefig(folder / name)
            except (OSError, FlsuiteError) as error:  # the run itself is complete
                log.warning("%s was not written: %s", name, one_line(error))
        self._print_next(folder)

    def _print_next(self, folder: Path) -> None:
        """Print commands for this run, but not for the cells of a sweep, which has its own end."""
        run = self.trainer.run
        if run is None or not run.options.show or read_sweep_record(folder.parent.parent):
            return
        name = shlex.quote(str(folder))
        print(f"next: flsuite report {name} --output report   # tables and figures for a paper")
        rows = (row for row in rows_of(folder / "timeline.csv") if row["outcome"] == "failed")
        failed = [(int(row["version"]) + 1, row["client"]) for row in rows]
        at, client = max(failed, key=lambda fit: fit[0], default=(0, ""))
        if at >= run.federation.first_round:  # else it is the parent's
            fit = f"--at {at} --client {client}"
            print(f"      flsuite debug {name} {fit}   # one of the fits that failed")
        else:
            moment = f"--at {run.round // 2} --without 0"
            print(f"      flsuite fork {name} {moment}   # the same without client 0")

    def _default_run_dir(self, config: Any) -> Path:
        """Return a new folder for a new run, else the folder of the existing run.

        The existing run is the one whose folder holds the config, else the newest run with the
        config's name.
        """
        ckpt_path = config.get("ckpt_path")
        # The path of a checkpoint identifies the run.
        if ckpt_path not in (None, "last", "best"):
            return Path(ckpt_path).resolve().parent.parent

        paths = [Path(str(path)) for path in config.get("config") or []]
        parts = config.data, config.trainer.get("aggregator") or {"class_path": "FedAvg"}
        kinds = (str(part["class_path"]).rpartition(".")[2] for part in parts)
        name = config_name(paths, "-".join(kinds).lower())  # as in Python
        if self.subcommand != "fit" or ckpt_path is not None:
            folders = [path.resolve().parent for path in paths]
            inside = [folder for folder in folders if (folder / "metrics.csv").exists()]
            earlier = sorted(path.parent for path in Path("runs", name).glob("*/config.yaml"))
            if existing := inside or earlier:
                return existing[-1]
        return new_run_dir(name, int(config.seed_everything))


def _speak() -> None:
    """Send the federation's messages to the terminal as plain lines."""
    if log.level != logging.DEBUG:  # by --debug
        log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    # "Seed set to 1", on stderr.
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
