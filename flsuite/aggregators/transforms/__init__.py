"""Transforms of a client's change on its way to the server, one per file."""

from flsuite.aggregators.transforms.base import ClipUpdates, FitView, Payload, Transform
from flsuite.aggregators.transforms.gaussian import GaussianMechanism

__all__ = ["ClipUpdates", "FitView", "GaussianMechanism", "Payload", "Transform"]
