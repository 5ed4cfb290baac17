"""The tools that a server offers to an aggregator: scoring and training on server samples."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.uplink import Uplink
from flsuite.common.errors import FederationError
from flsuite.common.messages import Broadcast, FitRequest
from flsuite.common.random import seed_for
from flsuite.common.state import State, load_
from flsuite.data.federated import FederatedData, Rows
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.client.entries import BatchNorm
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.server.evaluation import Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.metrics.scores import scores
from flsuite.models.abilities import LogitModel


class ServerFit:
    """Trains the model on the server's samples, like a client with these samples.

    It uses a copy of the model and its own randomness, so it does not affect any client's fit.

    Args:
        evaluator: Provides the model, the data and the Trainer arguments.
        batchnorm: The treatment of buffers, see ``WorkerSetup`` in ``client/setup.py``.
        lr_decay: How learning rates change from round to round.
    """

    def __init__(
        self, evaluator: Evaluator, batchnorm: BatchNorm, lr_decay: LRDecay | None
    ) -> None:
        self.evaluator = evaluator
        self.batchnorm = batchnorm
        self.lr_decay = lr_decay
        self._model: LightningModule | None = None

    def train(self, federation: Federation, state: State, round: int) -> State:
        """Return the shared state after a fit that starts from ``state``.

        Args:
            federation: The client half of its algorithm takes part.
            state: The shared state before the fit.
            round: The round, counted from 1.

        Raises:
            FederationError: If the fit fails.
        """
        if self._model is None:
            self._model = copy.deepcopy(self.evaluator.model)
        # The clients' objective, without transforms of the change.
        algorithm = Aggregator(objective=federation.aggregator.objective)
        setup = WorkerSetup(
            model=self._model,
            data=_of_one(federation.data.at(round)),
            uplink=Uplink(algorithm, federation.server.layout, state),
            seed=seed_for(self.evaluator.seed, "server"),
            initial=federation.initial,
            trainer_kwargs=self.evaluator.trainer_kwargs,
            batchnorm=self.batchnorm,
            channels_last=False,  # the copied model already is
            lr_decay=self.lr_decay,
        )
        with isolate_rng():
            request = FitRequest(0, 0, Broadcast(round, state, {}), {})
            (outcome,) = JobRunner(setup).answer([request])
        if outcome.failed:
            raise FederationError(
                f"round {round}: the server's own training failed: {outcome.reason}; the state of "
                f"round {round - 1} is kept"
            )
        return outcome.update.state


def _of_one(data: FederatedData) -> FederatedData:
    """Return data whose only client has the server's samples."""
    assert data.server is not None
    rows = Rows.of([np.arange(len(data.server))])
    return replace(data, train=replace(data.server, rows=rows))


def make_tools(evaluator: Evaluator, private: Sequence[str], rounds: int | None) -> ServerTools:
    """Return the tools that the server can offer to an aggregator. Its fit is the federation's.

    Args:
        evaluator: Provides the resident model and the data.
        private: Patterns of the clients' private entries.
        rounds: Rounds of the run, or ``None`` if another limit ends it.
    """
    spec, missing = evaluator.data.spec, _missing(evaluator, private)
    able = _Able(evaluator)
    return ServerTools(
        score=None if "score" in missing else able.score,
        score_module=None if "score_module" in missing else able.score_module,
        module=None if "module" in missing else able.module,
        to_inputs=None if "to_inputs" in missing else able.to_inputs,
        shape=spec.shape,
        outputs=spec.num_classes,
        task=spec.task,
        seed=evaluator.seed,
        rounds=rounds,
        missing=missing,
    )


def _missing(evaluator: Evaluator, private: Sequence[str]) -> dict[str, str]:
    """Return the reasons for missing tools, by tool name."""
    model, data = evaluator.model, evaluator.data
    kind, missing = type(model).__name__, {}
    if data.server is None:
        samples = "the server has no samples of its own; set data.server_samples, such as 500"
        missing = dict.fromkeys(("score", "score_module", "train"), samples)
    if not evaluator.has_classes:
        missing["score"] = f"{kind} has no classes that flsuite can score"
    if private:
        reason = f"the server has no whole {kind}, because clients keep {private[0]}"
        missing |= {"score": reason, "module": reason}
        missing.setdefault("train", reason)
    if not isinstance(model, LogitModel):
        missing["module"] = missing["score_module"] = (
            f"{kind} does not offer its logits; add a method logits(x) -> (n, outputs)"
        )
    if len(data.spec.shape) != 3:
        missing["to_inputs"] = "the samples are not images"
    return missing


class _Able:
    """Implements the tools on an evaluator's resident model."""

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
        """Return a new module that holds a state, on the device that scores.

        The resident model lies on a GPU only after a fit in this process, so a copy alone would
        compute on another device with other engines.
        """
        module = copy.deepcopy(self.evaluator.model).to(self.evaluator.device)
        load_(module.state_dict(), state)
        module.forward = _Logits(module)  # type: ignore[method-assign]
        return module.eval()

    def to_inputs(self, images: Tensor) -> Tensor:
        """Return images with values in [0, 1] scaled like the inputs of the clients' models."""
        return self.evaluator.data.scaling.of_fractions(images)


class _Logits:
    """A replacement of a module's forward pass by its method ``logits``. It survives deepcopy."""

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
