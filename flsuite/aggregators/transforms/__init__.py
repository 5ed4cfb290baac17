"""Transforms of a client's change on its way to the server, one per file."""

from flsuite.aggregators import __getattr__ as __getattr__  # the names that users know
