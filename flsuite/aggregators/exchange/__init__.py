"""Secure sums of client updates."""
