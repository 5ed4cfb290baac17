"""The record of what decides a run: a resume refuses what differs, and reports group by it."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from flsuite.aggregators import (
    ClipUpdates,
    DPFedAvg,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
    LocalOnly,
    Proximal,
)
from flsuite.callbacks import GradientDissimilarity
from flsuite.common.arguments import arguments, create
from flsuite.common.errors import FlsuiteError
from flsuite.models import MLP, Backbone, Classifier
from flsuite.runs.settings import describe
from tests.conftest import classifier, digits, trainer


def fit(folder: Path, rounds: int = 1, data: Any = None, model: Any = None, **kwargs: Any) -> Any:
    made = trainer(rounds=rounds, run_dir=folder, **kwargs)
    made.fit(model or classifier(), data or digits(2), ckpt_path="last")
    return made


class Scales(Callback):
    """Scales every gradient."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(self.factor)


def test_a_preset_is_described_by_what_a_config_can_set() -> None:
    def described(aggregator: Any) -> set[str]:
        return set(describe(aggregator)["init_args"])

    assert "server_optimizer" not in described(FedAdam()) and "rule" in described(FedAdam())
    assert described(FedAdam()) == described(FedYogi()) == described(FedAdagrad()) | {"beta2"}
    assert "objective" not in described(FedProx()) and not described(LocalOnly())
    private = DPFedAvg(noise_multiplier=1.0, transforms=[ClipUpdates(2.0)])
    assert describe(private)["init_args"]["transforms"] == [describe(ClipUpdates(2.0))]
    assert len(private.transforms) == 2


def test_what_a_config_creates_is_described_by_all_arguments_and_no_property_is_read() -> None:
    class Versioned:
        def __init__(self, version: int | None = None, rate: float = 0.1) -> None:
            self.factor = rate / 2

        @property
        def version(self) -> int:
            raise AssertionError("some loggers make a new version when it is read")

    made = create(Versioned, version=3, rate=0.4)
    assert arguments(made) == {"version": 3, "rate": 0.4}
    assert vars(made)["factor"] == 0.2


class Layers(LightningModule):
    """A model with attributes that have the names of its arguments, and hold other things."""

    name = None

    def __init__(self, layers: int = 1, name: str = "a", sizes: Any = (), **more: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        self.register_buffer("scale", torch.ones(()))
        sizes and sizes.pop()

    @property
    def device(self) -> Any:  # type: ignore[override]
        return "cpu"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"layers": 1}, {"layers": 2}),
        ({"name": "a"}, {"name": "b"}),
        ({"sizes": [1, 2]}, {"sizes": [1, 3]}),
        ({"device": 1}, {"device": 2}),
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"extra": 1}, {"extra": 2}),
    ],
)
def test_an_attribute_of_an_arguments_name_may_hold_another_thing(a: Any, b: Any) -> None:
    one, other = (describe(create(Layers, **copy.deepcopy(given)))["init_args"] for given in (a, b))
    (name,) = a
    assert one != other and (one[name], other[name]) == (a[name], b[name])


def test_arguments_that_a_class_sets_for_its_base_are_not_its_own() -> None:
    class Small(Classifier):
        def __init__(self) -> None:
            super().__init__(MLP())

    assert describe(Small())["init_args"] == {}


class Wrapped(FedAvg):
    def __init__(self, mu: float = 0.1, **kwargs: Any) -> None:
        self._mu = SimpleNamespace(value=mu)
        super().__init__(**kwargs)


class Same(FedAvg):
    """Nothing new."""


def test_a_preset_of_the_user_is_described_by_what_a_config_gives() -> None:
    assert describe(create(Wrapped, mu=0.2))["init_args"]["mu"] == 0.2
    # What the base class stores in its own form is in this form, as for the base class.
    given = create(Same, rule=None, private=None)
    assert describe(given)["init_args"] == describe(FedAvg())["init_args"]
    assert describe(Same())["init_args"] == describe(given)["init_args"]


def test_layers_are_not_described_by_their_weights() -> None:
    assert describe(nn.Linear(3, 4))["init_args"] == {
        "in_features": 3,
        "out_features": 4,
        "bias": "Parameter(4,)",
    }


def test_a_resume_with_another_network_is_refused_where_its_class_does_not_say(
    tmp_path: Path,
) -> None:
    class Deep(Backbone):
        def __init__(self, depth: int) -> None:
            self.count = depth

        def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
            hidden = [nn.Linear(64, 64) for _ in range(self.count)]
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, outputs))

    fit(tmp_path, model=Classifier(Deep(1)))
    with pytest.raises(FlsuiteError, match=r"the model is not that of .*network"):
        fit(tmp_path, rounds=2, model=Classifier(Deep(2)))


def test_a_preset_that_does_not_store_its_arguments_is_described_by_its_parts() -> None:
    class Unstored(FedAvg):
        def __init__(self, strength: float, **kwargs: Any) -> None:
            super().__init__(objective=Proximal(strength), **kwargs)

    weak, strong = (describe(Unstored(strength))["init_args"] for strength in (0.1, 0.2))
    assert weak["objective"]["init_args"] == {"mu": 0.1}
    assert weak["private"] == [] and weak != strong


def test_other_callbacks_that_change_weights_are_refused_and_observers_may_come_and_go(
    tmp_path: Path,
) -> None:
    def averaging(rate: float) -> Callback:
        return StochasticWeightAveraging(swa_lrs=rate)

    fit(tmp_path, callbacks=[Scales(0.5), averaging(0.1), GradientDissimilarity()])
    others = ([], [Scales(0.9), averaging(0.1)], [Scales(0.5), averaging(0.2)])
    for callbacks in (*others, [Scales(0.5), averaging(0.1), Scales(0.5)]):
        with pytest.raises(FlsuiteError, match=r"do not fit .*: callbacks is "):
            fit(tmp_path, rounds=2, callbacks=callbacks)
    assert fit(tmp_path, rounds=2, callbacks=[Scales(0.5), averaging(0.1)]).round == 2


def test_other_ways_to_pick_a_round_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, monitor="accuracy", evaluate_every=1, score_clients=100)
    for name, before, after in (
        ("monitor", "accuracy", "loss"),
        ("evaluate_every", 1, 2),
        ("score_clients", 100, 2),
    ):
        with pytest.raises(FlsuiteError, match=rf"{name} is {after!r} here and {before!r} there"):
            fit(tmp_path, rounds=2, **{"monitor": "accuracy", name: after})


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ({"a": (np.int32(3), None)}, {"a": [3, None]}),
        ({2, 1}, [1, 2]),
    ],
)
def test_descriptions_are_plain_data(value: Any, plain: Any) -> None:
    assert describe(value) == plain
    assert yaml.safe_load(yaml.safe_dump(describe(value))) == plain


def test_a_batch_size_changed_after_the_set_up_trains_and_is_recorded(tmp_path: Path) -> None:
    data = digits(seed=3)  # the run's own seed, so that nothing else makes it split again
    data.setup()
    data.batch_size = 8
    made = fit(tmp_path / "changed", data=data)
    steps = {update.client: update.steps for update in made.federation.log.updates}
    fresh = digits(seed=3)
    fresh.batch_size = 8
    expected = fit(tmp_path / "fresh", data=fresh).federation.log.updates
    assert steps == {update.client: update.steps for update in expected}
    settings = yaml.safe_load((tmp_path / "changed" / "settings.yaml").read_text())
    assert settings["data"]["init_args"]["batch_size"] == 8


def test_weights_that_a_model_brings_along_are_a_setting(tmp_path: Path) -> None:
    model, seeds = classifier(), (1, 2)
    model.ensure_built(fit(tmp_path / "fresh").federation.data.spec)
    digests = []
    for seed in seeds:
        made = trainer(rounds=1, seed=seed, run_dir=tmp_path / str(seed))
        made.prepare(model, digits(2))
        digests.append(made.run.settings["initial_weights"])
    assert digests[0] == digests[1] is not None
    fresh = yaml.safe_load((tmp_path / "fresh" / "settings.yaml").read_text())
    assert fresh["initial_weights"] is None


def test_a_function_of_a_file_that_has_changed_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of that name on the path may hold other lines, which need not be Python."""
    (tmp_path / "typed.py").write_text("x = (\n  'never closed\n")
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {"__name__": "typed"}
    exec(compile("def double(x):\n    return 2 * x\n", "typed.py", "exec"), namespace)
    assert "typed.double" in str(describe(namespace["double"]))
