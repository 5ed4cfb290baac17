"""The README and the pages of the configs show what is true."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import flsuite.aggregators
import flsuite.callbacks
import flsuite.data
import flsuite.engines
import flsuite.models
import flsuite.schedules
from flsuite.commands.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "configs" / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "configs").rglob("*.md"))]
RESULTS = ["asynchronous", "cmga", "fusedspacefed", "nf_fisher", "one_shot", "trust"]
MOST_WORDS = 900


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fit_commands(page: Path) -> list[list[str]]:
    """Return the arguments of every ``flsuite fit`` that a page shows, as bash expands them.

    Runs that differ in the seed alone count once.
    """
    commands: dict[tuple[str, ...], list[str]] = {}
    for block in blocks(page.read_text(), "bash"):
        if not re.search(r"^ *(run=\")?flsuite fit", block, flags=re.M):
            continue  # such as the installation and Flower's commands, which must not run here

        script = "flsuite() { printf '%q ' \"$@\"; echo; }\n" + block
        printed = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=True
        ).stdout
        for arguments in map(shlex.split, printed.splitlines()):
            if arguments[0] != "fit":
                continue
            if "--seed_everything" in arguments:
                seed = arguments.index("--seed_everything")
                del arguments[seed : seed + 2]
            commands.setdefault(tuple(arguments), arguments)
    return list(commands.values())


def test_the_readme_is_short() -> None:
    assert len(without_blocks(README).split()) < MOST_WORDS


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(README, "python")
    exec(compile(example, "<example>", "exec"), {"__name__": "__main__"})
    accuracy, worst = map(float, capsys.readouterr().out.split()[-2:])
    assert worst <= accuracy and accuracy > 0.5


def test_the_config_shown_is_the_shipped_one() -> None:
    (shown,) = blocks(README, "yaml")
    assert yaml.safe_load(shown) == yaml.safe_load(
        (ROOT / "configs" / "retinamnist.yaml").read_text()
    )


def test_the_test_command_is_where_ci_reads_it() -> None:
    (marked,) = re.findall(r"<!-- tests -->\n(.*?)<!-- /tests -->", README, flags=re.S)
    (command,) = blocks(marked, "bash")
    assert "pip install" in command and "python -m pytest" in command


def test_the_table_shown_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = (block for block in blocks(GUIDE, "yaml") if "Table" in block)
    monkeypatch.chdir(tmp_path)
    rows = [f"{n}.5,{n % 2},device{n % 9}" for n in range(180)]
    Path("traffic.csv").write_text("\n".join(["bytes,attack,device", *rows]) + "\n")
    Path("traffic.yaml").write_text(shown)
    with pytest.raises(SystemExit) as exit:
        main(["partition", "--config", "traffic.yaml"])
    assert exit.value.code == 0
    lines = Path("traffic-partition.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in lines} == {str(client) for client in range(9)}


def test_the_tasks_shown_are_those_of_a_config() -> None:
    (block,) = (block for block in blocks(GUIDE, "yaml") if "TaskSequence" in block)
    shown = yaml.safe_load(block)["data"]
    shipped = yaml.safe_load((ROOT / "configs" / "nf_fisher" / "fashionmnist.yaml").read_text())[
        "data"
    ]
    shipped["init_args"]["data"]["init_args"].pop("batch_size")  # the default
    assert shown == shipped


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)]*)\)", text)
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    named = re.findall(r"(?<![\w/])(?:configs|notebooks|flsuite)/[\w/.-]+\.\w+", text)
    assert links or named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("folder", RESULTS)
def test_a_results_page_names_its_configs(folder: str) -> None:
    page = ROOT / "configs" / folder / "README.md"
    named = set(re.findall(r"`([\w-]+\.yaml)`", page.read_text()))
    assert named and all((page.parent / name).is_file() for name in named)


@pytest.mark.parametrize("folder", RESULTS)
def test_a_results_page_opens_with_one_table_and_three_findings(folder: str) -> None:
    opening, appendix = (
        (ROOT / "configs" / folder / "README.md").read_text().split("\n## Appendix\n")
    )
    assert len(re.findall(r"^\|(?:---\|)+$", opening, flags=re.M)) == 1
    assert re.findall(r"^(\d)\. \*\*", opening, flags=re.M) == ["1", "2", "3"]
    assert opening.index("|---|") < opening.index("\n1. **") and "\n### " in appendix


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_shown_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = fit_commands(page)
    # Flower's page has commands of Flower, and a page of tables has none.
    assert commands or page.parent.name == "flower" or page.name == "tables.md"
    for command in commands:
        with pytest.raises(SystemExit) as exit:
            main([*command, "--print_config"])
        assert exit.value.code in (0, None), command


@pytest.mark.parametrize(
    "package", ["aggregators", "callbacks", "data", "engines", "models", "schedules"]
)
def test_everything_inside_is_listed(package: str) -> None:
    abstract = {
        "Aggregator",
        "Clock",
        "DataSplit",
        "Augment",
        "Backbone",
        "ClientModel",
        "CropFlip",
        "DataSpec",
        "Engine",
    }
    abstract |= {"CohortRule", "LinearRule", "Objective", "Part", "Rule", "Server", "Statistic"}
    abstract |= {
        "Transform",
        "FederatedData",
        "FederatedDataModule",
        "FederationCallback",
        "Partition",
        "Schedule",
        "PublishedSplits",
    }
    exported = set(getattr(flsuite, package).__all__) - abstract
    missing = {name for name in exported if f"`{name}`" not in README}
    assert not missing
