"""What a stack would train differently from single fits is refused, or trains by itself."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.federation import Auto, InProcess, Processes, Vectorized
from flsuite.models import Backbone, Classifier
from tests.aggregators.federations import assert_same_models, table_model
from tests.federation.engines.test_vectorized import close, distance, fitted

PLAIN = table_model()


def model(kind: type[Classifier], backbone: Backbone | None = None) -> Classifier:
    return kind(backbone or PLAIN.backbone, partial(SGD, lr=0.1, momentum=0.9))


def refusal(kind: type[Classifier], engine: Any = None, **kwargs: Any) -> str:
    with pytest.raises(FlsuiteError) as refused:
        fitted(engine or Vectorized(), model=model(kind), rounds=1, **kwargs)
    return str(refused.value)


class WithCallbacks(Classifier):
    def configure_callbacks(self) -> list[Callback]:
        return [Callback()]


class WithSetup(Classifier):
    def setup(self, stage: str) -> None:
        self.factor = 2.0


class WithFitStart(Classifier):
    def on_fit_start(self) -> None:
        self.factor = 2.0


class WithFitEnd(Classifier):
    def on_fit_end(self) -> None:
        next(self.parameters()).data.zero_()


class PrunedByHook(Classifier):
    """Its first weights have half the gradient."""

    def build(self, spec: DataSpec) -> None:
        super().build(spec)
        next(self.parameters()).register_hook(lambda gradient: 0.5 * gradient)


class NormalizedByHook(Classifier):
    def build(self, spec: DataSpec) -> None:
        super().build(spec)
        self.network.register_full_backward_hook(lambda part, inputs, outputs: None)


class WithOptimizerHook(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: None)
        return optimizer


class KeepsOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        self.own = super().configure_optimizers()
        return self.own


REFUSED = {
    WithCallbacks: "has configure_callbacks",
    WithSetup: "has setup",
    WithFitStart: "has on_fit_start",
    WithFitEnd: "has on_fit_end",
    PrunedByHook: "has hooks on gradients",
    NormalizedByHook: "has hooks on gradients",
    WithOptimizerHook: "the optimizer of WithOptimizerHook has hooks",
    KeepsOptimizer: "keeps its optimizer as an attribute",
}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_a_model_that_needs_fits_of_its_own_is_refused(kind: Any, reason: str) -> None:
    assert reason in refusal(kind)


def test_hooks_on_gradients_stay_in_this_process() -> None:
    """A worker's copy of the model would not have them."""
    assert "hooks on the gradients" in refusal(PrunedByHook, Processes(workers=2))
    own = model(PrunedByHook)
    assert_same_models(*(fitted(engine, model=own) for engine in (InProcess(), Auto())))


class Clamped(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            next(self.parameters()).clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Mixing(Classifier):
    """Draws from NumPy, as mixup does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float(np.random.beta(2, 2))


class Trying(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            epoch = self.trainer.current_epoch
        except RuntimeError:
            epoch = 0
        return super().training_step(batch, batch_idx) * (1 + epoch)


class Padded(Classifier):
    def build(self, spec: DataSpec) -> None:
        super().build(spec)
        self.table = nn.Parameter(torch.ones(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factors = F.embedding(batch[1], self.table, padding_idx=0)
        return super().training_step(batch, batch_idx) * factors.mean()


@pytest.mark.parametrize("kind", [Clamped, Mixing, Trying, Padded])
def test_a_step_that_a_stack_would_change_trains_alone(
    kind: type[Classifier], stacks: list[int]
) -> None:
    alone, other = (fitted(engine, model=model(kind)) for engine in (InProcess(), Vectorized()))
    assert_same_models(alone, other)
    assert not stacks


class HalfFrozen(Backbone):
    """A network whose BatchNorm layer stays in evaluation mode, as of a pre-trained network."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        size = int(np.prod(shape))
        return nn.Sequential(
            nn.Flatten(), nn.Linear(size, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, outputs)
        )


def test_layers_in_evaluation_mode_stay_there(stacks: list[int], tmp_path: Path) -> None:
    own = model(Classifier, HalfFrozen())
    close(stacks, 1e-5, model=own)
    # The kept updates of the first round are measured in place of training.
    kept = fitted(InProcess(), model=own, rounds=2, keep_updates=True, run_dir=tmp_path / "kept")
    again = fitted(InProcess(), model=own, rounds=2, from_updates=str(tmp_path / "kept"))
    assert distance(kept, again) == 0.0


LOGS: dict[str, dict[str, Any]] = {
    "step": {},
    "step_and_epoch": {"on_epoch": True},
    "hidden": {"logger": False},
    "maximum": {"on_step": False, "on_epoch": True, "reduce_fx": "max"},
    "one_sample": {"on_epoch": True, "batch_size": 1},
}


@pytest.mark.parametrize("options", LOGS.values(), ids=LOGS)
def test_logs_are_those_of_single_fits(options: dict[str, Any], stacks: list[int]) -> None:
    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            self.log("own", loss, **options)
            return loss

    rows: list[Callable[[str], Any] | dict[Any, float]] = []
    for engine in (InProcess(), Vectorized()):
        made = fitted(engine, model=model(Logging), rounds=1)
        of_steps = [row for row in made.run.folder.table.rows if row[7].startswith("own")]
        rows.append({(row[0], row[5], row[7]): row[8] for row in of_steps})
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)
    assert bool(rows[0]) == (options.get("logger") is not False)
    assert bool(stacks) == (not options.keys() & {"batch_size", "reduce_fx"})


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
def test_several_numbers_are_no_logged_value(engine: Any) -> None:
    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("own", torch.ones(3))
            return super().training_step(batch, batch_idx)

    with pytest.raises(FlsuiteError, match=r"log\(own, .* must have a single element"):
        fitted(engine, model=model(Logging), rounds=1)
