"""Common uses of a Lightning trainer before and after a fit."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from flsuite.aggregators import LocalOnly
from flsuite.analysis import confusion_figure, confusion_matrix, load, read_metrics
from flsuite.analysis.results import only
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer
from tests.plain import Net, blobs
from tests.test_plain_models import net, points


class Predictor(Net):
    """It predicts the class and the logits of a batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        logits = self(batch[0])
        return {"class": logits.argmax(1), "logits": logits}


class OwnHead(Predictor):
    private = ("body.2.",)


def predictor(kind: type[Net] = Predictor, **kwargs: Any) -> FederatedTrainer:
    torch.manual_seed(0)
    made = trainer(rounds=1, **kwargs)
    made.fit(kind(), points())
    return made


def stock() -> Trainer:
    return Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")


def batches() -> DataLoader[Any]:
    """Return the test samples of :func:`~tests.test_plain_models.points`."""
    return DataLoader(blobs(60, 1), batch_size=16)


# Scores


def test_metrics_and_results_are_those_of_the_table(tmp_path: Path) -> None:
    made = trainer(rounds=3, evaluate_every=2, run_dir=str(tmp_path))
    assert made.callback_metrics == {} and made.results is None
    made.fit(classifier(), datamodule=digits())

    table = read_metrics(tmp_path)
    rows = table[table["scope"] == "global"].astype({"split": str, "metric": str})
    rows = rows.assign(name=rows["split"] + "/" + rows["metric"])
    latest = rows.groupby("name")["value"].last().to_dict()
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    assert metrics == pytest.approx(latest) and {"val/accuracy", "train/loss"} <= metrics.keys()
    assert made.logged_metrics == made.callback_metrics

    # Rounds without scores would be gaps in a line.
    assert list(made.results.index) == [2, 3] and made.results.index.name == "round"
    by_round = rows[rows["name"] == "test/accuracy"].set_index("round")["value"]
    assert made.results["test/accuracy"].to_dict() == pytest.approx(by_round.to_dict())
    panel = made.results.plot(y=["val/accuracy", "test/accuracy"])
    assert list(panel.lines[1].get_ydata()) == pytest.approx(list(by_round))
    assert panel.get_xlabel() == "round"


def test_a_resumed_run_has_the_results_of_all_its_rounds(tmp_path: Path) -> None:
    whole, part, resumed = (trainer(rounds=n, run_dir=str(tmp_path / d)) for n, d in RESUMED)
    whole.fit(classifier(), digits())
    part.fit(classifier(), digits())
    resumed.fit(classifier(), digits(), ckpt_path="last")
    scores = ["val/accuracy", "test/loss"]
    # A table on disk has nine digits of a number.
    expected = whole.results[scores].round(6).to_dict()
    assert resumed.results[scores].round(6).to_dict() == expected and len(resumed.results) == 2


RESUMED = ((2, "whole"), (1, "part"), (2, "part"))


def test_scores_of_a_request_are_the_latest_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(rounds=2, run_dir=str(tmp_path), enable_progress_bar=True)
    made.fit(classifier(lr=0.001), digits())
    capsys.readouterr()
    fitted = dict(made.callback_metrics)
    made.test(ckpt_path="best", verbose=False)
    (best, *_), _ = made.test(ckpt_path="best", verbose=False), made.validate(verbose=False)
    assert capsys.readouterr().out == ""
    assert float(made.callback_metrics["test/loss"]) == pytest.approx(best["loss"])
    assert made.callback_metrics["train/loss"] == fitted["train/loss"]
    made.test()
    assert "global accuracy" in capsys.readouterr().out


def test_a_model_is_scored_before_any_fit() -> None:
    model = net()
    scores = trainer().test(model, points(), verbose=False)[0]
    (expected,) = stock().test(model, batches(), verbose=False)
    assert scores["accuracy"] == pytest.approx(expected["test_accuracy"])


# The folder


def test_the_run_dir_is_that_of_the_last_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Looks(FederationCallback):
        affects, reads_updates = "nothing", False

        def on_round_end(self, run: Any, round: int) -> None:
            during.append(made.run_dir)

    during: list[Path | None] = []
    made = trainer(rounds=1, enable_checkpointing=True, callbacks=Looks())
    assert made.run_dir is None
    for _ in range(2):
        made.fit(classifier(), digits())
        assert made.run_dir == during[-1] and (made.run_dir / "metrics.csv").is_file()
    assert during[0] != during[1]
    assert made.lightning_module is made.model and made.datamodule is not None

    assert trainer(run_dir="here").run_dir == Path("here")
    unwritten = trainer(rounds=1)
    unwritten.fit(classifier(), digits())
    assert unwritten.run_dir is None


# Predictions


def test_predictions_are_those_of_lightning(tmp_path: Path) -> None:
    made = predictor(run_dir=str(tmp_path))
    predictions = made.predict()
    model = Predictor.load_from_checkpoint(tmp_path / "checkpoints" / "model.ckpt")
    expected = stock().predict(model, batches())
    assert len(predictions) == len(expected) > 1
    assert all(map(equal_states, predictions, expected))
    kept = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert all(map(equal_states, kept, predictions))


def test_each_client_predicts_where_each_has_a_model() -> None:
    made = predictor(OwnHead)
    by_client = made.predict()
    assert len(by_client) == made.federation.data.clients
    assert not torch.equal(by_client[0][0]["logits"], by_client[1][0]["logits"])
    made.run.evaluator.load(made.federation.client_state(1))
    x, _ = next(iter(batches()))
    assert torch.equal(by_client[1][0]["logits"], made.lightning_module(x).detach())


def test_a_step_and_class_probabilities_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictor, "logits", Predictor.forward, raising=False)
    predictions = predictor(run_dir=str(tmp_path)).predict()
    classes = torch.cat([batch["class"] for batch in predictions])
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["prediction"].tolist() == classes.tolist()


def test_predictions_that_a_file_cannot_hold_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Predictor, "predict_step", lambda self, batch, batch_idx: Path("x"))
    assert set(predictor(run_dir=str(tmp_path)).predict()) == {Path("x")}
    assert "predictions.pt was not written" in caplog.text


def test_a_model_that_cannot_predict_is_told_what_to_add() -> None:
    made = predictor(Net)
    with pytest.raises(FlsuiteError, match="add a predict_step, or logits"):
        made.predict()


def test_a_client_is_predicted_by_its_own_model(tmp_path: Path) -> None:
    made = trainer(rounds=1, run_dir=str(tmp_path), aggregator=LocalOnly())
    made.fit(classifier(), digits())
    made.predict()
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert (table["model"] == "mean").sum() == table["sample"].nunique()
    own = table[table["model"] == table["client"].astype("Int64").astype(str)]
    assert len(own) == (table["model"] != "mean").sum()

    for scope in own["model"].unique():
        counts = confusion_matrix(tmp_path, int(scope)).to_numpy()
        scored = only(load(tmp_path), "accuracy", "test", scope)["value"].iloc[-1]
        assert counts.trace() / counts.sum() == pytest.approx(scored)
    assert len(confusion_figure(load(tmp_path), clients=[0, 1]).axes) == 3, "and the bar"
    with pytest.raises(FlsuiteError, match="no samples of client 77"):
        confusion_matrix(tmp_path, 77)
