"""The help of commands that read a config, and the line that says what is loading."""

import io
import sys
from pathlib import Path
from typing import get_args

import pytest

from flsuite.analysis.listing import Progress
from flsuite.commands.main import main
from flsuite.commands.parsers import PARSERS, parser_of
from flsuite.commands.process import waiting
from tests.commands.command import QUICKSTART, Capture, cli, refused


def shown(capsys: Capture, *args: str) -> str:
    """Return what a request for help prints."""
    capsys.readouterr()
    assert cli(*args) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def rows(text: str) -> dict[str, str]:
    """Return the first line of each entry, by its name."""
    entries = [
        line.split() for line in text.splitlines() if line.startswith("  ") and line[2] > " "
    ]
    return {words[0]: " ".join(words[1:]) for words in entries}


@pytest.mark.parametrize("form", ["--help", "-h"])
def test_the_options_of_flsuite_fit_are_its_own(form: str, capsys: Capture) -> None:
    text = shown(capsys, "fit", form)
    assert max(map(len, text.splitlines())) <= 100
    own = rows(text)
    assert own.keys() >= {"--config", "--model", "--data", "--ckpt_path", "--run_dir", "rounds"}
    assert own["batchnorm"].startswith("average|local|reset")
    assert own["max_epochs"] == "N Local epochs per fit. Default: 1."
    scaffold = rows(shown(capsys, "fit", "--help=SCAFFOLD"))
    assert scaffold["control"] == "displacement|mean_gradient"
    assert not own.keys() & {"devices", "accelerator"}  # Lightning's


def test_the_rest_of_the_trainer_is_lightnings(capsys: Capture) -> None:
    lightning = rows(shown(capsys, "fit", "--help=trainer"))
    assert lightning.keys() >= {"devices", "accelerator", "gradient_clip_val"}
    assert not lightning.keys() & {"rounds", "aggregator"}
    assert "enable_model_summary" not in lightning  # the trainer decides it


@pytest.mark.parametrize(
    ("topic", "names"),
    [
        ("trainer.aggregator", {"FedAvg", "SCAFFOLD", "Krum"}),
        ("--trainer.schedule", {"Synchronous", "Asynchronous"}),
        ("data.partition", {"Dirichlet", "IID"}),
        ("model.backbone", {"MLP", "CNN"}),
    ],
)
def test_a_key_lists_its_classes(topic: str, names: set[str], capsys: Capture) -> None:
    listed = rows(shown(capsys, "fit", f"--help={topic}"))
    assert listed.keys() >= names
    assert all(listed[name] for name in names), "each has a summary"
    assert not listed.keys() & {"Schedule", "Partition", "LightningModule", "BoringModel"}


def test_a_class_lists_its_arguments(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows(shown(capsys, "fit", "--help", "FedProx"))["mu"].startswith("X Weight of the prox")
    assert "objective" not in rows(shown(capsys, "fit", "--help=FedProx"))  # it is FedProx's own
    (tmp_path / "my_help.py").write_text(
        "class HelpNet:\n"
        '    """A net.\n\n    Args:\n        width: Units of ``layers``.\n    """\n\n'
        "    def __init__(self, width: int = 8, flag: bool | None = None):\n        pass\n"
    )
    own = rows(shown(capsys, "fit", "--help=my_help.HelpNet"))
    assert own == {"width": "N Units of layers. Default: 8.", "flag": "true|false"}
    assert "did you mean my_help.HelpNet?" in refused(capsys, "fit", "--help=HelpNet")
    (tmp_path / "my_rule.py").write_text(
        "from flsuite.aggregators import CohortRule\n\n\nclass OwnRule(CohortRule):\n    pass\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    request = ("--config", QUICKSTART, "--model", "tests.plain.Net")  # which is imported
    said = refused(capsys, "fit", *request, "--trainer.aggregator", "OwnRule")
    assert "did you mean my_rule.OwnRule?" in said


def test_a_plugin_gives_its_classes_short_names(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_pull.py").write_text(
        "from flsuite.aggregators import Objective\n\n\n"
        'class Pull(Objective):\n    """A pull."""\n\n'
        "    def __init__(self, strength: float = 0.1) -> None:\n        pass\n"
    )
    plugin = ("--plugins", "[my_pull]")
    assert rows(shown(capsys, "fit", *plugin, "--help=Pull"))["strength"] == "X Default: 0.1."
    listed = rows(shown(capsys, "fit", *plugin, "--help=trainer.aggregator.objective"))
    assert listed["Pull"] == "A pull." and "Proximal" in listed


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("FedPrx", "FedProx"),
        ("schedule", "trainer.sch"),
        ("trainer.agregator", "trainer.aggregator?"),
    ],
)
def test_an_unknown_topic_is_one_line(topic: str, meant: str, capsys: Capture) -> None:
    assert cli("fit", f"--help={topic}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean {meant}" in line


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_have_it_too(command: str, capsys: Capture) -> None:
    said = shown(capsys, command, "--help")
    assert said.startswith(f"usage: flsuite {command} RUN | --config FILE ")


def test_topics_are_for_the_commands_that_read_a_config(capsys: Capture) -> None:
    assert "alpha" in rows(shown(capsys, "partition", "--help=Dirichlet"))
    main(["report", "--help=Dirichlet"])
    assert capsys.readouterr().out.startswith("usage: flsuite report ")


def test_help_comes_before_anything_runs(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "nowhere.yaml", "--help"])
    assert end.value.code == 0
    assert "usage: flsuite fit" in capsys.readouterr().out


@pytest.mark.parametrize("command", PARSERS)
def test_the_commands_with_options_of_their_own_list_them(command: str, capsys: Capture) -> None:
    capsys.readouterr()
    main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: flsuite {command} ")
    assert max(map(len, said.splitlines())) <= 100
    assert all(name in said for a in parser_of(command)._actions for name in a.option_strings)


def test_the_folder_of_a_run_comes_before_its_options(capsys: Capture) -> None:
    main(["fork", "--help"])
    assert "usage: flsuite fork RUN --at ROUND [OPTION ...]" in capsys.readouterr().out


def test_the_states_that_are_listed_are_those_of_a_run() -> None:
    (states,) = (a.choices for a in parser_of("ls")._actions if a.dest == "state")
    assert states == get_args(Progress)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_what_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = _Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("loading"):
        assert terminal.getvalue() == "loading ..."
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is erased"
    monkeypatch.setattr(sys, "stderr", pipe)
    with pytest.raises(ValueError), waiting("loading"):
        raise ValueError
    assert pipe.getvalue() == ""
