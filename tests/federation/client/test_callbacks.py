"""Learning-rate decay from round to round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite.common.errors import FlsuiteError
from flsuite.data import IID
from flsuite.federation import Processes
from flsuite.federation.client.callbacks import CosineDecay, ExponentialDecay, LRDecay, StepDecay
from flsuite.models import MLP, Classifier, FusedSpaceFed
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.engines.test_vectorized import Scheduled


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (
            CosineDecay(rounds=4, final=0.2),
            [1.0, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4, 0.2, 0.2],
        ),
        (ExponentialDecay(gamma=0.5), [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (StepDecay(every=2, gamma=0.1), [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
    ],
    ids=["cosine", "exponential", "step"],
)
def test_worked_by_hand(decay: LRDecay, expected: list[float]) -> None:
    assert [decay.factor(round) for round in range(1, 7)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CosineDecay(rounds=0), "rounds"),
        (lambda: CosineDecay(rounds=5, final=0.0), "final"),
        (lambda: ExponentialDecay(gamma=1.5), "gamma"),
        (lambda: StepDecay(every=0), "every"),
        (lambda: StepDecay(every=2, gamma=float("nan")), "gamma"),
    ],
)
def test_bad_arguments_are_named(make: Any, named: str) -> None:
    with pytest.raises(FlsuiteError, match=named):
        make()


class Rates(Callback):
    """Records the rates that optimizers step with, on the class, because every fit has a copy."""

    seen: list[tuple[int, list[float]]] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        Rates.seen.append((trainer.train_dataloader.round, [group["lr"] for group in groups]))


@pytest.mark.parametrize("keep_optimizers", [False, True])
def test_every_group_steps_with_its_own_rate_times_the_factor(keep_optimizers: bool) -> None:
    """Check that factors do not compound: kept optimizers come back with a scaled rate."""
    Rates.seen = []
    model = FusedSpaceFed(latent_dim=4, backbone=MLP(hidden=(4,)), lr=0.1, autoencoder_lr=0.02)
    decay = ExponentialDecay(gamma=0.5)
    made = trainer(rounds=3, lr_decay=decay, keep_optimizers=keep_optimizers, callbacks=[Rates()])
    made.fit(model, digits(clients=2, resize=16, train_samples=60))
    assert [round for round, _ in Rates.seen] == [1, 1, 2, 2, 3, 3]
    rows = made.run.folder.table.rows
    assert [row[8] for row in rows if row[7] == "lr_factor"] == [1.0, 0.5, 0.25]
    for round, (autoencoder, head) in Rates.seen:
        assert (autoencoder, head) == pytest.approx(
            (0.02 * 0.5 ** (round - 1), 0.1 * 0.5 ** (round - 1))
        )


def test_a_step_is_as_much_shorter() -> None:
    """Check ``w_2 - w_1 = -gamma lr g(w_1)`` for one client and one step of SGD per round."""

    def states(rounds: int, **kwargs: Any) -> dict[str, torch.Tensor]:
        made = trainer(rounds=rounds, **kwargs)
        made.fit(classifier(lr=0.1), digits(clients=1, partition=IID()))
        assert made.federation is not None
        return made.federation.state

    first = states(1, limit_train_batches=1)
    plain, decayed = (
        states(2, limit_train_batches=1, lr_decay=decay)
        for decay in (None, ExponentialDecay(gamma=0.25))
    )
    for name, start in first.items():
        torch.testing.assert_close(
            decayed[name] - start, 0.25 * (plain[name] - start), rtol=1e-4, atol=1e-7
        )
    assert any(not torch.equal(plain[name], first[name]) for name in first)


def fit(
    folder: Path | None = None, rounds: int = 4, ckpt_path: str | None = None, **kwargs: Any
) -> FederatedTrainer:
    made = trainer(rounds=rounds, **({"run_dir": str(folder)} if folder else {}), **kwargs)
    model = Classifier(MLP(hidden=(16,)), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    made.fit(model, digits(), ckpt_path=ckpt_path)
    return made


def state(made: FederatedTrainer) -> dict[str, torch.Tensor]:
    assert made.federation is not None
    return made.federation.state


def test_resume_workers_and_more_rounds_give_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr_decay": CosineDecay(rounds=4), "keep_optimizers": True}
    whole = fit(**settings)
    fit(tmp_path / "run", rounds=2, **settings)
    workers = Processes(workers=2)
    extended = fit(tmp_path / "run", ckpt_path="last", engine=workers, **settings)
    assert equal_states(state(whole), state(extended))
    with pytest.raises(FlsuiteError, match="lr_decay"):
        fit(
            tmp_path / "run",
            rounds=5,
            ckpt_path="last",
            keep_optimizers=True,
            lr_decay=CosineDecay(rounds=5),
        )


def test_a_model_that_schedules_its_own_rate_is_refused() -> None:
    made = trainer(rounds=1, lr_decay=ExponentialDecay())
    with pytest.raises(FlsuiteError, match="Scheduled"):
        made.fit(Scheduled(MLP(hidden=(4,))), digits())
