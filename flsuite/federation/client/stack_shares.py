"""What runs that take turns train together: one stack of the clients of all of them."""

from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from flsuite.aggregators.losses import Draws, random_state
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import TrainedFit
from flsuite.common.state import State
from flsuite.data.federated import FederatedData
from flsuite.federation.client.stack import Stack
from flsuite.federation.client.stack_member import Member
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models.modes import PlainAttributes


class StackShare(NamedTuple):
    """What one run trains in stacks at one time.

    Attributes:
        stack: The stack of the run.
        alike: Its clients, by what those of one stack have in common.
        trainer: The Trainer, rewound for them.
        data: The samples, on its device.
    """

    stack: Stack
    alike: Mapping[Any, Sequence[Member]]
    trainer: ClientTrainer
    data: FederatedData


def train_shares(shares: Sequence[StackShare]) -> list[dict[int, TrainedFit]]:
    """Train the clients of runs that differ only in their seeds, and return the fits of each run.

    Runs whose models keep other things outside their state dicts share no stack.

    Raises:
        FlsuiteError: If a stack of several runs draws random numbers, which would differ from those
            of a run alone.
    """
    fits: list[dict[int, TrainedFit]] = [{} for _ in shares]
    alike: dict[Any, list[tuple[int, Member]]] = {}
    for place, share in enumerate(shares):
        model = _first_alike(shares[:place], share)
        for kind, members in share.alike.items():
            alike.setdefault((model, kind), []).extend((place, member) for member in members)
    for owned in alike.values():
        most = shares[owned[0][0]].stack.setup.stack * len({place for place, _ in owned})
        for first in range(0, len(owned), most):
            _train_owned(shares, owned[first : first + most], fits)
    return fits


def _train_owned(
    shares: Sequence[StackShare],
    owned: Sequence[tuple[int, Member]],
    fits: Sequence[dict[int, TrainedFit]],
) -> None:
    """Train a stack of clients, each with the place of its run, and add their fits.

    If it fails, each of its clients trains by itself, which shows whose fault it is.
    """
    if len(owned) < 2:  # a stack of one would only be slower
        return
    places, members = {place for place, _ in owned}, [member for _, member in owned]
    lead = shares[owned[0][0]]
    device, before = lead.trainer.strategy.root_device, None
    if len(places) > 1:
        lead.stack.seed("stack", members[0].request)  # as the stack does before its first step
        before = random_state(device)
    try:
        trained = lead.stack.train(members, lead.trainer, lead.data)
    except BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        for place in places:
            shares[place].stack.note_fault(len(members), error)
        return
    if before is not None and _differ(before, random_state(device)):
        raise FlsuiteError(
            f"together: a step of {type(lead.stack.model).__name__} draws random numbers, as "
            "dropout does, so runs of other seeds cannot share its stacks; leave together out of "
            "the sweep"
        )
    for (place, member), fit in zip(owned, trained, strict=True):
        if fit is not None:
            fits[place][member.request.number] = fit


def _first_alike(others: Sequence[StackShare], share: StackShare) -> int:
    """Return the place of the first run whose model a stack may use for this run too.

    Outside its state dict, a model may keep what depends on the seed, such as its initial weights.
    """
    if not others:  # a run alone needs no comparison
        return 0
    model = share.stack.model
    unsaved = _unsaved(model)
    for place, other in enumerate(others):
        theirs = _unsaved(other.stack.model)
        is_same = unsaved.keys() == theirs.keys() and all(
            torch.equal(value, theirs[name]) for name, value in unsaved.items()
        )
        if is_same and not PlainAttributes(other.stack.model).changed(model):
            return place
    return len(others)


def _unsaved(model: nn.Module) -> State:
    """Return the buffers that the state dict of a model leaves out."""
    saved = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name not in saved}


def _differ(before: Draws, after: Draws) -> bool:
    """Return whether a random state has changed. On a CPU, the part of the GPU is ``None``."""
    return any(
        a is not None and b is not None and not torch.equal(a, b)
        for a, b in zip(before, after, strict=True)
    )
