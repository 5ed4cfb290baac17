"""Scores of models, before and after clients adapt them."""

import copy
import logging
import re
from bdb import BdbQuit
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError, require_one_of, some, with_place
from flsuite.common.messages import Broadcast, FitRequest, OwnScores, ScoreRequest, Scores, Split
from flsuite.common.score_names import OF_CLASSES, lower_is_better, score_name, usual_score
from flsuite.common.state import State
from flsuite.data.federated import DataSplit, FederatedData
from flsuite.data.loader import SplitLoader
from flsuite.data.map_style import readable
from flsuite.federation.client.scorer import Scorer
from flsuite.federation.engines.base import Engine
from flsuite.federation.server.federation import Federation
from flsuite.metrics.scores import scores, summary
from flsuite.models.abilities import LatentModel
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.models.modes import evaluating

log = logging.getLogger("flsuite")

GLOBAL = "global"
_OF_SHAPES = re.compile(r"shape|size|bound|dimension|channel|broadcast")
_MAIN = ("accuracy", "f1_macro", "balanced_accuracy", "loss")


class Evaluator(Scorer):
    """Scores the models of a federation."""

    def at(self, data: FederatedData) -> "Evaluator":
        """Return an evaluator with the same model and the samples of another round."""
        twin = copy.copy(self)
        twin.data = data
        return twin

    @property
    def has_classes(self) -> bool:
        """Return whether flsuite's classification scores can be computed."""
        return self._has_columns and self.data.spec.task != "other"

    def monitored(
        self, monitor: str | None, has_own_models: bool = False, before: str | None = None
    ) -> str:
        """Return the score that picks the best round. The model must have it.

        Args:
            monitor: Its name, or the name of its mean or worst value over clients, such as
                ``accuracy_client_mean``. Default: :func:`~flsuite.common.score_names.usual_score`.
            has_own_models: Whether clients have models of their own. The default is then the mean
                over clients, if clients have validation samples.
            before: The score that picked the rounds of a run that is resumed. ``monitor`` replaces
                it.

        Returns:
            Its name. A model without scores is followed by its training loss.

        Raises:
            FlsuiteError: If there is no such score. The message lists the available ones.
        """
        names, val = self._rehearsed(), self.data.val
        if not names:
            return self._unscored(monitor)
        monitor = monitor or before
        # Without parts of their own, clients have no validation scores.
        has_parts = val is not None and len(val.rows) > 0
        of_clients = [n for n in dict.fromkeys(self.names) if n in names] if has_parts else []
        if monitor is not None:
            statistics = [f"{n}_client_{what}" for n in of_clients for what in ("mean", "worst")]
            chosen = score_name(monitor)
            if chosen not in (known := [*names, *statistics]):
                require_one_of("trainer", known, monitor=monitor)
        else:
            chosen = usual_score(names)
            if chosen == "loss" and (others := [name for name in names if name != chosen]):
                log.info(
                    "rounds are picked by loss; also logged: %s (--trainer.monitor %s)",
                    some(others, 5),
                    others[0],
                )
            if has_own_models and chosen in of_clients:
                chosen = f"{chosen}_client_mean"
        if lower_is_better(chosen) is None:
            log.warning(
                "trainer.monitor: high values of %s are taken to be good; if low ones are, log it "
                "under a name with a word such as loss or error",
                chosen,
            )
        return chosen

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the scores that are compared across clients."""
        return _MAIN if self._steps is None else (*_MAIN, *self._steps.names)

    def _rehearsed(self) -> list[str]:
        """Return the names of the scores that can pick a round.

        A few samples of both splits are scored, so that an error of the model shows before a round
        of training. Scores of validation data alone count if there are any.

        Raises:
            FlsuiteError: If the model cannot be scored. The message has the shapes of its samples
                and outputs, if they may be at fault.
        """
        is_usual = self._steps is None and self.data.spec.task != "other"
        usual = OF_CLASSES if self.has_classes else ()
        by_split = []
        for split in get_args(Split):
            samples = self.samples(split)
            if samples is None:
                continue
            most = 2 if is_usual else self.data.batch_size
            few = samples.take(torch.arange(min(len(samples), most)))
            try:
                with self._seeded(split), readable():
                    own = {} if is_usual else self._whole(few, split)[0]
                    self._refuse_other_outputs(few if is_usual else None)
            except (FlsuiteError, BdbQuit):
                raise
            except Exception as error:
                text = f"model: {type(error).__name__}: {with_place(error, longest=300)}"
                raise FlsuiteError(text + self._shapes(error, few)) from error
            # A value that is undefined on a few samples, such as an AUROC, may pick a round too.
            logged = () if self._steps is None else self._steps.names
            by_split.append(list(dict.fromkeys([*usual, *own, *logged])))
        return next(filter(None, by_split), [])

    def _unscored(self, monitor: str | None) -> str:
        """Return the monitor of a run without scores, and say what to add for some."""
        if self.data.val is None and not len(self.data.test):
            who, remedy = "the data", "a val_dataloader or a test_dataloader"
        else:
            who = type(self.model).__name__
            remedy = "a validation_step and a test_step that return a loss or call self.log"
        if monitor is not None:
            raise FlsuiteError(
                f"trainer.monitor: {who} has no scores, got {monitor!r}; add {remedy}, or leave "
                "monitor out"
            )
        log.warning(
            "%s has no scores: the final table has the training loss, and the last round is the "
            "picked one; for scores, add %s",
            who,
            remedy,
        )
        return "loss"

    def _refuse_other_outputs(self, samples: DataSplit | None) -> None:
        """Refuse a model with another number of class scores than there are classes."""
        scores = None if samples is None else self.outputs(samples).get("scores")
        classes = self.data.spec.num_classes
        if scores is not None and scores.shape[1:] != (classes,):
            raise FlsuiteError(
                f"model: {type(self.model).__name__} has {_times(scores.shape[1:])} outputs per "
                f"sample, but the data has {classes} classes; change the size of its last layer"
            )

    def _shapes(self, error: Exception, samples: DataSplit) -> str:
        """Return the shapes of the model's samples and outputs, if an error may be about them."""
        if not _OF_SHAPES.search(str(error)):
            return ""
        spec, returned = self.data.spec, ""
        text = f"; a sample is {_times(spec.shape)}"
        with suppress(Exception), evaluating(self.model), torch.inference_mode():
            batch = next(iter(SplitLoader(self.data, samples, 1)))
            x = move_data_to_device(batch, self.device)[0]
            outputs = (self._logits or self.model)(x)
            returned = f", the model returns {_times(outputs.shape[1:])} numbers for it"
        classes = f", and there are {spec.num_classes} classes" if spec.task != "other" else ""
        return text + returned + classes

    def scores(
        self,
        federation: Federation,
        split: Split,
        clients: Sequence[int],
        details: bool = False,
        engine: Engine | None = None,
    ) -> Scores:
        """Score a federation in its current state, and these clients.

        Returns no scores of a split that is not scored.

        Args:
            federation: The federation whose models are scored.
            split: ``val`` or ``test``.
            clients: Clients to score one by one.
            details: Add the accuracy per class.
            engine: Scores the clients' own models in parallel. Default: this process scores them
                one after another.
        """
        now = self.at(federation.data.at(federation.clock.round))
        if not federation.entries.personal:
            return now.shared(federation.client_state(None), split, clients, details)
        return _of_own_models(now.own_rows(federation, split, clients, details, engine), self.names)

    def shared(
        self, state: State, split: Split, clients: Sequence[int], details: bool = False
    ) -> Scores:
        """Score one model that all clients share.

        A client's own score is the model's score on the client's part of the split, which has the
        client's class mix.
        """
        scored = self._scored(state, split, clients, details)
        if scored is None:
            return {}
        whole, by_client, classes = scored
        return {GLOBAL: whole | classes | _spread(by_client, "client_", self.names)} | by_client

    def own_rows(
        self,
        federation: Federation,
        split: Split,
        clients: Sequence[int],
        details: bool,
        engine: Engine | None,
    ) -> dict[int, OwnScores]:
        """Score the clients' own models, and return the scores by client.

        Returns no scores if the data has no such split.
        """
        version = Broadcast(max(federation.clock.round, 1), federation.state, {})
        # A generator, so the clients' models are not all in memory at once.
        requests = (
            # Below 0, to differ from the numbers of fits.
            ScoreRequest(
                -1 - place, client, version, federation.own_entries(client), split, details
            )
            for place, client in enumerate(clients)
        )
        # For one model, sending it to a worker does not pay off.
        answers = engine.score(requests) if engine and len(clients) > 1 else None

        rows: dict[int, OwnScores] = {}
        for client, answer in zip(clients, answers or [None] * len(clients), strict=True):
            # If a worker failed, score here. This raises the worker's error if it persists.
            if not isinstance(answer, OwnScores):
                answer = self.own(client, federation.client_state(client), split, details)
            if answer is not None:
                rows[client] = answer
        return rows

    def of_module(self, module: nn.Module, samples: DataSplit) -> dict[str, float]:
        """Score a standalone module that maps inputs to logits, by the scores of logits alone."""
        device = next(module.parameters()).device
        with evaluating(module), torch.inference_mode():
            batches = SplitLoader(self.data, samples, self.batch_size)
            logits = torch.cat([module(x.to(device)).cpu() for x, _ in batches])

        y = samples.y
        outputs = {"scores": class_probabilities(logits, y), "loss": classification_loss(logits, y)}
        return scores(outputs, y, self.data.spec)

    def latents(self, x: Tensor) -> Tensor:
        """Return the latent variables of stored samples ``(n, latent)``, on the CPU.

        Raises:
            FlsuiteError: If the model has no latent space.
        """
        if not isinstance(self.model, LatentModel):
            raise FlsuiteError(
                f"{type(self.model).__name__} has no latent space: it has no method latent(x); use "
                "a model that has one, such as ACVAE"
            )

        self.model.to(self.device)
        with evaluating(self.model), torch.inference_mode(), self.precision():
            latents = [
                self.model.latent(self.data.scaling(chunk).to(self.device))
                for chunk in x.split(self.batch_size)
            ]
            return torch.cat([chunk.float().cpu() for chunk in latents])


def _times(shape: Iterable[int]) -> str:
    """Return a shape as text, such as ``3 x 32 x 32``."""
    return " x ".join(map(str, shape)) or "1"


def _of_own_models(clients: Mapping[int, OwnScores], names: Sequence[str]) -> Scores:
    """Combine the scores of the clients' own models.

    ``global`` is the mean over clients of their models' scores on the whole split, with worst and
    spread. ``accuracy_first_five`` is the mean over the first five clients, which some published
    tables report. A client's row has ``accuracy`` on its own part of the split, and
    ``accuracy_all`` on the whole split.
    """
    if not clients:
        return {}

    by_scope = {
        str(client): row.part | {f"{name}_all": value for name, value in row.whole.items()}
        for client, row in clients.items()
    }

    whole_splits = {str(client): row.whole for client, row in clients.items()}
    own_parts = {str(client): row.part for client, row in clients.items() if row.part}
    classes = [row.classes for row in clients.values() if row.classes]

    by_scope[GLOBAL] = (
        _means(list(whole_splits.values()))
        | _means(classes)
        | _spread(whole_splits, "", names)
        | _first_five(whole_splits)
        | _spread(own_parts, "client_", names)
    )
    return by_scope


def _spread(clients: Scores, prefix: str, names: Sequence[str]) -> dict[str, float]:
    """Return mean, worst and standard deviation over clients of the main scores."""
    if not clients:
        return {}
    spread: dict[str, float] = {}
    for metric in dict.fromkeys(names):
        values = [row[metric] for row in clients.values() if metric in row]
        if not values:
            continue
        for name, value in summary(values, metric, not lower_is_better(metric)).items():
            stem, statistic = name.rsplit("_", 1)
            if prefix or statistic != "mean":  # the mean of whole splits is the score itself
                spread[f"{stem}_{prefix}{statistic}"] = value
    return spread


def _first_five(clients: Scores) -> dict[str, float]:
    # Only if all five are scored: a mean over fewer is not comparable.
    first = [clients[str(c)]["accuracy"] for c in range(5) if "accuracy" in clients.get(str(c), {})]
    return {"accuracy_first_five": sum(first) / 5} if len(first) == 5 else {}


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    if not rows:
        return {}
    # A score that is undefined for some client has no mean over clients.
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


_AT_ONCE = 64  # clients whose own models are in memory at the same time


def adapted_scores(
    evaluator: Evaluator,
    federation: Federation,
    clients: Sequence[int],
    epochs: int,
    engine: Engine,
) -> Scores:
    """Return the test scores of clients whose models have adapted to their own samples.

    A client starts from its own model, or from the global one if it has none, and trains without
    the algorithm. Its model is dropped after it is scored.

    Args:
        evaluator: Scores the models.
        federation: The federation in its current state.
        clients: The clients.
        epochs: Epochs of the adaptation.
        engine: Trains the clients.
    """
    round = max(federation.clock.round, 1)
    evaluator = evaluator.at(federation.data.at(round))

    rows: dict[int, OwnScores] = {}
    version = Broadcast(round, federation.state, {})
    for first in range(0, len(clients), _AT_ONCE):
        requests = [
            _request(federation, version, client, epochs)
            for client in clients[first : first + _AT_ONCE]
        ]
        engine.submit(requests)
        for request in requests:
            outcome = engine.collect(request.number)
            if outcome.failed:
                log.warning("client %d could not adapt: %s", outcome.client, outcome.reason)
                continue
            model = {**federation.initial, **outcome.update.state, **outcome.memory["model"]}
            scores = evaluator.own(request.client, model, "test")
            if scores is not None:
                rows[request.client] = scores
    return _of_own_models(rows, evaluator.names)


def _request(federation: Federation, version: Broadcast, client: int, epochs: int) -> FitRequest:
    """Return the request of one client's adaptation, which starts from its own model."""
    own, state = federation.own_entries(client), version.state
    # One object for all clients without entries of their own, because a worker receives it once.
    if own.keys() & state.keys():
        version = replace(version, state={k: own.get(k, v) for k, v in state.items()})
    memory = {"model": {name: value for name, value in own.items() if name not in state}}
    # Below 0, to differ from the numbers and the repeats of fits.
    return FitRequest(-1 - client, client, version, memory, repeat=-1, adapts=epochs)
