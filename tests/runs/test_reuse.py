"""The clients' trained models of one run as the start of another one."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import SCAFFOLD, FedAvg, FedBuff, FedProx, LocalOnly
from flsuite.data import Digits, Dirichlet
from flsuite.engines import Processes
from flsuite.models import MLP, Classifier
from flsuite.schedules import Asynchronous, LogNormal, Synchronous


def fitted(folder: Path | None = None, aggregator: Any = None, **kwargs: Any) -> FederatedTrainer:
    size = kwargs.pop("batch_size", 64)
    data = Digits(4, partition=Dirichlet(0.5), batch_size=size, train_samples=240)
    model = Classifier(
        MLP(hidden=(16,)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        private=kwargs.pop("private", ()),
    )
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = FederatedTrainer(
        kwargs.pop("rounds", 1),
        aggregator or FedAvg(),
        run_dir=str(folder) if folder else None,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        accelerator="cpu",
        **{"seed": 1, **kwargs},
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def assert_equal(a: FederatedTrainer, b: FederatedTrainer) -> None:
    for client in [None, *range(4)]:
        ours, theirs = (t.federation.client_state(client) for t in (a, b))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("engine", [None, Processes(workers=2)])
def test_a_run_on_kept_models_is_the_run_that_trained_them(tmp_path: Path, engine: Any) -> None:
    first = fitted(tmp_path / "a", keep_updates=True)
    again = fitted(from_updates=str(tmp_path / "a"), engine=engine)
    assert_equal(first, again)
    names = ("samples", "steps", "bytes_up", "metrics")
    for one, other in zip(first.federation.log.updates, again.federation.log.updates, strict=True):
        assert all(getattr(one, name) == getattr(other, name) for name in names)


def test_later_rounds_train_and_private_parts_and_optimizers_come_along(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"private": ["network.3"], "keep_optimizers": True, "rounds": 3}
    first = fitted(tmp_path / "a", keep_updates=True, **settings)
    again = fitted(from_updates=str(tmp_path / "a"), **settings)
    assert_equal(first, again)


def test_a_client_that_trains_twice_from_one_version_keeps_its_first_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedule": Asynchronous(4, 3), "rounds": 5}
    first = fitted(tmp_path / "a", FedBuff(), keep_updates=True, **settings)
    again = fitted(None, FedBuff(), from_updates=str(tmp_path / "a"), **settings)
    assert_equal(first, again)


def test_clients_that_were_not_kept_train(tmp_path: Path) -> None:
    fitted(tmp_path / "a", keep_updates=True, schedule=Synchronous(2))
    whole, again = fitted(), fitted(from_updates=str(tmp_path / "a"))
    assert len(list((tmp_path / "a" / "updates" / "round-0001").iterdir())) == 2
    assert_equal(whole, again)


def test_other_training_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path / "a", keep_updates=True)
    with pytest.raises(FlsuiteError, match=r"data.batch_size is 32 here and 64 there"):
        fitted(from_updates=str(tmp_path / "a"), batch_size=32)
    with pytest.raises(FlsuiteError, match="seed is 2 here and 1 there"):
        fitted(from_updates=str(tmp_path / "a"), seed=2)
    with pytest.raises(FlsuiteError, match=r"client.max_epochs is 3 here"):
        fitted(from_updates=str(tmp_path / "a"), max_epochs=3)


@pytest.mark.parametrize("aggregator", [FedProx(mu=0.1), SCAFFOLD()])
def test_an_algorithm_that_takes_part_in_training_is_refused(
    tmp_path: Path, aggregator: Any
) -> None:
    fitted(tmp_path / "a", keep_updates=True)
    with pytest.raises(FlsuiteError, match="changes how clients train"):
        fitted(aggregator=aggregator, from_updates=str(tmp_path / "a"))
    with pytest.raises(FlsuiteError, match="changes how clients train"):
        fitted(tmp_path / "b", aggregator=aggregator, keep_updates=True)


def test_a_run_that_has_kept_nothing_is_named(tmp_path: Path) -> None:
    fitted(tmp_path / "a")
    with pytest.raises(FlsuiteError, match=r"fit it with --trainer.keep_updates true"):
        fitted(from_updates=str(tmp_path / "a"))
    with pytest.raises(FlsuiteError, match="is not the folder of a run"):
        fitted(from_updates=str(tmp_path / "nowhere"))
    with pytest.raises(FlsuiteError, match="LocalOnly does not train one model per client"):
        fitted(aggregator=LocalOnly(), from_updates=str(tmp_path / "a"))


def test_a_run_needs_the_other_one_only_while_its_first_round_trains(tmp_path: Path) -> None:
    fitted(tmp_path / "a", keep_updates=True)
    source = {"from_updates": str(tmp_path / "a")}
    whole = fitted(tmp_path / "b", rounds=2, **source)
    first = fitted(tmp_path / "c", **source)
    shutil.rmtree(tmp_path / "a")

    data, model = first.datamodule, first.lightning_module
    again = FederatedTrainer(1, run_dir=str(tmp_path / "c"), accelerator="cpu", seed=1,
                             enable_progress_bar=False, **source)  # fmt: skip
    assert again.test(model, data, ckpt_path="last") == first.test()
    assert torch.equal(again.predict(), first.predict())
    assert_equal(fitted(tmp_path / "c", rounds=2, ckpt_path="last", **source), whole)
    with pytest.raises(FlsuiteError, match="is not the folder of a run"):
        fitted(tmp_path / "d", **source)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_resume_takes_the_models_of_fits_in_flight_if_they_are_there(
    tmp_path: Path, is_gone: bool
) -> None:
    fitted(tmp_path / "a", keep_updates=True)
    schedule = partial(Asynchronous, 3, 1, speeds=LogNormal())
    source: dict[str, Any] = {"from_updates": str(tmp_path / "a")}
    whole = fitted(None, FedBuff(), rounds=3, schedule=schedule(), **source)
    fitted(tmp_path / "b", FedBuff(), rounds=1, schedule=schedule(), **source)
    if is_gone:
        shutil.rmtree(tmp_path / "a")
    resumed = fitted(
        tmp_path / "b", FedBuff(), rounds=3, schedule=schedule(), ckpt_path="last", **source
    )
    assert (resumed.run.reuse.trained is None) == is_gone
    assert_equal(resumed, whole)


def test_a_damaged_record_of_the_other_run_is_named(tmp_path: Path) -> None:
    fitted(tmp_path / "a", keep_updates=True)
    (tmp_path / "a" / "settings.yaml").write_text("{seed: 1")
    with pytest.raises(FlsuiteError, match=r"settings\.yaml"):
        fitted(from_updates=str(tmp_path / "a"))


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    first = fitted(tmp_path / "a", keep_updates=True)
    path = tmp_path / "a" / "updates" / "round-0001" / "client-00002.pt"
    if damage == "other":
        torch.save({"state": {}}, path)
    else:
        path.write_bytes({"cut": path.read_bytes()[:100], "empty": b"", "text": b"xx"}[damage])
    with pytest.raises(FlsuiteError, match=r"client-00002.pt cannot be read: .* delete it") as told:
        fitted(from_updates=str(tmp_path / "a"))
    reason = str(told.value).removeprefix(str(path))
    assert len(reason) < 120 and "torch" not in reason and "\n" not in reason
    path.unlink()
    assert_equal(first, fitted(from_updates=str(tmp_path / "a")))


def test_models_are_not_kept_without_a_folder() -> None:
    with pytest.raises(FlsuiteError, match=r"keep_updates .*enable_checkpointing to true"):
        fitted(keep_updates=True)
