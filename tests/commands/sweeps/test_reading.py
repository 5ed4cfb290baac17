"""Sweep files that are read, and the line that a wrong one gives."""

from pathlib import Path

import pytest

from flsuite.commands.sweeps.reading import Sweep, read_sweep
from flsuite.common.errors import FlsuiteError

GOOD = """
config: base.yaml
seeds: [1, 2]
methods:
  FedAvg: {}
  FedProx: {trainer.aggregator: {class_path: FedProx, init_args: {mu: 0.1}}}
"""


@pytest.fixture(autouse=True)
def _base() -> None:
    Path("base.yaml").write_text("trainer: {rounds: 3}\n")


def read(text: str) -> Sweep:
    Path("sweep.yaml").write_text(text)
    return read_sweep("sweep.yaml")


def test_keys_go_with_and_without_init_args_and_class_path() -> None:
    methods = "methods: {A: {trainer.aggregator.class_path: FedProx, data.init_args.clients: 3}}\n"
    sweep = read("config: base.yaml\nseeds: [1]\n" + methods)
    assert sweep.methods == {"A": {"trainer.aggregator": "FedProx", "data.clients": 3}}
    assert (sweep.name, sweep.workers, sweep.grid) == ("sweep", 1, {})


def test_a_value_stays_as_yaml_reads_it() -> None:
    """A cell keeps its folder only if no other reader makes a number of the text 1e-3."""
    methods = "methods: {A: {a.b: 1e-3, a.c: '0.1', a.d: {class_path: B, init_args: {e: null}}}}\n"
    sweep = read("config: base.yaml\nseeds: [1]\n" + methods)
    values = [*sweep.methods["A"].values()]
    assert values == ["1e-3", "0.1", {"class_path": "B", "init_args": {"e": None}}]


def test_the_config_is_found_beside_the_sweep_too(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "own.yaml").write_text("seed_everything: 1\n")
    (folder / "sweep.yaml").write_text(GOOD.replace("base.yaml", "own.yaml"))
    assert read_sweep(folder / "sweep.yaml").config == folder / "own.yaml"


def test_a_sweep_is_read_like_a_config() -> None:
    assert read(GOOD.replace("seeds: ", "seeds:\t")).seeds == read(GOOD).seeds, "with a tab"


def test_common_choices_are_every_methods() -> None:
    tune = "tune: {trials: 2, seeds: [9], common: {a.b: [1, 2]}, FedProx: {a.b: [3], c.d: [4]}}\n"
    sweep = read(GOOD + tune)
    assert sweep.tuning is not None
    own = {"FedAvg": {"a.b": [1, 2]}, "FedProx": {"a.b": [3], "c.d": [4]}}
    assert sweep.tuning.choices == own


WRONG = {
    "method: {}": "has an unknown key 'method'; did you mean methods?",
    "grid: {}": "grid is empty",
    "grid: {data.partition.alpha: []}": "grid.data.partition.alpha must be a list of values",
    "grid: {data.partition.alpha: 0.1}": "grid.data.partition.alpha must be a list of values",
    "grid: {a.b: [1, 2, 1]}": "grid.a.b has 1 twice",
    "grid: {trainer.aggregator: [FedAvg]}": "is set by methods.FedProx too",
    "grid: {seed_everything: [1]}": "the sweep sets it for each run",
    "overrides: [trainer.rounds]": "overrides must map keys",
    "workers: 0": "workers must be at least 1, got 0",
    "workers: 1.5": "workers must be a whole number",
    "seeds: [3]": "line 7: 'seeds' appears twice",
    "tune: {trials: 2, seeds: [1], FedAvg: {a.b: [1]}}": "which is a seed of the results too",
    "tune: {trials: 2, seeds: [9]}": "tune has no choices for any method",
    "tune: {trials: 2, FedAvg: {a.b: [1]}}": "tune.seeds is missing",
    "tune: {trials: 0, seeds: [9], FedAvg: {a.b: [1]}}": "tune: trials must be at least 1, got 0",
    "tune: {trials: 2, seeds: [9], FedAvgg: {a.b: [1]}}": "did you mean FedAvg?",
    "updates_from: FedNova": "updates_from must be one of the methods, got 'FedNova'",
    "updates_from: FedAvg\ntune: {trials: 2, seeds: [9], FedAvg: {a.b: [1]}}": "leave one of them",
    "grid: {a.b: [1]}\ntune: {trials: 2, seeds: [9], FedAvg: {a.b: [1]}}": "set by tune.FedAvg too",
}

WRONG = {GOOD + line + "\n": words for line, words in WRONG.items()} | {
    GOOD.replace("config: base.yaml", "config: [1]"): "config must be the path of a config",
    GOOD.replace("FedAvg: {}", "FedAvg: {1: 2}"): "1 is not a key of a config",
    "config: base.yaml\nseeds: [1]\nmethods: {}\n": "methods must map at least one name",
    GOOD + "tune: 3\n": "tune must be a mapping with trials and seeds",
    "": "must be a mapping",
    "config: base.yaml\nseeds: [1]\n": "methods is missing",
    GOOD.replace("base", "other"): "config names no file: other.yaml",
    GOOD.replace("[1, 2]", "5"): "seeds must be a list of whole numbers, got 5",
    GOOD.replace("[1, 2]", "[1, 1]"): "seeds has 1 twice",
    GOOD.replace("[1, 2]", "[-1]"): "seeds must be at least 0, got (-1,)",
    GOOD.replace("[1, 2]", "[1, x]"): "seeds must be a whole number, got (1, 'x')",
    GOOD.replace("FedAvg: {}", "FedProx: {}"): "'FedProx' appears twice",
    GOOD.replace("FedAvg: {}", "a/b: {}"): "'a/b' cannot be a name",
    GOOD.replace("FedAvg: {}", "trials: {}"): "'trials' cannot be a name",
    GOOD.replace("FedAvg: {}", "FedAvg: {run_dir: x}"): "cannot set 'run_dir'",
    GOOD.replace("FedAvg: {}", "FedAvg: 3"): "methods.FedAvg must map keys",
    GOOD.replace("[1, 2]", "[1, 2"): "is not valid YAML",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items())
def test_a_wrong_file_is_one_line(text: str, words: str) -> None:
    with pytest.raises(FlsuiteError) as error:
        read(text)
    message = str(error.value)
    assert words in message and "sweep.yaml" in message and "\n" not in message
