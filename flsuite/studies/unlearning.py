"""Unlearning: how far cheap ways to remove a client are from training without it.

The exact answer is a run without the client from the first round, with all other random draws
unchanged. Five ways are compared with it:

- ``keep``: the model that was trained with the client;
- ``subtract``: this model minus the client's weighted changes of all rounds (Wu, Zhu and Mitra
  2022, Federated Unlearning with Knowledge Distillation, arXiv:2201.09441, before its
  distillation);
- ``rebuild``: this model plus, for each round, the difference that the client's absence makes to
  its aggregation, see :mod:`flsuite.runs.rounds`;
- ``continue``: some more rounds without the client;
- ``fine-tune``: as many, at a lower learning rate.

``python -m flsuite.studies.unlearning --config CONFIG --output FOLDER`` writes table and figure.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from matplotlib.figure import Figure
from torch import Tensor

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import make_folder
from flsuite.common.state import State, add, cast, difference
from flsuite.metrics.scores import scores
from flsuite.runs.fork import Fork
from flsuite.runs.rounds import KeptRound, read_rounds
from flsuite.runs.run import Run
from flsuite.trainer import FederatedTrainer

WAYS = ("exact", "keep", "subtract", "rebuild", "continue", "fine-tune")
MEASURES = {
    "distance": "distance to exact, relative",
    "accuracy": "test accuracy",
    "membership": "membership AUC",
}


class Study(NamedTuple):
    """The settings of the study.

    Attributes:
        config: The federation, with ``keep_updates`` and ``keep_rounds: 1``.
        output: The folder of the runs.
        rounds: Rounds of ``continue`` and ``fine-tune``.
        rate: The learning rate of ``fine-tune``.
    """

    config: Path
    output: Path
    rounds: int = 5
    rate: float = 0.01


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of the runs, of which there are dozens."""
    loggers = [logging.getLogger(name) for name in ("flsuite", "lightning.fabric.utilities.seed")]
    with ExitStack() as restored:
        for logger in loggers:
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


@_quiet()
def _unlearning_table(
    study: Study, seeds: Sequence[int], clients: Sequence[int] | None = None
) -> pd.DataFrame:
    """Return a row per seed, removed client and way.

    Finished runs in the folder are read, and interrupted ones go on.

    Args:
        study: The settings.
        seeds: The seeds of the federation.
        clients: The clients that are removed, one at a time. Default: each.
    """
    _refuse(study, seeds[0], clients or ())
    rows = []
    for seed in seeds:
        whole, last = fitted(study, seed, "whole")
        trainer, model, data = built(study, seed, "whole")
        run = trainer.prepare(model, data)
        kept = read_rounds(trainer, run, study.output / f"{seed}-whole")
        for client in range(run.federation.data.clients) if clients is None else clients:
            states = {
                "keep": whole,
                "subtract": added(whole, (subtracted(one, client) for one in kept)),
                "rebuild": added(whole, (rebuilt(one, client) for one in kept)),
                **_trained(study, seed, client, last),
            }
            scale = distance(whole, states["exact"])
            for way in WAYS:
                apart = distance(states[way], states["exact"]) / scale
                numbers = {"distance": apart, **measured(run, states[way], client)}
                rows.append({"seed": seed, "client": client, "way": way, **numbers})
    return pd.DataFrame(rows)


def _refuse(study: Study, seed: int, clients: Sequence[int]) -> None:
    """Refuse a config that keeps too little, and unknown clients, before anything is trained.

    Raises:
        FlsuiteError: If the study cannot use the config, or a client does not exist.
    """
    trainer, model, data = built(study, seed, "whole")
    if not trainer.keep_updates or trainer.keep_rounds != 1:
        raise FlsuiteError(
            f"{study.config} must have trainer.keep_updates true and trainer.keep_rounds 1"
        )
    count = trainer.prepare(model, data).federation.data.clients
    if unknown := [client for client in clients if not 0 <= client < count]:
        raise FlsuiteError(f"--clients must be from 0 to {count - 1}, got {unknown[0]}")


def _trained(study: Study, seed: int, client: int, last: int) -> dict[str, State]:
    """Return the states of the ways that train."""
    begin = Fork(str(study.output / f"{seed}-whole"), last)
    alone = ("--trainer.without", f"[{client}]", "--trainer.keep_updates", "false")
    longer = (*alone, "--trainer.rounds", str(last + study.rounds))
    slower = (*longer, "--model.optimizer.lr", str(study.rate))
    return {
        "exact": fitted(study, seed, f"exact-{client}", *alone)[0],
        "continue": fitted(study, seed, f"continue-{client}", *longer, fork=begin)[0],
        "fine-tune": fitted(study, seed, f"fine-tune-{client}", *slower, fork=begin)[0],
    }


def fitted(
    study: Study, seed: int, name: str, *args: str, fork: Fork | None = None
) -> tuple[State, int]:
    """Return the last state of a run of the config, and its last round."""
    trainer, model, data = built(study, seed, name, *args)
    trainer.fork = fork
    trainer.fit(model, data, ckpt_path="last")
    assert trainer.federation is not None
    return trainer.federation.state, trainer.round


def built(
    study: Study, seed: int, name: str, *args: str
) -> tuple[FederatedTrainer, LightningModule, LightningDataModule]:
    """Return the trainer, model and data of a run of the config."""
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    cli = LightningCLI(
        model_class=LightningModule,
        datamodule_class=LightningDataModule,
        trainer_class=FederatedTrainer,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_callback=None,
        run=False,
        args=[
            *("--config", str(study.config), "--seed_everything", str(seed)),
            *("--trainer.run_dir", str(study.output / f"{seed}-{name}")),
            *("--trainer.enable_progress_bar", "false", *args),
        ],
    )
    assert isinstance(cli.trainer, FederatedTrainer)
    return cli.trainer, cli.model, cli.datamodule


def subtracted(one: KeptRound, client: int) -> State:
    """Return minus a client's weighted change in a round."""
    base: State = one.before["state"]
    samples = sum(update.samples for update in one.updates)
    for update in one.updates:
        if update.client == client:
            share = update.samples / samples
            return {name: share * (base[name] - value) for name, value in update.state.items()}
    return {name: torch.zeros_like(value) for name, value in base.items()}


def rebuilt(one: KeptRound, client: int) -> State:
    """Return the difference that a client's absence makes to the aggregation of a round."""
    with_it, without_it = one.without(()), one.without({client})
    return difference(without_it, with_it)


def added(state: State, changes: Iterator[State]) -> State:
    """Return a state plus all changes."""
    total = {name: value.double() for name, value in state.items()}
    for change in changes:
        total = add(total, change)
    return cast(total, state)


def distance(first: State, second: State) -> float:
    """Return the Euclidean distance of two states."""
    parts = [(first[name].double() - second[name].double()).norm() for name in first]
    return float(torch.stack(parts).norm())


def measured(run: Run, state: State, client: int) -> dict[str, float]:
    """Return a model's test accuracy, and how well its losses tell a client's training samples."""
    federation = run.federation
    data = federation.data.at(run.round)
    run.evaluator.load({**federation.initial, **state})
    test, own = data.test, data.train.take(data.train_rows(client))
    of_test, of_own = run.evaluator.outputs(test), run.evaluator.outputs(own)
    accuracy = scores(of_test, test.y, data.spec, auroc=False)["accuracy"]
    auc = membership(of_own["loss"], own.y, of_test["loss"], test.y)
    return {"accuracy": accuracy, "membership": auc}


def membership(members: Tensor, classes: Tensor, others: Tensor, other_classes: Tensor) -> float:
    """Return how often a member's loss is below an unseen sample's loss, within a class.

    It is the area under the ROC curve of an attacker who reads losses: 0.5 without any signal.
    Only samples of the same class are compared, because the class alone can identify a client.

    Args:
        members: Losses of the client's training samples.
        classes: Their classes.
        others: Losses of samples that nobody has trained on.
        other_classes: Their classes.
    """
    from scipy.stats import mannwhitneyu

    below, pairs = 0.0, 0
    for label in classes.unique():
        one, other = members[classes == label], others[other_classes == label]
        if len(other):
            # The pairs in which the other loss is the larger one, and half of the ties.
            below += float(mannwhitneyu(other, one, method="asymptotic").statistic) / len(other)
            pairs += len(one)
    return below / pairs


def _unlearning_figure(table: pd.DataFrame) -> Figure:
    """Draw every measure by the way of removal, a point per seed and client."""
    figure = Figure(figsize=(9.5, 2.9), layout="constrained")
    for axes, (measure, label) in zip(figure.subplots(1, 3), MEASURES.items(), strict=True):
        for place, way in enumerate(WAYS):
            values = table[table["way"] == way][measure]
            spread = torch.linspace(-0.15, 0.15, len(values))
            axes.scatter(place + spread, values, s=6, color="tab:blue", alpha=0.5)
            axes.plot([place - 0.3, place + 0.3], [values.mean()] * 2, color="black")
        axes.set_xticks(range(len(WAYS)), WAYS, rotation=35, ha="right", fontsize=8)
        axes.set_title(label, fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study, and write ``unlearning.csv`` and ``unlearning.png``."""
    parser = argparse.ArgumentParser(prog="python -m flsuite.studies.unlearning")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("unlearning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clients", type=int, nargs="+", default=None, help="default: each")
    parser.add_argument("--rounds", type=int, default=Study._field_defaults["rounds"])
    parser.add_argument("--rate", type=float, default=Study._field_defaults["rate"])
    request = parser.parse_args(argv)
    try:
        study = Study(request.config, make_folder(request.output), request.rounds, request.rate)
        table = _unlearning_table(study, request.seeds, request.clients)
    except FlsuiteError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    table.to_csv(study.output / "unlearning.csv", index=False)
    _unlearning_figure(table).savefig(study.output / "unlearning.png", dpi=100)
    means = table.groupby(["seed", "way"])[[*MEASURES]].mean().groupby("way", sort=False)
    print(means.agg(["mean", "std"]).loc[list(WAYS)].round(4).to_string())


if __name__ == "__main__":
    main()
