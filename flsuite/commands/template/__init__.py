"""What ``flsuite new`` writes: a model, its data and an experiment, as files to be changed."""
