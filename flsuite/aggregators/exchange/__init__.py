"""Compression codecs for client updates, and secure aggregation."""
