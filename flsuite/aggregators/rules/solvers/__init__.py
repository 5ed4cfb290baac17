"""Minimisers of a quadratic that is the sum of the clients' quadratics around their models."""
