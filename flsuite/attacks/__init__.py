"""Attacks by some of the clients, one per file."""

from flsuite.attacks.alie import ALittleIsEnough
from flsuite.attacks.backdoor import PixelBackdoor
from flsuite.attacks.base import Attack, Trial
from flsuite.attacks.collusion import Collusion
from flsuite.attacks.compose import with_attack
from flsuite.attacks.free_rider import FreeRider
from flsuite.attacks.inner_product import InnerProduct
from flsuite.attacks.label_flip import LabelFlip
from flsuite.attacks.noise import GaussianNoise
from flsuite.attacks.scaled_update import ScaledUpdate
from flsuite.attacks.sign_flip import SignFlip

__all__ = [
    "ALittleIsEnough",
    "Attack",
    "Collusion",
    "FreeRider",
    "GaussianNoise",
    "InnerProduct",
    "LabelFlip",
    "PixelBackdoor",
    "ScaledUpdate",
    "SignFlip",
    "Trial",
    "with_attack",
]
