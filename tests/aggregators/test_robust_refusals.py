"""What a robust rule refuses, and what it tells the log."""

import logging
from collections.abc import Callable

import pytest
import torch

from flsuite import FlsuiteError, aggregators as methods
from flsuite.aggregators.part import named, refuse_conflicts
from flsuite.aggregators.rules.robust.base import number_of
from flsuite.common.errors import FederationError
from tests.aggregators.robust import cloud, every_rule, folded, sent, trusting


@pytest.mark.parametrize(
    ("make", "enough", "message"),
    [
        (lambda: methods.Krum(2), 7, "but there are 6; lower byzantine to at most 1"),
        (lambda: methods.MultiKrum(0, 4), 4, "MultiKrum needs the 4 updates that it selects"),
        (lambda: methods.Krum(0), 3, "but there are 2; let more clients train"),
        (lambda: methods.TrimmedMean(2), 5, "TrimmedMean needs more than 2 b = 4 updates"),
        (
            lambda: methods.Bucketing(methods.Krum(1), 2),
            9,
            "Bucketing makes 4 buckets of 8 updates",
        ),
    ],
)
def test_too_few_updates_are_refused(
    make: Callable[[], methods.CohortRule], enough: int, message: str
) -> None:
    rule = make()
    assert rule.too_few(enough) is None
    assert message in str(rule.too_few(enough - 1)) and "\n" not in str(rule.too_few(enough - 1))
    folded(make(), sent(cloud(enough)))
    with pytest.raises(FederationError, match=r"^round 1: .* round 0 is kept$") as error:
        folded(make(), sent(cloud(enough - 1)))
    assert message in str(error.value)


@every_rule
def test_noise_on_a_sum_does_not_cover_a_rule(make: Callable[[], methods.Rule]) -> None:
    parts = [named("one", methods.GaussianMechanism(noise_multiplier=1.0)), named("other", make())]
    with pytest.raises(FlsuiteError, match=r"^GaussianMechanism needs a plain sum"):
        refuse_conflicts(parts)


def test_a_share_of_attackers_is_rounded_down() -> None:
    assert [number_of(0.3, n) for n in (3, 9, 10, 30)] == [0, 2, 3, 9]
    assert number_of(2, 5) == 2 and methods.TrimmedMean(0.49).too_few(1) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods.Krum(-1),
        lambda: methods.Krum(0.5),
        lambda: methods.Krum(True),
        lambda: methods.TrimmedMean(-0.1),
        lambda: methods.TrimmedMean(1.0),
        lambda: methods.MultiKrum(1, 0),
        lambda: methods.GeometricMedian(0),
        lambda: methods.GeometricMedian(smoothing=0.0),
        lambda: methods.GeometricMedian(tolerance=-1.0),
        lambda: methods.GeometricMedian(weighting="size"),
        lambda: methods.NormClipping(0.0),
        lambda: methods.NormClipping(float("nan")),
        lambda: methods.NormClipping(weighting="size"),
        lambda: methods.CenteredClipping(-1.0),
        lambda: methods.CenteredClipping(iterations=0),
        lambda: methods.CenteredClipping(centre="mean"),
        lambda: methods.Bucketing(methods.FedAvg()),
        lambda: methods.Bucketing(methods.CoordinateMedian(), 0),
    ],
)
def test_a_bad_argument_is_one_line(make: Callable[[], methods.Rule]) -> None:
    with pytest.raises(FlsuiteError, match=r"^[A-Za-z]+: [^\n]* must be [^\n]*$"):
        make()


def test_who_is_left_out_is_named_with_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flsuite")
    rows = 0.1 * cloud(7)
    rows[[2, 5]] = 50.0
    folded(methods.MultiKrum(2), sent(rows))
    folded(methods.NormClipping(1.0), sent(rows))
    folded(methods.CenteredClipping(1.0), sent(rows))
    folded(methods.FLTrust(), sent(rows), tools=trusting({"w": -torch.ones(6)}))
    assert "round 1: MultiKrum left out clients 2, 5\n" in caplog.text
    assert "round 1: NormClipping clipped clients 2, 5\n" in caplog.text
    assert "round 1: CenteredClipping clipped clients 2, 5\n" in caplog.text
    assert "FLTrust left out clients" in caplog.text
    folded(methods.Krum(0), sent(0.1 * cloud(40)))
    assert "0, 1, 2" in caplog.text and "and 19 more" in caplog.text
