"""The clients' trained models of one run as the start of another one."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import SCAFFOLD, FedAvg, FedBuff, FedProx, LocalOnly
from flsuite.federation import Asynchronous, LogNormal, Processes, Synchronous
from tests.conftest import classifier, digits, equal_states, trainer


def fitted(folder: Path | None = None, aggregator: Any = None, **kwargs: Any) -> FederatedTrainer:
    data = digits(4, train_samples=240)
    data.batch_size = kwargs.pop("batch_size", 64)
    model, ckpt_path = classifier(private=kwargs.pop("private", ())), kwargs.pop("ckpt_path", None)
    if folder:
        kwargs["run_dir"] = folder
    made = trainer(**{"rounds": 1, "aggregator": aggregator or FedAvg(), "seed": 1, **kwargs})
    made.fit(model, data, ckpt_path=ckpt_path)
    return made


def assert_equal(a: FederatedTrainer, b: FederatedTrainer) -> None:
    for client in [None, *range(4)]:
        assert equal_states(*(t.federation.client_state(client) for t in (a, b)))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    return fitted(tmp_path_factory.mktemp("kept"), keep_updates=True)


def folder_of(made: FederatedTrainer) -> str:
    return str(made.run.folder.path)


@pytest.mark.parametrize("engine", [None, Processes(workers=2)])
def test_a_run_on_kept_models_is_the_run_that_trained_them(kept: Any, engine: Any) -> None:
    first, again = kept, fitted(from_updates=folder_of(kept), engine=engine)
    assert_equal(first, again)
    names = ("samples", "steps", "bytes_up", "metrics")
    for one, other in zip(first.federation.log.updates, again.federation.log.updates, strict=True):
        assert all(getattr(one, name) == getattr(other, name) for name in names)


def test_later_rounds_train_and_private_parts_and_optimizers_come_along(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"private": ["network.3"], "keep_optimizers": True, "rounds": 2}
    first = fitted(tmp_path / "a", keep_updates=True, **settings)
    again = fitted(from_updates=str(tmp_path / "a"), **settings)
    assert_equal(first, again)


def test_a_client_that_trains_twice_from_one_version_keeps_its_first_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedule": Asynchronous(4, 3), "rounds": 5}
    first = fitted(tmp_path / "a", FedBuff(), keep_updates=True, **settings)
    again = fitted(None, FedBuff(), from_updates=str(tmp_path / "a"), **settings)
    assert_equal(first, again)


def test_clients_that_were_not_kept_train(kept: Any, tmp_path: Path) -> None:
    fitted(tmp_path / "a", keep_updates=True, schedule=Synchronous(2))
    whole, again = kept, fitted(from_updates=str(tmp_path / "a"))
    assert len(list((tmp_path / "a" / "updates" / "round-0001").iterdir())) == 2
    assert_equal(whole, again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 32}, r"data.batch_size is 32 here and 64 there"),
        ({"seed": 2}, "seed is 2 here and 1 there"),
        ({"max_epochs": 3}, r"client.max_epochs is 3 here"),
        ({"aggregator": FedProx(mu=0.1)}, "changes how clients train"),
        ({"aggregator": SCAFFOLD()}, "changes how clients train"),
        ({"aggregator": LocalOnly()}, "LocalOnly does not train one model per client"),
        ({"from_updates": "nowhere"}, "is not the folder of a run"),
        ({"from_updates": None, "keep_updates": True}, r"enable_checkpointing to true"),
    ],
)
def test_other_training_is_refused(settings: dict[str, Any], message: str, kept: Any) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(**{"from_updates": folder_of(kept), **settings})


def test_an_algorithm_that_takes_part_in_training_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="changes how clients train"):
        fitted(tmp_path, aggregator=SCAFFOLD(), keep_updates=True)


def test_a_run_that_has_kept_nothing_or_is_damaged_is_named(kept: Any, tmp_path: Path) -> None:
    fitted(tmp_path / "a")
    with pytest.raises(FlsuiteError, match=r"fit it with --trainer.keep_updates true"):
        fitted(from_updates=str(tmp_path / "a"))
    shutil.copytree(folder_of(kept), tmp_path / "b")
    (tmp_path / "b" / "settings.yaml").write_text("{seed: 1")
    with pytest.raises(FlsuiteError, match=r"settings\.yaml"):
        fitted(from_updates=str(tmp_path / "b"))


def test_a_run_needs_the_other_one_only_while_its_first_round_trains(
    kept: Any, tmp_path: Path
) -> None:
    shutil.copytree(folder_of(kept), tmp_path / "a")
    source = {"from_updates": str(tmp_path / "a")}
    whole = fitted(tmp_path / "b", rounds=2, **source)
    first = fitted(tmp_path / "c", **source)
    shutil.rmtree(tmp_path / "a")

    data, model = first.datamodule, first.lightning_module
    again = trainer(rounds=1, run_dir=tmp_path / "c", seed=1, **source)
    assert again.test(model, data, ckpt_path="last") == first.test()
    assert torch.equal(again.predict(), first.predict())
    assert_equal(fitted(tmp_path / "c", rounds=2, ckpt_path="last", **source), whole)
    with pytest.raises(FlsuiteError, match="is not the folder of a run"):
        fitted(tmp_path / "d", **source)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_resume_takes_the_models_of_fits_in_flight_if_they_are_there(
    kept: Any, tmp_path: Path, is_gone: bool
) -> None:
    shutil.copytree(folder_of(kept), tmp_path / "a")
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


@pytest.mark.parametrize("damage", ["cut", "text", "other"])
def test_a_damaged_file_is_named(kept: Any, tmp_path: Path, damage: str) -> None:
    shutil.copytree(folder_of(kept), tmp_path / "a")
    path = tmp_path / "a" / "updates" / "round-0001" / "client-00002.pt"
    if damage == "other":
        torch.save({"state": {}}, path)
    else:
        path.write_bytes({"cut": path.read_bytes()[:100], "text": b"xx"}[damage])
    with pytest.raises(FlsuiteError, match=r"client-00002.pt cannot be read: .* delete it") as told:
        fitted(from_updates=str(tmp_path / "a"))
    reason = str(told.value).removeprefix(str(path))
    assert len(reason) < 120 and "torch" not in reason and "\n" not in reason
    path.unlink()
    if damage == "cut":
        assert_equal(kept, fitted(from_updates=str(tmp_path / "a")))
