"""Start weights from a file: of a run, of another model, and files that hold none."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flsuite.common.errors import FlsuiteError
from flsuite.data import DataSpec
from flsuite.models import MLP, Classifier, LeNet5
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer

SPEC = DataSpec((1, 16, 16), 4)


def built(pretrained: object = None, spec: DataSpec = SPEC, bias: bool = True) -> Classifier:
    model = Classifier(LeNet5(bias), pretrained=None if pretrained is None else str(pretrained))
    model.ensure_built(spec)
    return model


def test_weights_start_as_those_of_a_runs_model(tmp_path: Path) -> None:
    made = trainer(rounds=1, run_dir=tmp_path)
    made.fit(classifier(), digits())
    file = tmp_path / "checkpoints" / "model.ckpt"
    before = torch.load(file, weights_only=True)["state_dict"]

    again = classifier(pretrained=str(file))
    again.ensure_built(digits_spec())
    assert equal_states(dict(again.state_dict()), before)
    assert all(value.requires_grad for value in again.parameters())
    other = trainer(rounds=1)
    other.fit(classifier(lr=0.0, pretrained=str(file)), digits())
    assert equal_states(other.federation.state, before), "a federation starts from them too"


def digits_spec() -> DataSpec:
    module = digits()
    module.setup()
    return module.spec


@pytest.mark.parametrize("part", ["model", "network", "checkpoint"])
def test_weights_start_as_those_of_a_file(part: str, tmp_path: Path) -> None:
    donor, file = built(), tmp_path / "weights.pt"
    own = donor.network.state_dict() if part == "network" else donor.state_dict()
    torch.save({"state_dict": own, "epoch": 3} if part == "checkpoint" else own, file)
    model = built(file)
    assert equal_states(dict(model.state_dict()), dict(donor.state_dict()))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert model.content_digests == {"pretrained": digest[:12]}
    assert built().content_digests == {}


def test_another_number_of_classes_leaves_the_last_layer_at_random(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    donor, file = built(), tmp_path / "weights.pt"
    torch.save(donor.state_dict(), file)
    more = DataSpec(SPEC.shape, 9)
    torch.manual_seed(1)
    fresh = built(spec=more)
    torch.manual_seed(1)
    model = built(file, more)

    last = {name for name in model.state_dict() if name.startswith("network.11.")}
    for name, value in model.state_dict().items():
        assert torch.equal(value, (fresh if name in last else donor).state_dict()[name])
    (record,) = [record for record in caplog.records if record.name == "flsuite"]
    assert "11.bias, 11.weight start at random" in record.getMessage()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(built(bias=False).state_dict(), file)
    with pytest.raises(FlsuiteError, match=r"weights\.pt are of another model"):
        built(file)
    torch.save(built().state_dict(), file)
    with pytest.raises(FlsuiteError, match=r"the model has no 0.bias, 3.bias, 7.bias and 2"):
        built(file, bias=False)
    with pytest.raises(FlsuiteError, match=r"of another shape are 7.weight \(120, 16\)"):
        built(file, DataSpec((1, 20, 20), 4))
    # A last layer of another width before it is another model, and not another number of classes.
    torch.save(Classifier(MLP(hidden=(3,))).state_dict() | {"1.weight": torch.zeros(5, 2)}, file)
    with pytest.raises(FlsuiteError, match="of another model"):
        built(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file .*weights.pt"),
        (b"not a checkpoint", "weights.pt cannot be read as pretrained"),
        ({}, "weights.pt has no weights; take checkpoints/model.ckpt"),
        ([torch.zeros(1)], "weights.pt has no weights"),
        ({"format": 3, "round": 1}, "weights.pt is not a state dict: format, round"),
    ],
)
def test_files_that_are_not_weights(content: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(FlsuiteError, match=message) as told:
        built(file)
    assert content is None or "or a state dict alone" in str(told.value)


def test_a_file_of_weights_runs_no_code(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"state_dict": Hostile()}, tmp_path / "weights.pt")
    with pytest.raises(FlsuiteError, match="cannot be read as pretrained weights"):
        built(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


def test_a_run_needs_the_file_only_to_start_and_its_model_never(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    donor = classifier()
    donor.ensure_built(digits_spec())
    torch.save(donor.state_dict(), file)

    def fitted(rounds: int, name: str, ckpt_path: str | None = None) -> FederatedTrainer:
        made = trainer(rounds=rounds, run_dir=tmp_path / name)
        made.fit(classifier(pretrained=str(file)), digits(), ckpt_path)
        return made

    whole, first = fitted(2, "whole"), fitted(1, "run")
    settings = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    file.unlink()
    loaded = Classifier.load_from_checkpoint(tmp_path / "run" / "checkpoints" / "model.ckpt")
    assert loaded.pretrained == str(file)
    assert equal_states(dict(loaded.state_dict()), first.federation.state)

    other = trainer(run_dir=tmp_path / "run")
    scores = other.test(classifier(pretrained=str(file)), digits(), ckpt_path="last")
    assert scores == first.test()
    assert equal_states(fitted(2, "run", "last").federation.state, whole.federation.state)
    resumed = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert resumed == settings | {"rounds": 2}, "with the digest of the file"
    other = trainer(run_dir=tmp_path / "run")
    with pytest.raises(FlsuiteError, match=r"pretrained is 'b.pt, content not read' here"):
        other.test(classifier(pretrained="b.pt"), digits(), ckpt_path="last")
    with pytest.raises(FlsuiteError, match=r"there is no file .*weights.pt"):
        fitted(1, "new", "last")
