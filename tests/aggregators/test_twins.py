"""Methods against their twins in plain PyTorch: half of the clients in each of four rounds."""

from collections.abc import Callable
from typing import Any

import pytest

from flsuite.aggregators import (
    APFL,
    MOON,
    Aggregator,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedBN,
    FedDyn,
    FedExP,
    FedNova,
    FedPer,
    FedRep,
    FedRoD,
    LGFedAvg,
    PerFedAvg,
    PFedMe,
)
from flsuite.callbacks import FederationCallback
from flsuite.schedules import Synchronous
from tests.aggregators import twins
from tests.aggregators.federations import run, table_model
from tests.aggregators.twins import Twin

PAIRS: dict[str, tuple[Callable[[], Aggregator], type[Twin]]] = {
    "fedavg": (FedAvg, Twin),
    "fedper": (FedPer, twins.FedPerTwin),
    "lgfedavg": (LGFedAvg, twins.LGFedAvgTwin),
    "fedbn": (FedBN, twins.FedBNTwin),
    "fedrep": (FedRep, twins.FedRepTwin),
    "fedbabu": (FedBABU, twins.FedBABUTwin),
    "fedrod": (FedRoD, twins.FedRoDTwin),
    "fedala": (lambda: FedALA(samples=1.0), twins.FedALATwin),
    "ditto": (lambda: Ditto(0.7), twins.DittoTwin),
    "apfl": (lambda: APFL(0.4), twins.APFLTwin),
    "pfedme": (lambda: PFedMe(5.0, steps=3, personal_lr=0.05), twins.PFedMeTwin),
    "perfedavg": (lambda: PerFedAvg(0.1), twins.PerFedAvgTwin),
    "feddyn": (FedDyn, twins.FedDynTwin),
    "fednova": (FedNova, twins.FedNovaTwin),
    "feddyn-private": (lambda: FedDyn(private=["network.3.bias"]), twins.PrivateFedDynTwin),
    "fedexp": (FedExP, twins.FedExPTwin),
    "fedexp-private": (lambda: FedExP(private=["network.3.bias"]), twins.PrivateFedExPTwin),
    "moon": (lambda: MOON(mu=2.0), twins.MOONTwin),
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
    assert trainer.federation is not None
    twin = kind(epochs=2)
    twin.rounds(cohorts.all)

    repeated = [client for cohort in cohorts.all for client in cohort]
    assert max(map(repeated.count, repeated)) >= 3, "a client that trains three times"
    for client in range(4):
        own, other = trainer.federation.client_state(client), twin.state_of(client)
        for key, value in own.items():
            gap = float((value.double() - other[key].double()).abs().max())
            assert gap < 2e-6, (client, key, gap)
