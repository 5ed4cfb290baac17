"""Loading of pretrained weights from a file."""

import hashlib
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import require_whole

log = logging.getLogger("flsuite")

_MUST_HOLD = (
    "it must be checkpoints/model.ckpt of a run, another Lightning checkpoint with a state_dict, "
    "or a state dict alone, as torch.save writes it"
)
_MOST_NAMED = 3
"""Maximum number of entries named in an error."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the weights of a file, by name.

    Args:
        path: A Lightning checkpoint, such as ``checkpoints/model.ckpt`` of a run, or a plain state
            dict saved by ``torch.save``. Nothing in it is executed.

    Raises:
        FlsuiteError: If the file does not exist, or is neither of the two.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FlsuiteError(f"there is no file {file} with pretrained weights; correct the path")
    try:
        if zipfile.is_zipfile(file):  # files of early torch versions are not zip files
            require_whole(file)
        # weights_only, because an untrusted pickle could run code.
        content = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file may raise any type
        raise FlsuiteError(
            f"{file} cannot be read as pretrained weights: {_MUST_HOLD} ({one_line(error, 80)})"
        ) from error

    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(weights, Mapping) or not weights:
        raise FlsuiteError(f"{file} has no weights: {_MUST_HOLD}")
    others = [str(name) for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise FlsuiteError(
            f"{file} is not a state dict: {_some(others)} are not tensors; {_MUST_HOLD}"
        )
    return dict(weights)


def file_digest(path: str) -> str:
    """Return a short digest of a file's content, which becomes part of the run's settings."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:12]


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a network.

    Names and shapes must match the network. The last linear layer keeps its own weights if it has
    another number of outputs, as for another number of classes.

    Args:
        network: The network, whose tensors are overwritten in place.
        weights: The weights by name.
        source: Name of the file, for messages.

    Raises:
        FlsuiteError: If an entry is missing, unknown, or of another shape.
    """
    # These tensors alias the network's.
    own = network.state_dict()
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    differing = [n for n in own if n in weights and own[n].shape != weights[n].shape]

    last = _of_last_layer(network)
    is_for_others = last <= {*differing} and all(
        own[name].shape[1:] == weights[name].shape[1:] for name in last
    )
    kept = last if is_for_others else set()
    shapes = [
        f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}"
        for name in differing
        if name not in kept
    ]

    reasons = [
        *([f"it has no {_some(missing)}"] if missing else []),
        *([f"the model has no {_some(unknown)}"] if unknown else []),
        *([f"of another shape are {_some(shapes)}"] if shapes else []),
    ]
    if reasons:
        raise FlsuiteError(
            f"the pretrained weights of {source} are of another model: {'; '.join(reasons)}; give "
            "weights of the same backbone"
        )

    for name in own.keys() - kept:
        own[name].copy_(weights[name])
    if kept:
        log.warning(
            "%s is for another number of classes: %s start at random", source, _some(sorted(kept))
        )


def _of_last_layer(network: nn.Module) -> set[str]:
    """Return the entries of the last linear layer. Empty if there is none."""
    linear = [name for name, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        return set()
    prefix = f"{linear[-1]}." if linear[-1] else ""
    return {prefix + name for name in network.get_submodule(linear[-1]).state_dict()}


def _some(names: list[str]) -> str:
    """Return the first names as text."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
