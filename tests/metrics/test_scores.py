"""Scores, by hand and against scikit-learn."""

import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from flsuite.common.score_names import lower_is_better, shown_number, shown_score
from flsuite.data.federated import DataSpec, Task
from flsuite.metrics import class_accuracy, scores, summary


def spec(classes: int, task: Task = "multiclass", names: tuple[str, ...] = ()) -> DataSpec:
    return DataSpec((4,), classes, task, names)


def certain(predicted: list[int], classes: int) -> Tensor:
    """Return the probabilities of an almost certain classifier."""
    return torch.nn.functional.one_hot(torch.tensor(predicted), classes) * 0.9 + 0.1 / classes


def test_a_confusion_matrix_by_hand() -> None:
    """By true class, 3 of 4, 1 of 2 and 1 of 2 are right."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    predicted = [0, 0, 0, 1, 1, 2, 2, 0]
    outputs = {"scores": certain(predicted, 3), "loss": torch.arange(8.0)}
    found = scores(outputs, y, spec(3), auroc=False)
    f1 = [2 * 3 / (4 + 4), 2 * 1 / (2 + 2), 2 * 1 / (2 + 2)]  # 2 hits / (true + predicted)
    assert found == pytest.approx(
        {
            "accuracy": 5 / 8,
            "balanced_accuracy": (3 / 4 + 1 / 2 + 1 / 2) / 3,
            "f1_macro": sum(f1) / 3,
            "loss": 3.5,
        }
    )
    by_class = class_accuracy(certain(predicted, 3), y, spec(3, names=("a", "b", "c")))
    assert by_class == pytest.approx({"a": 3 / 4, "b": 1 / 2, "c": 1 / 2})


def test_a_class_that_does_not_occur() -> None:
    """An absent class has no recall. Its F1 is 0 if predicted by mistake, and undefined if not."""
    y = torch.tensor([0, 0, 2, 2])
    found = scores({"scores": certain([0, 1, 2, 2], 4)}, y, spec(4))
    assert found == pytest.approx(
        {"accuracy": 3 / 4, "balanced_accuracy": (1 / 2 + 1) / 2, "f1_macro": (2 / 3 + 0 + 1) / 3}
    )
    by_class = class_accuracy(certain([0, 1, 2, 2], 4), y, spec(4))
    assert by_class == pytest.approx({"0": 0.5, "2": 1.0})


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("classes", "present", "seed"), [(2, 2, 0), (5, 5, 1), (5, 3, 2)])
def test_classes_as_scikit_learn_has_them(classes: int, present: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, present, (200,), generator=generator)
    logits = torch.randn(200, classes, generator=generator)
    probabilities = (logits + torch.nn.functional.one_hot(y, classes)).softmax(1)
    task = "binary" if classes == 2 else "multiclass"
    found = scores({"scores": probabilities}, y, spec(classes, task))
    predicted = probabilities.argmax(1)
    balanced = sk.balanced_accuracy_score(y, predicted)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, predicted))
    assert found["f1_macro"] == pytest.approx(sk.f1_score(y, predicted, average="macro"), abs=1e-6)
    assert found["balanced_accuracy"] == pytest.approx(balanced, abs=1e-6)
    if present < classes:
        assert "auroc" not in found
    elif classes == 2:
        assert found["auroc"] == pytest.approx(sk.roc_auc_score(y, probabilities[:, 1]), abs=1e-6)
    else:
        expected = sk.roc_auc_score(y, probabilities.double(), multi_class="ovr")
        assert found["auroc"] == pytest.approx(expected, abs=1e-5)


def test_labels_by_hand() -> None:
    """Of two labels, one has 3 of 4 right with one positive missed, the other all."""
    y = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=torch.uint8)
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.3], [0.4, 0.7]])
    found = scores({"scores": probabilities}, y, spec(2, "multilabel"))
    assert found == pytest.approx(
        {
            "accuracy": (3 / 4 + 1) / 2,
            "balanced_accuracy": ((1 / 2 + 1) / 2 + 1) / 2,
            "f1_macro": (2 / 3 + 1) / 2,
            "auroc": (3 / 4 + 1) / 2,
        }
    )
    by_label = class_accuracy(probabilities, y, spec(2, "multilabel", ("a", "b")))
    assert by_label == pytest.approx({"a": 3 / 4, "b": 1.0})


@pytest.mark.parametrize("constant", [{}, {1: 0}, {2: 1}, {1: 0, 2: 1}], ids=str)
def test_labels_as_scikit_learn_has_them(constant: dict[int, int]) -> None:
    generator = torch.Generator().manual_seed(len(constant))
    y = (torch.rand(150, 4, generator=generator) < 0.3).to(torch.uint8)
    for label, value in constant.items():
        y[:, label] = value
    probabilities = (torch.randn(150, 4, generator=generator) + 2 * y - 1).sigmoid()
    found = scores({"scores": probabilities}, y, spec(4, "multilabel"))
    truth, predicted = y.numpy(), (probabilities > 0.5).long().numpy()
    columns = [(truth[:, k], predicted[:, k], probabilities[:, k].numpy()) for k in range(4)]
    recalls = [
        np.mean([sk.recall_score(t, p, pos_label=value) for value in np.unique(t)])
        for t, p, _ in columns
    ]
    expected = {
        "accuracy": np.mean([sk.accuracy_score(t, p) for t, p, _ in columns]),
        "f1_macro": sk.f1_score(truth, predicted, average="macro", zero_division=0),
        "balanced_accuracy": np.mean(recalls),
        "auroc": np.mean([sk.roc_auc_score(t, q) for t, _, q in columns if len(np.unique(t)) == 2]),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (torch.zeros(5, dtype=torch.int64), 2),
        (torch.tensor([0, 1, 1, 0, 1]), 3),
        (torch.zeros(5, 3, dtype=torch.uint8), 3),
        (torch.ones(5, 3, dtype=torch.uint8), 3),
    ],
    ids=["one_class", "a_class_missing", "no_positive", "no_negative"],
)
def test_an_undefined_auroc_is_left_out(y: Tensor, classes: int) -> None:
    outputs = {"scores": torch.rand(5, classes, generator=torch.Generator().manual_seed(0))}
    found = scores(outputs, y, spec(classes, "multilabel" if y.ndim == 2 else "multiclass"))
    assert "auroc" not in found and all(value == value for value in found.values())


@pytest.mark.parametrize("classes", [2, 3])
def test_auroc_counts_ties_as_one_half(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    y = torch.arange(90) % classes
    steps = (torch.rand(90, classes, generator=generator) * 4).round() / 4  # five values
    found = scores({"scores": steps}, y, spec(classes))["auroc"]
    columns = range(1, 2) if classes == 2 else range(classes)
    expected = [sk.roc_auc_score(y == k, steps[:, k]) for k in columns]
    assert found == pytest.approx(np.mean(expected), abs=1e-12)


def test_auroc_ranks_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(7, (60,), generator=generator)
    outputs = {"scores": torch.rand(60, 7, generator=generator)}
    whole = scores(outputs, y, spec(7))["auroc"]
    for ranks in (1, 150):
        monkeypatch.setattr(sys.modules["flsuite.metrics.scores"], "_RANKS", ranks)
        assert scores(outputs, y, spec(7))["auroc"] == whole


def test_auroc_of_numbers_that_are_none_is_left_out() -> None:
    probabilities = torch.full((4, 2), float("nan"))
    assert "auroc" not in scores({"scores": probabilities}, torch.tensor([0, 1, 0, 1]), spec(2))


def test_summary() -> None:
    assert summary([0.2, 0.4, 0.9], "accuracy") == pytest.approx(
        {"accuracy_mean": 0.5, "accuracy_worst": 0.2, "accuracy_std": np.std([0.2, 0.4, 0.9])}
    )
    assert summary([0.2, 0.4, 0.9], "loss", higher_is_better=False)["loss_worst"] == 0.9
    alone = {"accuracy_mean": 0.7, "accuracy_worst": 0.7, "accuracy_std": 0.0}
    assert summary([0.7], "accuracy") == alone


LOW = "task_loss probe_mse dice_loss accuracy_error accuracy_std"
HIGH = "accuracy backward_transfer explained_variance all_clients/accuracy_client_worst"
OF_A_CLASS = "accuracy/loss"


@pytest.mark.parametrize(
    ("names", "is_low"), [(LOW, True), (HIGH, False), (OF_A_CLASS, False), ("gamma", None)]
)
def test_the_last_word_that_tells_says_which_values_are_better(
    names: str, is_low: bool | None
) -> None:
    assert {lower_is_better(name) for name in names.split()} == {is_low}


def test_figures_and_tables_show_names_for_people() -> None:
    shown = [shown_score(name) for name in ("f1_macro", "auroc", "balanced_accuracy", "dice_loss")]
    assert shown == ["macro F1", "AUROC", "balanced accuracy", "dice loss"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.1235"), (999999.0, "999999.0000"), (-1.5e6, "-1.5000e+06"), (np.inf, "inf")],
)
def test_a_number_from_a_million_on_is_in_scientific_form(value: float, text: str) -> None:
    assert shown_number(value) == text
