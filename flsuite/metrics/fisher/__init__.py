"""Fisher information of a model on data: ``F = mean_n sum_c J_nc J_nc^T``.

``J_nc`` is the gradient of scalar c of sample n with respect to the parameters. The empirical
Fisher has one scalar per sample, the log-likelihood of its label. The true Fisher of the model's
prediction has one scalar per output, see :mod:`~flsuite.metrics.fisher.estimates`, and needs no
labels.
"""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.metrics.fisher.estimates import (
        Expectation as Expectation,
        full_fisher as full_fisher,
        measuring as measuring,
    )
    from flsuite.metrics.fisher.forms import (
        Estimator as Estimator,
        fisher_diagonal as fisher_diagonal,
        kfac_factors as kfac_factors,
        predictive_diagonal as predictive_diagonal,
        require_kfac as require_kfac,
    )
    from flsuite.metrics.fisher.products import gram_matrices as gram_matrices


__getattr__, __dir__ = on_first_use(__name__)
