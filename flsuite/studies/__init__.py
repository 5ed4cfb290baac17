"""Experiments of single papers. Nothing else imports this package."""
