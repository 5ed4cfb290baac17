"""A script: two workers on three cells. One cell fails, and one never ends."""

import os
import sys
import time
from pathlib import Path

from flsuite.commands.sweeps import worker
from flsuite.commands.sweeps.queue import CellOutcome, Queue
from flsuite.commands.sweeps.reading import Sweep

METHODS = {"quick": {}, "failing": {"a.b": 1}, "endless": {"a.b": 2}, "killed": {"a.b": 3}}
SWEEP = Sweep("s", Path("base.yaml"), {}, (1,), METHODS, {}, workers=2)


def fit(arguments: list[str]) -> int:
    """Stand in for ``flsuite fit``."""
    if "--a.b=1" in arguments:
        print("flsuite: error: it cannot", file=sys.stderr)
        return 2
    if "--a.b=3" in arguments:
        os.kill(os.getpid(), 9)
    while "--a.b=2" in arguments:
        time.sleep(1)
    return 0


if __name__ == "__main__":
    worker.measure = lambda folder, seconds: CellOutcome(seconds, "accuracy", False, 0.5, 0.5)
    sys.exit(worker.run_workers(Queue(SWEEP, Path(sys.argv[1])), fit))
