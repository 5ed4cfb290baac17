"""The subcommands, each imported when it is called."""
