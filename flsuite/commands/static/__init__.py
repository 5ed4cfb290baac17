"""Checks of a request from source code alone, before torch and Lightning are imported."""
