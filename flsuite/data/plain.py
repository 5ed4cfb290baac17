"""Any Lightning data module as a federated one."""

from lightning.pytorch import LightningDataModule

from flsuite.data.datasets.from_data_module import FromDataModule
from flsuite.data.module import FederatedDataModule
from flsuite.errors import require_instance

__all__ = ["as_federated"]


def as_federated(datamodule: LightningDataModule) -> FederatedDataModule:
    """Return the data module itself if it is federated, else one that splits its samples.

    A plain data module may name arguments of :class:`~flsuite.data.FromDataModule` as attributes.
    """
    if isinstance(datamodule, FederatedDataModule):
        return datamodule
    require_instance("fit", LightningDataModule, datamodule=datamodule)
    return FromDataModule.of(datamodule)
