"""Benchmarks, which are no tests: both sides alternate in one run; see ``__main__``."""
