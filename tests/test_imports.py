"""Imports happen late, so that runs do not wait for libraries that they do not use."""

import multiprocessing
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

LATER = {"matplotlib.figure", "medmnist", "pandas", "pyarrow", "sklearn", "wandb"}
"""Libraries that only some runs use, or only at the end. Lightning does not import them itself."""
HEAVY = {"lightning", "numpy", "scipy", "torch", "torchmetrics", "torchvision"}


def imported(code: str) -> set[str]:
    """Return what a new process has imported after some code."""
    code = f"import sys; {code}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_what_comes_first_imports_nothing_heavy() -> None:
    first = "flsuite, flsuite.commands.main, flsuite.federation.engines.forkserver"
    assert not imported(f"import {first}") & (HEAVY | LATER)


def test_no_command_needs_an_extra_to_start() -> None:
    """``flsuite report`` ended with a traceback where Altair is not installed."""
    # A fork has Lightning already, whose import takes seconds.
    process = multiprocessing.get_context("fork").Process(target=import_commands_without_extras)
    process.start()
    process.join()
    assert process.exitcode == 0


def import_commands_without_extras() -> None:
    names = "altair vl_convert ray flwr opacus dp_accounting cryptography mlflow peft pyarrow"
    extras = names.split()
    for name in [n for n in sys.modules if n.partition(".")[0] in ("flsuite", *extras)]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(extras))
    for file in (Path(__file__).parents[1] / "flsuite" / "commands").glob("*.py"):
        import_module(f"flsuite.commands.{file.stem}")


@pytest.mark.long
def test_a_run_and_its_workers_import_little_beside_lightning() -> None:
    by_lightning = "import lightning.pytorch; known = set(sys.modules)"
    ours = "import flsuite.commands.fit, flsuite.federation.engines.wire"
    added = imported(f"{by_lightning}; {ours}; [sys.modules.pop(name) for name in known]")
    assert "flsuite.federation.engines.wire" in added
    assert not added & (HEAVY | LATER)
    packages = {name.split(".")[0] for name in added} - sys.stdlib_module_names
    assert packages <= {
        "cloudpickle",
        "docstring_parser",
        "flsuite",
        "jsonargparse",
        "lightning",
        "normflows",
        "typeshed_client",
        "yaml",
    }


def test_tests_import_each_other_under_one_name() -> None:
    """Pytest has their folders on the path too: a bare name would be a second module."""
    files = list(Path(__file__).parent.rglob("*.py"))
    bare = "|".join({file.stem for file in files} - {"__init__", "__main__"})
    line = re.compile(rf"^ *(?:from|import) (?:{bare})\b(?!\.)", re.MULTILINE)
    assert line.search("import conftest\n") and line.search("    from conftest import digits\n")
    assert not [str(file) for file in files if line.search(file.read_text("utf-8"))]
