"""Any LightningModule federates: fitted, scored by its own steps, resumed, on every engine."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flsuite import FederatedTrainer
from flsuite.aggregators import PFNM, OTFusion
from flsuite.analysis import read_metrics
from flsuite.common.errors import FlsuiteError
from flsuite.data import Dirichlet, FromDataset, Natural
from flsuite.data.loader import TrainLoader
from flsuite.federation import Processes
from flsuite.models import ClientModel
from tests.conftest import equal_states, trainer
from tests.plain import (
    CLASSES,
    Blobs,
    Net,
    Reader,
    Regression,
    Sentences,
    blobs,
    pad,
    plain_trainer,
    slope,
)


def net(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs)


def points(**kwargs: Any) -> FromDataset:
    kwargs = {"clients": 4, "partition": Dirichlet(0.5), "batch_size": 16, **kwargs}
    return FromDataset(blobs(200, 0), blobs(60, 1), **kwargs)


def table(**kwargs: Any) -> FromDataset:
    return FromDataset(slope(120, 0), slope(40, 1), clients=3, batch_size=8, **kwargs)


def sentences(**kwargs: Any) -> FromDataset:
    kwargs = {"clients": 3, "partition": Dirichlet(1.0), "batch_size": 8, **kwargs}
    return FromDataset(Sentences(90, 0), Sentences(30, 1), collate=pad, **kwargs)


def once(model: LightningModule, data: FromDataset | None = None) -> FederatedTrainer:
    """Return a federation after its only round."""
    made = trainer(rounds=1)
    made.fit(model, data or points())
    return made


CASES = {"classes": (net, points), "regression": (Regression, table), "text": (Reader, sentences)}


def fitted(
    case: str, rounds: int = 2, ckpt_path: str | None = None, **kwargs: Any
) -> FederatedTrainer:
    make_model, make_data = CASES[case]
    seed_everything(5, verbose=False)
    made = trainer(rounds=rounds, max_epochs=2, **kwargs)
    made.fit(make_model(), make_data(), ckpt_path=ckpt_path)
    return made


Whole = Callable[[str], FederatedTrainer]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return what makes a finished run of a case, once: tests only look at it."""
    rounds = {"classes": 2, "regression": 5, "text": 3}
    return cache(lambda case: fitted(case, rounds[case], run_dir=tmp_path_factory.mktemp(case)))


@pytest.mark.parametrize(
    "case",
    ["text", *(pytest.param(case, marks=pytest.mark.long) for case in ("classes", "regression"))],
)
def test_a_run_resumed_in_worker_processes_ends_with_the_same_weights(
    case: str, whole: Whole, tmp_path: Path
) -> None:
    fitted(case, rounds=1, run_dir=tmp_path)
    rounds, workers = whole(case).round, Processes(workers=2)
    resumed = fitted(case, rounds, ckpt_path="last", run_dir=tmp_path, engine=workers)
    assert equal_states(whole(case).federation.state, resumed.federation.state)
    assert whole(case).test() == resumed.test()


def test_one_client_is_lightnings_own_fit() -> None:
    """Take the batches of the federation, and expect the weights of a plain Trainer."""
    seed_everything(5, verbose=False)
    made, data = trainer(rounds=1, max_epochs=2), points(clients=1, partition=None)
    made.fit(model := net(), data)

    from flsuite.common.random import seed_process

    plain = net()
    seed_process(3, "fit", 1, 0)
    loader = TrainLoader(data.federated, 0, 3, 1)
    plain_trainer(max_epochs=2, limit_val_batches=0).fit(plain, loader)
    assert equal_states(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("case", "names"),
    [("classes", {"loss", "accuracy"}), ("text", {"loss", "acc"}), ("regression", {"r2", "mae"})],
)
def test_scores_are_those_of_lightnings_own_evaluation(
    case: str, names: set[str], whole: Whole
) -> None:
    made = whole(case)
    (scores, *clients) = made.test()
    assert names <= scores.keys()

    data, model = made.federation.data, made.run.evaluator.model
    dataset = CASES[case][1]().test
    run = plain_trainer().test if case != "regression" else plain_trainer().validate
    collate = pad if case == "text" else None

    def logged(numbers: Any) -> dict[str, float]:
        part = torch.utils.data.Subset(dataset, numbers)
        loader = DataLoader(part, batch_size=data.batch_size, collate_fn=collate)
        (row,) = run(model, loader, verbose=False)
        return {re.sub("^(test|val)[_/]", "", name): value for name, value in row.items()}

    for name, value in logged(range(len(dataset))).items():
        assert scores[name] == pytest.approx(value, abs=1e-6)
    for client, row in enumerate(clients):
        for name, value in logged(data.test.rows[client].tolist()).items():
            assert row[name] == pytest.approx(value, abs=1e-6)
        assert row["samples"] == len(data.test.rows[client])
    name = min(names)
    values = torch.tensor([row[name] for row in clients], dtype=torch.float64)
    assert scores[f"{name}_client_mean"] == pytest.approx(float(values.mean()))


class Counting(Reader):
    """Counts the samples that it is tested on."""

    seen: ClassVar[list[int]] = []

    def test_step(self, batch, batch_idx):
        self.seen.append(len(batch["topic"]))
        super().test_step(batch, batch_idx)


class Rarely(Counting):
    """Logs a value in some batches only, which is no mean over all samples."""

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        if len(batch["topic"]) == 8:
            self.log("test/full", 1.0)


@pytest.mark.parametrize(("kind", "times"), [(Counting, 1), (Rarely, 2)])
def test_samples_read_on_demand_are_evaluated_once_a_round(
    kind: type[Counting], times: int
) -> None:
    """Count them, and expect the scores of the parts that are evaluated one by one."""
    made = trainer(rounds=1)
    made.fit(kind(), sentences(in_memory=True))
    Counting.seen.clear()
    scores = made.test()
    assert sum(Counting.seen) == times * 30
    made.run.evaluator._steps._indivisible.update(("val", "test"))
    apart = made.test()
    assert sum(Counting.seen) == (times + 2) * 30, "all samples, and the parts one by one"
    for row, other in zip(scores, apart, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


def test_text_and_regression_learn(whole: Whole) -> None:
    assert whole("text").test()[0]["acc"] > 0.7
    assert whole("regression").test()[0]["r2"] > 0.8


def test_the_monitor_may_be_a_logged_number(tmp_path: Path) -> None:
    made = fitted("regression", rounds=3, monitor="val_mae", run_dir=tmp_path)
    rows = read_metrics(tmp_path).query("split == 'val' and metric == 'mae' and scope == 'global'")
    best = rows.loc[rows["value"].idxmin()]
    assert made.run.summary.best["round"] == best["round"]
    assert made.run.settings["monitor"] == "mae"
    with pytest.raises(FlsuiteError, match="monitor must be one of r2, mae"):
        fitted("regression", monitor="accuracy")
    # A score that only the test step logs would pick no round.
    with pytest.raises(FlsuiteError, match=r"monitor must be one of .*f1"):
        trainer(rounds=1, monitor="acc").fit(OtherScores(), points())


def test_of_two_names_of_a_score_the_splits_own_counts() -> None:
    class Twice(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"val_loss": 1.0, "temperature": 3.0, "loss": 7.0, "test_loss": 9.0})

        test_step = validation_step

    made = once(Twice())
    assert made.test()[0]["loss"] == 9.0 and made.validate()[0]["loss"] == 1.0


def test_the_suites_scores_are_added_for_logits() -> None:
    class WithLogits(Net):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    made = once(WithLogits())
    assert {"f1_macro", "balanced_accuracy", "auroc", "accuracy/0"} <= made.test()[0].keys()
    assert made.predict().shape == (60, CLASSES)

    class LogitsAlone(WithLogits):
        test_step = LightningModule.test_step
        validation_step = LightningModule.validation_step

    assert {"accuracy", "loss"} <= once(LogitsAlone()).test()[0].keys()


class Manual(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        self.seen.append(float(loss.detach()))

    def configure_optimizers(self):
        first, _, second = self.body
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]


def test_manual_optimization_on_every_engine() -> None:
    ends = []
    for engine in (None, Processes(workers=2)):
        seed_everything(5, verbose=False)
        made = trainer(rounds=2, engine=engine)
        made.fit(Manual(), points())
        ends.append(made.federation.state)
        losses = [row.value for row in made.run.folder.table.rows if row.metric == "loss"]
        assert losses and not any(map(math.isnan, losses)), "a step need not return its loss"
    assert equal_states(*ends)


class Lacking(LightningModule):
    """Has no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoStep(Net):
    training_step = LightningModule.training_step


class NoOptimizer(Net):
    configure_optimizers = LightningModule.configure_optimizers


class InSetup(Lacking):
    """Makes its layers in setup, in every fit again."""

    def setup(self, stage):
        self.layer = nn.Linear(4, CLASSES)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.layer(batch[0]), batch[1]))


class OtherScores(Net):
    """Logs other scores of test data than of validation data."""

    def validation_step(self, batch, batch_idx):
        self.log("val_f1", 0.5)

    def test_step(self, batch, batch_idx):
        self.log("test_acc", 0.5)


class Silent(Net):
    """Has a test step without scores."""

    def test_step(self, batch, batch_idx):
        self(batch[0])


def AllFrozen() -> Net:  # noqa: N802
    return Net().requires_grad_(False)


def LazySizes() -> Net:  # noqa: N802
    made = Net()
    made.layer = nn.LazyLinear(CLASSES)
    return made


class OldStyle(ClientModel):
    def build(self, spec):
        self.layer = nn.Linear(4, CLASSES)

    training_step = Lacking.training_step
    configure_optimizers = Lacking.configure_optimizers


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (NoStep, "NoStep has no training_step"),
        (NoOptimizer, "NoOptimizer has no configure_optimizers"),
        (AllFrozen, "all parameters of Net are frozen"),
        (LazySizes, "Net has lazy layers"),
        (InSetup, "a fit of InSetup makes new layers"),
    ],
)
def test_what_a_model_lacks_is_one_line_before_a_round(
    make: Callable[[], LightningModule], line: str, tmp_path: Path
) -> None:
    made = trainer(rounds=1, run_dir=str(tmp_path / "run"))
    with pytest.raises(FlsuiteError, match=line) as error:
        made.fit(make(), points())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


class Flat(Lacking):
    """Has one sequence of layers, and reads samples that have more parts than a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), nn.Linear(4, CLASSES))

    test_step = InSetup.test_step


def triples() -> FromDataset:
    sets = [TensorDataset(*blobs(n, n).tensors, torch.ones(n)) for n in (60, 20)]
    return FromDataset(*sets, clients=3, batch_size=8)


def test_samples_that_are_no_pairs_train_a_flattening_model_unless_a_rule_needs_its_chain() -> None:
    assert once(Flat(), triples()).round == 1
    for aggregator in (OTFusion(), PFNM()):
        with pytest.raises(FlsuiteError, match=r"layer\.0 does not take what comes before it"):
            trainer(rounds=1, aggregator=aggregator).fit(Flat(), triples())


def test_a_step_without_scores_is_like_a_missing_one() -> None:
    scores = [once(kind()).test() for kind in (Silent, net)]
    assert scores[0] == scores[1] and scores[0][0]["accuracy"] > 0


@pytest.mark.parametrize("kind", [Lacking, OldStyle])
def test_a_model_without_steps_trains_by_its_loss_alone(kind: type[LightningModule]) -> None:
    made = once(kind())
    assert {row.split for row in made.run.folder.table.rows} == {"train"}
    assert made.run.settings["monitor"] == "loss"


def test_a_client_model_may_be_scored_by_its_own_steps() -> None:
    class Logs(OldStyle):
        test_step = InSetup.test_step

    assert once(Logs()).test()[0].keys() >= {"loss", "loss_client_mean"}


def test_a_plain_data_module_is_split_over_clients() -> None:
    data = Blobs()
    data.clients, data.partition = 4, Dirichlet(0.5)
    made = trainer(rounds=2, max_epochs=5)
    made.fit(net(), data)
    federated = made.federation.data
    assert (federated.clients, federated.batch_size, len(federated.test)) == (4, 16, 60)
    assert sum(federated.samples(client) for client in range(4)) == 160 and len(federated.val) == 40
    assert made.test()[0]["accuracy"] > 0.5

    again = trainer(rounds=2).prepare(net(), (other := Blobs()))
    assert again.federation.data.clients == 10 and not hasattr(other, "clients")


def test_the_model_checkpoint_is_lightnings(whole: Whole) -> None:
    run = whole("classes").run
    loaded = Net.load_from_checkpoint(run.folder.path / "checkpoints" / "model.ckpt")
    assert equal_states(loaded.state_dict(), run.evaluator.model.state_dict())
    assert loaded.hparams.width == 8


def test_settings_tell_hyperparameters_and_samples_apart(whole: Whole) -> None:
    folder = whole("classes").run.folder.path
    other = points()
    other.train = blobs(200, 7)
    for model, data, words in (
        (net(lr=0.2), points(), r"model.lr is 0.2 here and 0.1 there"),
        (net(), other, r"data.content is"),
    ):
        seed_everything(5, verbose=False)
        with pytest.raises(FlsuiteError, match=words):
            trainer(rounds=3, max_epochs=2, run_dir=folder).fit(model, data, "last")


def test_natural_clients_by_a_field() -> None:
    data = sentences(partition=Natural(), clients=3, ids="topic")
    counts = trainer(rounds=1).prepare(Reader(), data).federation.data
    assert [int((counts.class_counts(c) > 0).sum()) for c in range(3)] == [1, 1, 1]


# What a run shows of itself


def test_a_run_shows_the_scores_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    fitted("regression", rounds=1, enable_progress_bar=True)
    out, err = capsys.readouterr()
    assert all("val/r2" in line and "test/r2" in line for line in err.splitlines())
    rows = [line.split("│")[0].strip() for line in out.splitlines() if "│" in line]
    assert rows[:3] == ["global r2", "global mae", "clients' r2, mean/worst"]
    assert "spread" not in out
