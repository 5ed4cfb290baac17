"""The server's tools, made from the resident model and the data."""

import copy
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.aggregators.part import ServerTools
from flsuite.lightning_internals import detached
from flsuite.metrics import scores
from flsuite.models.protocols import LogitModel
from flsuite.server.evaluation import Evaluator
from flsuite.server.own_fit import OwnFit
from flsuite.state import State, load_

__all__ = ["make_tools"]


def make_tools(
    evaluator: Evaluator, private: Sequence[str], seed: int, rounds: int | None, fit: OwnFit
) -> ServerTools:
    """Return what the server can offer to an aggregator beside the updates.

    Args:
        evaluator: It has the resident model and the data.
        private: Patterns of the entries that stay with the clients.
        seed: The run's seed.
        rounds: Rounds of the run, or ``None`` where another limit ends it.
        fit: Trains on the server's samples.
    """
    spec, missing = evaluator.data.spec, _missing(evaluator, private)
    if reason := fit.missing(private):
        missing["train"] = reason
    able = _Able(evaluator)
    return ServerTools(
        score=None if "score" in missing else able.score,
        score_module=None if "score_module" in missing else able.score_module,
        module=None if "module" in missing else able.module,
        to_inputs=None if "to_inputs" in missing else able.to_inputs,
        train=None if "train" in missing else fit.train,
        shape=spec.shape,
        outputs=spec.num_classes,
        task=spec.task,
        seed=seed,
        rounds=rounds,
        missing=missing,
    )


def _missing(evaluator: Evaluator, private: Sequence[str]) -> dict[str, str]:
    """Return why tools are missing, by their names."""
    model, data = evaluator.model, evaluator.data
    kind, missing = type(model).__name__, {}
    if data.server is None:
        samples = "the server has no samples of its own; set data.server_samples, such as 500"
        missing = {"score": samples, "score_module": samples}
    if not evaluator.has_classes:
        missing["score"] = f"{kind} has no classes that the suite can score"
    if private:
        parts = f"the server has no whole {kind}, because clients keep {private[0]}"
        missing |= {"score": parts, "module": parts}
    if not isinstance(model, LogitModel):
        missing["module"] = missing["score_module"] = (
            f"{kind} does not offer its logits; add a method logits(x) -> (n, outputs)"
        )
    if len(data.spec.shape) != 3:
        missing["to_inputs"] = "the samples are no images"
    return missing


class _Able:
    """The tools, on the resident model of an evaluator."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator

    def score(self, state: State) -> float:
        """Return the accuracy of a state on the server's samples."""
        samples, spec = self.evaluator.data.server, self.evaluator.data.spec
        assert samples is not None
        self.evaluator.load(state)
        return scores(self.evaluator.outputs(samples), samples.y, spec, auroc=False)["accuracy"]

    def score_module(self, module: nn.Module) -> float:
        """Return the accuracy of a module's logits on the server's samples."""
        samples = self.evaluator.data.server
        assert samples is not None
        return self.evaluator.of_module(module, samples)["accuracy"]

    def module(self, state: State) -> nn.Module:
        """Return a new module that holds a state."""
        model = self.evaluator.model
        # The copy must not take the Trainer along.
        with detached(model):
            module = copy.deepcopy(model)
        load_(module.state_dict(), state)
        module.forward = _Logits(module)  # type: ignore[method-assign]
        return module.eval()

    def to_inputs(self, images: Tensor) -> Tensor:
        """Return images within [0, 1] as the clients' models see them."""
        scaling = self.evaluator.data.scaling
        scale, shift = (
            part.to(images.device)[:, None, None] for part in (scaling.scale, scaling.shift)
        )
        # The scaling is that of stored bytes.
        return images * 255.0 * scale + shift


class _Logits:
    """A module's forward pass that is its method ``logits``, and is copied with the module."""

    def __init__(self, module: LightningModule) -> None:
        self.module: Any = module
        self._is_inside = False

    def __call__(self, *args: Any) -> Any:
        # The method may itself call the module.
        if self._is_inside:
            return type(self.module).forward(self.module, *args)
        self._is_inside = True
        try:
            return self.module.logits(*args)
        finally:
            self._is_inside = False
