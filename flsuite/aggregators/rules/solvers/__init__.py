"""Minimizers of the sum of the clients' quadratics around their models."""
