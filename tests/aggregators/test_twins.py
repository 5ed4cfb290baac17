"""Methods against their twins in plain PyTorch: half of the clients in each of four rounds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flsuite import aggregators as methods
from flsuite.callbacks import FederationCallback
from flsuite.federation import Synchronous
from tests.aggregators import twins
from tests.aggregators.federations import models_of, run, table_model
from tests.aggregators.twins import HEAD, Twin

BIAS = HEAD + "bias"

PAIRS: dict[str, tuple[Callable[[], methods.Aggregator], Callable[[], Twin]]] = {
    "fedavg": (methods.FedAvg, Twin),
    "fedper": (methods.FedPer, partial(Twin, HEAD)),
    "lgfedavg": (methods.LGFedAvg, partial(Twin, ("network.0.", "network.1."))),
    "fedbn": (methods.FedBN, partial(Twin, "network.1.")),
    "fedrep": (methods.FedRep, partial(twins.FedRepTwin, HEAD)),
    "fedbabu": (methods.FedBABU, partial(twins.FedBABUTwin, HEAD)),
    "fedrod": (methods.FedRoD, twins.FedRoDTwin),
    "fedala": (lambda: methods.FedALA(samples=1.0), twins.FedALATwin),
    "ditto": (lambda: methods.Ditto(0.7), twins.DittoTwin),
    "apfl": (lambda: methods.APFL(0.4), twins.APFLTwin),
    "pfedme": (lambda: methods.PFedMe(5.0, steps=3, personal_lr=0.05), twins.PFedMeTwin),
    "perfedavg": (lambda: methods.PerFedAvg(0.1), twins.PerFedAvgTwin),
    "feddyn": (methods.FedDyn, twins.FedDynTwin),
    "fednova": (methods.FedNova, twins.FedNovaTwin),
    "feddyn-private": (partial(methods.FedDyn, private=[BIAS]), partial(twins.FedDynTwin, BIAS)),
    "fedexp": (methods.FedExP, twins.FedExPTwin),
    "fedexp-private": (partial(methods.FedExP, private=[BIAS]), partial(twins.FedExPTwin, BIAS)),
    "moon": (lambda: methods.MOON(mu=2.0), twins.MOONTwin),
}


class Cohorts(FederationCallback):
    def __init__(self) -> None:
        self.all: list[list[int]] = []

    def on_round_start(self, run: Any, round: int, clients: list[int]) -> None:
        self.all.append(list(clients))


@pytest.mark.parametrize("name", PAIRS)
def test_a_method_is_its_twin(name: str) -> None:
    make, kind = PAIRS[name]
    cohorts = Cohorts()
    trainer = run(
        make(),
        4,
        model=table_model(**twins.OPTIMIZER),
        schedule=Synchronous(0.5),
        max_epochs=2,
        gradient_clip_val=twins.CLIP,
        callbacks=[cohorts],
    )
    twin = kind()
    twin.rounds(cohorts.all)

    repeated = [client for cohort in cohorts.all for client in cohort]
    assert max(map(repeated.count, repeated)) >= 3, "a client that trains three times"
    for client, own in enumerate(models_of(trainer)):
        other = twin.state_of(client)
        for key, value in own.items():
            gap = float((value.double() - other[key].double()).abs().max())
            assert gap < 2e-6, (client, key, gap)
