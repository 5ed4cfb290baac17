"""The schema of a config: what is shipped fits it, and mistakes do not."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flsuite.commands.schema import config_schema
from flsuite.common.files import parse_yaml, read_yaml
from tests.commands.command import CONFIGS, Capture, cli

TEMPLATE = CONFIGS.parent / "flsuite" / "commands" / "template" / "exp.yaml"
# The sweep of Weights & Biases has a schema of its own.
SHIPPED = [p for p in [*sorted(CONFIGS.rglob("*.yaml")), TEMPLATE] if p.name != "wandb.yaml"]


@cache
def validator() -> Any:
    made = config_schema()
    jsonschema.Draft7Validator.check_schema(made)
    return jsonschema.Draft7Validator(made)


def fits(content: Any) -> bool:
    return validator().is_valid(content)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_config_fits(path: Path) -> None:
    faults = [f"{e.json_path}: {e.message}" for e in validator().iter_errors(read_yaml(path))]
    assert not faults


GOOD = """
model: {class_path: Classifier, init_args: {backbone: {class_path: MLP, init_args: {hidden: [64]}}}}
data: {class_path: MedMNIST, init_args: {name: retinamnist, partition: {class_path: IID}}}
trainer: {rounds: 3, aggregator: {class_path: FedProx, init_args: {mu: 0.1}}}
"""
SWEEP = (
    "{config: a.yaml, seeds: [1], methods: {A: {trainer.aggregator: FedAvg}}, grid: {data.x: [1]}, "
    "until: decided}"
)
MISTAKES = {
    "a first key": ("trainer:", "trianer:"),
    "a key of the trainer": ("rounds:", "round:"),
    "a key of a class": ("mu:", "nu:"),
    "a key inside a class": ("hidden:", "hiden:"),
    "a key of the data": ("partition:", "partitions:"),
    "a key next to a class": ("init_args: {mu: 0.1}", "mu: 0.1"),
    "a class": ("FedProx", "FedPrx"),
    "a class of another kind": ("FedProx", "MLP"),
    "a whole number": ("rounds: 3", "rounds: 3.5"),
    "a number": ("mu: 0.1", "mu: much"),
    "a list": ("[64]", "64"),
    "a choice": ("name: retinamnist", "size: 32"),
    "text": ("retinamnist", "[1]"),
    "a range of the trainer": ("rounds: 3", "rounds: -3"),
    "a range of a class": ("mu: 0.1", "mu: -0.1"),
    "a count of the trainer": ("rounds: 3", "max_epochs: 0"),
    "a choice of numbers": ("rounds: 3", "precision: 17"),
    "a share or a number": (
        "rounds: 3",
        "schedule: {class_path: Synchronous, init_args: {participation: 0}}",
    ),
    "a seed": ("trainer:", "seed_everything: -1\ntrainer:"),
    "a required argument": ("class_path: IID", "class_path: FromFile"),
    "a required argument of a name": ("{class_path: IID}", "FromFile"),
    "a package that does not export it": ("FedProx", "flsuite.FedProx"),
    "a key of a class by its old path": (
        "rounds: 3",
        "schedule: {class_path: flsuite.schedules.Synchronous, init_args: {part: 1}}",
    ),
}


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_does_not_fit(right: str, wrong: str) -> None:
    assert right in GOOD and fits(parse_yaml(GOOD))
    assert not fits(parse_yaml(GOOD.replace(right, wrong)))


@pytest.mark.parametrize(
    "other",
    [
        ("FedProx", "flsuite.aggregators.FedProx"),
        (
            "class_path: FedProx, init_args: {mu: 0.1}",
            "class_path: my_package.Own, init_args: {a: 1}",
        ),
        ("{class_path: IID}", "IID"),
        ("{class_path: IID}", "null"),
        ("rounds: 3", "max_epochs: 3"),
        ("rounds: 3", "schedule: {class_path: flsuite.schedules.Synchronous}"),
    ],
)
def test_what_the_command_takes_fits(other: tuple[str, str]) -> None:
    assert fits(parse_yaml(GOOD.replace(*other)))


def test_an_argument_of_a_class_by_its_path_is_checked() -> None:
    path = GOOD.replace("FedProx", "flsuite.aggregators.FedProx")
    assert not fits(parse_yaml(path.replace("mu:", "nu:")))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("seeds: [1]", "seeds: 1"),
        ("seeds", "seed"),
        ("trainer.aggregator", "trainer.agregator"),
        ("FedAvg", "FedAvgg"),
        ("x: [1]}", "x: 1}"),
        ("until: decided", "until: soon"),
    ],
)
def test_a_mistake_in_a_sweep_does_not_fit(right: str, wrong: str) -> None:
    assert right in SWEEP and fits(parse_yaml(SWEEP))
    assert not fits(parse_yaml(SWEEP.replace(right, wrong)))


def test_names_types_defaults_and_first_lines(capsys: Capture) -> None:
    assert cli("schema") == 0
    made = json.loads(capsys.readouterr().out)
    assert made == config_schema()
    dirichlet = made["definitions"]["flsuite.data.partitions.dirichlet.Dirichlet"]
    assert dirichlet["description"].startswith("Each class is spread over the clients")
    redraws = dirichlet["properties"]["max_redraws"]
    assert redraws.pop("description").startswith("Redraws before the last table is leveled.")
    number = {"type": "integer", "minimum": 0}
    assert redraws == {"anyOf": [number, {"type": "null"}], "default": 100}
    assert dirichlet["required"] == ["alpha"]
    skew = made["definitions"]["flsuite.data.partitions.shares.QuantitySkew"]
    assert skew["properties"]["distribution"]["default"] == "lognormal"
    assert skew["properties"]["alpha"]["default"] == 0.5
    fed_avg = made["definitions"]["flsuite.aggregators.fedavg.FedAvg"]
    assert "default" not in fed_avg["properties"]["private"], "its default is a sentence"


def test_the_command_does_not_import_torch() -> None:
    code = "import sys; from flsuite.commands.main import main\n"
    code += "try: main(['schema'])\n"
    code += "finally: sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)
