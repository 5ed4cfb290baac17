"""How many examples a fuzz test takes.

In a test session they are few and always the same. ``FLSUITE_FUZZ=all`` takes five times as many,
and ``FLSUITE_FUZZ=N`` takes N random ones instead.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

__all__ = ["fuzzed"]


def fuzzed(examples: int) -> Any:
    """Return the settings of a fuzz test."""
    chosen = os.environ.get("FLSUITE_FUZZ", "few")
    campaign = int(chosen) if chosen not in ("few", "all") else None
    return settings(
        max_examples=campaign or (examples if chosen == "all" else max(2, examples // 5)),
        derandomize=campaign is None,
        database=None,
        deadline=None,
        # Shrinking repeats a run many times. A campaign has the time for it.
        phases=(Phase.explicit, Phase.generate, *([Phase.shrink] if campaign else [])),
        suppress_health_check=list(HealthCheck),
    )
