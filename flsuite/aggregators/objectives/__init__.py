"""Terms that clients minimize in addition to their loss, one per file."""

from flsuite.aggregators import __getattr__ as __getattr__  # the names that users know
