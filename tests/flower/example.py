"""The example app, and the results of its runs."""

import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flsuite.commands.main import main

EXAMPLE = Path(__file__).parents[2] / "configs" / "flower"


def our_own(arguments: str, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Run the example by ``flsuite fit``; return the resulting model and table."""
    config, run_dir = str(EXAMPLE / "digits.yaml"), str(folder / "own")
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", config, *shlex.split(arguments), "--run_dir", run_dir])
    assert exit.value.code == 0
    return left_in(folder / "own")


def left_in(run: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the model of a run's folder, and the lines of its table without times."""
    model = torch.load(run / "checkpoints" / "model.ckpt", weights_only=True)["state_dict"]
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return model, [",".join((row[0], *row[5:])) for row in rows if row[7] != "seconds"]
