"""Model and data, made ready for a run."""

from lightning.pytorch import LightningDataModule, LightningModule

from flsuite.data.module import FederatedDataModule
from flsuite.errors import require_instance
from flsuite.models.base import ClientModel
from flsuite.random import seed_process

__all__ = ["make_ready"]


def make_ready(
    model: LightningModule, datamodule: LightningDataModule, seed: int, channels_last: bool
) -> tuple[ClientModel, FederatedDataModule, bool]:
    """Split the data and build the model, both as the run's seed decides.

    Args:
        model: The client model.
        datamodule: The data of all clients.
        seed: The run's seed.
        channels_last: Whether convolutions use this memory format.

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
    seed_process(seed, "model")
    model.ensure_built(datamodule.federated.spec)
    if channels_last:
        model.to_channels_last()
    return model, datamodule, own_weights
