"""The pictures and numbers of a latent space, and the probe that looks at it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from flsuite.aggregators import CMGA, FedAvg
from flsuite.analysis import latent_figure
from flsuite.callbacks import FederationCallback, ForestProbe, LatentSpace
from flsuite.callbacks.monitors import prior_distances
from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits, Dirichlet, PublishedSplits
from flsuite.models import ACVAE
from flsuite.runs.run import Run
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer


def fit(
    callbacks: list[Any], rounds: int = 2, samples: int | None = 120, **kwargs: Any
) -> FederatedTrainer:
    made = trainer(rounds=rounds, callbacks=callbacks, **{"aggregator": CMGA(), **kwargs})
    model = ACVAE(
        latent_dim=4, width=4, cls_weight=5.0, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3)
    )
    settings: dict[str, Any] = {"standardize": False, "train_samples": samples, "batch_size": 32}
    made.fit(model, Digits(clients=3, partition=Dirichlet(1.0), **settings))
    return made


def logged(made: FederatedTrainer) -> dict[tuple[int, str], float]:
    return {(row[0], row[7]): row[8] for row in made.run.folder.table.rows if row[5] == "global"}


def test_distances_by_hand() -> None:
    numbers = prior_distances(
        torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]), torch.tensor([[1.0, 2.0]] * 3)
    )
    assert numbers["prior_distance_min"] == 1.0 and numbers["prior_sigma_min"] == 1.0
    assert numbers["prior_distance_mean"] == pytest.approx((5 + 1 + 18**0.5) / 3)


class Reads(FederationCallback):
    """Reads the pictures that a round has for the loggers."""

    affects = "nothing"

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        self.names.append(list(run.pictures))


@pytest.mark.draws
def test_every_round_is_measured_and_some_are_drawn(tmp_path: Path) -> None:
    space, reads = LatentSpace(every=2, clients=2, samples=50), Reads()
    made = fit([space, reads], rounds=3, run_dir=str(tmp_path / "run"))
    numbers = logged(made)
    assert {round for round, name in numbers if name == "prior_distance_min"} == {1, 2, 3}
    assert numbers[3, "prior_distance_min"] == pytest.approx(
        numbers[3, "prior_distance_after"], rel=1e-5
    )
    assert reads.names == [[], ["latent"], ["latent"]]
    pictures = sorted((tmp_path / "run" / "latent").iterdir())
    assert [path.name for path in pictures] == ["round-0002.png", "round-0003.png"]
    assert np.ptp(imread(pictures[0])[..., :3]) > 0.5


def test_the_picture_has_a_panel_a_client_and_a_cross_a_class() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 4
    figure = latent_figure(
        {"a": rng.normal(size=(40, 3)), "b": rng.normal(size=(40, 3))},
        y,
        rng.normal(size=(4, 3)),
        np.ones((4, 3)),
        "wxyz",
    )
    assert [panel.get_title() for panel in figure.axes] == ["a", "b"]
    dots = figure.axes[0].collections
    assert len(dots) == 8 and sum(len(d.get_offsets()) for d in dots) == 44
    two = latent_figure(
        {"a": rng.normal(size=(40, 2))}, y % 2, np.zeros((2, 2)), np.ones((2, 2)), "xy"
    )
    assert len(two.axes) == 1


def test_looking_changes_nothing() -> None:
    plain, watched = fit([]), fit([LatentSpace(every=1), ForestProbe(every=1, trees=5)])
    assert plain.federation is not None and watched.federation is not None
    assert equal_states(plain.federation.state, watched.federation.state)


def test_the_probe_reads_what_the_space_holds() -> None:
    made = fit([ForestProbe(clients=2, trees=30)], rounds=4, samples=None, aggregator=FedAvg())
    numbers = logged(made)
    assert {round for round, name in numbers if name == "probe_accuracy"} == {4}
    assert numbers[4, "probe_accuracy"] > 0.5 and 0 < numbers[4, "probe_f1_macro"] <= 1


def test_the_probe_sees_every_class_of_a_sorted_client() -> None:
    class Sorted(Digits):
        def load(self) -> PublishedSplits:
            source = super().load()
            order = source.train.y.argsort(stable=True)
            return PublishedSplits(source.spec, source.train.take(order), source.test)

    made = trainer(rounds=1, callbacks=[ForestProbe(trees=20, samples=200)])
    made.fit(ACVAE(latent_dim=4, width=4), Sorted(clients=1, standardize=False, batch_size=64))
    assert logged(made)[1, "probe_accuracy"] > 0.3, "the first two hundred rows are of two classes"


def test_one_dimension_cannot_be_drawn() -> None:
    with pytest.raises(FlsuiteError, match=r"raise model\.latent_dim"):
        trainer(rounds=1, callbacks=[LatentSpace()]).fit(
            ACVAE(latent_dim=1, width=4), digits(standardize=False)
        )


@pytest.mark.parametrize("callback", [LatentSpace(), ForestProbe(every=1)])
def test_a_model_without_a_latent_space_is_refused(callback: Any) -> None:
    with pytest.raises(FlsuiteError, match="Classifier has no"):
        trainer(rounds=1, callbacks=[callback]).fit(classifier(), digits())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LatentSpace(clients=0), "LatentSpace: clients"),
        (lambda: ForestProbe(trees=0), "ForestProbe: trees"),
    ],
)
def test_bad_settings_are_named(make: Any, said: str) -> None:
    with pytest.raises(FlsuiteError, match=said):
        make()
