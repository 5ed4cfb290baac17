"""Runs with attackers: their choice, engines, resume, and what is unchanged without them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flsuite import aggregators as methods
from flsuite.aggregators import (
    ALittleIsEnough,
    Attack,
    FreeRider,
    GaussianNoise,
    InnerProduct,
    LabelFlip,
    PairwiseMasks,
    PixelBackdoor,
    ScaledUpdate,
    SignFlip,
    TopK,
)
from flsuite.analysis.groups import find_runs, group_runs
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.federation import Asynchronous, Processes
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import Updates
from tests.conftest import classifier, digits, equal_states, mostly_long, state, table, trainer

WHO = [1, 3]
ATTACKS: dict[str, Attack] = {
    "label_flip": LabelFlip(WHO),
    "backdoor": PixelBackdoor(WHO, target=3, boost=2.0),
    "sign_flip": SignFlip(WHO),
    "scaled": ScaledUpdate(WHO),
    "noise": GaussianNoise(WHO, std=0.1),
    "free_rider": FreeRider(WHO, last_change=True, noise=0.01),
    "alie": ALittleIsEnough(WHO, z=1.0),
    "inner_product": InnerProduct(WHO),
}


def fitted(attack: Attack | None, rounds: int = 2, **kwargs: Any) -> FederatedTrainer:
    ckpt_path = kwargs.pop("ckpt_path", None)
    model = kwargs.pop("model", None) or classifier()
    made = trainer(rounds=rounds, attack=attack, **kwargs)
    made.fit(model, digits(train_samples=200), ckpt_path=ckpt_path)
    return made


# Engines and resume


@pytest.mark.parametrize("attack", mostly_long(ATTACKS, "free_rider", "alie"))
def test_every_engine_and_a_resumed_run_end_with_the_same_bits(
    attack: Attack, tmp_path: Path
) -> None:
    whole = fitted(attack)
    scores = whole.test()
    spread = fitted(attack, engine=Processes(workers=2))
    assert equal_states(state(whole), state(spread))
    assert spread.test() == scores

    fitted(attack, rounds=1, run_dir=str(tmp_path))
    resumed = fitted(attack, ckpt_path="last", run_dir=str(tmp_path))
    assert equal_states(state(whole), state(resumed))
    assert resumed.test() == scores


# What stays as it is without attackers


def first_round(attack: Attack | None) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    """Return a run of one round, and its updates."""
    updates = Updates()
    return fitted(attack, rounds=1, callbacks=[updates]), updates.all


@pytest.fixture(scope="module")
def honest() -> tuple[FederatedTrainer, list[ClientUpdate]]:
    return first_round(None)


@pytest.mark.parametrize("name", ATTACKS)
def test_honest_clients_and_evaluation_data_do_not_change(name: str, honest: Any) -> None:
    (plain, honest_updates), (attacked, updates) = honest, first_round(ATTACKS[name])
    for before, after in zip(honest_updates, updates, strict=True):
        assert before.client == after.client
        # Attackers that work together train honestly, and the server's side replaces their update.
        is_same = before.client not in WHO or name in ("alie", "inner_product")
        assert equal_states(before.state, after.state) == is_same

    ours, theirs = attacked.federation.data, plain.federation.data
    for split in ("val", "test"):
        pair = getattr(ours, split), getattr(theirs, split)
        assert torch.equal(*(part.x for part in pair)) and torch.equal(*(part.y for part in pair))
        # The state after the attack, scored by a run with and by one without an attack.
        scores, expected = (
            made.run.evaluator.shared(state(attacked), split, range(5))
            for made in (attacked, plain)
        )
        scores["global"].pop("backdoor_success", None)
        assert scores == expected


@pytest.mark.parametrize(
    "attack",
    [
        SignFlip(clients=[]),
        ALittleIsEnough(clients=[]),
        InnerProduct(fraction=0.0),
        ScaledUpdate(WHO, boost=1.0),
        GaussianNoise(WHO, std=0.0),
        LabelFlip(WHO, pairs={}),
        PixelBackdoor(WHO, share=0.0),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_an_attack_without_strength_is_no_attack(attack: Attack, honest: Any) -> None:
    assert equal_states(state(fitted(attack, rounds=1)), state(honest[0]))


@pytest.mark.parametrize("make", [methods.FedAdam, methods.SCAFFOLD, methods.CoordinateMedian])
def test_a_single_attacker_that_sees_no_deviation_sends_its_honest_change(make: Any) -> None:
    """A rule under attack keeps its name, server optimizer and objective."""
    honest = state(fitted(None, aggregator=make()))
    attacked = state(fitted(ALittleIsEnough([2], z=1.0), aggregator=make()))
    assert all(torch.allclose(honest[name], attacked[name], atol=1e-5) for name in honest)


# Other parts of a run


def test_models_with_private_parts_score_their_backdoor_client_by_client() -> None:
    def fit(**kwargs: Any) -> FederatedTrainer:
        made = trainer(rounds=1, attack=PixelBackdoor(WHO, target=3), **kwargs)
        made.fit(classifier(private=["network.3"]), digits(clients=4))
        return made

    here, there = fit(), fit(engine=Processes(workers=2))
    assert equal_states(state(here), state(there))
    whole, *clients = here.test()
    assert whole["backdoor_success"] == pytest.approx(
        sum(row["backdoor_success_all"] for row in clients) / 4
    )
    assert there.test()[0]["backdoor_success"] == whole["backdoor_success"]


@pytest.mark.parametrize(
    "attack", [FreeRider(WHO, last_change=True, noise=0.01), PixelBackdoor(WHO), InnerProduct(WHO)]
)
def test_nodes_of_flower_may_be_attackers(attack: Attack) -> None:
    pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")
    from tests.flower.grid import both

    rounds = 2 if isinstance(attack, FreeRider) else 1
    ours, theirs, _ = both(classifier, methods.FedAvg, attack=attack, rounds=rounds)
    assert equal_states(state(ours), state(theirs)) and table(ours) == table(theirs)


# Who attacks


def test_attackers_are_drawn_with_the_seed_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs whose seeds draw other attackers are one group."""
    with caplog.at_level(logging.INFO, logger="flsuite"):
        runs = [
            fitted(SignFlip(fraction=0.4), rounds=1, seed=seed, run_dir=str(tmp_path / f"{seed}"))
            for seed in (0, 1)
        ]
    drawn = [list(made.attack.attackers) for made in runs]
    assert [len(attackers) for attackers in drawn] == [2, 2]
    assert drawn[0] != drawn[1], "another seed draws others"
    for folder, attackers in zip(("0", "1"), drawn, strict=True):
        assert f"attack: SignFlip by 2 of 5 clients: {attackers[0]}, {attackers[1]}" in caplog.text
        record = json.loads((tmp_path / folder / "attackers.json").read_text())
        assert record == {"attack": "SignFlip", "attackers": attackers, "clients": 5}
        settings = yaml.safe_load((tmp_path / folder / "settings.yaml").read_text())
        assert settings["attackers"] == attackers
        assert settings["attack"]["init_args"] == {"clients": None, "fraction": 0.4, "scale": 1.0}

    fitted(None, rounds=1, seed=0, run_dir=str(tmp_path / "honest"))
    assert not (tmp_path / "honest" / "attackers.json").exists()
    groups = {group.method: len(group.runs) for group in group_runs(find_runs([tmp_path]))}
    assert groups == {"FedAvg, SignFlip": 2, "FedAvg, attack=None": 1}


def test_a_resume_with_another_attack_is_refused(tmp_path: Path) -> None:
    fitted(SignFlip(WHO), rounds=1, run_dir=str(tmp_path))
    with pytest.raises(FlsuiteError, match="attack"):
        fitted(SignFlip([1]), rounds=2, run_dir=str(tmp_path), ckpt_path="last")


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (SignFlip, {}, "SignFlip: give either clients"),
        (SignFlip, {"clients": [0], "fraction": 0.2}, "SignFlip: give either clients"),
        (GaussianNoise, {"fraction": 1.5}, "fraction must be from 0 to 1, got 1.5"),
        (LabelFlip, {"fraction": -0.1}, "fraction must be from 0 to 1, got -0.1"),
        (FreeRider, {"clients": [5]}, "FreeRider: clients names 5"),
        (FreeRider, {"clients": [-1]}, "FreeRider: clients names -1"),
        (FreeRider, {"clients": [0.5]}, "FreeRider: clients names 0.5"),
        (FreeRider, {"clients": ["a"]}, "FreeRider: clients names 'a'"),
        (InnerProduct, {"clients": [1, 1]}, "names a client twice"),
        (SignFlip, {"fraction": 0.05}, "a fraction of 0.05 of 5 clients is 0 clients"),
        (ScaledUpdate, {"clients": [0], "boost": float("nan")}, "boost must be at least 0"),
        (ALittleIsEnough, {"clients": [0], "z": -1.0}, "z must be at least 0"),
        (ALittleIsEnough, {"clients": [0], "knows": "honest"}, "one of attackers, all"),
        (InnerProduct, {"clients": [0], "epsilon": -1.0}, "epsilon must be at least 0"),
        (PixelBackdoor, {"clients": [0], "target": -1}, "target must be at least 0"),
        (PixelBackdoor, {"clients": [0], "size": 0}, "size must be at least 1"),
        (PixelBackdoor, {"clients": [0], "value": 1.5}, "value must be from 0 to 1"),
        (PixelBackdoor, {"clients": [0], "share": -0.5}, "share must be from 0 to 1"),
    ],
)
def test_attackers_that_cannot_be_are_refused_before_training(
    make: Any, kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(make(**kwargs), rounds=1, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


BUFFERED = {"aggregator": methods.FedBuff(), "schedule": Asynchronous(concurrency=2)}


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (SignFlip, {"aggregator": methods.Centralized()}, "Centralized trains on pooled data"),
        (InnerProduct, BUFFERED, "InnerProduct needs current models"),
        (InnerProduct, {"compression": TopK()}, "plain updates, but TopK encodes"),
        (ALittleIsEnough, {"secure_sum": PairwiseMasks()}, "PairwiseMasks shows .* a sum"),
        (SignFlip, {"aggregator": methods.LocalOnly()}, "SignFlip needs shared parameters"),
        (InnerProduct, {"model": classifier(private=["*"])}, "needs shared parameters"),
        (SignFlip, {"keep_updates": True}, "keep_updates and from_updates need models as"),
    ],
)
def test_what_an_attack_does_not_go_with_is_refused(
    make: Any, kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(make(WHO), rounds=1, run_dir=str(tmp_path / "run"), **kwargs)
    assert not (tmp_path / "run").exists()


def test_an_attack_on_batches_needs_nothing_that_travels() -> None:
    plain, flipped = (fitted(a, 1, aggregator=methods.LocalOnly()) for a in (None, LabelFlip(WHO)))
    of_both = [made.federation.client_state(1) for made in (plain, flipped)]
    assert not equal_states(*of_both)
