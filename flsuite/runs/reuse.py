"""The clients' trained models of one run as the start of another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.arguments import renamed
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.runs.checkpoint import refuse_mismatch
from flsuite.runs.settings import WEIGHTS
from flsuite.server.federation import Federation
from flsuite.server.update_store import UpdateStore

__all__ = ["UPDATES", "require_plain_training", "trained_clients"]

UPDATES = "updates"
"""Where a run keeps its clients' trained models, in its folder."""

# They decide what local training leads to in the first round.
_DECIDE_TRAINING = (
    "seed",
    "model",
    *WEIGHTS,
    "data",
    "client",
    "callbacks",
    "lr_decay",
    "batchnorm",
    "keep_optimizers",
    "channels_last",
)


def trained_clients(run_dir: Path, settings: Mapping[str, Any]) -> UpdateStore:
    """Return the trained models of a run whose clients train as those of another one do.

    Args:
        run_dir: Folder of the run that has trained them.
        settings: Settings of the run that is to start from them.

    Raises:
        FlsuiteError: If the run has kept none, or its clients train otherwise.
    """
    if not (run_dir / "settings.yaml").is_file():
        raise FlsuiteError(f"from_updates: {run_dir} is not the folder of a run")
    if not (run_dir / UPDATES).is_dir():
        raise FlsuiteError(
            f"from_updates: {run_dir} has not kept its clients' models; fit it with "
            "--trainer.keep_updates true"
        )

    theirs = renamed(yaml.safe_load((run_dir / "settings.yaml").read_text()))
    ours = yaml.safe_load(yaml.safe_dump(dict(settings)))  # with lists for tuples, as a file has
    now, then = ({name: s.get(name) for name in _DECIDE_TRAINING} for s in (ours, theirs))
    refuse_mismatch(now, then, run_dir)
    return UpdateStore(run_dir / UPDATES)


def require_plain_training(federation: Federation) -> None:
    """Refuse an algorithm that takes part in local training.

    Raises:
        FlsuiteError: If it does. The message names it.
    """
    aggregator, data = federation.aggregator, federation.data.at(1)
    name = aggregator.name
    if aggregator.pools or aggregator.private:
        raise FlsuiteError(
            f"{name} has no clients whose models another run could start "
            "from; set trainer.keep_updates to false, and leave out from_updates"
        )

    federation.begin_round()
    client = ClientContext(
        id=0,
        round=1,
        samples=data.samples(0),
        class_counts=data.class_counts(0),
        global_state=federation.state,
        received={},
        memory={},
        layout=federation.layout,
    )
    if not all(isinstance(c, AfterFit) for c in aggregator.callbacks(client)):
        raise FlsuiteError(
            f"{name} changes how clients train, so that their models fit no other aggregator; set "
            "trainer.keep_updates to false, and leave out from_updates"
        )
