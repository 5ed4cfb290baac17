"""Client selection by what earlier updates have shown: power-of-choice, and Oort's utility."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Range, Settings, Share
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.federation.schedules.base import Clock
from flsuite.federation.schedules.launcher import Launcher

ShareOrNumber = Annotated[
    int | float,
    Range(
        "a share above 0 and at most 1.0, or a whole number of clients",
        lambda x: 0 < x <= 1 if isinstance(x, float) else x >= 1,
        (("exclusiveMinimum", 0),),
    ),
]


class Selection(ABC):
    """Chooses the cohort of a round, by default by what arrived from clients before.

    Attributes:
        last: By client, what its last valid update showed: its mean training loss, its samples, its
            round, and the virtual seconds of its fit (0 if they were measured).
        silent: Clients whose last fit has not been answered, and the version that it started from.
        reads_updates: Whether the cohort depends on what clients have sent.
    """

    reads_updates = True

    def configure(self, sizes: Sequence[int], cohort: int) -> None:
        """Prepare for a run.

        Args:
            sizes: Training samples of each client.
            cohort: Clients per round.

        Raises:
            FlsuiteError: If these clients cannot satisfy the settings.
        """
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.last: dict[int, tuple[float, int, int, float]] = {}
        self.silent: dict[int, int] = {}

    @abstractmethod
    def choose(self, number: int, clock: Clock, launcher: Launcher, attempt: int) -> list[int]:
        """Return the clients of the next cohort, ascending.

        Args:
            number: Number of clients.
            clock: The clock.
            launcher: Draws clients that are available.
            attempt: Number of earlier draws from this version.
        """

    def started(self, clients: Sequence[int], version: int) -> None:
        """Register the fits of a cohort, which are silent until their updates arrive."""
        self.silent |= dict.fromkeys(clients, version)

    def left_out(self, client: int) -> None:
        """Register a client that was late, and so has not failed."""
        self.silent.pop(client, None)

    def arrived(self, update: ClientUpdate, seconds: float) -> None:
        """Register a valid update, and the virtual seconds of its fit."""
        loss = float(update.metrics.get("loss", math.nan))
        # A fit without a loss counts as 0, so that clients with a loss come first.
        loss = loss if math.isfinite(loss) else 0.0
        self.last[update.client] = (loss, update.samples, update.round, seconds)
        self.silent.pop(update.client, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs, as plain data."""
        last = {client: list(seen) for client, seen in self.last.items()}
        return {"last": last, "silent": dict(self.silent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.last = {client: tuple(seen) for client, seen in state["last"].items()}
        self.silent = dict(state["silent"])


def at_random(weights: np.ndarray | None = None) -> Selection:
    """Return the draw of a cohort at random, whatever clients have sent.

    Args:
        weights: Unnormalized probabilities of all clients. Default: equal.
    """
    return _Draw(weights)


class _Draw(Selection):
    reads_updates = False

    def __init__(self, weights: np.ndarray | None) -> None:
        self._weights = weights

    def choose(self, number: int, clock: Clock, launcher: Launcher, attempt: int) -> list[int]:
        return launcher.draw(number, clock, attempt, weights=self._weights)

    def started(self, clients: Sequence[int], version: int) -> None:
        return

    def left_out(self, client: int) -> None:
        return

    def arrived(self, update: ClientUpdate, seconds: float) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def _rounded_up(number: float) -> int:
    # 0.07 * 100 is a little more than 7.
    return math.ceil(round(number, 9))


@dataclass
class PowerOfChoice(Selection, Settings):
    """Cho, Wang and Joshi 2020, section 3: of some candidates, those with the highest loss.

    Take it to learn faster from the clients that are served worst.

    Towards Understanding Biased Client Selection in Federated Learning, arXiv:2010.01243. This is
    the variant rpow-d, which takes the mean training loss of a client's last fit, so that nobody
    computes or sends anything for the selection. Clients that have not been chosen yet come first,
    and those whose last fit failed come last. The paper weights the cohort equally, because sizes
    count in the draw: set the aggregator's ``weighting`` to ``uniform`` for this.

    Args:
        candidates: Number ``d`` of candidates, or their share of all clients. They are drawn with
            probabilities in proportion to their training samples.
    """

    candidates: ShareOrNumber = 0.5

    def configure(self, sizes: Sequence[int], cohort: int) -> None:
        super().configure(sizes, cohort)
        is_share = isinstance(self.candidates, float)
        share = _rounded_up(self.candidates * len(sizes))
        self._number = share if is_share else int(self.candidates)
        if not cohort <= self._number <= len(sizes):
            raise FlsuiteError(
                f"PowerOfChoice: candidates {self.candidates} of {len(sizes)} clients comes to "
                f"{self._number}, and a round has {cohort} clients; set candidates between them"
            )

    def choose(self, number: int, clock: Clock, launcher: Launcher, attempt: int) -> list[int]:
        drawn = launcher.draw(self._number, clock, attempt, weights=self.sizes)
        return sorted(sorted(drawn, key=lambda client: (-self._loss(client), client))[:number])

    def _loss(self, client: int) -> float:
        if client in self.silent:
            return -math.inf  # a client that fails every time must not be chosen every time
        return self.last[client][0] if client in self.last else math.inf


@dataclass
class Oort(Selection, Settings):
    """Lai et al. 2021, algorithm 1: clients by their utility, and some that are new.

    Take it if time to a target matters, and clients differ in speed.

    Oort: Efficient Federated Learning via Guided Participant Selection, arXiv:2010.06081. The
    utility of a client is its samples times its last mean loss, plus ``sqrt(0.1 ln R / L)`` times
    the largest one for a client whose last round is ``L`` of ``R``, times ``(T / t)^penalty`` for a
    client whose fit takes ``t`` virtual seconds, more than ``T`` (eq. 2). In place of the mean, the
    paper has the root mean square of the samples' losses, which clients do not report here. The
    pacer, which moves ``T``, and the cap on the number of a client's rounds are left out.

    Args:
        exploration: Share of the cohort for clients that have not trained yet, while there are any.
        preferred_seconds: ``T``. Default: slow clients are not penalized.
        penalty: Exponent of the penalty, ``alpha``.
    """

    exploration: Share = 0.2
    preferred_seconds: PositiveFloat | None = None
    penalty: NonNegativeFloat = 2.0

    def choose(self, number: int, clock: Clock, launcher: Launcher, attempt: int) -> list[int]:
        tried = self.last.keys() | self.silent.keys()
        known = launcher.available(sorted(tried), clock)
        new = len(self.sizes) - len(tried)
        wanted = min(new, max(_rounded_up(self.exploration * number), number - len(known)))
        explored = launcher.draw(wanted, clock, attempt, busy=tried) if wanted else []

        utilities = self._utilities(known, clock.round + 1)
        # Failed clients come last, the one that was chosen longest ago first.
        best = sorted(known, key=lambda c: (-utilities[c], self.silent.get(c, -1), c))
        return sorted([*explored, *best[: number - len(explored)]])

    def _utilities(self, clients: Sequence[int], round: int) -> dict[int, float]:
        answering = [client for client in clients if client not in self.silent]
        statistical = {c: self.last[c][1] * self.last[c][0] for c in answering}
        largest = max(statistical.values(), default=0.0)
        utilities = {
            client: (value + largest * self._staleness(client, round)) * self._speed(client)
            for client, value in statistical.items()
        }
        return dict.fromkeys(clients, -math.inf) | utilities

    def _staleness(self, client: int, round: int) -> float:
        return math.sqrt(0.1 * math.log(round) / self.last[client][2])

    def _speed(self, client: int) -> float:
        seconds, preferred = self.last[client][3], self.preferred_seconds
        is_slow = preferred is not None and seconds > preferred
        return (preferred / seconds) ** self.penalty if is_slow and preferred else 1.0
