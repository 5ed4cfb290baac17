"""The split of a dataset and the predictions of a run, as tables."""

import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import escaped, make_folder, replace_tensors, unescaped
from flsuite.common.random import seed_process
from flsuite.common.state import plain
from flsuite.data.federated import DataSplit, FederatedData
from flsuite.data.loader import SplitLoader
from flsuite.data.tasks import TaskData
from flsuite.federation.server.evaluation import Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.models.abilities import has_step, pictures
from flsuite.models.modes import evaluating

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image


_COLUMNS = ("client", "split", "class", "samples")
_SPLITS = ("train", "val", "test")
_CLIENTS_AT_A_TIME = 10_000  # bounds memory


def write_partition(file: TextIO, data: FederatedData) -> None:
    """Write ``partition.csv``: client, split, class name and number of samples.

    For multi-label data, the number counts the positive samples per label.
    """
    cells = [f",{split},{_quoted(name)}," for split in _SPLITS for name in data.spec.names]
    # One template per client instead of one call per row: a million clients have millions of rows.
    of_client = "".join("%d" + cell.replace("%", "%%") + "%d\n" for cell in cells)

    file.write(",".join(_COLUMNS) + "\n")
    for first, counts in _counts(data):
        clients = torch.arange(first, first + len(counts))[:, None].expand_as(counts)
        numbers = torch.stack([clients, counts], dim=2).flatten().tolist()
        file.write(of_client * len(counts) % tuple(numbers))


def partition_table(data: FederatedData) -> "pd.DataFrame":
    """Return the content of a run's ``partition.csv``."""
    import pandas as pd

    text = io.StringIO()
    write_partition(text, data)
    text.seek(0)
    table = pd.read_csv(text, dtype={"class": str}, keep_default_na=False)
    return table.assign(**{"class": table["class"].map(unescaped)})


def task_table(data: TaskData) -> "pd.DataFrame":
    """Return the content of a run's ``tasks.csv``.

    Its columns are client, task, first round of the task, class name and number of training
    samples.
    """
    import pandas as pd

    names, rows = data.spec.names, []
    for client, groups in enumerate(data.sequences):
        counts = data.class_counts(client).tolist()
        for task, (group, start) in enumerate(zip(groups, data.starts, strict=True)):
            rows += [(client, task, start, names[c], counts[c]) for c in group]
    return pd.DataFrame(rows, columns=["client", "task", "first_round", "class", "samples"])


def _counts(data: FederatedData) -> Iterator[tuple[int, Tensor]]:
    """Yield the first client of each group, and the counts of the group.

    Counts are int64 ``(clients, splits * classes)``, ordered by split and then by class.
    """
    classes = data.spec.num_classes
    for first in range(0, data.clients, _CLIENTS_AT_A_TIME):
        last = min(first + _CLIENTS_AT_A_TIME, data.clients)
        splits = (data.train, data.val, data.test)
        of_splits = [_count(split, first, last, classes) for split in splits]
        yield first, torch.cat(of_splits, dim=1)


def _count(split: DataSplit | None, first: int, last: int, classes: int) -> Tensor:
    """Return the samples of each class per client, int64 ``(clients, classes)``."""
    counts = torch.zeros(last - first, classes, dtype=torch.int64)
    if split is None or not len(split.rows):
        return counts
    rows = split.rows.part(first, last)
    labels, owners = split.classes[rows.values], rows.owners()
    if labels.ndim == 1:
        return torch.bincount(owners * classes + labels, minlength=counts.numel()).view_as(counts)
    return counts.index_add_(0, owners, labels.long())


def _quoted(name: str) -> str:
    """Return a cell of a CSV file, escaped and quoted if necessary."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([escaped(name)])
    return line.getvalue()


log = logging.getLogger("flsuite")

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
