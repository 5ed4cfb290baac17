"""Run folders as arguments: ``flsuite test RUN`` and ``flsuite resume RUN``."""

from pathlib import Path

from flsuite.common.errors import FlsuiteError, likeliest
from flsuite.common.files import read_yaml

_FILES = ("config.yaml", "metrics.csv")  # of a run from the command line
_MOST = 3  # suggestions


def with_run_folder(command: str, args: list[str]) -> tuple[str, list[str]]:
    """Return the command and its arguments, with a leading run folder expanded to options.

    ``resume RUN`` becomes a fit that continues from the last checkpoint. Later options win, so
    ``--ckpt_path best`` still works.

    Raises:
        FlsuiteError: If the command cannot read the folder as a run.
    """
    named = args[:1] if args and not args[0].startswith("-") else []
    if command == "resume" and not named:
        raise FlsuiteError("resume: name the folder of a run, e.g. runs/quickstart/TIME-SEED")
    if not named:
        return command, args

    folder = require_run(command, Path(named[0]))
    if command == "fit":
        raise FlsuiteError(f"fit: {folder} is a run; continue it with flsuite resume {folder}")
    options = ["--config", str(folder / "config.yaml"), "--run_dir", str(folder)]
    if command == "resume":
        return "fit", [*options, "--ckpt_path", "last", *args[1:]]
    return command, [*options, *args[1:]]


def require_run(command: str, folder: Path) -> Path:
    """Return the folder if it holds a run started from the command line.

    Raises:
        FlsuiteError: If it does not. The message names the nearest runs.
    """
    if not _is_run(folder):
        lacking = " and ".join(name for name in _FILES if not (folder / name).is_file())
        fault = f"has no {lacking}" if folder.is_dir() else "is not a folder"
        runs = _nearest(folder)
        hint = f"; did you mean {' or '.join(runs)}?" if runs else "; see flsuite ls"
        if folder.is_file() and folder.suffix in (".yaml", ".yml"):
            hint = f"; did you mean --config {folder}?"
        if lacking == "config.yaml":
            hint = "; if it was killed at its start, remove it and start the run again"
        raise FlsuiteError(f"{command}: {folder} is not a run, it {fault}{hint}")
    config = read_yaml(folder / "config.yaml")
    if not isinstance(config, dict):
        raise FlsuiteError(f"{command}: {folder / 'config.yaml'} is empty or damaged; restore it")
    if not {"model", "data", "trainer"} <= config.keys():
        raise FlsuiteError(
            f"{command}: {folder} was run from Python, so its config.yaml cannot build the "
            "model; use trainer.fit or trainer.test with run_dir and ckpt_path there"
        )
    return folder


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _nearest(folder: Path) -> list[str]:
    """Return the newest runs below a folder, or runs with similar paths if it does not exist."""
    if folder.is_dir():
        newest = sorted(_runs_below(folder), key=lambda run: run.stat().st_mtime, reverse=True)
        return [str(run) for run in newest[:_MOST]]
    # Searching the whole working folder would take long, and runs are in runs/ by default.
    above = next(parent for parent in folder.parents if parent.is_dir())
    root = Path("runs") if above.resolve() == Path.cwd() else above
    return likeliest(str(folder), map(str, _runs_below(root)), _MOST, cutoff=0.5)


def _runs_below(root: Path) -> list[Path]:
    return [table.parent for table in root.rglob("metrics.csv") if _is_run(table.parent)]
