"""FedRoD: Chen and Chao 2022, algorithm 1, with a linear personal head.

On Bridging Generic and Personalized Federated Learning for Image Classification, arXiv:2107.00778.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.feature_term import FeatureTerm, classes_of
from flsuite.aggregators.partial import HeadAware
from flsuite.common.arguments import Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, Tree, clone, matches
from flsuite.models.abilities import own_entries
from flsuite.models.layers import entry_names


class FedRoD(HeadAware):
    """A generic head for all classes alike, and a personal head for a client's own classes.

    Take it if the global and the personal model both matter, under skewed classes.

    Body and generic head are averaged. They minimize the balanced softmax loss, in which the logit
    of class ``c`` grows by ``log n_kc`` (eq. 6, with a gamma of 1). A class without samples leaves
    the client's softmax, and its logit has no gradient. The personal head is trained on the
    detached features, and its logits are added to the detached generic ones (eq. 9). It starts at
    zero, where public code copies the generic head. A client is scored by the sum of both heads,
    which are one linear layer. A step costs one more forward pass. It sends as many bytes as
    FedAvg.

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
        if not {*names} <= {*entry_names(model)}:
            raise FlsuiteError(
                f"FedRoD copies {head}, which shares weights with another layer; give it its own"
            )
        if any(name in own_entries(model) or matches(name, self.private) for name in names):
            raise FlsuiteError(f"FedRoD averages {head}; leave it out of the private entries")
        return self.with_objective(TwoHeads(head))


@dataclass(frozen=True)
class TwoHeads(FeatureTerm, Settings):
    """The balanced softmax loss, and a personal head.

    The sum of both heads is one linear layer, at which the personal one has its gradient.
    """

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        names = [name for name in client.layout.parameters if name.startswith(self.head)]
        # At first it adds nothing to the generic head.
        head = client.memory.get("head") or {name: torch.zeros_like(w[name]) for name in names}
        # A class that the client lacks leaves the softmax: exp(-1e4) is 0, and so is its gradient.
        # A logit of minus infinity would do the same, but 0 times infinity is NaN.
        return w, {"head": head, "shift": client.class_counts.log().clamp(min=-1e4)}

    def logits(self, outputs: Tensor, batch: Any, held: Tree) -> Tensor:
        classes_of(batch, "FedRoD")  # a softmax needs one class per sample
        z = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return z + held["shift"]  # eq. 6

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        v = held["head"]
        both = {name: v[name] + w[name] for name in v}
        v = oracle.step("head", v, oracle(both, batch))  # eq. 9
        return oracle(w, batch), {**held, "head": v}

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        client.memory["head"] = clone(held["head"])

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return {name: state[name] + value for name, value in memory.get("head", {}).items()}
