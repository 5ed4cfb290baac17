"""Attacks on training batches: label flipping, and the backdoor with its score."""

from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import TensorDataset

from flsuite.aggregators import Attack, LabelFlip, PixelBackdoor
from flsuite.analysis import read_metrics
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.data import DataSpec, DataSplit, FederatedDataModule, FromDataset, PublishedSplits
from flsuite.data.loader import TrainLoader
from flsuite.runs.summary import print_summary
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import table_data
from tests.commands.command import cli
from tests.conftest import classifier, digits, trainer
from tests.plain import Net, Reader, Regression, slope
from tests.test_plain_models import sentences


class Labels(FederationCallback):
    """Keeps the classes that each client has trained on."""

    seen: ClassVar[dict[int, list[Tensor]]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.seen.setdefault(trainer.train_dataloader.client, []).append(batch[1].clone())


class Several(FederatedDataModule):
    """Images with several labels each."""

    def __init__(self) -> None:
        super().__init__(clients=3, batch_size=8, val_fraction=0.0)

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (60, 8, 8, 1), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 2, (60, 4), dtype=torch.uint8, generator=generator)
        split = DataSplit(x, y)
        return PublishedSplits(DataSpec((1, 8, 8), 4, "multilabel"), split, split)


def configured(attack: Attack, data: FederatedDataModule) -> Any:
    data.use_seed(0)
    data.setup("fit")
    attack.configure(data.federated, seed=0)
    return attack


def poisoned(attack: Attack, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return attack.poison((x, y), torch_generator(0, "test"))


def batches_of(attack: Attack, data: FederatedDataModule, client: int) -> tuple[Any, Any]:
    """Return the loader of a client's fit, without and with the attack."""
    honest, attacked = (TrainLoader(data.federated, client, 3, 1) for _ in range(2))
    assert attack.poisons(client)
    attack.poisoned(attacked)
    return honest, attacked


def numbers() -> FromDataset:
    return FromDataset(slope(40, 0), slope(20, 1), clients=2)


# Label flipping


def test_labels_of_attackers_alone_are_flipped() -> None:
    def seen(attack: Attack | None) -> dict[int, Tensor]:
        Labels.seen.clear()
        trainer(rounds=1, attack=attack, callbacks=[Labels()]).fit(classifier(), digits())
        return {client: torch.cat(labels) for client, labels in Labels.seen.items()}

    honest, attacked = seen(None), seen(LabelFlip([1, 3]))
    for client in range(5):
        expected = 9 - honest[client] if client in (1, 3) else honest[client]
        assert torch.equal(attacked[client], expected)


def test_what_an_algorithm_measures_after_training_is_poisoned_too() -> None:
    data = digits()
    attack = configured(LabelFlip([1]), data)
    honest, attacked = batches_of(attack, data, client=1)
    for plain, flipped in zip(honest.plain_batches(), attacked.plain_batches(), strict=True):
        assert torch.equal(flipped[0], plain[0]) and torch.equal(flipped[1], 9 - plain[1])


def test_labels_flip_by_given_pairs() -> None:
    attack = configured(LabelFlip([0], pairs={7: 1, 1: 7, 4: 9}), digits())
    y = torch.tensor([7, 1, 4, 9, 0])
    flipped = poisoned(attack, torch.zeros(5, 1, 8, 8), y)[1]
    assert flipped.tolist() == [1, 7, 9, 9, 0] and y.tolist() == [7, 1, 4, 9, 0]


def test_several_labels_of_a_sample_move_together() -> None:
    y = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.uint8)
    x = torch.zeros(3, 1, 8, 8)
    reversed_ = configured(LabelFlip([0]), Several())
    assert torch.equal(poisoned(reversed_, x, y)[1], y.flip(1))
    paired = configured(LabelFlip([0], pairs={0: 1}), Several())
    expected = [[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert poisoned(paired, x, y)[1].tolist() == expected


# The backdoor


def test_the_pattern_is_on_the_share_of_a_batch_and_has_the_target_class() -> None:
    data = digits()
    attack = configured(PixelBackdoor([1], target=3, size=2, share=0.25, value=0.5), data)
    (x, y), (changed, classes) = (next(iter(loader)) for loader in batches_of(attack, data, 1))

    is_stamped = (changed != x).flatten(1).any(1)
    assert int(is_stamped.sum()) == int(0.25 * len(y) + 0.5)
    assert torch.equal(classes[~is_stamped], y[~is_stamped])
    assert bool((classes[is_stamped] == 3).all())
    # Half of the brightness, as the scaling of the data shows a stored byte to the model.
    pixel = data.federated.scaling(torch.full((1, 1, 1, 1), 128, dtype=torch.uint8)).item()
    assert bool((changed[is_stamped][:, :, -2:, -2:] == pixel).all())
    assert torch.equal(changed[:, :, :-2], x[:, :, :-2])
    assert torch.equal(changed[:, :, :, :-2], x[:, :, :, :-2])


def test_a_trial_takes_other_classes_and_changes_copies() -> None:
    data = digits()
    attack = configured(PixelBackdoor([1], target=3), data)
    test = data.federated.test
    before = test.x.clone(), test.y.clone()
    trial = attack.trial(test)
    assert trial.metric == "backdoor_success"
    assert torch.equal(trial.rows, (test.y != 3).nonzero().squeeze(1))

    batch = next(data.federated.batches_of(test, [trial.rows[:5]]))
    untouched = batch[0].clone()
    stamped, _ = trial.change(batch)
    assert torch.equal(batch[0], untouched) and not torch.equal(stamped, untouched)
    assert bool((stamped[:, :, -3:, -3:] == stamped[0, 0, -1, -1]).all())
    assert trial.hits(torch.eye(10)).tolist() == [c == 3 for c in range(10)]
    assert torch.equal(test.x, before[0]) and torch.equal(test.y, before[1])


def test_the_success_of_a_model_that_answers_by_the_pattern_is_known() -> None:
    attack, data = PixelBackdoor([0], target=7), digits()
    made = trainer(rounds=1, attack=attack)
    run = made.prepare(classifier(), data)

    def success(weight: float, bias: float) -> float:
        state = {name: torch.zeros_like(value) for name, value in run.federation.state.items()}
        first, last = (name for name in state if name.endswith("weight"))
        state[first][0, -1] = weight  # one unit reads the last pixel
        state[last][7, 0] = 1.0
        state[last.replace("weight", "bias")][2] = bias
        return run.evaluator.shared(state, "test", [])["global"]["backdoor_success"]

    assert success(weight=100.0, bias=1.0) == 1.0
    assert success(weight=0.0, bias=1.0) == 0.0


def test_labels_are_marked_where_a_sample_has_several() -> None:
    data = Several()
    attack = configured(PixelBackdoor([0], target=2, share=1.0), data)
    y = data.federated.train.y[:6]
    marked = poisoned(attack, torch.zeros(6, 1, 8, 8), y)[1]
    assert bool((marked[:, 2] == 1).all()) and torch.equal(marked[:, :2], y[:, :2])
    trial = attack.trial(data.federated.test)
    assert bool((data.federated.test.y[trial.rows, 2] == 0).all())
    assert trial.hits(torch.tensor([[0.9, 0.1, 0.6, 0.2], [0.9, 0.1, 0.4, 0.2]])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("x", "value", "seen", "in_memory"),
    [
        (torch.randn(60, 3, 6, 6), 0.75, 0.75, True),
        (torch.randint(100, (60, 3, 6, 6), dtype=torch.uint8), 0.8, 204, True),
        (torch.randint(100, (60, 3, 6, 6), dtype=torch.uint8), 0.8, 204, False),
    ],
    ids=["transformed", "bytes", "bytes read anew"],
)
def test_a_backdoor_in_images_of_a_dataset(
    x: Tensor, value: float, seen: float, in_memory: bool
) -> None:
    images = TensorDataset(x, torch.arange(60) % 4)
    kwargs = {"labels": lambda sample: int(sample[1]), "in_memory": in_memory}
    data = FromDataset(images, images, clients=2, batch_size=10, **kwargs)
    attack = configured(PixelBackdoor([0], target=1, value=value, share=1.0), data)
    changed, y = poisoned(attack, x, torch.arange(60) % 4)
    assert changed.dtype == x.dtype and y.unique().tolist() == [1]
    assert bool((changed[:, :, -3:, -3:] == seen).all())


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    folder = str(tmp_path_factory.mktemp("runs") / "backdoor")
    attack = PixelBackdoor([0, 1, 2], target=3, boost=2.0)
    places: Any = {"run_dir": folder, "logger": CSVLogger(folder, name="log", version="")}
    made = trainer(rounds=4, evaluate_every=2, attack=attack, **places)
    made.fit(classifier(), digits())
    return made


def test_the_success_rate_is_in_tables_loggers_and_reports(
    attacked: FederatedTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = attacked.run.folder.path
    table = read_metrics(folder)
    rows = table[(table["metric"] == "backdoor_success") & (table["scope"] == "global")]
    values = dict(zip(zip(rows["round"], rows["split"], strict=True), rows["value"], strict=True))
    assert {*values} == {(2, "test"), (2, "val"), (4, "test"), (4, "val")} and len(rows) == 4
    assert rows["value"].between(0, 1).all() and values[4, "test"] > 0.8

    logged = pd.read_csv(folder / "log" / "metrics.csv")
    assert logged["test/backdoor_success"].notna().sum() == 2
    settings = yaml.safe_load((folder / "log" / "hparams.yaml").read_text())
    assert settings["attackers"] == [0, 1, 2]
    print_summary(attacked.run.summary, None)
    assert "backdoor success" in capsys.readouterr().out

    to = ["--metric", "backdoor_success", "--output", str(tmp_path)]
    assert cli("report", str(folder), *to) == 0
    assert "test backdoor success" in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "report.csv")["last"].item() > 0.8


# Refusals


@pytest.mark.parametrize(
    ("make", "model", "data", "message"),
    [
        (lambda: LabelFlip([0], pairs={3: 10}), classifier, digits, "class 10, but the classes"),
        (lambda: PixelBackdoor([0], target=10), classifier, digits, "classes are 0 to 9"),
        (lambda: PixelBackdoor([0], size=9), classifier, digits, "the images have 8 x 8"),
        (lambda: PixelBackdoor([0]), classifier, table_data, "needs images"),
        (lambda: LabelFlip([0]), Reader, sentences, r"\(x, y\), but a batch .* is a dict"),
        (lambda: PixelBackdoor([0]), Reader, sentences, r"\(x, y\), but a batch .* is a dict"),
        (lambda: LabelFlip([0]), Regression, numbers, "needs data with classes"),
    ],
)
def test_data_that_cannot_be_poisoned_is_refused_before_training(
    make: Any, model: Any, data: Any, message: str, tmp_path: Path
) -> None:
    made = trainer(rounds=1, attack=make(), run_dir=str(tmp_path / "run"))
    with pytest.raises(FlsuiteError, match=message):
        made.fit(model(), data())
    assert not (tmp_path / "run").exists()


def test_a_model_without_class_scores_has_no_success_rate() -> None:
    images = TensorDataset(torch.randn(40, 1, 4, 4), torch.arange(40) % 3)

    class Flat(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1)[:, :4])

    made = trainer(rounds=1, attack=PixelBackdoor([0]))
    with pytest.raises(FlsuiteError, match="Flat has no class scores to measure"):
        made.fit(Flat(), FromDataset(images, images, clients=2))
