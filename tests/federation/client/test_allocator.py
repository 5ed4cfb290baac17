"""Freed memory is kept for the next tensors."""

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from flsuite.federation.client.devices import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for step in range(40):
    if step == 20:  # the memory of the first steps is new in any case
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(5 * 2**20 // 4) for _ in range(8)]  # 40 MB in tensors of 5 MB
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.long
def test_freed_memory_is_not_asked_for_again() -> None:
    # What glibc keeps by itself depends on where the system has put the program. With this
    # threshold it keeps nothing.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    faults = {}
    for how in ("keep", "default"):
        command = [sys.executable, "-c", CODE, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 0.01 * faults["default"]
