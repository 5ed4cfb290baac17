"""Autoencoders return images of the shape that they got."""

from typing import Any

import pytest
import torch

from flsuite.models.autoencoders import (
    BottleneckDecoder,
    BottleneckEncoder,
    UNetDecoder,
    UNetEncoder,
)


@pytest.mark.parametrize(
    ("side", "norm"), [(4, "batch"), (7, "group"), (8, "none"), (28, "batch"), (33, "none")]
)
def test_autoencoders_return_the_shape_they_got(side: int, norm: Any) -> None:
    x = torch.rand(2, 3, side, side + 1)
    shape = (3, side, side + 1)
    latent = BottleneckEncoder(shape, 7, norm)(x)
    assert latent.shape == (2, 7)
    assert BottleneckDecoder(shape, 7, norm)(latent).shape == x.shape
    features = UNetEncoder(3, norm)(x)
    assert [f.shape[1] for f in features] == [64, 32, 16]
    assert UNetDecoder(3, norm)(features).shape == x.shape
