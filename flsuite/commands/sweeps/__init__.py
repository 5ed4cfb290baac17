"""Sweeps: methods x grid x seeds as a queue of run folders."""
