"""Rules that combine the updates of a round into one model, one per file."""

from flsuite.aggregators import __getattr__ as __getattr__  # the names that users know
