"""Evaluation of a model, on a whole split and on a client's part of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from flsuite.aggregators.attacks.base import Attack
from flsuite.common.lightning_internals import loss_of, make_slim, take_logged_means
from flsuite.common.messages import OwnScores, Scores, Split
from flsuite.common.random import seed_process
from flsuite.common.score_names import score_name
from flsuite.common.state import State, load_
from flsuite.data.federated import DataSplit, FederatedData
from flsuite.data.loader import SplitLoader
from flsuite.federation.client.entries import ResidentModel
from flsuite.federation.client.trainer import quiet_lightning, raising_interrupts
from flsuite.metrics.scores import class_accuracy, scores
from flsuite.models.abilities import class_outputs, has_step, scores_by_columns, scores_by_steps
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.models.modes import evaluating, kept_modes

_SCORING_ARGUMENTS = (  # Lightning Trainer arguments that affect scoring
    "accelerator",
    "benchmark",
    "deterministic",
    "devices",
    "inference_mode",
    "plugins",
    "precision",
    "strategy",
)


_RETURNED = "flsuite/returned_loss"
_Logged = dict[int | None, dict[str, float]]  # by client, and on the whole split


class _BatchEnds(Callback):
    """Logs the loss that a step returns, and divides what is logged among parts of a split.

    Attributes:
        ends: The number of batches up to the end of each part.
        parts: What was logged in each part so far, see :func:`take_logged_means`.
    """

    def __init__(self) -> None:
        self.ends: Sequence[int] = ()
        self.parts: list[_Part | None] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loss = loss_of(outputs)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            pl_module.log(_RETURNED, loss)
        if batch_idx + 1 in self.ends and None not in self.parts:
            self.parts.append(take_logged_means(trainer))

    on_test_batch_end = on_validation_batch_end


class _EvaluationSteps:
    """Runs a model's own evaluation steps, and returns what they log.

    Lightning reduces the logged values as usual: by a mean over batches weighted by their sizes, by
    a metric's own reduction, or in the model's hooks. If a step logs nothing, the loss that it
    returns counts.

    Args:
        model: The resident model.
        trainer_kwargs: Arguments of each client's Lightning Trainer.

    Attributes:
        names: The names of all logged values, in order, as keys.
        silent: The splits that no step has logged anything of.
    """

    def __init__(self, model: LightningModule, trainer_kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self._kwargs = {k: v for k, v in trainer_kwargs.items() if k in _SCORING_ARGUMENTS}
        self.names: dict[str, None] = {}
        self.silent: set[Split] = set()
        self._ends = _BatchEnds()
        self._indivisible: set[Split] = set()

    def metrics(self, split: Split, batches: SplitLoader) -> dict[str, float]:
        """Return the values that the step logs, with the same names for both splits.

        Args:
            split: ``test`` runs ``test_step``, and ``val`` runs ``validation_step``. If one of them
                is missing or logs nothing, the other is used.
            batches: The samples.
        """
        tried = (_as_scores(self._run(step, batches), split) for step in self._of(split))
        logged = next(filter(None, tried), {})
        if not logged:
            self.silent.add(split)
        return self._defined(logged)

    def by_part(self, split: Split, batches: SplitLoader) -> list[dict[str, float]]:
        """Return the values on all samples, and on each part, from one pass over the samples.

        Returns:
            Nothing if a value is not a mean over samples, or is logged elsewhere than in the step.
        """
        if split in self._indivisible:
            return []
        self._ends.ends, self._ends.parts = batches.ends, []
        try:
            logged = self._run(self._of(split)[0], batches)
        finally:
            self._ends.ends = ()
        if not _are_whole(parts := self._ends.parts, logged, len(batches.ends)):
            self._indivisible.add(split)
            return []
        whole = [part for part in parts if part]
        means = [{name: mean for name, (mean, _) in part.items()} for part in whole]
        return [self._defined(_as_scores(one, split)) for one in (_joined(whole), *means)]

    def _defined(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Return the values without those that are undefined, like flsuite's own scores."""
        self.names.update(dict.fromkeys(logged))
        return {name: value for name, value in logged.items() if not math.isnan(value)}

    def _run(self, step: str, batches: SplitLoader) -> dict[str, float]:
        """Run a step on all batches, and return what is logged."""
        self._apart("test" if step == "test_step" else "validate", batches, verbose=False)
        return {name: float(value) for name, value in self._trainer.callback_metrics.items()}

    def predictions(self, batches: SplitLoader) -> list[Any]:
        """Return what the model's ``predict_step`` returns for each batch."""
        return self._apart("predict", batches) or []

    def _apart(self, name: str, batches: SplitLoader, **kwargs: Any) -> Any:
        """Call a method of the trainer.

        Neither modes nor values collected by a step leak into the next fit.
        """
        resident = ResidentModel(self.model)
        with kept_modes(self.model), raising_interrupts():
            returned = getattr(self._trainer, name)(self.model, dataloaders=batches, **kwargs)
        resident.restore()
        return returned

    def _of(self, split: Split) -> list[str]:
        """Return the model's own steps for a split, the preferred one first."""
        steps = ["test_step", "validation_step"]
        return [s for s in steps[:: 1 if split == "test" else -1] if has_step(self.model, s)]

    @cached_property
    def _trainer(self) -> Trainer:
        quiet_lightning()
        trainer = Trainer(
            **self._kwargs,
            callbacks=[self._ends],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        make_slim(trainer)
        return trainer


_Part = dict[str, tuple[float, int]]  # the mean and the number of samples of each logged value


def _are_whole(parts: Sequence[_Part | None], logged: Mapping[str, float], number: int) -> bool:
    """Return whether there are so many parts, and each has a mean of each logged value."""
    are_alike = all(part and part.keys() == logged.keys() for part in parts)
    return are_alike and len(parts) == number and all(n for p in parts if p for _, n in p.values())


def _joined(parts: Sequence[_Part]) -> dict[str, float]:
    """Return the means over the samples of all parts, which have the same names."""
    columns = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: sum(mean * size for mean, size in own) / sum(size for _, size in own)
        for name, own in columns.items()
    }


def _as_scores(values: Mapping[str, float], split: Split) -> dict[str, float]:
    """Return logged values by the names of scores, or else the loss that was returned."""
    logged: dict[str, float] = {}
    for name, value in values.items():
        # If a score has several names, such as loss and val_loss, the split's own one counts.
        if name != _RETURNED and (score_name(name) not in logged or name.startswith(split)):
            logged[score_name(name)] = value
    return logged or ({"loss": values[_RETURNED]} if _RETURNED in values else {})


class Scorer:
    """Scores models in large batches, off the clients' critical path.

    A model is scored by its ``evaluation_step``, which returns a row per sample. A model without
    one is scored by the values that its own ``test_step`` and ``validation_step`` log. If it also
    has class logits, flsuite's scores are added.

    Args:
        model: The resident model that states are copied into.
        data: The samples.
        device: The device for scoring.
        precision: Returns the context of the forward pass, for example autocast.
        seed: The run's seed, for randomness during evaluation.
        trainer_kwargs: Arguments of each client's Lightning Trainer.
        attack: The attack, whose success is also scored. Default: none.

    Attributes:
        batch_size: Samples per forward pass. Samples that are not tensors in memory, and a model's
            own steps, use the batches of training.
    """

    batch_size = 1024

    def __init__(
        self,
        model: LightningModule,
        data: FederatedData,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        *,
        seed: int = 0,
        trainer_kwargs: Mapping[str, Any] | None = None,
        attack: Attack | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.device = device
        self.trainer_kwargs = dict(trainer_kwargs or {})
        self.precision = precision
        self.seed = seed
        self.attack = attack
        self._steps = (
            _EvaluationSteps(model, self.trainer_kwargs) if scores_by_steps(model) else None
        )

    def own(
        self, client: int, state: State, split: Split, details: bool = False
    ) -> OwnScores | None:
        """Score one client's own model.

        Returns ``None`` if the split is not scored.
        """
        scored = self._scored(state, split, [client], details, client)
        if scored is None:
            return None
        whole, by_client, classes = scored
        return OwnScores(whole, by_client.get(str(client), {}), classes)

    def _scored(
        self, state: State, split: Split, clients: Sequence[int], details: bool, seeded: int = 0
    ) -> tuple[dict[str, float], Scores, dict[str, float]] | None:
        """Return a model's scores on a whole split, on the clients' parts of it, and by class.

        One forward pass serves all clients. It has the seed of the client ``seeded``. ``None`` if
        the split is not scored.
        """
        samples = self.samples(split)
        if samples is None:
            return None

        self.load(state)
        with self._seeded(split, seeded):
            logged = self._logged(samples, split, clients)
            whole, outputs = self._whole(samples, split, logged.get(None))
            if not self._is_scored(split):
                return None
            by_client = self._local(outputs, samples, clients, split, logged)
        return whole, by_client, self._class_rows(outputs, samples) if details else {}

    @contextmanager
    def _seeded(self, split: Split, client: int = 0) -> Iterator[None]:
        """Seed an evaluation, so it does not depend on earlier draws."""
        with isolate_rng():
            seed_process(self.seed, f"score/{split}", client=client)
            yield

    def load(self, state: State) -> None:
        """Load a state into the resident model."""
        load_(self.model.state_dict(), state)

    def predictions(self, batches: SplitLoader) -> list[Any]:
        """Return what the ``predict_step`` of the resident model returns for each batch."""
        with isolate_rng():
            seed_process(self.seed, "predict")
            return _EvaluationSteps(self.model, self.trainer_kwargs).predictions(batches)

    def outputs(self, samples: DataSplit) -> dict[str, Tensor]:
        """Return the model's evaluation columns for every sample, on the CPU."""
        self.model.to(self.device)  # parameters moved in inference mode would not be trainable
        with evaluating(self.model), torch.inference_mode():
            return self._outputs(samples)

    def samples(self, split: Split) -> DataSplit | None:
        """Return the samples of a split, or ``None`` if there are none, or no scores of them."""
        samples = self.data.test if split == "test" else self.data.val
        return samples if samples is not None and len(samples) and self._is_scored(split) else None

    def _is_scored(self, split: Split) -> bool:
        """Return whether the model has scores of a split, as far as its steps have run."""
        if self._steps is None:
            return self._has_columns
        return self._has_columns or split not in self._steps.silent

    @property
    def _has_columns(self) -> bool:
        """Return whether :meth:`outputs` returns columns: a row per sample, or class logits."""
        return scores_by_columns(self.model) or self._logits is not None

    @property
    def _logits(self) -> Callable[[Any], Tensor] | None:
        return class_outputs(self.model, self.data.spec)

    def _outputs(
        self, samples: DataSplit, change: Callable[[Any], Any] | None = None
    ) -> dict[str, Tensor]:
        parts: list[dict[str, Tensor]] = []
        is_stored = not samples.in_memory
        size = self.data.batch_size if is_stored else self.batch_size

        for batch in SplitLoader(self.data, samples, size):
            batch = batch if change is None else change(batch)
            with self.precision():
                columns = self._columns(move_data_to_device(batch, self.device))
            # Move to the CPU batch by batch, so the outputs of a large split do not fill the
            # device.
            parts.append({name: column.float().cpu() for name, column in columns.items()})

        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _columns(self, batch: Any) -> Mapping[str, Tensor]:
        """Return a batch's columns, with one row per sample."""
        model: Any = self.model
        if scores_by_columns(model):
            return model.evaluation_step(batch)
        assert self._logits is not None
        x, y = batch
        logits = self._logits(x)
        return {"loss": classification_loss(logits, y), "scores": class_probabilities(logits, y)}

    def _logged(self, samples: DataSplit, split: Split, clients: Sequence[int]) -> _Logged:
        """Return what the model's steps log on a whole split, and on the clients' parts of it.

        Samples that are not in memory are read and evaluated once. Empty if that is impossible.
        """
        if self._steps is None or samples.in_memory or not len(samples.rows):
            return {}
        own = {client: samples.rows[client] for client in clients}
        own = {client: rows for client, rows in own.items() if len(rows)}
        is_left = torch.ones(len(samples), dtype=torch.bool)
        for rows in own.values():
            is_left[rows] = False
        parts = [*own.values(), is_left.nonzero().flatten()]
        if sum(map(len, parts)) != len(samples):  # a sample of two clients would count twice
            return {}
        batches = SplitLoader(self.data, samples, self.data.batch_size, parts=parts)
        return dict(zip([None, *own], self._steps.by_part(split, batches), strict=False))

    def _whole(
        self, samples: DataSplit, split: Split, logged: dict[str, float] | None = None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the scores on a whole split, and the columns that they are computed from."""
        outputs = self.outputs(samples) if self._has_columns else {}
        values = self._numbers(outputs, samples, split, logged=logged)
        return values | self._aim(samples), outputs

    def _aim(self, samples: DataSplit) -> dict[str, float]:
        """Return an attack's success on a changed copy of a split."""
        trial = None if self.attack is None else self.attack.trial(samples)
        if trial is None or not len(trial.rows):
            return {}
        self.model.to(self.device)
        # Draws of the model here must not affect its draws for the other scores.
        with isolate_rng(), evaluating(self.model), torch.inference_mode():
            seed_process(self.seed, "attack/score")
            outputs = self._outputs(samples.take(trial.rows), trial.change)
        return {trial.metric: float(trial.hits(outputs["scores"]).double().mean())}

    def _numbers(
        self,
        outputs: Mapping[str, Tensor],
        samples: DataSplit,
        split: Split,
        rows: Tensor | None = None,
        logged: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Return the scores on some rows of a split, or on all."""
        part = outputs if rows is None else {name: column[rows] for name, column in outputs.items()}
        y = samples.y if rows is None else samples.y[rows]
        # No AUROC of a client's part, because it is costly, and the part often lacks a class.
        values = scores(part, y, self.data.spec, auroc=rows is None) if part else {}
        if self._steps is not None:
            if logged is None:
                batches = SplitLoader(self.data, samples, self.data.batch_size, rows)
                logged = self._steps.metrics(split, batches)
            values |= logged  # the model's own logged value takes precedence
        return values

    def _local(
        self,
        outputs: Mapping[str, Tensor],
        samples: DataSplit,
        clients: Sequence[int],
        split: Split,
        logged: _Logged,
    ) -> Scores:
        """Return each client's scores on its part of a split. Empty if clients have no parts."""
        by_client: Scores = {}
        for client in clients if len(samples.rows) else ():
            own = samples.rows[client]
            if len(own):
                values = self._numbers(outputs, samples, split, own, logged.get(client))
                by_client[str(client)] = values | {"samples": float(len(own))}
        return by_client

    def _class_rows(self, outputs: Mapping[str, Tensor], samples: DataSplit) -> dict[str, float]:
        if "scores" not in outputs:
            return {}
        by_class = class_accuracy(outputs["scores"], samples.y, self.data.spec)
        return {f"accuracy/{name}": value for name, value in by_class.items()}
