"""Anomaly detection: finding test samples of classes that no client has trained on.

The data are tables of scikit-learn, and MNIST, with some classes left out of the training split.
Name the data and the callback in a config: ``flsuite.studies.detection.SklearnTable``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback, require_model
from flsuite.common.arguments import NonNegativeInt, Settings, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import seed_for
from flsuite.data.datasets.vision import MNIST
from flsuite.data.federated import DataSpec, DataSplit, FederatedData, PublishedSplits
from flsuite.data.module import FederatedDataModule
from flsuite.models.acvae import ACVAE
from flsuite.models.modes import evaluating
from flsuite.runs.run import Run

_BATCH = 512
_TEST_FRACTION, _SPLIT_SEED = 0.3, 0
_FALSE_ALARMS = 0.01


class SklearnTable(FederatedDataModule):
    """A table of scikit-learn in which some classes are anomalies.

    The test split has all classes. The training split has no anomalies. The range of each feature
    in the training split is scaled to [0, 1]. The split is stratified by class and has a fixed
    seed.

    Args:
        name: ``breast_cancer`` (569 samples, 30 features; class 0 is malignant), ``wine`` (178, 13,
            three classes) or ``digits`` (1,797, 64, ten classes).
        anomalies: The classes that no client trains on.
        kwargs: See :class:`~flsuite.data.FederatedDataModule`.
    """

    def __init__(
        self,
        name: Literal["breast_cancer", "wine", "digits"] = "breast_cancer",
        anomalies: Sequence[NonNegativeInt] = (0,),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.anomalies = tuple(anomalies)
        check_init(self, SklearnTable)

    def load(self) -> PublishedSplits:
        import sklearn.datasets
        from sklearn.model_selection import train_test_split

        table = getattr(sklearn.datasets, f"load_{self.name}")()
        x, y = table.data.astype(np.float32), table.target.astype(np.int64)
        parts = train_test_split(
            x, y, test_size=_TEST_FRACTION, stratify=y, random_state=_SPLIT_SEED
        )
        x, test_x, y, test_y = (torch.from_numpy(part) for part in parts)
        names = tuple(str(name) for name in table.target_names)
        train = without(DataSplit(x, y), self.anomalies)
        low, high = train.x.min(0).values, train.x.max(0).values
        train.x, test_x = ((t - low) / (high - low).clamp(min=1e-6) for t in (train.x, test_x))
        spec = DataSpec((x.shape[1],), len(names), class_names=names)
        return PublishedSplits(spec, train, DataSplit(test_x, test_y))


class MNISTAnomalies(MNIST):
    """MNIST with some digits missing from the training split.

    Args:
        anomalies: The digits that no client trains on.
        kwargs: See :class:`~flsuite.data.FederatedDataModule`.
    """

    def __init__(self, anomalies: Sequence[NonNegativeInt] = (0,), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.anomalies = tuple(anomalies)
        check_init(self, MNISTAnomalies)

    def load(self) -> PublishedSplits:
        published = super().load()
        return replace(published, train=without(published.train, self.anomalies))


def without(split: DataSplit, classes: Sequence[int]) -> DataSplit:
    """Return the samples of all other classes.

    Raises:
        FlsuiteError: If no samples are left, or one of the classes has no samples.
    """
    chosen = torch.isin(split.y, torch.tensor(classes))
    if chosen.all() or {*classes} - {*split.y.tolist()}:
        raise FlsuiteError(
            f"data.anomalies must be some of the classes {sorted({*split.y.tolist()})}, and leave "
            f"at least one, got {list(classes)}"
        )
    return split.take((~chosen).nonzero().flatten())


@dataclass(eq=False)
class Detection(FederationCallback, Settings):
    """Scores how well the clients' models separate test samples of unknown classes from others.

    A sample's anomaly score is ``E(D(h), x) - log sum_c N(h; mu_c, sigma_c^2) pi_c`` in nats, with
    the sum over the classes that some client has trained on. It is high for a sample with a bad
    reconstruction, or far from all these classes.

    The models are scored after the last round. The following are logged under ``test/``, as means
    over the clients' own models, and under ``test/forest/`` for an isolation forest on the training
    samples of all clients:

    - ``detection/auroc``;
    - ``detection/f1``, at the threshold that 1 % of a client's own training samples exceed;
    - ``detection/recall``, the fraction of the anomalies above the threshold that 1 % of the other
      test samples exceed.
    """

    affects: ClassVar[Affects] = "nothing"

    def on_federation_start(self, run: Run) -> None:
        needs = "Detection scores by the densities of classes"
        require_model(run, ACVAE, needs, "ACVAE")
        if not _unknown(run.federation.data.at(run.round)).any():
            raise FlsuiteError(
                "Detection needs test samples of classes that no client trains on; set "
                "data.anomalies"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        if not run.finished:
            return
        data = run.federation.data.at(run.round)
        scores = [_of_client(run, data, client) for client in range(data.clients)]
        for name in scores[0]:
            mean = sum(score[name] for score in scores) / len(scores)
            run.log_metric(f"detection/{name}", mean, split="test")
        for name, value in _of_forest(data, run.options.seed).items():
            run.log_metric(f"forest/{name}", value, split="test")


def detection_scores(test: Tensor, unknown: Tensor, train: Tensor) -> dict[str, float]:
    """Return ``auroc``, ``f1`` and ``recall`` of anomaly scores.

    Args:
        test: The score of each test sample, high for an anomaly, ``(n,)``.
        unknown: Whether each test sample is an anomaly, ``(n,)``.
        train: The scores of training samples, which set the threshold of ``f1``.
    """
    from torchmetrics.functional.classification import binary_auroc, binary_f1_score

    alarms = test > train.quantile(1 - _FALSE_ALARMS)
    # Ranks, because torchmetrics applies a sigmoid to scores outside [0, 1].
    ranks = test.unique(return_inverse=True)[1].double()
    bound = test[~unknown].quantile(1 - _FALSE_ALARMS, interpolation="higher")
    return {
        "auroc": float(binary_auroc(ranks / len(test), unknown.long())),
        "f1": float(binary_f1_score(alarms.long(), unknown.long())),
        "recall": float((test[unknown] > bound).float().mean()),
    }


def _unknown(data: FederatedData) -> Tensor:
    """Return which test samples are of a class without training samples, bool ``(n,)``."""
    return ~torch.isin(data.test.y, _known(data))


def _known(data: FederatedData) -> Tensor:
    return torch.cat([data.train.y[data.train_rows(c)] for c in range(data.clients)]).unique()


def _of_client(run: Run, data: FederatedData, client: int) -> dict[str, float]:
    model: Any = run.evaluator.model  # an ACVAE
    run.evaluator.load(run.federation.client_state(client))
    known = _known(data)
    test = _energies(model, data, data.test, torch.arange(len(data.test)), known)
    train = _energies(model, data, data.train, data.train_rows(client), known)
    return detection_scores(test, _unknown(data), train)


@torch.no_grad()
def _energies(
    model: ACVAE, data: FederatedData, split: DataSplit, rows: Tensor, known: Tensor
) -> Tensor:
    """Return the anomaly scores of some rows of a split, in nats."""
    energies = []
    with evaluating(model):
        for x, _ in data.batches_of(split, rows.split(_BATCH)):
            x = x.to(model.device)
            h = model.latent(x)
            density = model.class_logits(h)[:, known].logsumexp(1)
            energies.append((model.reconstruction_error(h, x) - density).cpu())
    return torch.cat(energies)


def _of_forest(data: FederatedData, seed: int) -> dict[str, float]:
    """Return the scores of an isolation forest trained on the samples of all clients."""
    from sklearn.ensemble import IsolationForest

    rows = torch.cat([data.train_rows(client) for client in range(data.clients)])
    train, test = (split.x.flatten(1).float() for split in (data.train, data.test))
    forest = IsolationForest(random_state=seed_for(seed, "detection/forest") % 2**32)
    forest.fit(train[rows].numpy())
    scores = [torch.from_numpy(-forest.score_samples(x.numpy())) for x in (test, train[rows])]
    return detection_scores(scores[0], _unknown(data), scores[1])
