"""What stays with clients follows from the head and the norm layers of a model."""

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg, FedBN, FedPer, LGFedAvg
from flsuite.models import MLP, Classifier
from tests.aggregators.federations import Quadratic, Quadratics, run


def test_a_head_of_the_config_overrides_the_models() -> None:
    made = run(FedPer(head="network.0"), 1)
    assert set(made.federation.clients.private(0)) == {"network.0.weight", "network.0.bias"}


def test_without_batchnorm_there_is_nothing_to_keep() -> None:
    model = Classifier(MLP((4,)), lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(FlsuiteError, match="has none"):
        run(FedBN(), model=model)


def test_a_model_that_does_not_name_its_head_is_told_how() -> None:
    with pytest.raises(FlsuiteError, match="does not name its head"):
        run(FedPer(), 1, Quadratics((1.0, 2.0), (0.0, 1.0)), model=Quadratic())


@pytest.mark.parametrize("make", [FedPer, LGFedAvg])
def test_a_head_of_the_whole_network_is_refused(make: type[FedAvg]) -> None:
    with pytest.raises(FlsuiteError, match="network has all parameters"):
        run(make(head="network"), 1)
