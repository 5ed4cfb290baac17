"""Model, data and federation, made ready for a run."""

from collections.abc import Callable

from lightning.pytorch import LightningDataModule, LightningModule

from flsuite.aggregators import Aggregator
from flsuite.client.setup import Buffers, private_patterns
from flsuite.data.module import FederatedDataModule
from flsuite.errors import require_instance
from flsuite.exchange import Exchange
from flsuite.models.base import ClientModel
from flsuite.random import seed_process
from flsuite.runs.folder import RunFolder
from flsuite.runs.run import RunOptions
from flsuite.schedules import Schedule
from flsuite.server.client_store import ClientStore
from flsuite.server.evaluation import Evaluator
from flsuite.server.federation import Federation
from flsuite.server.tools import make_tools
from flsuite.server.version_store import VersionStore

__all__ = ["make_federation", "make_ready"]


def make_ready(
    model: LightningModule,
    datamodule: LightningDataModule,
    seed: int,
    channels_last: bool,
    is_restored: bool,
) -> tuple[ClientModel, FederatedDataModule, bool]:
    """Split the data and build the model, both as the run's seed decides.

    Args:
        model: The client model.
        datamodule: The data of all clients.
        seed: The run's seed.
        channels_last: Whether convolutions use this memory format.
        is_restored: Whether the weights of a checkpoint follow, so that the model reads none.

    Returns:
        Model, data module, and whether the model had its weights before.

    Raises:
        FlsuiteError: If model or data are of the wrong kind, or do not fit each other.
    """
    require_instance("fit", ClientModel, model=model)
    require_instance("fit", FederatedDataModule, datamodule=datamodule)
    assert isinstance(model, ClientModel) and isinstance(datamodule, FederatedDataModule)
    datamodule.use_seed(seed)
    datamodule.setup("fit")

    # Before the model is built: a model without a spec has no weights yet.
    own_weights = model.spec is not None
    model.weights_follow = is_restored
    seed_process(seed, "model")
    model.ensure_built(datamodule.federated.spec)
    if channels_last:
        model.to_channels_last()
    return model, datamodule, own_weights


def make_federation(
    evaluator: Evaluator,
    aggregator: Aggregator,
    schedule: Schedule,
    buffers: Buffers,
    exchange: Exchange,
    folder: RunFolder,
    options: RunOptions,
    fit_samples: Callable[[int], int],
) -> Federation:
    """Return the federation of a run, as it is before the first round.

    Args:
        evaluator: It has the model and the data.
        aggregator: The algorithm.
        schedule: Who trains when.
        buffers: What happens to buffers, see :class:`~flsuite.client.setup.WorkerSetup`.
        exchange: The way of updates from clients to the server.
        folder: Where clients and versions are kept.
        options: The options of the run.
        fit_samples: Returns the samples that a fit processes, given those of the client.

    Raises:
        FlsuiteError: If the algorithm fits neither the model nor the schedule.
    """
    model, path = evaluator.model, folder.path
    private = private_patterns(model, aggregator, buffers)
    return Federation(
        model,
        evaluator.data,
        aggregator,
        schedule,
        buffers,
        ClientStore(path / "clients" if path else None),
        options.seed,
        VersionStore(path / "in_flight" if path else None),
        fit_samples,
        make_tools(evaluator, private, options.seed, options.budget.rounds),
        exchange,
    )
