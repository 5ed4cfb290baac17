"""The options that a subcommand adds to the model, the data and the trainer."""

_USUAL = {
    "config": "A config file. Several are read in their order, and later keys win.",
    "seed_everything": "The run's seed, which decides everything random.",
    "plugins": "Modules of yours to import first, whose classes then go by short names.",
}
_OF_A_RUN = {
    **_USUAL,
    "run_dir": "The run's folder.",
    "from_updates": "A run whose clients' trained models are used again; it had keep_updates.",
    "print_config": "Print the resolved config, and do nothing.",
}
_OUTPUT = {"output": "Where to write."}
OPTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), _OF_A_RUN),
    "schedule": _OF_A_RUN | _OUTPUT | {"ckpt_path": "Of a config for fit, and of no effect."},
    "partition": _OF_A_RUN | _OUTPUT | {"ckpt_path": "Of a config for fit, and of no effect."},
}
