"""What an objective stated in functions of tensors may return, read and change, on two engines."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import Aggregator, FeatureTerm, FedAvg, Mean, Objective
from flsuite.aggregators.objectives.base import second_start
from flsuite.common.client import ClientContext
from flsuite.data import Dirichlet
from flsuite.federation import InProcess, Vectorized
from flsuite.models import Classifier
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_same_models,
    assert_same_tree,
    federation,
    run,
    table_model,
)
from tests.conftest import long
from tests.federation.engines import test_vectorized
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble, close, fitted

stacks = test_vectorized.stacks  # a fixture


class Steps(Objective):
    """A second model that pulls the first one."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"v": second_start(client, w, None)}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        _, own, buffers = oracle.evaluate(held["v"], batch)
        v = oracle.step("v", held["v"], own) | buffers
        g = oracle(w, batch)
        return {k: g[k] + 0.1 * (w[k] - v[k]) for k in g}, {"v": v}

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        client.memory["v"] = held["v"]


class MeansStayNear(FeatureTerm):
    """Mixes the samples of a batch, and is zero at the start of a fit."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"received": client.global_state}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held["received"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).mean(0).square().sum()


class OfSomeClients(FeatureTerm):
    """Mixes the samples of a batch, but not those of the first client."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"weight": torch.tensor(float(client.id > 0), dtype=torch.float64)}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return held["weight"] * features.mean(0).square().sum()


class FromStart(FeatureTerm):
    """Reads tensors of the model, which its steps change."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"start": w}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held["start"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).square().mean()


class ToStart(Steps):
    """The same with a second model, at the rate of the model."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"v": dict(w), "start": w}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        v, start = held["v"], held["start"]
        own = oracle(v, batch)
        v = oracle.step("v", v, {k: own[k] + oracle.rate * (v[k] - start[k]) for k in own})
        return oracle(w, batch), {"v": v, "start": start}


class Leaves(Objective):
    """Starts at other weights, and is pulled back to those that it has left."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return {name: 0.5 * value for name, value in w.items()}, {"left": w}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return {k: g + w[k] - held["left"][k] for k, g in oracle(w, batch).items()}, held


class Normed(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return {k: g / (1.0 + g.norm()) for k, g in oracle(w, batch).items()}, held


class Pulling(Mean):
    """A rule that changes the gradient of the objective."""

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return {k: g + 0.1 * w[k] for k, g in oracle(w, batch).items()}, held


ALIKE = (
    *(FedAvg(objective=one()) for one in (MeansStayNear, OfSomeClients, FromStart, Leaves)),
    *(FedAvg(objective=one()) for one in (Steps, ToStart)),
    Aggregator(objective=Normed(), rule=Pulling()),
)


@pytest.mark.parametrize(
    "method", [*ALIKE[:4], *long(*ALIKE[4:])], ids=lambda one: type(one.objective).__name__
)
def test_clients_of_a_stack_train_as_alone(method: Aggregator, stacks: list[int]) -> None:
    data = Images(clients=6, partition=Dirichlet(1.0), batch_size=8, val_fraction=0.0)
    model = Classifier(InDouble(), partial(SGD, lr=0.01))
    close(stacks, 1e-12, method, model, data)


def test_a_rule_changes_the_gradient_of_the_objective() -> None:
    """The first step of one client goes down the objective's gradient, and then the rule's."""

    class Fixed(Objective):
        def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
            return {k: torch.ones_like(g) for k, g in oracle(w, batch).items()}, held

    made = federation(Aggregator(objective=Fixed(), rule=Pulling()), 1, max_epochs=2)
    made.fit(Quadratic(partial(SGD, lr=0.5)), Quadratics((1.0,), (0.0,)))
    assert float(made.federation.state["w"]) == pytest.approx(-0.5 - 0.5 * (1.0 - 0.05))


class StepsOfTheRule(Mean):
    """A second model with the name of the one of the objective."""

    second = "v"

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"v": second_start(client, w, None)}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        v = oracle.step(self.second, held["v"], oracle(held["v"], batch))
        return {k: g + 0.1 * (w[k] - v[k]) for k, g in oracle(w, batch).items()}, {"v": v}


class OtherName(StepsOfTheRule):
    second = "u"


def test_second_models_of_two_parts_have_their_own_optimizers() -> None:
    one, other = (
        run(Aggregator(objective=Steps(), rule=rule()), 1, model=table_model(momentum=0.9))
        for rule in (StepsOfTheRule, OtherName)
    )
    assert_same_models(one, other)


class OfAll(Objective):
    """Returns a gradient of all parameters to each of two optimizers."""

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        g = oracle(w, batch)
        return {k: g.get(k, torch.zeros_like(value)) for k, value in w.items()}, held

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        client.metrics["counted"] = client.fit.steps("network.3.bias")


class TwoOptimizers(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [SGD([first], lr=0.1), SGD(others, lr=0.1)]


def test_a_parameter_steps_with_its_own_optimizer_alone() -> None:
    made = run(FedAvg(objective=OfAll()), 1, model=table_model(TwoOptimizers))
    for update in made.federation.log.updates:
        assert update.metrics["counted"] == update.steps > 0


class Momentum(Objective):
    """Holds the gradient that it returns, and gives it to a second model, too."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies

    def start(self, client: ClientContext, w: Any) -> Any:
        w_0 = {name: w[name] for name in client.layout.parameters}
        return w, {"m": w_0, "v": {name: w[name] for name in client.layout.parameters}}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        m = {k: g + 0.5 * held["m"][k] for k, g in oracle(w, batch).items()}
        sent, v = ({k: g.clone() for k, g in m.items()} if self.copies else m for _ in range(2))
        return sent, {"m": {**held["m"], **m}, "v": oracle.step("v", held["v"], v)}

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        client.memory["v"] = {name: value.clone() for name, value in held["v"].items()}


@pytest.mark.parametrize("way", ["norm", "value", "optimizer"])
@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
def test_changes_in_place_leave_what_the_algorithm_holds(engine: Any, way: str) -> None:
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": way}
    nesterov = {"momentum": 0.9, "nesterov": True, "foreach": True}  # as on a GPU
    settings, own = ({}, nesterov) if way == "optimizer" else (clip, {})
    one, other = (
        run(
            FedAvg(objective=Momentum(held)), 1, engine=engine, model=table_model(**own), **settings
        )
        for held in (True, False)
    )
    assert_same_models(one, other)
    for client in range(4):
        assert_same_tree(one.federation.clients[client], other.federation.clients[client])


class Keeps(Objective):
    """Keeps a tensor of the model, or a copy, where a fit starts, ends and is measured."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies

    def keep(self, client: ClientContext, name: str, value: Tensor) -> None:
        client.memory[name] = [value.detach().clone() if self.copies else value.detach()]

    def start(self, client: ClientContext, w: Any) -> Any:
        self.keep(client, "start", w["network.3.bias"])
        return w, {}

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        self.keep(client, "end", w["network.3.bias"][1:])

    def measure(self, client: ClientContext, module: Any, loader: Any) -> None:
        self.keep(client, "measured", module.network[3].bias)


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
def test_what_a_client_keeps_stays_as_it_was(engine: Any) -> None:
    one, other = (run(FedAvg(objective=Keeps(copies)), engine=engine) for copies in (True, False))
    for client in range(4):
        assert_same_tree(one.federation.clients[client], other.federation.clients[client])


def test_what_a_client_keeps_of_a_stack_is_its_own(stacks: list[int]) -> None:
    made = fitted(Vectorized(clients=4), FedAvg(objective=ToStart()))
    kept = [made.federation.clients[client]["objective"]["v"] for client in range(4)]
    assert stacks
    for value in (value for v in kept for value in v.values()):
        assert value.untyped_storage().nbytes() == value.nbytes


class OfEachSample(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 0.0 * features.square().mean(1)


class OneFeature(FeatureTerm):
    def compared(self, features_of: Any, held: Any) -> Any:
        return features_of({})


class OtherWeights(FeatureTerm):
    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of({"body.weight": torch.zeros(1)})]


class OtherNamesAtTheOracle(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle({**w, "offset": w["network.0.bias"]}, batch), held


class InCompared(FeatureTerm):
    """Changes the global model in place."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"bias": client.global_state["network.3.bias"]}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        held["bias"].add_(0.5)
        return []


class ReadsNumbers(FeatureTerm):
    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"samples": client.samples}


class OnlyWeights(Steps):
    def start(self, client: ClientContext, w: Any) -> Any:
        return w


class SomeWeights(Steps):
    def start(self, client: ClientContext, w: Any) -> Any:
        return dict([*w.items()][:2]), {}


class OtherNames(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return {f"module.{name}": value for name, value in oracle(w, batch).items()}, held


class OnlyGradient(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle(w, batch)


class NoGradient(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        oracle(w, batch)


class Counts(Objective):
    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle(w, batch), {"steps": 1}


class Decays(Objective):
    """Changes the model in place."""

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        w["network.3.bias"].mul_(0.9)
        return oracle(w, batch), held


class HoldsWeights(Objective):
    """Holds the weights that the step changes."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"before": w["network.3.bias"]}

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle(w, batch), {"before": w["network.3.bias"].view(-1)}


class DoublesInPlace(Objective):
    """Changes the gradient of the fit, which the oracle returns again."""

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        oracle(w, batch)["network.3.bias"].mul_(2.0)
        return oracle(w, batch), held


class Averages(FeatureTerm):
    """Changes in place what it holds."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"mean": torch.zeros(())}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        held["mean"].mul_(0.9).add_(features.detach().mean(), alpha=0.1)
        return (features.mean() - held["mean"]).square()


class Shrinks(Objective):
    """Changes the global model in place."""

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, client.global_state

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        held["network.3.bias"].mul_(0.9)
        return oracle(w, batch), held


class ReplacesInTerm(Averages):
    """Puts another tensor in the place of what it holds."""

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        held["mean"] = held["mean"] + 1
        return features.square().mean() * held["mean"]


class ChangesGlobal(FeatureTerm):
    def start(self, client: ClientContext, w: Any) -> Any:
        client.global_state["network.3.bias"].mul_(1.01)
        return w, {}


class ChangesReceived(Objective):
    """Changes in place what the server sends to all clients."""

    def broadcast(self, server: Any) -> Any:
        return {"rate": torch.ones(()), "name": "of all"}

    def start(self, client: ClientContext, w: Any) -> Any:
        client.received["rate"].mul_(0.9)
        return w, {}


class ChangesAtTheEnd(Objective):
    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        client.global_state["network.3.bias"].mul_(1.01)


class ShrinksAtTheEnd(Objective):
    """Changes what the client sends."""

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        w["network.3.bias"].mul_(0.5)


class TwoAsOne(OnlyGradient):
    batches_per_step = 2


class NoNumberOfBatches(Normed):
    batches_per_step: Any = "two"


class MeasuresInTraining(Objective):
    """Changes the statistics of BatchNorm."""

    def measure(self, client: ClientContext, module: Any, loader: Any) -> None:
        module.training_step(next(loader.plain_batches()), 0)


class FewLogits(FeatureTerm):
    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Any:
        return outputs[:, :1]


class HasCallbacks(Objective):
    def callbacks(self, client: ClientContext) -> Any:
        return []


WRONG = {
    OfEachSample: r"term returned Tensor of shape \(\d+,\); return the mean over the samples",
    OneFeature: r"compared returned Tensor of shape \(16, 8\); return a list of tensors",
    OtherWeights: r"Classifier has no body\.weight; give them the names of w",
    OtherNamesAtTheOracle: r"Classifier has no offset; give them the names of w",
    ReadsNumbers: "start returned int; return tensors in dictionaries",
    InCompared: "InCompared changes in place what it is given",
    OnlyWeights: "start returned dict; return the weights, and what the steps hold",
    SomeWeights: "start returned dict; return all entries of w, network.1.weight too",
    OtherNames: r"returned the entry module.network.0.weight; return entries of w alone",
    OnlyGradient: "gradient returned dict; return a gradient, and what the steps hold",
    NoGradient: "gradient returned None; return a gradient, and what the steps hold",
    Counts: "gradient returned int; return tensors in dictionaries",
    Decays: "Decays changes in place what it is given",
    HoldsWeights: "HoldsWeights.gradient returned w to hold it; return a clone",
    DoublesInPlace: "DoublesInPlace changes in place what it is given",
    Averages: "Averages changes in place what it is given",
    ReplacesInTerm: "ReplacesInTerm changes in place what it is given",
    ChangesGlobal: "ChangesGlobal changes in place what it is given",
    ChangesReceived: "ChangesReceived changes in place what it is given",
    ChangesAtTheEnd: "ChangesAtTheEnd changes in place what it is given",
    ShrinksAtTheEnd: "ShrinksAtTheEnd changes in place what it is given",
    TwoAsOne: r"gradient hands a tuple to the oracle as a batch; .* such as batch",
    NoNumberOfBatches: "NoNumberOfBatches: batches_per_step must be a whole number",
    MeasuresInTraining: "MeasuresInTraining changes in place .*, and measure in evaluation mode",
    FewLogits: r"logits returned Tensor of shape \(\d+, 1\); return logits of the outputs' shape",
    HasCallbacks: "HasCallbacks.callbacks is not called: state what a client does",
    Shrinks: "Shrinks changes in place what it is given",
}


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    ("kind", "match"), WRONG.items(), ids=lambda one: getattr(one, "__name__", "")
)
def test_wrong_returns_are_named(kind: Callable[[], Objective], match: str, engine: Any) -> None:
    with pytest.raises(FlsuiteError, match=match):
        run(FedAvg(objective=kind()), 1, engine=engine)


def test_a_head_that_the_model_lacks_is_refused_before_the_first_round() -> None:
    with pytest.raises(FlsuiteError, match=r"^trainer.aggregator.objective.head: .* 'nope'; it"):
        run(FedAvg(objective=MeansStayNear("nope.")), 1)


class MeasuresSome(FeatureTerm):
    def measure(self, client: ClientContext, module: Any, loader: Any) -> None:
        if client.id in (1, 2):
            client.metrics["measured"] = 1.0


def test_a_stack_measures_the_clients_that_are_to_be_measured(stacks: list[int]) -> None:
    made = run(FedAvg(objective=MeasuresSome()), 1, engine=Vectorized())
    updates = made.federation.log.updates
    assert stacks and [one.client for one in updates if "measured" in one.metrics] == [1, 2]


class OwnEntries(Objective):
    """Returns something as the entries of a client's own model."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own

    def own_entries(self, state: Any, received: Any, memory: Any) -> Any:
        return self.own(state)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (lambda state: None, "returned None; return a dictionary"),
        (lambda state: {"x": torch.zeros(1)}, "returned the entry x; return entries of w alone"),
        (lambda state: {"network.0.bias": torch.zeros(1)}, r"of shape \(1,\) .*; return network"),
        (lambda state: {"network.0.bias": state["network.0.bias"].mul_(2)}, "changes in place"),
    ],
    ids=["none", "other name", "other shape", "in place"],
)
def test_wrong_entries_of_an_own_model_are_named(own: Any, words: str) -> None:
    with pytest.raises(FlsuiteError, match=f"OwnEntries.*{words}"):
        run(FedAvg(objective=OwnEntries(own)), 1)


class Sends(Objective):
    """Sends the same to all clients."""

    def __init__(self, sent: Any) -> None:
        self.sent = sent

    def broadcast(self, server: Any) -> Any:
        return self.sent

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        client.metrics["rate"] = client.received["rate"]


class RuleSends(Mean):
    def broadcast(self, server: Any) -> Any:
        return {"rate": 2.0}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (None, "Sends.broadcast returned None; return a dictionary"),
        ({"rate": 1.0}, "RuleSends and Sends both return rate from broadcast; rename one of them"),
    ],
    ids=["none", "same name"],
)
def test_a_broadcast_is_a_dictionary_of_one_part(sent: Any, words: str) -> None:
    with pytest.raises(FlsuiteError, match=words):
        run(Aggregator(objective=Sends(sent), rule=RuleSends()), 1)


class Wrong(Objective):
    """Makes one mistake in one of its functions."""

    def __init__(self, method: str, mistake: Any) -> None:
        self.method, self.mistake = method, mistake

    def start(self, client: Any, w: Any) -> Any:
        return self.mistake(client, w) if self.method == "start" else (w, {})

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        if self.method == "gradient":
            return self.mistake(oracle, w, held, batch)
        return oracle(w, batch), held

    def trains(self, epoch: Any, names: Any) -> Any:
        return self.mistake(names) if self.method == "trains" else names


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "dtype": (
        "start",
        lambda client, w: ({name: value.half() for name, value in w.items()}, {}),
        r"Wrong\.start returned network.* torch\.float16; return network.* torch\.float32",
    ),
    "no entry": ("start", lambda client, w: ({}, {}), r"Wrong\.start .* all entries of w, "),
    "none": (
        "gradient",
        lambda oracle, w, held, batch: (dict.fromkeys(w), held),
        r"Wrong\.gradient returned None; return ",
    ),
    "other entry": (
        "gradient",
        lambda oracle, w, held, batch: ({**oracle(w, batch), "x": torch.zeros(1)}, held),
        r"Wrong\.gradient returned the entry x; return entries of w alone",
    ),
    "held": (
        "gradient",
        lambda oracle, w, held, batch: (oracle(w, batch), {"m": torch.zeros(1)}),
        r"Wrong\.gradient returned other entries of held; return those of start",
    ),
    "draws": (
        "gradient",
        lambda oracle, w, held, batch: (
            {name: random.random() * value for name, value in oracle(w, batch).items()},
            held,
        ),
        r"Wrong\.gradient draws from random or numpy",
    ),
    "reads the batch": (
        "gradient",
        lambda oracle, w, held, batch: (batch[0] * oracle(w, batch), held),
        "gradient cannot read the batch",
    ),
    "measures the batch": (
        "gradient",
        lambda oracle, w, held, batch: (len(batch) * oracle(w, batch), held),
        "gradient cannot read the batch",
    ),
    "nothing": ("trains", lambda names: None, r"Wrong\.trains returned None; return some of"),
    "no name": (
        "trains",
        lambda names: [],
        r"Wrong\.trains returned no name in epoch 0; return one",
    ),
    "unknown": ("trains", lambda names: ["x"], r"Wrong\.trains returned list; return some of"),
}


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
@pytest.mark.parametrize(("method", "mistake", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_function(
    method: str, mistake: Any, words: str, engine: Any
) -> None:
    with pytest.raises(FlsuiteError, match=words):
        run(FedAvg(objective=Wrong(method, mistake)), 1, engine=engine)


def test_a_stack_says_that_a_gradient_reads_a_number(caplog: pytest.LogCaptureFixture) -> None:
    def reads(oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        g = oracle(w, batch)
        return {name: value * float(value.norm() < 9) for name, value in g.items()}, held

    one, other = (
        run(FedAvg(objective=Wrong("gradient", reads)), 1, engine=engine)
        for engine in (InProcess(), Vectorized())
    )
    assert_same_models(one, other)
    assert "gradient of Wrong reads a number" in caplog.text


class RestsBesideAnother(Objective):
    """Trains a part of the model in each epoch, and all of a second model."""

    def start(self, client: Any, w: Any) -> Any:
        return w, {"v": {name: w[name] for name in client.layout.parameters}}

    def trains(self, epoch: Any, names: Any) -> Any:
        return [name for name in names if name.endswith("bias") == (epoch == 0)]

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        g = oracle(held["v"], batch)
        assert g.keys() == held["v"].keys()
        return oracle(w, batch), {"v": oracle.step("v", held["v"], g)}

    def end(self, client: Any, w: Any, held: Any) -> None:
        client.memory["v"] = {name: value.clone() for name, value in held["v"].items()}
        w_0 = client.global_state
        client.metrics["moved"] = float(
            sum(not torch.equal(w_0[k], v) for k, v in held["v"].items())
        )


def test_a_second_model_trains_where_the_first_one_rests() -> None:
    one, other = (
        run(FedAvg(objective=RestsBesideAnother()), 1, engine=engine, max_epochs=2)
        for engine in (InProcess(), Vectorized())
    )
    for client in range(2):
        ours, theirs = (m.federation.clients[client]["objective"]["v"] for m in (one, other))
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value)
    for made in (one, other):
        # A bias in front of BatchNorm has no gradient.
        assert min(u.metrics["moved"] for u in made.federation.log.updates) >= len(ours) - 1


class NoFunction(Objective):
    """Misspells the one function that it has."""

    def grad(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle(w, batch), held


class ReadsOfOld(FeatureTerm):
    """Was written for 0.2."""

    def read(self, client: Any, module: Any) -> Any:
        return {}


class NoTerm(FeatureTerm):
    """Forgets to return its term."""

    def term(self, features: Any, others: Any, batch: Any, held: Any) -> Any:
        features.square().mean()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NoFunction, "NoFunction has none of the functions start, gradient"),
        (ReadsOfOld, r"ReadsOfOld\.read is not called: return what the term reads from start"),
        (NoTerm, r"NoTerm\.term returned None; return the mean over the samples"),
    ],
)
def test_an_objective_does_not_do_nothing_without_a_word(kind: Any, words: str) -> None:
    with pytest.raises(FlsuiteError, match=words):
        run(FedAvg(objective=kind()), 1)
