"""One run, on disk and in time."""
