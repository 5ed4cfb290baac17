"""Misspelled keys and classes are refused at once, all together, each with the likeliest name."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse._typehints import get_all_subclass_paths

import flsuite.commands.fit  # noqa: F401  (loads all classes with short names)
from flsuite import federation
from flsuite.commands import known
from flsuite.commands.known import TRAINER, find
from flsuite.commands.main import work_here
from flsuite.commands.parsing import OneLineParser
from flsuite.commands.request import import_plugins, options
from flsuite.commands.typos import refuse_typos
from flsuite.common.errors import FlsuiteError
from flsuite.federation.engines.base import EngineChoice
from flsuite.trainer import FederatedTrainer
from tests.commands.command import QUICKSTART, Capture, cli, refused
from tests.conftest import mostly_long

MODULE = """
import enum
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule
from flsuite.aggregators import FedAvg


class MyFedAvg(FedAvg):
    pass


class Tower(LightningModule):
    def __init__(self, hidden: int = 8, lr: float = 0.1):
        super().__init__()


class NotSeenHere(Tower):
    pass


class Deep(Tower):
    def __init__(self, depth: int = 2, **kwargs):
        super().__init__(**kwargs)


class Taker(Tower):
    def __init__(self, **kwargs):
        self.bonus = kwargs.pop("bonus", 1)
        super().__init__(**kwargs)


class Sub:
    def __init__(self, x: int = 1):
        pass


class SubB(Sub):
    def __init__(self, y: int = 1):
        pass


class Holder(LightningModule):
    def __init__(self, sub: Sub):
        super().__init__()


class Mode(enum.Enum):
    FAST = 1


class Chosen(LightningModule):
    def __init__(self, mode: Mode, file: Path | None = None):
        super().__init__()


class MyData(LightningDataModule):
    def __init__(self, samples: int = 60):
        super().__init__()


class Loose(LightningModule):
    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = dict(**kwargs)
"""


@pytest.fixture(autouse=True)
def _my_module(tmp_path: Path) -> None:
    (tmp_path / "my_typos.py").write_text(MODULE)
    # No test imports this one. A class that was imported once goes by its short name.
    (tmp_path / "my_unseen.py").write_text(
        "from my_typos import FedAvg\nclass Unseen(FedAvg): ...\n"
    )
    work_here()


def typos(*args: str, command: str = "fit") -> list[str]:
    """Return what is said of a request, before anything is parsed."""
    try:
        if refuse_typos(command, list(args)):
            import_plugins(list(args))
            refuse_typos(command, list(args), imports=True)
    except FlsuiteError as error:
        return [*error.args]
    return []


def written(name: str, *changes: tuple[str, str]) -> str:
    """Write the quickstart with some words replaced, and return the file's name."""
    text = Path(QUICKSTART).read_text()
    for good, bad in changes:
        assert good in text
        text = text.replace(good, bad)
    Path(name).write_text(text)
    return name


def test_all_of_them_are_named_at_once(capsys: Capture) -> None:
    file = written(
        "exp.yaml",
        ("hidden:", "hiden:"),
        ("lr: 0.1", "lrr: 0.1"),
        ("class_path: Dirichlet", "class_path: Dirichlt"),
        ("trainer:", "trainr:"),
        ("rounds: 20", "round: 20"),
        ("class_path: FedAvg", "class_pth: FedAvg"),
    )
    assert cli("fit", "--config", file, "--seed", "7", "--trainer.logger", "WandLogger") == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        f"flsuite: error: {line}"
        for line in (
            "exp.yaml: unknown key model.backbone.hiden (did you mean model.backbone.hidden?)",
            "exp.yaml: unknown key model.optimizer.lrr (did you mean model.optimizer.lr?)",
            "exp.yaml: data.partition: there is no Partition called Dirichlt "
            "(did you mean Dirichlet?)",
            "exp.yaml: unknown key trainr (did you mean trainer?)",
            "exp.yaml: unknown key trainer.round (did you mean trainer.rounds?)",
            "exp.yaml: unknown key trainer.aggregator.class_pth (did you mean class_path?)",
            "unknown key --seed (did you mean --seed_everything?)",
            "--trainer.logger: there is no Logger called WandLogger (did you mean WandbLogger?)",
        )
    ]


LIKELIEST = {
    "--trainer.round 5": "--trainer.rounds?",  # an abbreviation
    "--seed 7": "--seed_everything?",
    "--rounds 1": "--trainer.rounds?",
    "--epochs 1": "--trainer.max_epochs?",
    "--trainer.epochs 1": "--trainer.max_epochs?",
    "--lr 0.1": "--model.optimizer.lr?",
    "--batch_size=8": "--data.batch_size?",
    "--alpha 0.1": "--data.partition.alpha?",
    "--trainer.acelerator cpu": "--trainer.accelerator?",
    "--trainer.rule Krum": "--trainer.aggregator.rule?",
    "--trainer {roundz: 3}": "--trainer.rounds?",
    "--model.optimizer torch.optim.SDG": "torch.optim has no class SDG (did you mean SGD?)",
    "--model.optimizer.momentumm 0.9": "--model.optimizer.momentum?",
    "--model.optimizer AdamW --model.optimizer.init_args.wieght_decay 1": "weight_decay?",
    "--model.backbone CNN --model.backbone.hiden 3": "--model.backbone.hidden?",
    "--data.partition {class_path: Pathological, classes_per_client: 2}": "init_args: classes_per",
    "--trainer.aggregator {class_path: FedAvgM, inti_args: {lr: 1}}": "did you mean init_args?",
    "--trainer.callbacks Zzyx": "as my_module.Name, or see flsuite fit --help=trainer.callbacks",
    "--trainer.callbacks Krum": "there is no Callback called Krum; it is for the key rule",
    "--trainer.aggregator Proximal": "Rule called Proximal; it is for the key objective",
    "--trainer.aggregator Unseen": "called Unseen (did you mean my_unseen.Unseen?)",
    "--data Classifier": "LightningDataModule called Classifier; it is for the key model",
    "--trainer.engine my_typos.MyFedAvg": "my_typos.MyFedAvg is not of type Engine; it is "
    "for the key aggregator",
    "--plugins [my_typos] --trainer.engine MyFedAvg": "called MyFedAvg; it is for the key aggregat",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr x": "callbacks.monitor?",
    "--trainer.logger [CSVLogger, WandLogger]": "did you mean WandbLogger?",
    "--plugns [my_typos]": "--plugins?",
    "--model my_typos.Tower --model.hiden 3": "--model.hidden?",
    "--model my_typos.Deep --model.hiden 3 --model.depth 1": "--model.hidden?",
    "--model my_typos.Loose --model.anything 3": "--model.anything; Loose takes no arguments",
    "--model my_typos.Towr": "my_typos has no class Towr (did you mean Tower?)",
    "--model my_typo.Net": "there is no module my_typo in this folder (did you mean my_typos?)",
    "--plugins [my_typos] --trainer.aggregator FedAvgg": "did you mean FedAvg?",
    "--plugins [my_typos] --model Tower --model.hiden 3": "--model.hidden?",
    "--trainer.engine flsuite.engines.Proceses": "flsuite.engines has no class Proceses (did you m",
    "--trainer.engine flsuite.engine.Processes": "did you mean flsuite.federation.Processes?",
    "--trainer.aggregator flsuite.aggregators.fedprox.FedPrx": "did you mean FedProx?",
    "--trainer.class_path X": "unknown key --trainer.class_path; see flsuite fit --help",
    "--trainer.engine X": "no Engine called X; give its module too, as my_module.Name; there are: "
    "Auto, InProcess, Processes, Ray, Vectorized",
    "--trainer.fork foo": "no Fork called foo; give its module too, as my_module.Name; there are: "
    "Fork",
    "--model Classifier --lr 0.1": "(did you mean --model.optimizer.lr?)",
    "--model Classifier --model.lr 0.1": "(did you mean --model.optimizer.lr?)",
    "--data.bogus 3": "unknown key --data.bogus; Digits takes clients, partition",
    "--bogus 3": "unknown key --bogus; see flsuite fit --help",
}


@pytest.mark.parametrize(("args", "words"), LIKELIEST.items(), ids=LIKELIEST)
def test_the_likeliest_name_is_given(args: str, words: str) -> None:
    (line,) = typos("--config", QUICKSTART, *re.findall(r"\{.*\}|\[.*\]|\S+", args))
    assert words in line


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_lambda_in_a_config_is_told_what_to_write(quote: str, tmp_path: Path) -> None:
    text = f"model: {{optimizer: {quote}lambda p: torch.optim.SGD(p, lr=0.1){quote}}}"
    (tmp_path / "exp.yaml").write_text(f"{text}\n")
    with pytest.raises(FlsuiteError, match="cannot hold a lambda; name a function, as my_"):
        refuse_typos("fit", ["--config", QUICKSTART, "--config", str(tmp_path / "exp.yaml")])


def test_keys_below_the_name_of_the_command_are_told_to_move(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("fit:\n  trainer: {rounds: 3}\n")
    (line,) = typos("--config", QUICKSTART, "--config", str(tmp_path / "exp.yaml"))
    assert line.endswith("unknown key fit; remove it, and move the keys below it to the left")


RIGHT = (
    "--trainer.rounds=3 --seed_everything 2 --print_config",
    "--trainer.aggregator FedProx --trainer.aggregator.mu 0.1 --trainer.aggregator.init_args.mu 1",
    "--trainer.aggregator null --trainer.aggregator.rule Krum --trainer.aggregator.rule.x 1",
    "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitor x --trainer.profiler simple",
    "--trainer.logger WandbLogger --trainer.logger.project x --trainer.logger.settings.quiet true",
    "--trainer.strategy ddp --trainer.precision 16-mixed --trainer.logger true",
    "--model my_typos.Deep --model.hidden 3 --model.depth 1 --model.lr 1",
    "--model my_typos.Holder --model.sub SubB --model.sub.y 2",
    "--model my_typos.Taker --model.bonus 3 --model.hidden 2",
    "--plugins [my_typos] --model NotSeenHere --model.hidden 3 --trainer.aggregator MyFedAvg",
    "--model my_typos.Tower --trainer.aggregator MyFedAvg",
    "--model somewhere/model.yaml --model.any 3 --data data.yaml",
    "--data FromDataModule --data.data my_typos.MyData --data.data.init_args.samples 1",
    "--data Table --data.path traffic.csv --data.label attack",
    "--model my_typos.Chosen --model.mode FAST --model.file some.csv",
    "--model.help Classifier --data.partition.help Dirichlet",
)


@pytest.mark.parametrize("args", RIGHT)
def test_what_is_right_is_let_through(args: str) -> None:
    assert typos("--config", QUICKSTART, *args.split()) == []


def test_another_version_of_torch_is_imported_and_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(known._file()["versions"], "torch", "1.0")
    args = ("--config", QUICKSTART, "--model.optimizer.momentumm", "0.9")
    assert refuse_typos("fit", [*args]), "it may be a new argument"
    (line,) = typos(*args)
    assert "did you mean --model.optimizer.momentum?" in line
    assert not typos(*args[:2], "--model.optimizer.momentum", "0.9")


def test_a_sweep_is_named_once_and_the_data_module_that_splits() -> None:
    Path("s.yaml").write_text("config: x.yaml\nseeds: [1]\nmethods: {A: {}}\nworkers: 2\n")
    assert typos("--config", "s.yaml") == ["s.yaml: this is a sweep: flsuite sweep --config s.yaml"]
    plain = "lightning.pytorch.demos.boring_classes.BoringDataModule"
    (line,) = typos("--data", plain, "--data.clients", "5")
    assert line == (
        "unknown key --data.clients; FromDataModule takes it, with BoringDataModule as its data"
    )


@pytest.mark.parametrize("command", ["validate", "test", "predict", "partition", "schedule"])
def test_every_command_with_a_config_looks_for_them(command: str) -> None:
    (line,) = typos("--config", QUICKSTART, "--trainer.rouns", "3", command=command)
    assert line == "unknown key --trainer.rouns (did you mean --trainer.rounds?)"
    assert not typos("--config", QUICKSTART, "--ckpt_path", "last", command=command)


def _real_arguments(cls: type) -> set[str]:
    parser = OneLineParser()
    parser.add_class_arguments(cls, "x", fail_untyped=False)
    return {a.dest[2:].split(".")[0] for a in parser._actions if a.dest.startswith("x.")}


BASES = (
    *("flsuite.federation.Schedule", "flsuite.data.Partition", "flsuite.aggregators.Aggregator"),
    *("flsuite.models.ClientModel", "lightning.pytorch.loggers.Logger", "flsuite.aggregators.Rule"),
    *("lightning.pytorch.LightningDataModule", "lightning.pytorch.Callback"),
    *("torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
)


def test_every_engine_goes_by_its_short_name() -> None:
    exported = [getattr(federation, name) for name in federation.__all__]
    engines = {cls.__name__ for cls in exported if issubclass(cls, EngineChoice)}
    names = {path.rpartition(".")[2] for path in get_all_subclass_paths(EngineChoice)}
    assert len(engines) > 4 and names >= engines - {"Engine"}


@pytest.mark.parametrize("path", mostly_long({name: name for name in BASES}, *BASES[:2]))
def test_no_less_is_known_than_the_parser_takes(path: str) -> None:
    module, _, name = path.rpartition(".")
    base = getattr(importlib.import_module(module), name)
    closed = 0
    for path in get_all_subclass_paths(base):
        found = find(path)
        if found and not found.is_open:
            closed += 1
            module, _, name = path.rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            assert _real_arguments(cls) <= found.arguments.keys(), path
    assert closed > 1


def test_the_known_arguments_of_the_trainer_are_those_that_the_parser_takes() -> None:
    found = find(TRAINER)
    assert found and not found.is_open
    assert found.arguments.keys() == _real_arguments(FederatedTrainer)


def test_the_parser_itself_takes_no_abbreviation() -> None:
    parser = OneLineParser()
    parser.add_argument("--rounds", type=int)
    with pytest.raises(FlsuiteError, match=r"unknown key --roun$"):
        parser.parse_command(["--roun", "3"])


def test_a_refusal_waits_for_no_library() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "flsuite"]
    request = ["fit", "--config", QUICKSTART, "--rounds", "3"]
    done = subprocess.run([*command, *request], capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 2 and "did you mean --trainer.rounds?" in done.stderr
    assert "yaml" in imported
    assert not imported & {"torch", "lightning", "numpy", "jsonargparse"}


WORDS = {
    "labels": ("1", "data.labels: expected text, a function, a list or null, got 1"),
    "bins": ("many", "data.bins: expected a whole number (at least 2) or null, got 'many'"),
    "download": ("perhaps", "data.download: expected true or false, got 'perhaps'"),
}


@pytest.mark.parametrize("key", WORDS)
def test_a_wrong_value_is_told_in_words(key: str, capsys: Capture) -> None:
    value, words = WORDS[key]
    file = written(
        "exp.yaml",
        ("class_path: Digits", "class_path: FromDataset"),
        ("clients: 10", f"{key}: {value}"),
    )
    assert words in refused(capsys, "fit", "--config", file)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--trainer.batchnorm", "averge"), "local or reset, got 'averge' (did you mean average?)"),
        (
            ("--trainer.callbacks", "-1.5"),
            "expected a list of Callback, Callback or null, got -1.5",
        ),
        (
            ("--trainer.schedule", "null", "--trainer.schedule.participation", "3.5"),
            "trainer.schedule: name a specific Schedule: ",
        ),
        (
            ("--trainer.logger", "WandbLogger", "--trainer.logger.projct", "x"),
            "trainer.logger.projct: unknown key (did you mean project?)",
        ),
    ],
    ids=["choice", "list", "no_class", "open_class"],
)
def test_the_parser_says_it_in_words(args: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert words in refused(capsys, "fit", "--config", QUICKSTART, *args)


def test_own_classes_are_found_whatever_folder_the_config_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # As the command is installed: its own folder is on the path, and not the working folder.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    own = Path("here_alone.py")
    own.write_text("from flsuite.aggregators import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["trainer"]["aggregator"]["class_path"] = "here_alone.Mine"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "exp.yaml").write_text(yaml.safe_dump(config))
    own.rename("elsewhere/here_alone.py")
    line = refused(capsys, "fit", "--config", "elsewhere/exp.yaml")
    assert "this folder; run the command in elsewhere, which has here_alone.py" in line
    Path("elsewhere/here_alone.py").rename(own)
    try:
        assert cli("fit", "--config", "elsewhere/exp.yaml", "--print_config") == 0
        assert "class_path: here_alone.Mine" in capsys.readouterr().out
        assert str(tmp_path) in sys.path and "" not in sys.path
        sys.modules.pop("here_alone")

        config["plugins"], config["trainer"]["aggregator"]["class_path"] = ["here_alone"], "Mine"
        (tmp_path / "elsewhere" / "exp.yaml").write_text(yaml.safe_dump(config))
        assert cli("test", "--config", "elsewhere/exp.yaml", "--print_config") == 0
    finally:
        sys.modules.pop("here_alone", None)


def test_a_short_option_is_no_value_of_the_one_before_it() -> None:
    args = ["--print_config", "-c", "c.yaml", "-c=d.yaml", "--seed_everything", "-1"]
    configs = [("config", "c.yaml"), ("config", "d.yaml")]
    assert list(options(args)) == [("print_config", None), *configs, ("seed_everything", "-1")]
