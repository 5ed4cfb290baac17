"""Clients that train on a GPU.

The first tests need none: fake tensors have a device and a shape, but no values. Torch refuses to
mix their devices, as it does with real ones.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flsuite.aggregators import CMGA, Aggregator, FedAvg, FedFisher, FedNova, Mean, QFedAvg, Server
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.rules.base import LinearRule
from flsuite.aggregators.rules.pfnm import expanded_module
from flsuite.common.messages import Broadcast, ClientUpdate, FitRequest
from flsuite.common.state import Sums, Tree, moved
from flsuite.federation import Engine, InProcess, Processes, Vectorized
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.setup import StartStates
from flsuite.models import ACVAE, MLP, Classifier
from flsuite.runs.preparation import worker_setup
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.client.workers import runner
from tests.plain import Net
from tests.test_plain_models import points

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda:0")
# After fake tensors of a GPU, the first backward pass of a process starts a thread per GPU, and no
# fork of the process can train then, in other tests neither. So the first pass is here.
torch.ones((), requires_grad=True).backward()


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def devices(tree: Any) -> set[torch.device]:
    """Return the devices of all tensors in nested data."""
    if isinstance(tree, Tensor):
        return {tree.device}
    parts = tree.values() if isinstance(tree, Mapping) else ()
    return set().union(*map(devices, parts))


def test_sums_stay_where_their_first_tensors_are(fake: FakeTensorMode) -> None:
    sums = Sums()
    for device in (GPU, "cpu", GPU):
        number = torch.ones((), dtype=torch.int64, device=device)
        sums.add({"rule": {"w": torch.ones(3, device=device), "n": number}, "weight": 2.0}, 0.5)
    assert devices(sums.values) == {GPU} and sums.values["weight"] == 3.0
    assert devices(moved(sums.values, "cpu")) == {torch.device("cpu")}


def test_what_all_clients_start_from_is_moved_once(fake: FakeTensorMode) -> None:
    initial = {"w": torch.zeros(2), "own": torch.zeros(3), "mean": torch.zeros(4)}
    setup, entries = SimpleNamespace(initial=initial), SimpleNamespace(reset=["mean"])
    starts = StartStates(cast(Any, setup), cast(Any, entries))
    broadcast = Broadcast(1, {"w": torch.ones(2)}, {}, ())
    first, second = (
        starts.of(FitRequest(client, client, broadcast, {"model": own}), GPU)
        for client, own in enumerate(({}, {"own": torch.ones(3)}))
    )
    assert first["w"] is second["w"] and first["w"].device == first["own"].device == GPU
    assert second["own"].device.type == "cpu"  # it is copied into the model
    assert first["mean"] is initial["mean"]
    again = starts.of(FitRequest(0, 0, Broadcast(2, {"w": torch.ones(2)}, {}, ()), {}), GPU)
    assert again["w"] is not first["w"]


RULES: dict[str, tuple[Any, Aggregator]] = {
    "FedAvg": (Classifier(MLP((8,))), FedAvg()),
    "FedNova": (Classifier(MLP((8,))), FedNova()),
    "QFedAvg": (Classifier(MLP((8,))), QFedAvg()),
    "FedFisher diag": (Classifier(MLP((8,))), FedFisher(fisher="diag")),
    "FedFisher kfac": (Classifier(MLP((8,))), FedFisher(fisher="kfac")),
    "CMGA": (ACVAE(latent_dim=3, hidden=(8,)), CMGA()),
}


def can_index_fakes() -> bool:
    """Return whether torch can index a fake tensor of a GPU where there is none."""
    with FakeTensorMode():
        try:
            return torch.ones(1, device=GPU)[:, None].device == GPU
        except RuntimeError:
            return False


@pytest.mark.skipif(not can_index_fakes(), reason="torch 2.6 asks a driver to index a fake tensor")
@pytest.mark.parametrize("name", RULES)
def test_a_client_on_a_gpu_contributes_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, aggregator = RULES[name]
    made = trainer(rounds=1, aggregator=aggregator, enable_checkpointing=False)
    run = made.prepare(model, digits())
    setup, whole = worker_setup(made, run), run.federation.state
    uplink, layout, aggregator = setup.uplink, setup.uplink.layout, setup.uplink.aggregator
    statistics = aggregator.statistics(layout, whole).items()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {k: mode.from_tensor(v).to(GPU) for k, v in whole.items()}
        counts = torch.ones(10, dtype=torch.int64)
        extras = _empty({name: statistic.template for name, statistic in statistics})
        update = ClientUpdate(0, 1, 7, 2, counts, state, extras)
        jobs = JobRunner.__new__(JobRunner)
        jobs._setup = setup
        tree = jobs._contribution(update)
        assert devices(tree) == {GPU}
        sums = Sums()
        sums.add(tree)
        update.state, update.partial, update.part = {}, sums, 3
        server = Server(whole, layout, ServerTools())
        rule = cast(LinearRule, aggregator.rule)
        reduction = rule.begin(server, uplink.contribution)
        reduction.add(update)
        monkeypatch.setattr(type(rule), "result", lambda rule, server, sums, updates: whole)
        assert devices(reduction.finish()[1]) == {torch.device("cpu")}


def test_modules_of_the_server_are_on_the_device_that_scores() -> None:
    made = trainer(rounds=1, enable_checkpointing=False)
    run = made.prepare(Classifier(MLP((8,))), digits(server_samples=20))
    server, state = run.federation.server, run.federation.state
    run.evaluator.device = torch.device("meta")
    assert server.tools.module is not None
    module = server.tools.module(state)
    wider = expanded_module(module, server.layout.chain, state)
    for each in (module, wider):
        assert devices(each.state_dict()) == {torch.device("meta")}
    assert devices(run.evaluator.model.state_dict()) == {torch.device("cpu")}


def _empty(templates: Mapping[str, Any]) -> Tree:
    zeros = {k: _empty(v) for k, v in templates.items() if isinstance(v, Mapping)}
    for name, value in templates.items():
        if isinstance(value, Tensor):
            zeros[name] = torch.zeros(value.shape, dtype=value.dtype)
    return {**templates, **zeros}


class _OwnTensor(Mean):
    """Has a tensor of its own."""

    def terms(self, update: ClientUpdate, layout: Any) -> Tree:
        return {"w": update.state["w"] + torch.ones(3)}


class _NumPy(Mean):
    """Reads the model as NumPy does, which refuses tensors on a GPU with a TypeError."""

    def terms(self, update: ClientUpdate, layout: Any) -> Tree:
        if update.state["w"].device != torch.device("cpu"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return {"w": update.state["w"]}


@pytest.mark.parametrize("rule", [_OwnTensor, _NumPy])
def test_a_rule_that_needs_the_cpu_sums_there(rule: type[Mean]) -> None:
    setup = runner(Classifier(MLP((8,))), FedAvg(), lean=True).setup
    setup.uplink.aggregator.rule = rule()
    jobs = JobRunner.__new__(JobRunner)
    jobs._setup = setup
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts = torch.ones(10, dtype=torch.int64)
        update = ClientUpdate(0, 1, 7, 2, counts, {"w": torch.zeros(3, device=GPU)}, {})
        assert devices(jobs._contribution(update)) == {torch.device("cpu")}


# With a GPU


def fitted(engine: Engine, **kwargs: Any) -> Any:
    """Return a trainer after two rounds of 45 clients, which are summed in parts of two."""
    made = trainer(
        rounds=2, engine=engine, accelerator="gpu", precision="32-true", deterministic=True,
        max_epochs=2, **kwargs,
    )  # fmt: skip
    made.fit(classifier(), digits(clients=45, train_samples=None), ckpt_path=None)
    return made


@needs_gpu
def test_workers_and_this_process_end_with_the_same_weights() -> None:
    here, there = fitted(InProcess()), fitted(Processes(2))
    assert equal_states(here.federation.state, there.federation.state)
    assert devices(here.federation.state) == {torch.device("cpu")}


@needs_gpu
def test_a_stack_trains_as_its_clients_alone() -> None:
    here, stacked = fitted(InProcess()), fitted(Vectorized(clients=45))
    for name, value in here.federation.state.items():
        torch.testing.assert_close(stacked.federation.state[name], value, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_the_model_and_its_checkpoint_end_on_the_cpu(tmp_path: Path) -> None:
    made = fitted(InProcess(), run_dir=str(tmp_path))
    assert devices(dict(made.lightning_module.state_dict())) == {torch.device("cpu")}
    content = torch.load(tmp_path / "checkpoints" / "model.ckpt", weights_only=True)
    assert devices(content["state_dict"]) == {torch.device("cpu")}
    made.test(verbose=False)
    assert devices(dict(made.lightning_module.state_dict())) == {torch.device("cpu")}


@needs_gpu
def test_metrics_of_a_plain_model_follow_it() -> None:
    """Lightning moves the metrics that a step has logged to the CPU, after each fit and score."""
    made = trainer(rounds=2, accelerator="gpu")
    made.fit(Net(), points())
    assert 0 <= made.callback_metrics["test/accuracy"] <= 1
