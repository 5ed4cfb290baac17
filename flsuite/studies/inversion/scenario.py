"""What the server has where one client alone has a class."""

import torch
from torch import Tensor

from flsuite.data import FederatedData
from flsuite.errors import FlsuiteError
from flsuite.random import torch_generator

__all__ = ["public_images"]


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
