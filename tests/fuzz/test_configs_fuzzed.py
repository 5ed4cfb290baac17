"""Configs with random keys and values end in a run or in one line, never in a traceback."""

import contextlib
import importlib
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, strategies as st
from jsonargparse._typehints import get_all_subclass_paths

from flsuite.commands.main import main
from flsuite.runs.settings import Budget
from tests.fuzz.settings import fuzzed

BASE: dict[str, Any] = {
    "seed_everything": 1,
    "model": {
        "class_path": "Classifier",
        "init_args": {
            "backbone": {"class_path": "MLP", "init_args": {"hidden": [8]}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {
        "class_path": "Digits",
        "init_args": {
            "clients": 3,
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}},
            "batch_size": 16,
            "train_samples": 120,
        },
    },
    "trainer": {
        "accelerator": "cpu",
        "rounds": 1,
        "max_epochs": 1,
        "aggregator": {"class_path": "FedAvg"},
        "schedule": {"class_path": "Synchronous", "init_args": {"participation": 1.0}},
        "engine": {"class_path": "InProcess"},
    },
}


def named(text: str, place: str = "") -> list[str]:
    """Return the words of a text, each after its place in a config."""
    return [place + word for word in text.split()]


KEYS = [
    *named(
        """
        seed_everything model model.class_path model.init_args data data.class_path
        data.init_args trainer plugins run_dir ckpt_path
        """
    ),
    *named(
        """
        backbone backbone.class_path backbone.init_args.hidden optimizer optimizer.class_path
        optimizer.init_args optimizer.init_args.lr optimizer.init_args.momentum private frozen
        num_classes
        """,
        "model.init_args.",
    ),
    *named(
        """
        clients partition partition.class_path partition.init_args.alpha batch_size val_fraction
        train_samples server_samples train_part resize rgb augment standardize seed root
        """,
        "data.init_args.",
    ),
    *named(
        """
        rounds max_epochs aggregator aggregator.class_path aggregator.init_args
        aggregator.init_args.mu schedule schedule.class_path schedule.init_args
        schedule.init_args.participation schedule.init_args.speeds
        schedule.init_args.availability schedule.init_args.over_selection
        schedule.init_args.deadline engine engine.class_path engine.init_args.threads compression
        secure_sum evaluate_every monitor max_virtual_seconds max_client_updates score_clients
        batchnorm buffers keep_optimizers lr_decay channels_last seed keep_updates from_updates
        logger callbacks enable_checkpointing enable_progress_bar precision accelerator devices
        gradient_clip_val gradient_clip_algorithm accumulate_grad_batches limit_train_batches
        max_steps min_epochs max_time deterministic benchmark profiler detect_anomaly plugins
        num_nodes use_distributed_sampler overfit_batches
        """,
        "trainer.",
    ),
]
CLASSES = named(
    """
    FedAvg FedProx SCAFFOLD FedAdam FedBuff FedAsync CMGA FedFisher RegMean Centralized
    Synchronous Asynchronous Faults Stragglers LogNormal PerSample Bernoulli OnOff InProcess IID
    Dirichlet Pathological SoleOwner Natural MLP CNN LeNet5 ResNet20 Classifier ACVAE
    FusedSpaceFed NFClassifier Digits Synthetic Quantize TopK LowRank PairwiseMasks
    RoundEarlyStopping StopAt torch.optim.Adam torch.nn.Linear os.path.join flsuite builtins.dict
    """
)

_SLOW = ("DENSE",)  # its server trains for minutes

# Sizes are small, or so large that no machine has them: those in between would be met.
numbers = st.sampled_from([-1, 0, 1, 2, 3, 40, 2**62, 10**30]) | st.sampled_from(
    [-0.5, 0.0, 1e-30, 0.3, 1.0, 1.5, 1e308, float("inf"), float("-inf"), float("nan")]
)
words = st.sampled_from(["", "0", "auto", "true", "a.b", "{", "é\n", *CLASSES])
scalars = st.none() | st.booleans() | numbers | words
classes = st.fixed_dictionaries(
    {"class_path": st.sampled_from(CLASSES)},
    optional={
        "init_args": st.dictionaries(
            st.sampled_from(["alpha", "mu", "nan", "hidden", "momentum", "schedule", "bits", "x"]),
            scalars,
            max_size=2,
        )
    },
)
values = (
    scalars
    | classes
    | st.lists(scalars | classes, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "class_path", "init_args", "lr"]), scalars, max_size=2)
)
changes = st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=2)


@pytest.fixture(autouse=True)
def _workplace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Budget, "is_spent", lambda self, clock: clock.round >= 1)
    monkeypatch.setenv("FLSUITE_DATA_ROOT", "nowhere")  # nothing is downloaded
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        yield
        os.chdir(here)


def changed(changes: list[tuple[str, Any]]) -> Any:
    """Return the config with these keys set to these values."""
    config = yaml.safe_load(yaml.safe_dump(BASE))
    for key, value in changes:
        *path, last = key.split(".")
        place = config
        for name in path:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = value
    return config


def end_of(config: Any) -> None:
    """Check that a config ends in a run, or in one line that says what is wrong."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        said = io.StringIO()
        quiet = contextlib.redirect_stdout(io.StringIO())
        with contextlib.redirect_stderr(said), quiet, pytest.raises(SystemExit) as end:
            main(["fit", "--config", str(file)])
        errors = [line for line in said.getvalue().splitlines() if "flsuite: error: " in line]
        status = int(end.value.code or 0)
        assert status in (0, 1, 2) and len(errors) == (status != 0), said.getvalue()
        assert "Traceback" not in said.getvalue()


def _parameters(kind: type) -> list[str]:
    """Return the names that a config may give a class."""
    names: list[str] = []
    for cls in kind.__mro__:
        if inspect.isfunction(function := vars(cls).get("__init__")):
            parameters = inspect.signature(function).parameters.values()
            names += [
                p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            ]
    return sorted({*names} - {"self"})


def _chosen(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a class with one or two of its arguments."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    names = _parameters(kind)
    some = st.dictionaries(st.sampled_from(names), values, max_size=2) if names else st.just({})
    return some.map(lambda arguments: {"class_path": path, "init_args": arguments})


def _places() -> list[tuple[str, type]]:
    """Return every class of the project that a config may name, with its place in a config."""
    bases = {
        "trainer.aggregator": ("flsuite.aggregators", "Aggregator"),
        "trainer.schedule": ("flsuite.federation", "Schedule"),
        "trainer.schedule.init_args.speeds": ("flsuite.federation", "Speeds"),
        "trainer.schedule.init_args.availability": ("flsuite.federation", "Availability"),
        "trainer.compression": ("flsuite.aggregators", "Transform"),
        "trainer.secure_sum": ("flsuite.aggregators", "SecureAggregation"),
        "trainer.lr_decay": ("flsuite.federation.client.callbacks", "LRDecay"),
        "trainer.callbacks": ("flsuite.callbacks", "FederationCallback"),
        "data.init_args.partition": ("flsuite.data", "Partition"),
        "data.init_args.augment": ("flsuite.data.images", "Augment"),
        "model": ("flsuite.models", "ClientModel"),
        "model.init_args.backbone": ("flsuite.models.backbones.base", "Backbone"),
    }
    paths = [
        (place, path.rpartition("."))
        for place, (module, base) in bases.items()
        for path in get_all_subclass_paths(getattr(importlib.import_module(module), base))
        if path.startswith("flsuite.")
    ]
    kinds = [(place, getattr(importlib.import_module(m), name)) for place, (m, _, name) in paths]
    return sorted(
        (pair for pair in kinds if pair[1].__qualname__ not in _SLOW),
        key=lambda pair: (pair[0], pair[1].__qualname__),
    )


chosen = st.deferred(
    lambda: st.sampled_from(_places()).flatmap(lambda at: st.tuples(st.just(at[0]), _chosen(at[1])))
)


@fuzzed(6)
@given(chosen)
def test_a_class_with_random_arguments_ends_in_a_run_or_one_line(at: tuple[str, Any]) -> None:
    end_of(changed([at]))


@fuzzed(6)
@given(changes)
@example([("seed_everything", None)])
@example([("trainer", None)])
@example([("trainer.evaluate_every", None)])
@example([("trainer.engine.init_args.threads", None)])
@example([("trainer.engine.init_args.threads", 2**62)])
@example([("plugins", 2)])
def test_a_random_config_ends_in_a_run_or_one_line(changes: list[tuple[str, Any]]) -> None:
    end_of(changed(changes))
