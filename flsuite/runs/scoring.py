"""The part of the trainer that scores and predicts, and gives access to its run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor

from flsuite.common.errors import FlsuiteError, log, one_line
from flsuite.common.files import make_folder, replace_tensors
from flsuite.common.messages import Split
from flsuite.common.random import seed_process
from flsuite.common.state import plain
from flsuite.data.federated import FederatedData
from flsuite.data.loader import SplitLoader
from flsuite.federation.server.evaluation import GLOBAL, Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.models.abilities import has_step, pictures
from flsuite.models.modes import evaluating
from flsuite.runs.run import Run
from flsuite.runs.session import left_on_cpu
from flsuite.runs.summary import print_scores

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image


_PICTURED = 10  # test samples
_LEAST_SIDE = 56  # pixels of a picture
_LETTERS = 18  # pixels of a label's height


class ScoringTrainer(Trainer, ABC):
    """A Trainer that scores the federation of a run.

    Attributes:
        run: The run of the last fit, or of the last request for scores.
    """

    run: Run | None = None
    datamodule: LightningDataModule | None
    _run_dir: Path | None = None  # as requested
    _scores: dict[str, float]  # of validate and test

    @abstractmethod
    def prepare(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> Run:
        """Build everything that a round needs, without writing anything."""

    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Score on validation data. The arguments are the same as for :meth:`test`."""
        return self._score("val", model, datamodule, ckpt_path, verbose)

    def test(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Score on test data.

        Args:
            model: Not needed after a fit.
            datamodule: Not needed after a fit.
            ckpt_path: ``last``, ``best`` (the round picked on validation data) or a path. Default:
                the state after a fit, else ``last`` in ``run_dir``, else the unchanged model.
            verbose: Whether to print the global scores.

        Returns:
            The global scores, then one dict per client.
        """
        return self._score("test", model, datamodule, ckpt_path, verbose)

    def predict(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> Any:
        """Return predictions on the test split. The arguments are the same as for :meth:`test`.

        For a model with its own ``predict_step`` the result is Lightning's: a list with one
        prediction per batch, or one such list per client if each has its own model. Otherwise the
        result is class probabilities ``(n, classes)``, averaged over the clients' models if there
        are several.

        Class probabilities are written to ``predictions.csv`` in the run's folder, with the model's
        pictures. Other predictions are written to ``predictions.pt``.
        """
        run = self._restored(model, datamodule, ckpt_path)
        with left_on_cpu(run.evaluator.model):
            predictions, paths = predict(run.federation, run.evaluator, run.folder.path)
        if run.options.show and paths:
            print(f"predictions of round {run.round}: {', '.join(map(str, paths))}")
        return predictions

    @property
    def run_dir(self) -> Path | None:
        """Return the run's folder, or the requested one before the first fit."""
        return self.run.folder.path if self.run else self._run_dir

    @property
    def results(self) -> "pd.DataFrame | None":
        """Return the global numbers of each scored round, or ``None`` before the first fit.

        Rows are rounds, and columns are named as in :attr:`callback_metrics`. To plot it:
        ``trainer.results.plot(y=["val/accuracy", "test/accuracy"])``.
        """
        if self.run is None:
            return None
        import pandas as pd  # not needed during a run

        rounds = self.run.folder.table.by_round()
        return pd.DataFrame.from_dict(rounds, orient="index").rename_axis("round")

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Return the latest global numbers as ``<split>/<metric>``, such as ``val/accuracy``.

        Scores from :meth:`validate` and :meth:`test` replace scores from the fit.
        """
        numbers = {**self.run.folder.table.latest, **self._scores} if self.run else {}
        return {name: torch.tensor(value) for name, value in numbers.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Return :attr:`callback_metrics`, all of which go to the loggers."""
        return self.callback_metrics

    def _restored(
        self,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
    ) -> Run:
        """Return the run in the requested state."""
        run = self.run
        ours = {"model": self.lightning_module, "data": self.datamodule}
        if run is None:
            if model is None or datamodule is None:
                raise FlsuiteError("nothing has been fitted yet: pass model, datamodule, ckpt_path")
            if self._run_dir is None and ckpt_path not in (None, "last", "best"):
                self._run_dir = Path(str(ckpt_path)).parent.parent
            ckpt_path = ckpt_path or ("last" if self._run_dir else None)
            run = self.prepare(model, datamodule, ckpt_path)
            if ckpt_path is None:
                return run
        elif model not in (None, ours["model"]) or datamodule not in (None, ours["data"]):
            raise FlsuiteError("this trainer holds another federation: make a new FederatedTrainer")
        elif ckpt_path is None and (run.round or not self._run_dir):
            return run
        checkpoint = run.folder.find_checkpoint(ckpt_path or "last")
        if checkpoint is None:
            raise FlsuiteError(
                f"there is no last.ckpt in {run.folder.checkpoints}: fit first, or name another "
                "checkpoint with ckpt_path, such as best"
            )
        run.store.restore(checkpoint, to_train=False)
        return run

    def _score(
        self,
        split: Split,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        run = self._restored(model, datamodule, ckpt_path)
        federation = run.federation
        with left_on_cpu(run.evaluator.model):
            scores = run.evaluator.scores(federation, split, federation.present(), details=True)
        if not scores:
            of_val = "set data.val_fraction above 0", "validation_step"
            data, step = of_val if split == "val" else ("give the data a test split", "test_step")
            raise FlsuiteError(
                f"there is no {split} data, or the model has no scores: {data}, or add a {step} "
                "that returns a loss"
            )
        whole = scores.pop(GLOBAL)
        self._scores |= {f"{split}/{name}": value for name, value in whole.items()}
        if run.options.show and verbose:
            print_scores(whole, split, run.round, run.summary.monitor)
        return [whole, *scores.values()]


def predict(
    federation: Federation, evaluator: Evaluator, folder: Path | None
) -> tuple[Any, list[Path]]:
    """Return predictions on the test split, see :meth:`ScoringTrainer.predict`, and their files.

    Args:
        federation: The federation in its current state.
        evaluator: Runs the models of the federation.
        folder: Folder of the table and of the model's pictures. ``None`` writes nothing.

    Raises:
        FlsuiteError: If the model offers neither a ``predict_step`` nor class probabilities.
    """
    own = None
    if has_step(evaluator.model, "predict_step"):
        own = _own_predictions(federation, evaluator)
        if not evaluator.has_classes:
            return own, [] if folder is None else _write_own(own, folder)
    elif not evaluator.has_classes:
        raise FlsuiteError(
            f"predict: {type(evaluator.model).__name__} offers no class probabilities; add a "
            "predict_step, or logits(x) for data whose targets are classes"
        )
    probabilities, by_client = class_probabilities(federation, evaluator)
    predictions = probabilities if own is None else own
    if folder is None:
        return predictions, []

    paths = [_write_probabilities(make_folder(folder), probabilities, by_client, federation.data)]
    for name, grid in _pictures(federation, evaluator).items():
        paths.append(folder / f"{name}.png")
        _labelled(grid).save(paths[-1])
    return predictions, paths


def class_probabilities(
    federation: Federation, evaluator: Evaluator
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the class probabilities ``(n, classes)`` of the test data.

    The first are those of the global model, or the mean over the clients' models. The others are
    those of each client's own model on the client's part, if clients have models of their own.
    """
    total, clients, by_client = torch.zeros(()), _models(federation), {}
    for client in clients:
        evaluator.load(federation.client_state(client))
        scores = evaluator.outputs(federation.data.test)["scores"]
        total = total + scores
        if client is not None:
            by_client[client] = scores[federation.data.test.rows[client]]
    return total / len(clients), by_client


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


def _write_own(predictions: Any, folder: Path) -> list[Path]:
    """Write the results of a model's ``predict_step`` if they are plain data. Return the file."""
    path = make_folder(folder) / "predictions.pt"
    try:
        replace_tensors(plain(predictions, "predictions"), path)
    except FlsuiteError as error:
        log.warning("%s was not written: %s", path, one_line(error))
        return []
    return [path]


def _write_probabilities(
    folder: Path, probabilities: Tensor, by_client: Mapping[int, Tensor], data: FederatedData
) -> Path:
    """Write ``predictions.csv``, a row per sample and model.

    Its columns are ``sample, client, model, target, prediction``, and a probability per class.
    ``sample`` is the number in the published samples, as in the CSV file of ``FromFile``.
    ``client`` is the one whose part of the test data has the sample, empty for none. ``model`` is
    ``global``, ``mean`` over the clients' models, or the number of the client whose model it is.

    Args:
        folder: The folder.
        probabilities: Of all samples.
        by_client: Of the samples of each client, by its own model.
        data: The data.
    """
    import pandas as pd  # not needed during a run

    clients = pd.Series(data.test.rows.client_of(len(data.test)), dtype="Int64")
    clients = clients.where(clients >= 0)
    tables = []

    def add(model: int | str, rows: Tensor, scores: Tensor) -> None:
        columns = [f"p_{c}" for c in range(data.spec.num_classes)]
        table = pd.DataFrame(scores.double().cpu().numpy(), rows.tolist(), columns)
        target, prediction = _predicted(data.test.y[rows], scores)
        names = {"client": clients[table.index], "model": model}
        tables.append(table.assign(**names, target=target, prediction=prediction))

    add("mean" if by_client else "global", torch.arange(len(data.test)), probabilities)
    for client, scores in by_client.items():
        add(client, data.test.rows[client], scores)
    table = pd.concat(tables)
    names = ["client", "model", "target", "prediction"]
    path = folder / "predictions.csv"
    if data.test.numbers is not None:
        table.index = data.test.numbers[table.index.to_numpy(copy=True)].tolist()
    table[[*names, *table.columns.drop(names)]].to_csv(
        path, index_label="sample", float_format="%.6f"
    )
    return path


def _predicted(targets: Tensor, probabilities: Tensor) -> tuple[list[Any], list[Any]]:
    """Return targets and predictions as numbers of classes, or as lists of the labels set."""
    if targets.ndim == 1:
        return targets.tolist(), probabilities.argmax(1).tolist()

    def set_labels(samples: Tensor) -> list[str]:
        return [" ".join(map(str, row.nonzero().flatten().tolist())) for row in samples]

    return set_labels(targets), set_labels(probabilities >= 0.5)


def _pictures(federation: Federation, evaluator: Evaluator) -> dict[str, dict[str, Tensor]]:
    """Return the model's pictures of the first test samples, on the CPU.

    If each client has its own model, the first client's model is used.
    """
    # The same random draws in every run, for comparison.
    seed_process(0, "pictures", federation.clock.round)
    evaluator.load(federation.client_state(_models(federation)[0]))
    data, model, device = evaluator.data, evaluator.model.to(evaluator.device), evaluator.device
    samples = federation.data.test.take(torch.arange(min(_PICTURED, len(data.test))))
    x, _ = next(iter(SplitLoader(data, samples, len(samples))))
    with evaluating(model), torch.inference_mode(), evaluator.precision():
        grids = pictures(model, x.to(device))
        return {
            name: {label: images.float().cpu() for label, images in grid.items()}
            for name, grid in grids.items()
        }


def _labelled(grid: Mapping[str, Tensor]) -> "Image":
    """Return a picture with a row of images ``(n, channels, height, width)`` per label."""
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


def _enlarge(images: Tensor) -> Tensor:
    """Enlarge small images by repeating their pixels."""
    # Rounded up, so that the side has at least _LEAST_SIDE pixels.
    factor = max(1, -(-_LEAST_SIDE // images.shape[-1]))
    return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
