"""FedRoD: Chen and Chao 2022, algorithm 1, with a linear personal head.

On Bridging Generic and Personalized Federated Learning for Image Classification, arXiv:2107.00778.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.features import classes_of
from flsuite.aggregators.objectives import Objective
from flsuite.aggregators.partial import HeadAware
from flsuite.aggregators.second_model import SecondModel
from flsuite.arguments import Settings
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.models.declarations import own_entries
from flsuite.state import State, matches


class FedRoD(HeadAware):
    """A generic head for all classes alike, and a personal head for a client's own classes.

    Body and generic head are averaged. They minimize the balanced softmax loss, in which the logit
    of class ``c`` grows by ``log n_kc`` (eq. 6). The personal head is trained on the detached
    features, and its logits are added to the detached generic ones (eq. 9). A client is scored by
    the sum of both heads, which are one linear layer. The bytes are those of FedAvg.

    Args:
        head: Prefix of the head's entries, a linear layer. Default: as named by the model.
        kwargs: See FedAvg.
    """

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        if not isinstance(layer := model.get_submodule(head.rstrip(".")), nn.Linear):
            kind = type(layer).__name__
            raise FlsuiteError(f"FedRoD needs a linear head, and {head} is a {kind}; set head")
        if not all(parameter.requires_grad for parameter in layer.parameters()):
            raise FlsuiteError(f"FedRoD trains {head}, and a part of it is frozen; unfreeze it")
        names = [name for name in model.state_dict() if name.startswith(head)]
        if any(name in own_entries(model) or matches(name, self.private) for name in names):
            raise FlsuiteError(f"FedRoD averages {head}; leave it out of the private entries")
        return self.with_objective(TwoHeads(head))


@dataclass(frozen=True)
class TwoHeads(Objective, Settings):
    """The balanced softmax loss, and a personal head.

    Args:
        head: Prefix of the head's entries.
    """

    head: str

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_PersonalHead(client, self.head)]

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return {name: state[name] + value for name, value in memory.get("head", {}).items()}


class _PersonalHead(Callback):
    def __init__(self, client: ClientContext, head: str) -> None:
        self.client, self.head = client, head
        self._handle: Any = None
        self.seen: tuple[Tensor, Tensor] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layer = pl_module.get_submodule(self.head.rstrip("."))
        own = layer.named_parameters(prefix=self.head.rstrip("."))
        # At first it adds nothing to the generic head.
        zeros = {k: torch.zeros_like(p) for k, p in own}
        start = self.client.memory.get("head", zeros)
        self.personal = SecondModel(trainer, pl_module, start)

        # A class that the client lacks must not have a logit of minus infinity.
        counts = self.client.class_counts.clamp(min=1).to(pl_module.device)
        self.log_counts = counts.log()
        self._handle = layer.register_forward_hook(self._balance)

    def _balance(self, layer: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        self.seen = inputs[0].detach(), logits.detach()
        return logits.float() + self.log_counts

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch, self.seen = batch, None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Step the personal head with the features of the model's own step."""
        if self.seen is None:
            return  # a step that does not call the head
        features, generic = self.seen
        own = self.personal.parameters
        with torch.enable_grad():
            logits = generic.float() + F.linear(features.float(), *own.values())
            loss = F.cross_entropy(logits, classes_of(self.batch, "FedRoD"))
            gradient = torch.autograd.grad(loss, list(own.values()))
        self.personal.step(dict(zip(own, gradient, strict=True)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.client.memory["head"] = self.personal.state()
        self._handle.remove()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
