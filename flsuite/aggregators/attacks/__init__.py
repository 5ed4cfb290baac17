"""Attacks by some of the clients, one per file."""
