"""``flsuite new``: a folder with a model, its data and an experiment that runs."""

import shlex
from importlib.resources import files
from pathlib import Path

from flsuite.commands.parsers import parser_of
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import make_folder

_FILES = ("my_model.py", "my_data.py", "exp.yaml")


def new(args: list[str]) -> None:
    """Write the files, and print the next commands to try.

    Raises:
        FlsuiteError: If one of the files already exists.
    """
    name = parser_of("new").parse_args(args).name
    folder = Path(name)
    if not name.strip() or folder.name == "..":
        raise FlsuiteError(f"new: {name!r} is not the name of a new folder; give one, e.g. mine")

    present = [name for name in _FILES if (folder / name).exists()]
    if present:
        raise FlsuiteError(f"new: {folder} already has {', '.join(present)}; name another folder")
    make_folder(folder)
    template = files("flsuite.commands.template")
    for name in _FILES:
        text = (template / name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")

    print(f"wrote {', '.join(str(folder / name) for name in _FILES)}")
    print("next:")
    for line in (
        f"cd {shlex.quote(str(folder))} && flsuite fit --config exp.yaml",
        "flsuite fit --config exp.yaml --trainer.aggregator FedAdam",
        "flsuite ls --sort score",
    ):
        print(f"  {line}")
