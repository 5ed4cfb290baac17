"""One client's fit."""
