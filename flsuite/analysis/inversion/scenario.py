"""A federation in which one client alone has a class, and what its server has."""

import numpy as np
import torch
from torch import Tensor

from flsuite.data import FederatedData, Partition
from flsuite.errors import FlsuiteError, require_at_least, require_below_one
from flsuite.random import torch_generator

__all__ = ["SoleOwner", "public_images"]


class SoleOwner(Partition):
    """Client 0 has all samples of one class and some others. The rest is split evenly at random.

    Args:
        label: The class that no other client has.
        share: The share of the other samples that client 0 has.

    Raises:
        FlsuiteError: If there is no other client, no sample of the class, or too few others.
    """

    def __init__(self, label: int, share: float = 0.1) -> None:
        self.label = label
        self.share = share
        require_at_least("SoleOwner", 0, label=label)
        require_below_one("SoleOwner", share=share)

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        own = np.flatnonzero(labels == self.label)
        others = rng.permutation(np.flatnonzero(labels != self.label))
        taken = round(self.share * len(others))
        if clients < 2 or not len(own) or len(others) - taken < clients - 1:
            raise FlsuiteError(
                f"SoleOwner: {clients} clients cannot share {len(own)} samples of class "
                f"{self.label} and {len(others)} others; it takes a second client, a sample of the "
                "class, and one of another class for each further client"
            )

        rest = np.array_split(others[taken:], clients - 1)
        parts = [np.concatenate([own, others[:taken]]), *rest]
        return [np.sort(part) for part in parts]


def public_images(
    data: FederatedData, owner: int, label: int, samples: int, seed: int = 0
) -> Tensor:
    """Return images of the other clients, none of them of the owner's class.

    They are what the server has, and what its generator is trained on.

    Args:
        data: The data of all clients.
        owner: The client under attack.
        label: Its class, which the server has no image of.
        samples: Number of images.
        seed: Picks them.

    Returns:
        Images within [0, 1], ``(samples, channels, height, width)``.

    Raises:
        FlsuiteError: If the data are no images, or the other clients have too few.
    """
    if data.train.x.dtype != torch.uint8 or data.train.y.ndim != 1:
        raise FlsuiteError("the inversion attack needs images with one class each")
    rows = torch.cat([data.train_rows(c) for c in range(data.clients) if c != owner])
    rows = rows[data.train.y[rows] != label]
    if not 1 <= samples <= len(rows):
        raise FlsuiteError(
            f"public_images: samples must be within 1 and {len(rows)}, the images of the other "
            f"clients without class {label}, got {samples}"
        )

    draws = torch_generator(seed, "inversion/public")
    chosen = rows[torch.randperm(len(rows), generator=draws)[:samples]]
    return data.train.x[chosen].permute(0, 3, 1, 2).float() / 255
