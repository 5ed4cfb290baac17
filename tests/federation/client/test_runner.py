"""No fit depends on earlier fits of its worker, and all engines give the same results."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD
from torchmetrics import SumMetric

from flsuite.aggregators import Aggregator, FedAvg, Objective
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Broadcast, FitRequest
from flsuite.data import IID
from flsuite.federation import InProcess, Processes
from flsuite.federation.client.jobs import JobRunner
from flsuite.models import MLP, Classifier
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.client.workers import outcome, runner


class _Freezes(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.train_dataloader.client == 0:
            next(pl_module.parameters()).requires_grad_(False)


class _Clips(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.train_dataloader.client == 0:
            trainer.gradient_clip_val = 0.01


class _Evaluates(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.eval()


class OnlyTrains(Classifier):
    """Has no loss in evaluation mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.training


class Metered(Classifier):
    """Counts its steps in a metric."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counted = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counted.update(1.0)
        return super().training_step(batch, batch_idx)


class Buffered(Classifier):
    """Weighs its loss by a count of steps, in a buffer that is not in the state dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("steps", torch.ones(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        return super().training_step(batch, batch_idx) / self.steps.clone()

    def count(self) -> None:
        self.steps.add_(1.0)


class Replaced(Buffered):
    """The same with another tensor in every step."""

    def count(self) -> None:
        self.steps = self.steps + 1.0


def fit(
    engine: Any,
    model: Any = Classifier,
    aggregator: Aggregator | None = None,
    clients: int = 4,
    **kwargs: Any,
) -> Any:
    made = trainer(rounds=2, max_epochs=2, engine=engine, aggregator=aggregator, **kwargs)
    net = model(MLP(hidden=(16,)), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    made.fit(net, digits(clients=clients, partition=IID(), val_fraction=0.0))
    return made


@pytest.mark.parametrize(
    ("model", "callbacks"),
    [
        (Classifier, [_Freezes()]),
        (Classifier, [_Clips()]),
        (OnlyTrains, [_Evaluates()]),
        (Buffered, []),
        (Replaced, []),
    ],
    ids=["freezes", "clips", "evaluates", "changes a buffer", "replaces a buffer"],
)
def test_what_one_client_changes_does_not_reach_the_next(model: Any, callbacks: Any) -> None:
    """With a worker per client, no client follows another one in the first round."""
    engines = InProcess(), Processes(workers=2)
    here, there = (
        fit(engine, model, clients=2, callbacks=callbacks).federation for engine in engines
    )
    assert not here.log.failures and not there.log.failures
    assert equal_states(here.state, there.state)


def test_the_next_fit_of_a_worker_does_not_change_an_update() -> None:
    setup = runner(classifier(), FedAvg(), lean=True).setup
    jobs, broadcast = JobRunner(setup), Broadcast(1, setup.initial, {}, ())
    first, second = (
        jobs.answer([FitRequest(client, client, broadcast, {})])[0].update.state
        for client in range(2)
    )
    (again,) = JobRunner(setup).answer([FitRequest(0, 0, broadcast, {})])
    assert equal_states(first, again.update.state) and not equal_states(first, second)


def test_a_metric_of_the_model_starts_anew_in_every_fit() -> None:
    made = runner(Metered(MLP((4,))), FedAvg(), lean=True)
    for client in range(3):
        steps = outcome(made, client).update.steps
        assert made.model.counted.compute() == steps


class _Draws(Objective):
    """Logs a random number, such as a dropout draws."""

    def start(self, client: Any, w: Any) -> Any:
        client.metrics["drawn"] = float(torch.rand(()))
        return w, {}


def test_fits_of_a_client_from_one_version_draw_anew() -> None:
    made = runner(classifier(), Aggregator(objective=_Draws()), lean=True)
    broadcast = Broadcast(1, made.setup.initial, {})
    drawn = [
        made.run(FitRequest(0, 0, broadcast, {}, repeat=repeat)).update.metrics["drawn"]
        for repeat in (0, 1, 2, 0)
    ]
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


class _Counts(Objective):
    """Counts a client's fits in its memory."""

    def end(self, client: Any, w: Any, held: Any) -> None:
        client.memory["fits"].append(client.round)


def test_a_fit_leaves_the_stored_memory_of_its_client_alone() -> None:
    """A refused update, or a second try, starts from the memory before the fit."""
    made = runner(classifier(), Aggregator(objective=_Counts()), lean=True)
    memory = {"objective": {"fits": [7]}}
    broadcast = Broadcast(1, made.setup.initial, {})
    done = made.run(FitRequest(0, 0, broadcast, memory))
    assert done.memory["objective"] == {"fits": [7, 1]}
    assert memory == {"objective": {"fits": [7]}}


def test_the_users_model_is_not_left_frozen() -> None:
    model, made = classifier(), trainer(rounds=1, callbacks=[_Freezes()])
    made.fit(model, digits())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_checkpoint_callback_of_the_model_is_refused() -> None:
    class Own(Classifier):
        def configure_callbacks(self) -> list[Callback]:
            return [ModelCheckpoint()]

    with pytest.raises(FlsuiteError, match="ModelCheckpoint belongs to a single fit"):
        fit(InProcess(), Own)


@pytest.mark.parametrize("engine", [InProcess(), Processes(workers=2)], ids=["in_process", "two"])
def test_a_metric_that_is_no_number_costs_the_round_this_client(engine: Any) -> None:
    class Says(Objective):
        def end(self, client: Any, w: Any, held: Any) -> None:
            client.metrics["n"] = "a" if client.id == 1 else 1

    made = fit(engine, aggregator=Aggregator(objective=Says()))
    (failure,) = made.federation.log.failures
    assert failure.client == 1 and "client.metrics['n'] must be a number" in failure.reason


def test_a_step_that_forgets_its_loss_is_named() -> None:
    class Forgetful(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            super().training_step(batch, batch_idx)

    with pytest.raises(FlsuiteError, match="training_step of Forgetful returned no loss"):
        trainer(rounds=1).fit(Forgetful(MLP((4,))), digits())


def test_a_method_with_the_name_of_the_warm_up_is_no_warm_up() -> None:
    class Named(Classifier):
        def extra_epochs(self) -> int:  # type: ignore[override]
            return 2

    metrics = outcome(runner(Named(MLP((4,))), FedAvg(), lean=True), 0).update.metrics
    assert metrics["loss"] > 0 and "warmup_loss" not in metrics


class Scales(Classifier):
    """Multiplies its batch by a weight, in place or not."""

    def __init__(self, *args: Any, in_place: bool) -> None:
        super().__init__(*args)
        self.scale, self.in_place = torch.nn.Parameter(torch.ones(())), in_place

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.mul_(self.scale) if self.in_place else x * self.scale
        return super().training_step((x, y), batch_idx)


def test_a_step_may_change_its_batch_in_place() -> None:
    there, here = (
        fit(InProcess(), partial(Scales, in_place=one)).federation for one in (False, True)
    )
    assert equal_states(there.state, here.state)


def test_the_training_loss_is_not_divided_by_accumulated_batches() -> None:
    losses = []
    for batches in (1, 3):
        made = trainer(rounds=1, accumulate_grad_batches=batches)
        made.fit(Classifier(MLP((8,)), lambda params: SGD(params, lr=0.0)), digits(clients=2))
        losses.append(float(made.callback_metrics["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
