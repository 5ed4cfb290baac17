"""``flsuite pack``: a run in one file, for others to verify."""

import sys
from pathlib import Path

from rich.filesize import decimal

from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import is_finished, last_round, table_fault


def pack(args: list[str]) -> None:
    """Write the file, and print its size."""
    request = parser_of("pack").parse_args(args)
    run = require_run("pack", Path(request.run))
    file = Path(request.output or f"{run.resolve().name}.zip")

    last = last_round(run)  # before a file is written: it refuses a run without rounds
    if fault := table_fault(run):
        raise FlsuiteError(f"pack: {fault}; restore it")
    is_whole = is_finished(run)

    from flsuite.runs import packing  # imported late: it needs torch

    size = packing.pack(run, file)
    if not is_whole:
        how = f"flsuite resume {run} goes on, and flsuite pack {run} packs it again"
        print(f"{run} was interrupted after round {last}: {how}", file=sys.stderr)
    print(f"{file}: {decimal(size)}; verify it with flsuite verify {file}")
