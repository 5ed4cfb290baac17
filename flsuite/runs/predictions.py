"""Predictions of a run, as a table and as pictures."""

import csv
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import make_folder, replace_tensors
from flsuite.common.random import seed_process
from flsuite.common.state import plain
from flsuite.data.federated import FederatedData
from flsuite.data.loader import SplitLoader
from flsuite.federation.server.evaluation import Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.models.declarations import has_step, pictures
from flsuite.models.modes import evaluating

log = logging.getLogger("flsuite")

if TYPE_CHECKING:
    from PIL.Image import Image

_PICTURED = 10  # test samples
_LEAST_SIDE = 56  # pixels of a picture
_LETTERS = 18  # pixels of a label's height


def predict(
    federation: Federation, evaluator: Evaluator, folder: Path | None
) -> tuple[Any, list[Path]]:
    """Return predictions on the test split, and the files written.

    With a ``predict_step``, predictions are a list of its results per batch, or one such list per
    client if each client has its own model. Without it they are class probabilities
    ``(n, classes)`` of the global model, or the mean over the clients' models.

    Args:
        federation: The federation in its current state.
        evaluator: Runs the models of the federation.
        folder: Folder of the table and of the model's pictures. ``None`` writes nothing.

    Raises:
        FlsuiteError: If the model offers neither.
    """
    own = None
    if has_step(evaluator.model, "predict_step"):
        own = _own_predictions(federation, evaluator)
        if not evaluator.has_classes:
            return own, _kept(own, folder)
    elif not evaluator.has_classes:
        raise FlsuiteError(
            f"predict: {type(evaluator.model).__name__} offers no class probabilities; add a "
            "predict_step, or logits(x) for data whose targets are classes"
        )
    probabilities = class_probabilities(federation, evaluator)
    predictions = probabilities if own is None else own
    if folder is None:
        return predictions, []

    table = _write_predictions(folder, probabilities, federation.data)
    return predictions, [table, *_write_pictures(folder, _pictures(federation, evaluator))]


def class_probabilities(federation: Federation, evaluator: Evaluator) -> Tensor:
    """Return the class probabilities ``(n, classes)`` of the test data.

    They are those of the global model, or the mean over the clients' models.
    """
    total, clients = torch.zeros(()), _models(federation)
    for client in clients:
        evaluator.load(federation.client_state(client))
        total = total + evaluator.outputs(federation.data.test)["scores"]
    return total / len(clients)


def _models(federation: Federation) -> Sequence[int | None]:
    """Return the clients whose models predict, or ``None`` alone for the global model."""
    return federation.present() if federation.entries.personal else [None]


def _own_predictions(federation: Federation, evaluator: Evaluator) -> list[Any]:
    """Return the results of the model's ``predict_step``, one list per client model."""
    batches = SplitLoader(federation.data, federation.data.test, federation.data.batch_size)
    by_client = []
    for client in _models(federation):
        evaluator.load(federation.client_state(client))
        by_client.append(evaluator.predictions(batches))
    return by_client if federation.entries.personal else by_client[0]


def _kept(predictions: Any, folder: Path | None) -> list[Path]:
    """Write the results of a model's ``predict_step`` if they are plain data. Return the file."""
    if folder is None:
        return []
    path = make_folder(folder) / "predictions.pt"
    try:
        readable = plain(predictions, "predictions")
    except FlsuiteError as error:
        log.warning("%s was not written: %s", path, one_line(error))
        return []
    replace_tensors(readable, path)
    return [path]


def _pictures(federation: Federation, evaluator: Evaluator) -> dict[str, dict[str, Tensor]]:
    """Return the model's pictures of the first test samples, on the CPU.

    If each client has its own model, the first client's model is used.
    """
    # The same random draws in every run, for comparison.
    seed_process(0, "pictures", federation.clock.round)
    personal = federation.entries.personal
    evaluator.load(federation.client_state(federation.present()[0] if personal else None))
    data, model, device = evaluator.data, evaluator.model.to(evaluator.device), evaluator.device
    samples = federation.data.test.take(torch.arange(min(_PICTURED, len(data.test))))
    x, _ = next(iter(SplitLoader(data, samples, len(samples))))
    with evaluating(model), torch.inference_mode(), evaluator.precision():
        grids = pictures(model, x.to(device))
        return {
            name: {label: images.float().cpu() for label, images in grid.items()}
            for name, grid in grids.items()
        }


def _write_predictions(folder: Path, probabilities: Tensor, data: FederatedData) -> Path:
    """Write ``predictions.csv``: sample, target, prediction, and a probability per class.

    Classes are numbers. For multi-label samples, the cells list the labels that are set.
    """
    path = make_folder(folder) / "predictions.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = [f"p_{c}" for c in range(data.spec.num_classes)]
        writer.writerow(["sample", "target", "prediction", *columns])

        for sample, (row, target) in enumerate(zip(probabilities, data.test.y, strict=True)):
            if target.ndim:
                cells = [_set_labels(target), _set_labels(row >= 0.5)]
            else:
                cells = [str(int(target)), str(int(row.argmax()))]
            writer.writerow([sample, *cells, *(f"{p:.6f}" for p in row.tolist())])
    return path


def _write_pictures(folder: Path, grids: Mapping[str, Mapping[str, Tensor]]) -> list[Path]:
    """Write one PNG per grid, with a row of images ``(n, channels, height, width)`` per label."""
    paths = []
    for name, grid in grids.items():
        paths.append(folder / f"{name}.png")
        _labelled(grid).save(paths[-1])
    return paths


def _labelled(grid: Mapping[str, Tensor]) -> "Image":
    """Return the rows of a grid as one picture, each with its label on the left."""
    from PIL import Image, ImageDraw, ImageFont
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    rows = [_enlarge(images.clamp(0, 1)) for images in grid.values()]
    images = to_pil_image(make_grid(torch.cat(rows), nrow=len(rows[0]), pad_value=1.0))
    font = ImageFont.load_default(_LETTERS)
    width = int(max(font.getlength(label) for label in grid)) + _LETTERS
    picture = Image.new("RGB", (width + images.width, images.height), "white")
    picture.paste(images, (width, 0))

    height = images.height / len(rows)
    for row, label in enumerate(grid):
        place = width - _LETTERS / 2, (row + 0.5) * height
        ImageDraw.Draw(picture).text(place, label, "black", font, anchor="rm")
    return picture


def _set_labels(labels: Tensor) -> str:
    return " ".join(map(str, labels.nonzero().flatten().tolist()))


def _enlarge(images: Tensor) -> Tensor:
    """Enlarge small images by repeating their pixels."""
    # Rounded up, so that the side has at least _LEAST_SIDE pixels.
    factor = max(1, -(-_LEAST_SIDE // images.shape[-1]))
    return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
