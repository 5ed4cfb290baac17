"""Byzantine-robust rules, which tolerate clients that send anything."""

from flsuite.aggregators import __getattr__ as __getattr__  # the names that users know
