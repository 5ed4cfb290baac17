"""The short loop makes the calls of Lightning's own, and gives the same weights bit for bit."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from flsuite.aggregators import SCAFFOLD, Aggregator, FedAvg, FedProx, PerFedAvg
from flsuite.common.lightning_internals import hooks_with
from flsuite.common.messages import ClientResult
from flsuite.federation.client.plain import PlainLoop
from flsuite.models import MLP, Classifier, FusedSpaceFed
from flsuite.models.base import ClientModel
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.client.workers import outcome, runner

HOOKS = [
    name
    for name in vars(LightningModule)
    if name.startswith(("on_", "setup", "teardown"))
    and name in hooks_with("fit") + hooks_with("steps")
]


class Diary:
    """Records every hook of a model that is called, with the counters that it may read."""

    lines: list[tuple[Any, ...]] = []


def _note(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        state = trainer.state.status, trainer.state.stage, self.training
        counters = trainer.current_epoch, trainer.global_step, trainer.num_training_batches
        Diary.lines.append((name, *state, *counters))
        getattr(super(type(self), self), name)(*args, **kwargs)

    hook.__name__ = name
    return hook


def with_diary(model: ClientModel) -> ClientModel:
    """Let a model write a line in each of its hooks."""
    kind = type(model)
    # With a name of its own: the command looks for all classes of one name.
    hooks = {name: _note(name) for name in HOOKS}
    model.__class__ = type(f"{kind.__name__}WithDiary", (kind,), hooks)
    return model


class Accumulates(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def dropout() -> Classifier:
    return Classifier(
        MLP(hidden=(16,), dropout=0.5), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )


def fused() -> FusedSpaceFed:
    return FusedSpaceFed(warmup_epochs=1, latent_dim=4, backbone=MLP(hidden=(8,)))


def fits(
    model: ClientModel, lean: bool, aggregator: Aggregator, **kwargs: Any
) -> tuple[list[ClientResult], list[Any], bool]:
    """Fit three clients; return results, the diary, and whether the short loop is in use."""
    made = runner(with_diary(model), aggregator, lean, **{"max_epochs": 2, **kwargs})
    Diary.lines = []
    results = []
    for client in range(3):
        result = outcome(made, client)
        assert isinstance(result, ClientResult), result.reason
        results.append(result)
    return results, Diary.lines, not made._needs_lightning


@pytest.mark.parametrize(
    ("model", "aggregator", "kwargs"),
    [
        (dropout, FedAvg, {}),
        (dropout, lambda: FedProx(0.1), {"gradient_clip_val": 0.5}),
        (dropout, PerFedAvg, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (dropout, lambda: SCAFFOLD(control="mean_gradient"), {"precision": "bf16-mixed"}),
        (dropout, FedAvg, {"max_steps": 3}),
        (dropout, FedAvg, {"accumulate_grad_batches": 2}),
        (fused, FedAvg, {"max_epochs": 1}),
        (lambda: Accumulates(MLP(hidden=(8,))), FedAvg, {}),
    ],
    ids=[
        *("plain", "clipped_prox", "pairs_clipped_by_value", "bf16_scaffold", "max_steps"),
        *("accumulated", "fused", "own_optimizer_step"),
    ],
)
def test_same_weights_and_same_hooks(
    model: Any, aggregator: Any, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = PlainLoop.fit
    monkeypatch.setattr(PlainLoop, "fit", lambda *args: (runs.append(1), run(*args))[1])
    is_special = kwargs.keys() & {"max_steps", "accumulate_grad_batches"}
    is_special = is_special or isinstance(model(), Accumulates)
    lean, lean_diary, _ = fits(model(), True, aggregator(), **kwargs)
    assert len(runs) == (0 if is_special else 3), "from the first fit on, or not at all"
    whole, whole_diary, _ = fits(model(), False, aggregator(), **kwargs)
    for a, b in zip(lean, whole, strict=True):
        assert equal_states(a.update.state, b.update.state)
        assert a.update.steps == b.update.steps and a.update.metrics == b.update.metrics
    assert lean_diary == whole_diary


def one_optimizer(first: Any) -> Any:
    """Return a model whose first fit has the plain optimizer, and its others another form of it."""

    class Changes(Classifier):
        fits = 0

        def configure_optimizers(self) -> Any:
            type(self).fits += 1  # an attribute of the model would start anew in each fit
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer if self.fits == 1 else first(optimizer)

    return Changes(MLP(hidden=(8,)))


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizer: [optimizer],
        lambda optimizer: {"optimizer": optimizer},
        lambda optimizer: ([optimizer], []),
    ],
)
def test_later_fits_take_the_optimizer_in_the_forms_that_lightning_takes(form: Any) -> None:
    plain, _, _ = fits(one_optimizer(lambda optimizer: optimizer), True, FedAvg())
    other, _, _ = fits(one_optimizer(form), True, FedAvg())
    for a, b in zip(plain, other, strict=True):
        assert equal_states(a.update.state, b.update.state)


@pytest.mark.parametrize(
    ("output", "words"),
    [(1.0, "must return a Tensor, a dict, or None"), ({"los": 1}, "the 'loss' key needs to be")],
    ids=["number", "no loss"],
)
def test_both_loops_refuse_a_step_in_the_same_words(output: Any, words: str) -> None:
    class Returns(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output if batch_idx else super().training_step(batch, batch_idx)

    for lean in (True, False):
        failure = outcome(runner(Returns(MLP(hidden=(8,))), FedAvg(), lean), 0)
        assert words in failure.reason


class Fails(Callback):
    """Raises at the end of the first epoch of one client, and records its calls."""

    told: list[str] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.train_dataloader.client == 1:
            raise ValueError("of client 1")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        Fails.told.append(str(exception))


def test_a_callback_is_told_of_an_error_in_a_later_fit() -> None:
    Fails.told = []
    made = trainer(rounds=1, callbacks=[Fails()])
    made.fit(classifier(), digits(clients=3))
    assert Fails.told == ["of client 1"]
    assert made.federation is not None
    assert [failure.client for failure in made.federation.log.failures] == [1]


class Looks(Classifier):
    """Records the Trainer's state before the first step of a fit."""

    seen: list[Any] = []

    def on_fit_start(self) -> None:
        Looks.seen.append(self.trainer.train_dataloader)
        Looks.seen.append(self.trainer.estimated_stepping_batches)

    def teardown(self, stage: str) -> None:
        self.trainer = None


@pytest.mark.parametrize("lean", [True, False])
def test_no_fit_sees_the_loader_or_the_trainer_of_the_one_before(lean: bool) -> None:
    Looks.seen = []
    results, _, _ = fits(Looks(MLP(hidden=(8,))), lean, FedAvg())
    assert Looks.seen[::2] == [None] * 3, "Lightning's loop would have it later"
    assert Looks.seen[1::2] == [result.update.steps for result in results]


class Prepares(Classifier):
    """Notes what is called before a fit, and freezes the mode of a layer."""

    seen: list[str] = []

    def prepare_data(self) -> None:
        Prepares.seen.append("prepare_data")

    def configure_model(self) -> None:
        super().configure_model()
        Prepares.seen.append("configure_model")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Prepares.seen.append(str(self.network[0].training))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("lean", [True, False])
def test_a_fit_prepares_the_model_and_leaves_the_modes_of_its_layers(lean: bool) -> None:
    model = Prepares(MLP(hidden=(8,)))
    made = runner(model, FedAvg(), lean, max_epochs=1)
    made.model.network[0].eval()
    Prepares.seen = []
    for client in (0, 1):
        assert isinstance(outcome(made, client), ClientResult)
    steps = [name for name in Prepares.seen if name in ("True", "False")]
    assert set(steps) == {"False"}
    before = [name for name in Prepares.seen if name not in steps]
    assert before == ["prepare_data", "configure_model"] * 2
