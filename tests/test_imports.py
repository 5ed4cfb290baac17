"""What is imported when. Nobody waits for a library that a run does not use."""

import subprocess
import sys

import pytest

LATER = {"matplotlib.figure", "medmnist", "pandas", "pyarrow", "sklearn", "wandb"}
"""What only some runs use, or only their end. Lightning imports none of it, or only with pyplot."""
HEAVY = {"lightning", "numpy", "scipy", "torch", "torchmetrics", "torchvision"}


def imported(code: str) -> set[str]:
    """Return what a new process has imported after some code."""
    code = f"import sys; {code}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


@pytest.mark.parametrize(
    "module",
    ["flsuite", "flsuite.commands.main", "flsuite.engines", "flsuite.engines.forkserver"],
)
def test_what_comes_first_imports_nothing_heavy(module: str) -> None:
    assert not imported(f"import {module}") & (HEAVY | LATER)


def test_a_run_and_its_workers_import_little_beside_lightning() -> None:
    by_lightning = "import lightning.pytorch; known = set(sys.modules)"
    ours = "import flsuite.commands.fit, flsuite.engines.worker"
    added = imported(f"{by_lightning}; {ours}; [sys.modules.pop(name) for name in known]")
    assert "flsuite.engines.worker" in added
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
