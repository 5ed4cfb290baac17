"""The loggers of a config: where they write, and the packages that they need."""

from pathlib import Path
from typing import Any

from flsuite.errors import require_extra

__all__ = ["complete_loggers"]

_NOWHERE = (None, "", ".", "./mlruns")  # defaults of Lightning's loggers
# Class, packages of which one must be there, and the extra that installs it.
_EXTRAS = {
    "MLFlowLogger": (("mlflow",), "mlflow"),
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "tensorboard"),
}


def complete_loggers(config: Any, run_dir: Path) -> None:
    """Give loggers without a folder that of the run, and MLflow a database.

    MLflow compares the runs of one database. It is ``mlflow.db`` in the working folder, or in the
    ``save_dir`` of the config.

    Args:
        config: ``trainer.logger`` of the config, which is changed in place.
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
            arguments.tracking_uri = arguments.tracking_uri or f"sqlite:///{folder}/mlflow.db"
        elif is_open:
            arguments.save_dir = str(run_dir.resolve())
