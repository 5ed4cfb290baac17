"""The federation: its state, its evaluation, and what its clients keep."""
