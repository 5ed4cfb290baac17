"""The fuzz tests with all of their examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_all_examples_end_as_the_few_of_the_fast_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", str(Path(__file__).parent)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FLSUITE_FUZZ": "all"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
