"""The lower and the upper baseline of federated learning: no exchange, and pooled data."""

from flsuite.aggregators.aggregator import Aggregator


class LocalOnly(Aggregator):
    """The lower baseline: every entry is private, so each client trains alone."""

    needs = frozenset()  # nothing is averaged

    def __init__(self) -> None:
        super().__init__(private=["*"])


class Centralized(Aggregator):
    """The upper baseline: one client with the training samples of all clients.

    In each round, one fit replaces the fits of the cohort. It draws batches from the union of all
    clients' training samples, and takes as many steps as the cohort does in total.
    """

    pools = True
    needs = frozenset()
    withholds = {"clients": "trains on pooled data, without clients"}

    def __init__(self) -> None:
        super().__init__()
