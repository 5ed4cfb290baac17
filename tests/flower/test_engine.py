"""Answers that lose a client for the round, and answers that end the run."""

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import ConfigRecord, Context, Message, RecordDict

from flsuite.aggregators import SCAFFOLD, Centralized, LabelFlip
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.flower.app import make_client_app
from flsuite.flower.client import Site
from flsuite.flower.nodes import own_client
from flsuite.flower.records import pack, read_update, to_arrays, to_state, unpack, write_update
from flsuite.flower.server import _NodeEvaluator, serve
from tests.conftest import classifier, digits, trainer
from tests.flower.grid import Nodes, check_round_without_client_1, convolution, node_app, unscaled


def test_the_server_scores_as_the_run_does() -> None:
    run = trainer(rounds=1, seed=5, attack=LabelFlip([0]), gradient_clip_val=1.0).prepare(
        convolution(), digits()
    )
    made = _NodeEvaluator(run.evaluator)
    assert made.seed == 5 and made.attack is run.evaluator.attack is not None
    assert made.trainer_kwargs == run.evaluator.trainer_kwargs


def not_a_number(answer: Message) -> None:
    arrays = to_state(answer.content.array_records["arrays"])
    next(iter(arrays.values())).fill_(float("nan"))
    answer.content["arrays"] = to_arrays(arrays)


def another_shape(answer: Message) -> None:
    arrays = to_state(answer.content.array_records["arrays"])
    answer.content["arrays"] = to_arrays(
        {name: value.reshape(-1) for name, value in arrays.items()}
    )


def another_client(answer: Message) -> None:
    update = read_update(answer.content)
    update.client = 0
    answer.content = write_update(update)


def claims(**values: Any) -> Any:
    """Return what lets an answer claim other numbers."""

    def spoil(answer: Message) -> None:
        answer.content.update(pack("update", {**unpack("update", answer.content), **values}))

    return spoil


def garbage(answer: Message) -> None:
    answer.content["update"] = ConfigRecord({"tree": '{"tensor": "0"'})


def nothing(answer: Message) -> None:
    answer.content = RecordDict()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_a_number, "not finite"),
        (another_shape, "has shape"),
        (another_client, "its answer is from client 0 in round 2"),
        (garbage, "its answer cannot be read: JSONDecodeError"),
        (nothing, "its answer cannot be read: KeyError"),
        (None, "its node did not answer in time"),
        (claims(steps=10**400), "its steps are more than 2**53"),
        (claims(samples=10**9), "it claims 1000000000 training samples, and"),
    ],
)
def test_the_round_goes_on_without_a_bad_answer(spoil: Any, reason: str) -> None:
    def tamper(round: int, client: int, answer: Message) -> Message | None:
        if (round, client) != (2, 1):
            return answer
        return None if spoil is None else spoil(answer) or answer

    check_round_without_client_1(Nodes(5, node_app(classifier), tamper), reason)


def test_a_round_that_nobody_finished_ends_the_run() -> None:
    made = trainer(rounds=2)
    grid = Nodes(
        5, node_app(classifier), lambda number, client, answer: None if number == 2 else answer
    )
    with pytest.raises(FederationError, match=r"round 2: 5 of 5 clients failed alike: its node"):
        serve(grid, made, classifier(), unscaled())
    assert made.round == 1


def test_a_setting_that_nobody_can_train_with_is_the_users_error() -> None:
    grid = Nodes(5, node_app(convolution, aggregator=SCAFFOLD()))
    refusal = "ControlVariates: control 'displacement'"
    with pytest.raises(FlsuiteError, match=refusal):
        serve(grid, trainer(aggregator=SCAFFOLD()), convolution(), unscaled())


class Fussy(Site):
    """Refuses the request of round 2, as client 1."""

    def train(self, message: Message, context: Context) -> Message:
        if (unpack("fit", message.content)["round"], own_client(context)) == (2, 1):
            raise FlsuiteError("the disk is full")
        return super().train(message, context)


def test_a_node_cannot_end_a_run_that_is_under_way() -> None:
    site = Fussy(trainer(), classifier(), unscaled())
    grid = Nodes(5, make_client_app(lambda context: site))
    check_round_without_client_1(grid, "the disk is full")


def test_pooled_training_has_no_place() -> None:
    with pytest.raises(FlsuiteError, match="Centralized trains on all clients' data"):
        serve(Nodes(5), trainer(aggregator=Centralized()), classifier(), digits())


def test_server_and_nodes_need_the_same_model() -> None:
    with pytest.raises(FlsuiteError, match="the server's model is not this node's"):
        serve(Nodes(5, node_app(convolution)), trainer(), classifier(), unscaled())
