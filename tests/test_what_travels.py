"""Frozen parameters stay where they are, and a model may name what it shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from flsuite.aggregators import SCAFFOLD, FedAvg, LocalOnly, PairwiseMasks, Quantize
from flsuite.analysis import read_metrics
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import nbytes
from flsuite.data import FromDataset
from flsuite.federation import Processes
from tests.conftest import equal_states, trainer
from tests.plain import Net, Reader, blobs
from tests.test_plain_models import points, sentences


class FrozenBody(Net):
    """Trains its last layer alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body[0].requires_grad_(False)


class Tuned(Reader):
    """A transformer whose encoder is adapted by LoRA."""

    def __init__(self, rank: int = 2) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        torch.manual_seed(0)
        whole = Network()
        config = LoraConfig(r=rank, target_modules=["linear1", "linear2"], modules_to_save=["head"])
        del self.embed, self.encoder, self.head
        self.rank = rank
        self.net = get_peft_model(whole, config)

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words)


class Network(nn.Module):
    """The layers of :class:`Reader`, as somebody has trained them before."""

    forward = Reader.forward

    def __init__(self) -> None:
        super().__init__()
        reader = Reader()
        self.embed, self.encoder, self.head = reader.embed, reader.encoder, reader.head


def fit(model: Any, data: Any, rounds: int = 2, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    seed_everything(5, verbose=False)
    made = trainer(rounds=rounds, **kwargs)
    made.fit(model, data, ckpt_path=ckpt_path)
    return made


def few() -> FromDataset:
    return FromDataset(blobs(48, 0), blobs(20, 1), clients=2, batch_size=16)


def bytes_up(folder: Path) -> set[float]:
    table = read_metrics(folder)
    return set(table[(table["metric"] == "bytes_up") & (table["scope"] != "global")]["value"])


def frozen(seed: int, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return fit(FrozenBody(), few(), **kwargs)


def test_frozen_parameters_do_not_travel_and_are_in_the_model(tmp_path: Path) -> None:
    """Resume with other frozen weights in the model too, and expect the run's weights."""
    torch.manual_seed(1)
    before = FrozenBody().state_dict()
    made = frozen(1, run_dir=tmp_path / "run")
    assert set(made.federation.state) == {"body.2.weight", "body.2.bias"}
    assert bytes_up(tmp_path / "run") == {4.0 * (8 * 3 + 3)}

    folder = tmp_path / "run" / "checkpoints"
    saved = torch.load(folder / "model.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == before.keys()
    assert torch.equal(saved["body.0.weight"], before["body.0.weight"])
    assert not torch.equal(saved["body.2.weight"], before["body.2.weight"])
    last = torch.load(folder / "last.ckpt", weights_only=True)["federation"]
    assert "body.0.weight" not in {**last["state"], **last["initial"]}

    frozen(1, rounds=1, run_dir=tmp_path / "parts")
    resumed = frozen(2, ckpt_path="last", run_dir=tmp_path / "parts")
    assert equal_states(
        made.run.evaluator.model.state_dict(), resumed.run.evaluator.model.state_dict()
    )
    assert made.test() == resumed.test()


def test_private_and_shared_are_two_ways_to_say_the_same() -> None:
    class Private(Net):
        private = ("body.2.",)

    class Shared(Net):
        shared = ("body.0.",)

    ends = []
    for kind in (Private, Shared):
        torch.manual_seed(0)
        made = fit(kind(), few())
        assert set(made.federation.state) == {"body.0.weight", "body.0.bias"}
        assert made.federation.entries.personal
        ends.append((made.federation.state, made.test()))
    assert equal_states(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        ({"shared": ("head.",)}, "model.shared: 'head.' matches no entry"),
        ({"private": ("head.",)}, "model.private: 'head.' matches no entry"),
        ({"private": ("body.",), "shared": ("body.",)}, "has both shared and private"),
    ],
)
def test_a_wrong_declaration_is_one_line(declared: dict[str, Any], line: str) -> None:
    with pytest.raises(FlsuiteError, match=line):
        fit(type("Said", (Net,), declared)(), few())


def test_a_layer_of_that_name_is_no_declaration() -> None:
    class Twin(Net):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(2, 2)

    assert len(trainer(rounds=1).prepare(Twin(), few()).federation.state) == 6


def test_a_frozen_parameter_that_a_fit_changes_is_refused() -> None:
    class Teacher(FrozenBody):
        def on_train_batch_end(self, *args: Any) -> None:
            self.body[0].weight.mul_(0.9)

    class Thaws(FrozenBody):
        def on_train_start(self) -> None:
            self.requires_grad_(True)

    for kind in (Teacher, Thaws):
        with pytest.raises(FlsuiteError, match="frozen at the start and changes in a fit"):
            fit(kind(), few())


CHOICES: dict[str, dict[str, Any]] = {
    "processes": {"engine": Processes(workers=2)},
    "quantized": {"compression": Quantize()},
    "secure aggregation": {"secure_sum": PairwiseMasks()},
    "SCAFFOLD": {"aggregator": SCAFFOLD()},
    "local buffers": {"batchnorm": "local"},
}


class PlainSGD(FrozenBody):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(kind: type[PlainSGD], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(kind(), points(clients=2), max_epochs=2, **kwargs)


@pytest.fixture(scope="module")
def alone() -> Any:
    torch.set_num_threads(1)
    return trained(PlainSGD)


@pytest.mark.parametrize("name", CHOICES)
def test_all_parts_agree_on_what_travels(name: str, alone: Any) -> None:
    made = trained(PlainSGD, **CHOICES[name])
    assert set(made.federation.state) == {"body.2.weight", "body.2.bias"}
    assert made.test()[0]["accuracy"] > 0.4
    if name in ("processes", "local buffers"):
        assert equal_states(made.federation.state, alone.federation.state)


def test_a_frozen_run_equals_one_with_the_frozen_layer_private(alone: Any) -> None:
    """A private entry that nobody trains has its initial value everywhere too."""

    class Kept(PlainSGD):
        private = ("body.0.",)
        training_only = ("body.0.",)

    assert equal_states(alone.federation.state, trained(Kept).federation.state)


def test_alone_every_client_keeps_what_it_trains() -> None:
    made = fit(FrozenBody(), few(), aggregator=LocalOnly())
    assert set(made.federation.clients.private(0)) == {"body.2.weight", "body.2.bias"}


@pytest.mark.long
def test_lora_sends_adapters_alone_and_resumes_in_workers(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'flsuite[peft]'")
    tuned, whole = Tuned(), Reader()
    made = fit(tuned, sentences(), run_dir=tmp_path / "lora", aggregator=FedAvg())
    fit(whole, sentences(), rounds=1, run_dir=tmp_path / "whole", aggregator=FedAvg())

    adapters = {
        name: value
        for name, value in tuned.state_dict().items()
        if "lora_" in name or "modules_to_save" in name
    }
    assert bytes_up(tmp_path / "lora") == {float(nbytes(adapters))}
    assert bytes_up(tmp_path / "whole") == {float(nbytes(whole.state_dict()))}
    assert nbytes(adapters) < nbytes(whole.state_dict()) / 5

    saved = torch.load(tmp_path / "lora" / "checkpoints" / "model.ckpt", weights_only=True)
    base = "net.base_model.model.encoder.linear1.base_layer.weight"
    assert torch.equal(saved["state_dict"][base], tuned.state_dict()[base])

    fit(Tuned(), sentences(), rounds=1, run_dir=tmp_path / "parts")
    workers = {"engine": Processes(workers=2), "run_dir": tmp_path / "parts"}
    resumed = fit(Tuned(), sentences(), ckpt_path="last", **workers)
    assert equal_states(made.federation.state, resumed.federation.state)
