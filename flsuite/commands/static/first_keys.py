"""The top-level keys of a config and of the command line."""

import ast
from functools import cache

from flsuite.commands.static.modules import lookup
from flsuite.commands.static.signatures import (
    Parameter,
    Signature,
    argument_docs,
    function_parameters,
    own_and_bases,
)

TRAINER = ("flsuite.trainer", "FederatedTrainer")
_HOME = "flsuite.commands.fit"  # imports the classes that the keys take
_CLASSES = {
    "model": ("LightningModule", "The model that every client trains."),
    "data": ("LightningDataModule", "The data of all clients."),
    "trainer": (TRAINER[1], "The federation."),
}
_OF_A_RUN = {
    "config": "A config file. Several are read in order, and later keys win.",
    "seed_everything": "The run's seed, which determines all random numbers.",
    "plugins": "Your modules to import first, so that their classes have short names.",
    "run_dir": "The run's folder.",
    "print_config": "Print the resolved config and exit.",
}
_OF_A_PICTURE = {
    **_OF_A_RUN,
    "output": "Where to write.",
    "ckpt_path": "Ignored; accepted from a config for fit.",
}
# The options that each subcommand adds to the model, the data and the trainer.
_OPTIONS = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), _OF_A_RUN),
    **dict.fromkeys(("schedule", "partition"), _OF_A_PICTURE),
}


@cache
def first_keys(command: str) -> Signature:
    """Return the keys of a subcommand."""
    known = {name: Parameter(_HOME, doc=doc) for name, doc in _OPTIONS[command].items()}
    for name, (base, doc) in _CLASSES.items():
        known[name] = Parameter(_HOME, ast.Name(base), doc=doc)
    for defined in own_and_bases(lookup(*TRAINER)):
        for node in defined.node.body if isinstance(defined.node, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and node.name == command:
                docs = argument_docs(ast.get_docstring(node))
                arguments = function_parameters(defined.module, node, docs)
                own = {k: v for k, v in arguments.items() if k not in ("model", "datamodule")}
                return Signature(known | own)
    return Signature(known)
