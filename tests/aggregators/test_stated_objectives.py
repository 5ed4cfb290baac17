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
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble, close, fitted


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


def after(change: Any, returned: Any) -> Any:
    return returned


def wrong(base: type[Objective] = Objective, **functions: Any) -> Objective:
    """Return an objective that has only these functions, and a mistake in one of them."""
    return type("Wrong", (base,), functions)()


def gives(returned: Callable[[Any, Any], Any]) -> Objective:
    """Return an objective whose ``gradient`` returns this."""
    return wrong(gradient=lambda _, oracle, w, held, batch: returned(oracle(w, batch), held))


BIAS = "network.3.bias"
MISTAKES: dict[str, Objective] = {
    r"term returned Tensor of shape \(\d+,\); return the mean over the samples": wrong(
        FeatureTerm, term=lambda _, z, *more: 0.0 * z.square().mean(1)
    ),
    r"Wrong\.term returned None; return the mean over the samples": wrong(
        FeatureTerm, term=lambda _, z, *more: None
    ),
    r"compared returned Tensor of shape \(16, 8\); return a list of tensors": wrong(
        FeatureTerm, compared=lambda _, features_of, held: features_of({})
    ),
    r"Classifier has no body\.weight; give them the names of w": wrong(
        FeatureTerm, compared=lambda _, of, held: [of({"body.weight": torch.zeros(1)})]
    ),
    r"logits returned Tensor of shape \(\d+, 1\); return logits of the outputs' shape": wrong(
        FeatureTerm, logits=lambda _, outputs, batch, held: outputs[:, :1]
    ),
    r"Wrong\.read is not called: return what the term reads from start": wrong(
        FeatureTerm, read=lambda _, client, module: {}
    ),
    "Wrong has none of the functions start, gradient": wrong(
        grad=lambda _, oracle, w, held, batch: (oracle(w, batch), held)
    ),
    "Wrong.callbacks is not called: state what a client does": wrong(
        callbacks=lambda _, client: []
    ),
    "start returned int; return tensors in dictionaries": wrong(
        FeatureTerm, start=lambda _, client, w: (w, {"samples": client.samples})
    ),
    "start returned dict; return the weights, and what the steps hold": wrong(
        Steps, start=lambda _, client, w: w
    ),
    "start returned dict; return all entries of w, network.1.weight too": wrong(
        Steps, start=lambda _, client, w: (dict([*w.items()][:2]), {})
    ),
    r"Wrong\.start .* all entries of w, ": wrong(start=lambda _, *more: ({}, {})),
    r"Wrong\.start returned network.* torch\.float16; return network.* torch\.float32": wrong(
        start=lambda _, client, w: ({name: value.half() for name, value in w.items()}, {})
    ),
    r"Classifier has no offset; give them the names of w": wrong(
        gradient=lambda _, oracle, w, *more: oracle({**w, "offset": w[BIAS]}, more[1])
    ),
    r"returned the entry module.network.0.weight; return entries of w alone": gives(
        lambda g, held: ({f"module.{name}": value for name, value in g.items()}, held)
    ),
    r"Wrong\.gradient returned the entry x; return entries of w alone": gives(
        lambda g, held: ({**g, "x": torch.zeros(1)}, held)
    ),
    r"Wrong\.gradient returned None; return ": gives(lambda g, held: (dict.fromkeys(g), held)),
    "gradient returned dict; return a gradient, and what the steps hold": gives(lambda g, held: g),
    "gradient returned None; return a gradient, and what the steps hold": gives(
        lambda g, held: None
    ),
    "gradient returned int; return tensors in dictionaries": gives(
        lambda g, held: (g, {"steps": 1})
    ),
    r"Wrong\.gradient returned other entries of held; return those of start": gives(
        lambda g, held: (g, {"m": torch.zeros(1)})
    ),
    r"Wrong\.gradient draws from random or numpy": gives(
        lambda g, held: ({name: random.random() * value for name, value in g.items()}, held)
    ),
    "gradient cannot read the batch, which only stands for its samples": wrong(
        gradient=lambda _, oracle, w, held, batch: (batch[0] * oracle(w, batch), held)
    ),
    "gradient cannot read the batch": wrong(
        gradient=lambda _, oracle, w, held, batch: (len(batch) * oracle(w, batch), held)
    ),
    r"Wrong\.trains returned None; return some of": wrong(trains=lambda _, epoch, names: None),
    r"Wrong\.trains returned no name in epoch 0; return one": wrong(
        trains=lambda _, epoch, names: []
    ),
    r"Wrong\.trains returned list; return some of": wrong(trains=lambda _, epoch, names: ["x"]),
    "Wrong.*returned None; return a dictionary": wrong(own_entries=lambda _, state, *more: None),
    "Wrong.*returned the entry x; return entries of w alone": wrong(
        own_entries=lambda _, state, *more: {"x": torch.zeros(1)}
    ),
    r"Wrong.*of shape \(1,\) .*; return network": wrong(
        own_entries=lambda _, state, *more: {BIAS: torch.zeros(1)}
    ),
    "Wrong.*changes in place": wrong(
        own_entries=lambda _, state, *more: {BIAS: state[BIAS].mul_(2)}
    ),
    "Wrong changes in place .*, and measure in evaluation mode": wrong(
        measure=lambda _, client, m, data: m.training_step(next(data.plain_batches()), 0)
    ),
    "gradient hands a tuple to the oracle as a batch; .* such as batch": wrong(
        batches_per_step=2, gradient=lambda _, oracle, w, held, batch: oracle(w, batch)
    ),
    "Wrong: batches_per_step must be a whole number": wrong(Normed, batches_per_step="two"),
    "Wrong.gradient returned w to hold it; return a clone": wrong(
        start=lambda _, client, w: (w, {"before": w[BIAS]}),
        gradient=lambda _, oracle, w, held, b: (oracle(w, b), {"before": w[BIAS].view(-1)}),
    ),
}
IN_PLACE = [
    wrong(
        gradient=lambda _, oracle, w, held, b: after(
            oracle(w, b)[BIAS].mul_(2.0), (oracle(w, b), held)
        )
    ),
    wrong(end=lambda _, client, w, held: after(w[BIAS].mul_(0.5), None)),
    wrong(
        FeatureTerm,
        start=lambda _, client, w: (w, {"bias": client.global_state[BIAS]}),
        compared=lambda _, features_of, held: after(held["bias"].add_(0.5), []),
    ),
    wrong(
        FeatureTerm,
        start=lambda _, client, w: (w, {"mean": torch.zeros(())}),
        term=lambda _, z, others, batch, held: (
            z.mean() - held["mean"].mul_(0.9).add_(z.detach().mean(), alpha=0.1)
        ).square(),
    ),
    wrong(
        FeatureTerm,
        start=lambda _, client, w: (w, {"mean": torch.zeros(())}),
        term=lambda _, z, others, batch, held: after(
            held.update(mean=held["mean"] + 1), z.square().mean() * held["mean"]
        ),
    ),
    wrong(start=lambda _, client, w: after(client.global_state[BIAS].mul_(1.01), (w, {}))),
    wrong(
        start=lambda _, client, w: (w, client.global_state),
        gradient=lambda _, oracle, w, held, batch: after(
            held[BIAS].mul_(0.9), (oracle(w, batch), held)
        ),
    ),
    wrong(
        gradient=lambda _, oracle, w, held, batch: after(
            w[BIAS].mul_(0.9), (oracle(w, batch), held)
        )
    ),
    wrong(
        broadcast=lambda _, server: {"rate": torch.ones(()), "name": "of all"},
        start=lambda _, client, w: after(client.received["rate"].mul_(0.9), (w, {})),
    ),
    wrong(end=lambda _, client, *more: after(client.global_state[BIAS].mul_(1.01), None)),
]


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    ("words", "objective"),
    [*MISTAKES.items(), *(("Wrong changes in place what it is given", one) for one in IN_PLACE)],
)
def test_a_mistake_is_named(words: str, objective: Objective, engine: Any) -> None:
    with pytest.raises(FlsuiteError, match=words):
        run(FedAvg(objective=objective), 1, engine=engine)


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


def test_a_stack_says_that_a_gradient_reads_a_number(caplog: pytest.LogCaptureFixture) -> None:
    def reads(_: Any, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        g = oracle(w, batch)
        return {name: value * float(value.norm() < 9) for name, value in g.items()}, held

    one, other = (
        run(FedAvg(objective=wrong(gradient=reads)), 1, engine=engine)
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
