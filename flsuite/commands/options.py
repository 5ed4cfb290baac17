"""The options that a subcommand adds to the model, the data and the trainer."""

_USUAL = {
    "config": "A config file. Several are read in order, and later keys win.",
    "seed_everything": "The run's seed, which determines all random numbers.",
    "plugins": "Your modules to import first, so that their classes have short names.",
}
_OF_A_RUN = {
    **_USUAL,
    "run_dir": "The run's folder.",
    "from_updates": "A run with keep_updates, whose trained client models are reused.",
    "print_config": "Print the resolved config and exit.",
}
_OUTPUT = {"output": "Where to write."}
OPTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), _OF_A_RUN),
    "schedule": _OF_A_RUN | _OUTPUT | {"ckpt_path": "Ignored; accepted from a config for fit."},
    "partition": _OF_A_RUN | _OUTPUT | {"ckpt_path": "Ignored; accepted from a config for fit."},
}
