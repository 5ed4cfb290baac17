"""Freed memory is kept for the next tensors."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from flsuite.client.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
torch.ones(30, 2**17).sum()  # threads and code are loaded
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    held = [torch.ones(5 * 2**20 // 4) for _ in range(8)]  # 40 MB in tensors of 5 MB
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_not_asked_for_again() -> None:
    faults = {}
    for how in ("keep", "default"):
        command = [sys.executable, "-c", CODE, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    # 40 MB are 10,000 pages of 4 KiB. By default, they are new in each of the 20 passes.
    assert faults["keep"] < 0.2 * faults["default"]
