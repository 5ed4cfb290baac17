"""The gradient scaler of 16-mixed: the same steps in both loops, and no state carried over."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler

from flsuite.aggregators import SCAFFOLD, Aggregator, FedAvg, FedProx
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientResult
from flsuite.federation import InProcess, Processes
from flsuite.federation.client.plain import PlainLoop
from flsuite.federation.client.runner import ClientRunner
from flsuite.models import MLP, Classifier
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.client.workers import outcome, runner

LARGE = 2.0**24  # the first steps of a fit overflow, and the scale falls from step to step


def half(scale: float = LARGE) -> MixedPrecision:
    """Return 16-mixed on the CPU, where Lightning itself would choose bfloat16."""
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale, growth_interval=3))


def half_precision(aggregator: Aggregator, lean: bool = True, **kwargs: Any) -> ClientRunner:
    settings = {"max_epochs": 5, "plugins": half(), **kwargs}
    return runner(classifier(), aggregator, lean, **settings)


def fit(made: ClientRunner, client: int, *callbacks: Callback) -> Any:
    result = outcome(made, client, *callbacks)
    assert isinstance(result, ClientResult), result.details
    return result.update


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (FedAvg, {}),
        (lambda: FedProx(0.1), {"gradient_clip_val": 0.5}),
        (lambda: SCAFFOLD(control="mean_gradient"), {}),
    ],
    ids=["fedavg", "clipped_prox", "mean_gradient"],
)
def test_both_loops_take_the_same_steps(
    make: Any, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, runs, run = [], list[int](), PlainLoop.fit
    monkeypatch.setattr(PlainLoop, "fit", lambda *args: (runs.append(1), run(*args))[1])
    for lean in (True, False):
        made = half_precision(make(), lean, **kwargs)
        updates.append([fit(made, client) for client in range(3)])
    assert len(runs) == 3, "the short loop takes the first three fits"
    for a, b in zip(*updates, strict=True):
        assert equal_states(a.state, b.state) and a.metrics == b.metrics and a.steps == b.steps
        assert a.metrics["skipped_steps"] > 0 and a.steps > 0
        # What an algorithm measures from gradients leaves out those that overflow.
        assert all(bool(v.isfinite().all()) for v in a.extras.get("control_change", {}).values())


class Unknown(Callback):
    """A callback that might change the Trainer, so that every fit has a new one."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        return


@pytest.mark.parametrize(("lean", "callbacks"), [(True, ()), (True, (Unknown(),)), (False, ())])
def test_a_fit_does_not_depend_on_the_scale_that_another_has_found(
    lean: bool, callbacks: tuple[Callback, ...]
) -> None:
    busy, fresh = half_precision(FedAvg(), lean), half_precision(FedAvg(), lean)
    for client in (0, 1):
        fit(busy, client, *callbacks)
    after, alone = (fit(made, 2, *callbacks) for made in (busy, fresh))
    assert equal_states(after.state, alone.state) and after.metrics == alone.metrics
    # The user's own scaler is unchanged.
    assert busy.setup.trainer_kwargs["plugins"].scaler.get_scale() == LARGE


def test_a_small_scale_gives_the_steps_of_float32() -> None:
    mixed = fit(half_precision(FedAvg(), plugins=half(2.0**10)), 0)
    full = fit(half_precision(FedAvg(), plugins=None), 0)
    assert "skipped_steps" not in mixed.metrics and mixed.steps == full.steps
    for name, value in full.state.items():
        assert torch.allclose(mixed.state[name], value, atol=5e-3)
    assert not equal_states(mixed.state, full.state)


def test_engines_agree() -> None:
    states = []
    for engine in (InProcess(), Processes(2)):
        made = trainer(rounds=2, engine=engine, plugins=half())
        made.fit(classifier(), digits(clients=3))
        states.append(made.federation.state)
        assert all(u.metrics["skipped_steps"] > 0 for u in made.federation.log.updates)
    assert equal_states(*states)


@pytest.mark.parametrize("precision", ["16-mixed", 16])
def test_the_argument_is_accepted(precision: Any) -> None:
    with pytest.warns(UserWarning, match="bf16-mixed"):  # on a CPU, by Lightning
        trainer(rounds=2, precision=precision)


def test_optimizers_that_unscale_within_their_step_are_refused() -> None:
    made = trainer(rounds=2, plugins=half())
    fused = Classifier(MLP(hidden=(8,)), partial(torch.optim.Adam, lr=1e-3, fused=True))
    with pytest.raises(FlsuiteError, match="leave out its fused=True"):
        made.fit(fused, digits(clients=3))
