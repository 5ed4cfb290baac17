"""Fisher information of a model on data: ``F = mean_n sum_c J_nc J_nc^T``.

``J_nc`` is the gradient of scalar c of sample n with respect to the parameters. The empirical
Fisher has one scalar per sample, the log-likelihood of its label. The true Fisher of the model's
prediction has one scalar per output, see :mod:`~flsuite.metrics.fisher.estimates`, and needs no
labels.
"""

from flsuite.metrics.fisher.empirical import Estimator, fisher_diagonal
from flsuite.metrics.fisher.estimates import Expectation, full_fisher, measuring
from flsuite.metrics.fisher.predictive import kfac_factors, predictive_diagonal, require_kfac
from flsuite.metrics.fisher.products import gram_matrices

__all__ = [
    "Estimator",
    "Expectation",
    "fisher_diagonal",
    "full_fisher",
    "gram_matrices",
    "kfac_factors",
    "measuring",
    "predictive_diagonal",
    "require_kfac",
]
