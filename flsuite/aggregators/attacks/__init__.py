"""Attacks by some of the clients."""
