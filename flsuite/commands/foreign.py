"""What the config of a pack may name.

A config is code: the command builds the classes, and calls the functions, that it names. Whoever
verifies a pack runs the config of another person, so only classes are built from it that cannot run
code of that person.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

from jsonargparse import _typehints, _util
from jsonargparse._common import ImportDenied

from flsuite.commands.typos import exists
from flsuite.common.errors import FlsuiteError, path_of
from flsuite.common.files import read_yaml
from flsuite.common.moved import moved

# Classes of these places only. Functions of the same packages load pickles or run code, and no
# shipped config names one. Ray is left out, because its runtime_env starts programs.
_PLACES = (
    *("flsuite.FederatedTrainer", "flsuite.trainer", "flsuite.commands.fork.StopAfter"),
    *("flsuite.aggregators", "flsuite.callbacks", "flsuite.data", "flsuite.metrics"),
    *("flsuite.models", "flsuite.runs.fork.Fork", "flsuite.studies"),
    *("flsuite.federation.schedules", "flsuite.federation.client.callbacks"),
    "flsuite.federation.client.profiler",
    *("flsuite.federation.engines.auto", "flsuite.federation.engines.base"),
    "flsuite.federation.engines.processes",
    *("torch.nn", "torch.optim", "torch.utils.data"),
    *("torchvision.datasets", "torchvision.models", "torchvision.transforms"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
    *("lightning.pytorch.plugins.precision", "torchmetrics", "normflows"),
)
_EXPORTS = ("flsuite.federation",)  # rooms that export names of these places, and of others
_EXCEPT = (
    "torch.utils.data.datapipes",  # unpickles files whose names end in .pickle
    "torchvision.datasets.LSUN",  # unpickles an index next to the images
    "torchvision.datasets.lsun",
)

_CHECK = "check_import_path"  # jsonargparse's own check before it imports a name of a config
_REMEDY = (
    "a pack may name classes of flsuite, torch, torchvision, lightning, torchmetrics and "
    "normflows; if you trust its author, add --trust"
)


@contextmanager
def only_known_classes(config: Path) -> Iterator[None]:
    """Let the parser import only known classes, wherever in a config they are named.

    All names of a config, in files and texts that it refers to as well, reach the parser's one
    function that imports them. The name is checked before the import, and the place where the
    object is defined after it. Nothing is built once a name was refused.

    Args:
        config: The config.

    Raises:
        FlsuiteError: If it names plugins, which are imported as a whole.
    """
    if (read_yaml(config) or {}).get("plugins"):
        raise FlsuiteError(f"config.yaml names plugins, which could run code; {_REMEDY}")
    refused: list[ImportDenied] = []

    def check(path: str) -> None:
        is_text = not exists(path.partition(".")[0])  # such as the name of a field
        if not refused and not is_text and not _is_known(path):
            refused.append(ImportDenied(f"{path} could run code; {_REMEDY}"))
        if refused:
            raise refused[0]

    before = vars(_util)[_CHECK]
    try:
        vars(_util)[_CHECK] = vars(_typehints)[_CHECK] = check
        yield
    finally:
        vars(_util)[_CHECK] = vars(_typehints)[_CHECK] = before


def _is_known(path: str) -> bool:
    """Return whether a path names a class that one of the places defines."""
    now = moved(path)
    if not _is_within(now, (*_PLACES, *_EXPORTS)):
        return False
    try:
        found: Any = locate(now)
    except ErrorDuringImport:  # the parser says so
        return True
    if found is None:  # the parser says so, unless it finds something else under an old name
        return now == path
    is_public = inspect.isclass(found) and not found.__name__.startswith("_")
    return is_public and _is_within(path_of(found), _PLACES)


def _is_within(path: str, places: Sequence[str]) -> bool:
    inside, outside = (
        any(f"{path}.".startswith(f"{place}.") for place in some) for some in (places, _EXCEPT)
    )
    return inside and not outside
