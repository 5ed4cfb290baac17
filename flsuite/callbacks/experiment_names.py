"""Names of a run for loggers, from its settings."""

from collections.abc import Mapping
from typing import Any

__all__ = ["group_name", "run_name", "tags"]

_LONGEST = 64  # characters of a tag in W&B


def run_name(settings: Mapping[str, Any]) -> str:
    """Return the method and the seed, such as ``FedProx-1``."""
    return f"{_class_name(settings['aggregator'])}-{settings['seed']}"


def group_name(settings: Mapping[str, Any]) -> str:
    """Return the method and a hash that runs share if they differ in nothing but the seed.

    For example ``FedProx-1a2b3c4d``. Groups are those of ``flsuite report``.
    """
    from flsuite.analysis.groups import experiment_hash  # pandas is of no use before

    return f"{_class_name(settings['aggregator'])}-{experiment_hash(settings)}"


def tags(settings: Mapping[str, Any]) -> list[str]:
    """Return the dataset and the partition, such as ``retinamnist`` and ``Dirichlet(0.05)``."""
    arguments = settings["data"].get("init_args", {})
    dataset = arguments.get("name") or _class_name(settings["data"])
    partition = arguments.get("partition")
    found = [str(dataset), *([_with_value(partition)] if isinstance(partition, Mapping) else [])]
    return [tag[:_LONGEST] for tag in found]


def _class_name(description: Mapping[str, Any]) -> str:
    return str(description["class_path"]).rsplit(".", 1)[-1]


def _with_value(description: Mapping[str, Any]) -> str:
    """Return a class with its first argument, which is the one that every use of it sets."""
    arguments = description.get("init_args", {})
    first = next((value for value in arguments.values() if value is not None), None)
    return _class_name(description) + ("" if first is None else f"({first})")
