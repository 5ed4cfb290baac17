"""Names of experiments: the settings in which they differ, as text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Flat = dict[str, Any]
"""Settings by path: ``model`` is a class, ``model.lr`` one of its parameters."""


class _Class(str):
    """The path of a class. Labels show only the class name."""


def flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield path and value of each setting, with a class before its parameters."""
    if isinstance(node, Mapping) and "class_path" in node:
        yield path, _Class(node["class_path"])
        arguments = node.get("init_args")
        for key, value in arguments.items() if isinstance(arguments, Mapping) else ():
            # A mapping of plain values is one value, because another group may have a word there.
            yield from flatten(repr(value) if _is_plain(value) else value, f"{path}.{key}")
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from flatten(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        # Objects in a list are keyed by class name, so that labels can name them.
        for name, item in zip(_names(node), node, strict=True):
            yield from flatten(item, f"{path}.{name}")
    else:
        yield path, repr(node) if isinstance(node, (list, Mapping)) else node


def _is_plain(node: Any) -> bool:
    """Return whether an argument is a mapping of plain values."""
    return (
        isinstance(node, Mapping)
        and "class_path" not in node
        and not any(isinstance(value, (Mapping, list)) for value in node.values())
    )


def _names(items: Sequence[Any]) -> list[str]:
    """Return a name per item: its class if it has one, numbered from the second on."""
    names: list[str] = []
    for item in items:
        path = item.get("class_path", "") if isinstance(item, Mapping) else ""
        name = str(path).rsplit(".", 1)[-1]
        count = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
    return names


_PLAIN = {"Mean", "MixedMean", "Objective"}  # default parts of an algorithm


class Variation:
    """The settings in which groups differ.

    A parameter is compared only among groups that share the classes it belongs to.

    Args:
        all_settings: The settings of each group.
    """

    def __init__(self, all_settings: Sequence[Flat]) -> None:
        # The algorithm first, because it is what most tables compare.
        self.keys = sorted(_keys(all_settings), key=lambda key: not _is_of(key, "aggregator"))
        self._owners = {key: _owners(key) for key in self.keys}
        self._values: dict[tuple[str, ...], set[str]] = {}
        for own in all_settings:
            for key in self.keys:
                self._values.setdefault(self._peers(key, own), set()).add(repr(own.get(key)))

    def differs(self, key: str, own: Flat) -> bool:
        """Return whether groups with the same owner of this setting differ in it."""
        return len(self._values[self._peers(key, own)]) > 1

    def texts(self, own: Flat, keep: Callable[[str], bool] = lambda key: True) -> list[str]:
        """Return the settings in which a group differs as text, if ``keep`` accepts their path."""
        keys = [key for key in self.keys if keep(key) and self.differs(key, own)]
        return [
            self.algorithm(own) if key == "aggregator" else setting_text(key, own.get(key), keys)
            for key in keys
        ]

    def algorithm(self, own: Flat) -> str:
        """Return the aggregator with its non-default parts, except those that differ."""
        names = [_last(own.get("aggregator", "run"))]
        for key, value in own.items():
            owner, _, part = key.partition(".")
            is_part = owner == "aggregator" and part.removeprefix("transforms.").isidentifier()
            if is_part and isinstance(value, _Class) and not self.differs(key, own):
                names += [_last(value)] if _last(value) not in _PLAIN else []
        return " + ".join(names)

    def _peers(self, key: str, own: Flat) -> tuple[str, ...]:
        return (key, *(repr(own.get(owner)) for owner in self._owners[key]))


def label_of(own: Flat, variation: Variation) -> str:
    """Return the settings in which a group differs from the others, as text."""
    return ", ".join(variation.texts(own)) or "all"


def method_of(own: Flat, variation: Variation) -> str:
    """Return the aggregator, and other differing settings outside of the data."""
    parts = variation.texts(own, lambda key: key != "aggregator" and not _is_data(key))
    return ", ".join([variation.algorithm(own), *parts])


def data_texts(own: Flat, variation: Variation) -> list[str]:
    """Return the settings of the data in which a group differs from the others, as text."""
    return variation.texts(own, _is_data)


def partition_of(own: Flat, variation: Variation) -> str:
    """Return the partition, and other differing settings of the data.

    The first parameter of a partition, such as alpha, is always named.
    """
    place = next((key for key in own if _is_data(key) and _last(key) == "partition"), None)
    parts = variation.texts(
        own, lambda key: _is_data(key) and not f"{key}.".startswith(f"{place}.")
    )
    if place is None:
        return ", ".join(parts) or _last(own.get("data", "data"))

    named = [key for key in own if key.startswith(f"{place}.")]
    shown = named[:1] + [key for key in named[1:] if variation.differs(key, own)]
    values = ", ".join(f"{_last(key)}={own[key]}" for key in shown)
    name = _last(own[place] or "IID")  # the default of every data module
    return ", ".join([f"{name}({values})" if values else name, *parts])


def setting_text(key: str, value: Any, keys: Iterable[str]) -> str:
    """Return a setting as text, with its whole path if another key has the same name."""
    if isinstance(value, _Class):
        return shown_value(value)
    last = _last(key)
    name = last if sum(_last(other) == last for other in keys) == 1 else key
    return f"{name}={shown_value(value)}"


def differing(all_settings: Sequence[Flat]) -> list[str]:
    """Return the paths of the settings in which any two groups differ."""
    return [
        key
        for key in _keys(all_settings)
        if len({repr(settings.get(key)) for settings in all_settings}) > 1
    ]


def shown_value(value: Any) -> str:
    """Return a setting's value as text on one line. For a class, it is the name."""
    return _last(value) if isinstance(value, _Class) else " ".join(str(value).split())


def _keys(all_settings: Sequence[Flat]) -> list[str]:
    return list(dict.fromkeys(key for settings in all_settings for key in settings))


def _is_data(key: str) -> bool:
    return _is_of(key, "data")


def _is_of(key: str, owner: str) -> bool:
    return key == owner or key.startswith(f"{owner}.")


def _last(path: object) -> str:
    """Return the last part of the path of a class or a setting."""
    return str(path).rsplit(".", 1)[-1]


def _owners(key: str) -> list[str]:
    """Return the paths of the classes that a setting may belong to."""
    if key == "monitor":  # its default depends on the scores, and on who has a model of its own
        return ["model", "model.private", "aggregator", "data.val_fraction"]
    parts = key.split(".")
    owners = [".".join(parts[:n]) for n in range(1, len(parts))]
    # A digest tells data of one class apart. Another class has other content anyway.
    return [*owners, f"{owners[-1]}.data"] if parts[1:] and parts[-1] == "content" else owners
