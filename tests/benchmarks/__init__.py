"""Benchmarks: both sides alternate in one run, and medians and ratios are reported; nothing here is a test."""
