"""Robust rules in federations: resuming, refusals, the table, and the server's own fit."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite import FlsuiteError, aggregators as methods
from flsuite.common.errors import FederationError
from flsuite.common.state import clone
from flsuite.data import FederatedDataModule
from flsuite.federation import Schedule, Stragglers, Synchronous
from flsuite.federation.client.callbacks import ExponentialDecay
from flsuite.models import FusedSpaceFed
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    Updates,
    assert_equal,
    assert_same_models,
    federation,
    run,
    table_data,
    table_model,
)
from tests.conftest import digits

POISSON = Synchronous(0.5, sampling="poisson")


def table(samples: int = 20) -> FederatedDataModule:
    """Return the small tables, of which the server holds some samples."""
    data = table_data()
    data.server_samples = samples
    return data


def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    """tests/composition resumes every rule. Here, one that keeps a memory is in a Bucketing."""
    rule, settings = (
        methods.Bucketing(methods.CenteredClipping(), 2),
        {"schedule": Synchronous(0.75)},
    )
    whole = run(rule, 3, table(), **settings)
    folder = str(tmp_path / "run")
    run(rule, 1, table(), run_dir=folder, **settings)
    resumed = federation(rule, 3, run_dir=folder, **settings)
    resumed.fit(table_model(), table(), ckpt_path="last")
    assert_same_models(whole, resumed)
    assert whole.federation.server.memory["rule"]


def test_the_number_of_threads_changes_nothing() -> None:
    one = run(methods.Bucketing(methods.GeometricMedian(), 2), 2)
    torch.set_num_threads(2)
    assert_same_models(one, run(methods.Bucketing(methods.GeometricMedian(), 2), 2))
    assert torch.get_num_threads() == 2


# Too few clients


@pytest.mark.parametrize(
    ("rule", "schedule", "message"),
    [
        (methods.Krum(1), None, "Krum needs more than 2 f + 2 = 4 updates"),
        (methods.TrimmedMean(1), Synchronous(2), "TrimmedMean needs more than 2 b = 2 updates"),
        (methods.Bucketing(methods.Krum(0), 2), None, "Bucketing makes 2 buckets of 4 updates"),
        (methods.Bucketing(methods.Krum(0)), POISSON, "Bucketing needs a cohort of known size"),
    ],
    ids=["krum", "trimmed", "buckets", "poisson"],
)
def test_what_cannot_work_is_refused_before_training(
    rule: methods.Rule, schedule: Schedule | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trainer = federation(rule, 2, schedule=schedule, run_dir=str(folder))
    with pytest.raises(FlsuiteError, match=re.escape(message)) as refusal:
        trainer.fit(table_model(), table_data())
    assert "\n" not in str(refusal.value) and not folder.exists()


def test_over_selection_counts_what_the_round_takes() -> None:
    schedule = Synchronous(2, over_selection=2.0, speeds=Stragglers())
    with pytest.raises(FlsuiteError, match=r"needs more than 2 f \+ 2 = 2 .* there are 2"):
        federation(methods.Krum(0), 1, schedule=schedule).fit(table_model(), table_data())


def test_a_round_with_too_many_failures_is_refused_by_the_rule(tmp_path: Path) -> None:
    """Two of five clients fail, and Krum with one attacker needs five."""
    data = Quadratics((1.0, 2.0, 3.0, -1.0, -1.0), (0.1, 0.2, 0.3, 0.0, 0.0))
    trainer = federation(methods.Krum(1), 3, run_dir=str(tmp_path / "run"))
    with pytest.raises(FederationError, match=r"^round 1: .* there are 3; lower byzantine"):
        trainer.fit(Quadratic(), data)
    assert float(trainer.federation.state["w"]) == 0.0


def test_a_model_that_shares_nothing_is_left_alone() -> None:
    alone = run(methods.LocalOnly(), 1)
    other = run(methods.Aggregator(methods.CoordinateMedian(), private=["*"]), 1)
    assert other.federation.state == {}
    for client in range(4):
        assert_equal(alone.federation.client_state(client), other.federation.client_state(client))


# FLTrust


def test_a_server_with_the_clients_data_trusts_them_all() -> None:
    """All samples are equal, so the server's fit equals every client's, and FedAvg's."""

    def data(server: int) -> Quadratics:
        made = Quadratics((2.0,) * 4, (1.5,) * 4, samples=(3, 3, 3, 3))
        made.server_samples = server
        return made

    seen = Updates()
    settings = {"max_epochs": 5, "lr_decay": ExponentialDecay(gamma=0.5)}
    mean = run(methods.FedAvg(), 3, data(0), model=Quadratic(), **settings)
    trust = run(methods.FLTrust(), 3, data(2), model=Quadratic(), callbacks=[seen], **settings)
    torch.testing.assert_close(trust.federation.state["w"], mean.federation.state["w"])
    assert [u.metrics["trust"] for u in seen.all] == pytest.approx([1.0] * 12)


def test_the_servers_fit_changes_no_client_and_depends_on_seed_and_round_alone() -> None:
    of_trust, of_mean = Updates(), Updates()
    trust = run(methods.FLTrust(), 1, table(), callbacks=[of_trust])
    run(methods.FedAvg(), 1, table(), callbacks=[of_mean])
    for one, other in zip(of_trust.all, of_mean.all, strict=True):
        assert_equal(one.state, other.state)

    train, state = trust.federation.server.tools.train, clone(trust.federation.state)
    before = torch.get_rng_state()
    first, second = train(state, 5), train(state, 6)
    assert_equal(first, train(state, 5))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert_equal(state, trust.federation.state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "samples", "message"),
    [
        (table_model, 0, "FLTrust trains on the server's own samples"),
        (lambda: FusedSpaceFed(latent_dim=4), 50, "has no whole FusedSpaceFed, because clients"),
    ],
)
def test_a_server_that_cannot_train_is_refused(
    model: Callable[[], Any], samples: int, message: str
) -> None:
    data = table(samples) if model is table_model else digits(server_samples=samples)
    for rule in (methods.FLTrust(), methods.Bucketing(methods.FLTrust())):
        with pytest.raises(FlsuiteError, match=message):
            federation(rule, 1).fit(model(), data)


def test_a_failure_of_the_servers_fit_is_named() -> None:
    data = Quadratics((1.0, 1.0), (0.5, 0.5), samples=(3, 3))
    data.server_samples = 2
    trainer = federation(methods.FLTrust(), 1)
    run_ = trainer.prepare(Quadratic(), data)
    run_.federation.data.server.x[:] = -1.0
    with pytest.raises(FederationError, match="round 1: the server's own training failed"):
        run_.federation.server.tools.train(run_.federation.state, 1)


# What a run shows


def test_the_table_has_what_a_rule_did_to_each_client(tmp_path: Path) -> None:
    run(methods.MultiKrum(0, 2), 1, run_dir=str(tmp_path / "run"))
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    weights = {r["scope"]: float(r["value"]) for r in rows if r["metric"] == "weight"}
    assert sorted(weights[str(client)] for client in range(4)) == [0.0, 0.0, 0.5, 0.5]
    assert sum(row["metric"] == "krum_score" for row in rows) == 5
