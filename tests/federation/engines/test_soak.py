"""A run with failing clients does not leak resources from round to round."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.soak import Watch, soaking_run


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts what only Linux tells")
def test_failing_clients_leave_no_descriptors_threads_or_processes(tmp_path: Path) -> None:
    watch = Watch([5, 30])
    soaking_run(30, tmp_path / "run", watch, raises=0.05, nan=0.05, late=0.05, dies=0.03)
    assert watch.failed > 10
    early, late = watch.taken[5], watch.taken[30]
    for group in ("server", "children"):
        assert late[group].processes == early[group].processes
        assert late[group].descriptors <= early[group].descriptors + 2
        assert late[group].threads == early[group].threads
