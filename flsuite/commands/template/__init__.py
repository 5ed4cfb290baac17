"""The files of ``flsuite new``: a model, its data and an experiment, for users to change."""
