"""The README, the guide and the result pages show what is true."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import flsuite
from flsuite.aggregators import FedProx, LocalOnly
from flsuite.commands.main import main
from flsuite.commands.sweeps.plan import fit_arguments, samples_of
from flsuite.commands.sweeps.reading import read_sweep
from tests.commands.command import QUICKSTART, Capture, cli
from tests.conftest import long, mostly_long
from tests.docs.generated import (
    KINDS,
    KNOWN,
    badge_file,
    badges,
    card,
    classes,
    known_classes,
    tables,
    written,
)
from tests.docs.pages import (
    NOTEBOOKS,
    PAGES,
    ROOT,
    anchors,
    blocks,
    broken_links,
    commands,
    files_shown,
    missing_files,
    new_commands,
    page_id,
    text_of,
)
from tests.test_notebooks import cells_of

README = (ROOT / "README.md").read_text("utf-8")
GUIDE = ROOT / "configs" / "guide"
OWN = GUIDE / "your-own.md"
RESULTS = [
    *("asynchronous", "cmga", "counterfactual", "fusedspacefed", "nf_fisher", "one_shot"),
    *("personal", "trust"),
]
RESULT_PAGES = [*RESULTS, "benchmarks"]
PACKAGES = ["aggregators", "callbacks", "data", "federation", "models"]
WITH_CONFIG = ("fit", "validate", "test", "predict", "partition", "schedule")


# What it says


@pytest.mark.long
def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(README, "python")
    exec(compile(example, "<example>", "exec"), {"__name__": "__main__"})
    accuracy, worst = map(float, capsys.readouterr().out.split()[-2:])
    assert worst <= accuracy and accuracy > 0.5


def test_the_config_shown_is_the_shipped_one() -> None:
    (shown,) = blocks(README, "yaml")
    shipped = (ROOT / "configs" / "quickstart.yaml").read_text("utf-8")
    assert yaml.safe_load(shown) == yaml.safe_load(shipped)


def test_the_test_command_is_where_ci_reads_it() -> None:
    (marked,) = re.findall(r"<!-- tests -->\n(.*?)<!-- /tests -->", README, flags=re.S)
    (command,) = blocks(marked, "bash")
    assert "pip install" in command and "python -m pytest" in command


def test_the_guide_has_a_line_for_every_page_and_notebook() -> None:
    index = (ROOT / "configs" / "README.md").read_text("utf-8")
    assert all(f"(guide/{page.name})" in index for page in GUIDE.glob("*.md"))
    assert all(f"| [{path.stem}](../notebooks/{path.name}) |" in index for path in NOTEBOOKS)


def test_the_readme_fits_a_newcomer() -> None:
    assert len(README.split()) < 900 and len(README.splitlines()) < 130


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=page_id)
def test_a_page_of_the_guide_is_one_task(page: Path) -> None:
    assert len(page.read_text("utf-8").split()) < 900


def test_the_quickstart_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (shown,) = re.findall(r"\n```\n( .*?)```", README, flags=re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli("fit", "--config", QUICKSTART, "--trainer.rounds", "1") == 0
    printed = capsys.readouterr().out
    rows = [[r.partition("│")[0] for r in t.splitlines() if "│" in r] for t in (shown, printed)]
    assert rows[0] == rows[1] and len(rows[0]) == 9
    assert all(word in printed for word in ("last round (", "picked on validation (", "\nrun: "))


# The tables that follow from the code


@pytest.mark.parametrize("page", [p for p in PAGES if tables(p.read_text("utf-8"))], ids=page_id)
def test_generated_tables_are_those_of_today(page: Path) -> None:
    assert page.read_text("utf-8") == written(page.read_text("utf-8")), (
        "run python -m tests.docs.generated"
    )


def test_the_known_classes_are_those_of_today() -> None:
    now, then = json.loads(known_classes()), json.loads(KNOWN.read_text("utf-8"))
    if now.pop("versions") == then.pop("versions"):
        assert now == then, "run python -m tests.docs.generated"
    ours = [{k: v for k, v in f["classes"].items() if k.startswith("flsuite")} for f in (now, then)]
    assert ours[0] == ours[1], "run python -m tests.docs.generated"


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_inside_is_listed(package: str) -> None:
    """Each exported class is in the gallery, unless configs cannot name it."""
    others = {base.__name__ for base, _ in KINDS.values()}
    others |= {"CohortRule", "LinearRule", "Part", "Server", "Statistic"}  # parts of an algorithm
    others |= {"Cohort", "FeatureTerm", "FitView", "ParameterRule", "Payload"}
    others |= {"Collusion", "Trial", "with_attack"}
    others |= {"DataSpec", "DataSplit", "FederatedData", "PublishedSplits"}
    others |= {"Parties", "PartyCost", "SumReport"}
    others |= {"Clock", "Fit"}
    others |= {"Engine"}
    exported = set(getattr(flsuite, package).__all__) - others
    assert exported <= {cls.__name__ for kind in KINDS for cls in classes(kind)}


def test_the_gallery_says_when_to_take_what() -> None:
    cards = [card(cls) for kind in KINDS if kind != "data" for cls in classes(kind)]
    assert not [name for name, _, when, _ in cards if not when]
    papers = {name: one for name, _, _, one in map(card, classes("aggregators"))}
    assert [name for name, one in papers.items() if not one] == [card(LocalOnly)[0]]
    assert "Li et al. 2020](https://arxiv.org/abs/1812.06127)" in papers[card(FedProx)[0]]


def test_badges_are_those_of_today() -> None:
    for text, picture in badges().items():
        assert f"[![{text}](" in README and badge_file(text).read_text("utf-8") == picture


# The files of the project


def test_the_workflow_runs_what_the_readme_shows() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "readme.yml").read_text("utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    shown = [step.partition(" | ")[0] for step in steps if "tests.docs.pages" in step]
    printed = "".join(
        subprocess.run(
            [sys.executable, *shlex.split(command)[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in shown
    )
    first, last = blocks(README, "bash")[0], blocks(README, "bash")[-1]
    assert printed == first + last
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert all(re.sub(" -q", "", step) in contributing for step in steps[-2:])


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=page_id
)
def test_a_form_asks_for_what_it_names(form: Path) -> None:
    asked = yaml.safe_load(form.read_text("utf-8"))
    if form.name != "config.yml":  # which has no form
        assert asked.keys() >= {"name", "description", "body"}
        assert all(one["attributes"]["label"] for one in asked["body"])


def imported() -> set[str]:
    """Return what the pages and the notebooks import from flsuite."""
    cells = [cell for path in NOTEBOOKS for cell in cells_of(path.stem, "code")]
    code = [re.sub(r"^[%!].*$", "", cell, flags=re.M) for cell in cells if cell[:2] != "%%"]
    code += [block for page in PAGES for block in blocks(text_of(page), "python")]
    nodes = [node for block in code for node in ast.parse(block).body]
    found = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return {f"{n.module}.{a.name}" for n in found for a in n.names if "flsuite." in f"{n.module}."}


@pytest.mark.long
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="needs the site: pip install 'flsuite[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    names = {page_id(page).removesuffix(page.suffix) for page in [*PAGES, *NOTEBOOKS]}
    assert {f"{re.sub('README$', 'index', name)}.html" for name in names} <= pages
    assert (tmp_path / "notebooks" / "quickstart-1.png").exists()
    listed = (tmp_path / "configs" / "guide" / "flower.html").read_text("utf-8")
    assert re.search(r"<li>[^/]*These settings are refused:</strong>\s*<ul>", listed)
    searched = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))
    found = {doc["location"].partition("#")[2] for doc in searched["docs"]}
    assert imported() <= found, "name the module in REFERENCE of tests/docs/site.py"
    exported = {f"flsuite.{p}.{n}" for p in PACKAGES for n in getattr(flsuite, p).__all__}
    assert exported <= found


def test_the_site_has_the_files_of_a_theme_in_an_environment_below_the_repository() -> None:
    pytest.importorskip("mkdocstrings", reason="needs the site: pip install 'flsuite[docs]'")
    from mkdocs.config.base import load_config
    from mkdocs.structure.files import File, Files

    from tests.docs.site import on_files

    config = load_config(str(ROOT / "mkdocs.yml"))
    config.plugins._current_plugin = None
    style = str(ROOT / ".venv" / "lib" / "main.css")
    page = next(iter((ROOT / "configs" / "guide").glob("*.md")))
    given = [File.generated(config, p.split("/")[-1], abs_src_path=p) for p in (style, str(page))]
    kept = [file.abs_src_path for file in on_files(Files(given), config)]
    assert style in kept and kept.count(str(page)) == 1


# Blocks of code


def test_the_table_shown_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = (b for b in blocks((GUIDE / "data.md").read_text("utf-8"), "yaml") if "Table" in b)
    monkeypatch.chdir(tmp_path)
    rows = [f"{n}.5,{n % 2},device{n % 9}" for n in range(180)]
    Path("traffic.csv").write_text("\n".join(["bytes,attack,device", *rows]) + "\n")
    Path("traffic.yaml").write_text(shown)
    assert cli("partition", "--config", "traffic.yaml") == 0
    lines = Path("traffic-partition.csv").read_text("utf-8").splitlines()[1:]
    assert {line.split(",")[0] for line in lines} == {str(client) for client in range(9)}


def test_the_dataset_shown_can_be_read(at_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (GUIDE / "data.md").read_text("utf-8")
    (shown,) = (b for b in blocks(page, "yaml") if "FromDataset" in b)
    monkeypatch.chdir(at_root)
    Path("sensors.yaml").write_text(shown)
    assert cli("partition", "--config", "sensors.yaml") == 0
    drawn = Path("sensors-partition.csv").read_text("utf-8").splitlines()[1:]
    assert {line.split(",")[0] for line in drawn} == set("01234")


def test_the_tasks_shown_are_those_of_a_config() -> None:
    (block,) = blocks((GUIDE / "tasks.md").read_text("utf-8"), "yaml")
    shipped = (ROOT / "configs" / "nf_fisher" / "fashionmnist.yaml").read_text("utf-8")
    data = yaml.safe_load(shipped)["data"]
    data["init_args"]["data"]["init_args"].pop("batch_size")  # the default
    assert yaml.safe_load(block)["data"] == data


@pytest.mark.parametrize("page", mostly_long({n: n for n in ("parts", "failures")}, "failures"))
def test_parts_of_a_config_that_are_shown_are_understood(page: str, tmp_path: Path) -> None:
    path, quickstart = tmp_path / "shown.yaml", str(ROOT / "configs" / "quickstart.yaml")
    parts = blocks((GUIDE / f"{page}.md").read_text("utf-8"), "yaml")
    assert parts
    for shown in parts:
        path.write_text(shown)
        assert cli("fit", "--config", quickstart, "--config", str(path), "--print_config") == 0


def test_the_sweep_shown_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = blocks((GUIDE / "sweeps.md").read_text("utf-8"), "yaml")
    monkeypatch.chdir(ROOT)
    (tmp_path / "shown.yaml").write_text(shown)
    sweep = read_sweep(tmp_path / "shown.yaml")
    cell = samples_of(sweep)[-1]  # the FedProx cell, with a value of each kind
    assert cli("fit", *fit_arguments(sweep, cell, tmp_path), "--print_config") == 0


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p.read_text("utf-8"), "python")], ids=page_id
)
def test_python_shown_is_python(page: Path) -> None:
    """Everything that a block imports from flsuite exists."""
    if page.name == "flower.md":
        pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")
    for block in blocks(page.read_text("utf-8"), "python"):
        tree = ast.parse(block)
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        for node in imports:
            if node.module and node.module.startswith("flsuite"):
                exec(compile(ast.unparse(node), "<imports>", "exec"), {})


# Commands


@pytest.fixture
def at_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the root of the repository, with the files that pages show in a folder on the path.

    Returns:
        The folder.
    """
    for page in PAGES:
        for name, code in files_shown(page).items():
            (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    return tmp_path


def require_understood(commands: list[list[str]], capsys: Capture) -> None:
    """Parse those that read a config, and look up the options of the others in their help."""
    for command, *arguments in commands:
        if command in WITH_CONFIG and arguments[0].startswith("--"):
            assert cli("fit", *arguments, "--print_config") == 0, arguments
            continue

        capsys.readouterr()
        main(["--help"] if command in WITH_CONFIG else [command, "--help"])
        help = capsys.readouterr().out
        options = {word for word in arguments if re.match(r"--[\w-]+$", word)}
        unknown = [option for option in options if option not in f"{help} --ckpt_path"]
        assert re.search(rf"(flsuite|^ ) {command}\b", help, flags=re.M) and not unknown


WITH_COMMANDS = {page_id(page): page for page in PAGES if commands(page) and page != OWN}


@pytest.mark.parametrize("page", mostly_long(WITH_COMMANDS, "README.md", "configs/guide/forks.md"))
def test_commands_shown_are_understood(page: Path, at_root: Path, capsys: Capture) -> None:
    shown = new_commands()[page]
    assert all(Path(word).exists() for c in shown for word in c if word.startswith("configs/"))
    require_understood(shown, capsys)


def test_the_ten_minutes_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pytest.importorskip("flsuite.commands.new")
    monkeypatch.chdir(tmp_path)
    (config,) = blocks(OWN.read_text("utf-8"), "yaml")
    first, *others = new_commands()[OWN]
    assert cli(*first) == 0
    monkeypatch.chdir(tmp_path / "my_project")
    monkeypatch.syspath_prepend(Path.cwd())
    assert yaml.safe_load(config) == yaml.safe_load(Path("exp.yaml").read_text("utf-8"))
    require_understood(others, capsys)


@pytest.mark.long
def test_the_rule_and_the_speeds_shown_run(at_root: Path) -> None:
    short = ["--trainer.rounds", "2", "--trainer.enable_progress_bar", "false"]
    plugged = [c for p in PAGES for c in commands(p) if "my_" in " ".join(c) and "--plugins" in c]
    assert len(plugged) == 2
    for command in plugged:
        where = "--run_dir" if command[0] == "fit" else "--output"
        assert cli(*command, *short, where, str(at_root / command[0])) == 0


SHORT = ["--trainer.rounds=1", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
SHORT += ["--data.train_samples=400", "--data.clients=4"]
PARTS = {
    name: command
    for name in ("SAM", "SmallFeatures", "BestHalf")
    for command in commands(GUIDE / "algorithm.md")
    if name in command
}


def weights_of(run: Path, *command: str) -> torch.Tensor:
    assert cli(*command, *SHORT, "--run_dir", str(run)) == 0
    saved = torch.load(run / "checkpoints" / "model.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in saved.values()])


@pytest.mark.parametrize("name", [*long("SAM"), *(one for one in PARTS if one != "SAM")])
def test_a_part_shown_gives_the_same_weights_on_every_engine(
    name: str, at_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone, stack, workers = (
        weights_of(at_root / engine, *PARTS[name], "--trainer.engine", engine)
        for engine in ("InProcess", "Vectorized", "Processes")
    )
    assert torch.equal(alone, workers) and torch.allclose(alone, stack, rtol=1e-5, atol=1e-5)
    # The clients trained in a stack, and with the part.
    assert not [r for r in caplog.records if r.name.endswith("client.stack")]
    plain = weights_of(at_root / "plain", "fit", "--config", QUICKSTART)
    assert not torch.allclose(alone, plain, atol=1e-3)


def test_fedprox_as_shown_is_fedprox(at_root: Path) -> None:
    fit = ["fit", "--config", QUICKSTART]
    fit += ["--plugins", "[fedprox]", "--trainer.aggregator", "FedAvg"]
    shown = weights_of(at_root / "shown", *fit, "--trainer.aggregator.objective", "PlainProx")
    fedprox = ["--trainer.aggregator", "FedProx", "--trainer.aggregator.mu", "0.1"]
    ours = weights_of(at_root / "ours", "fit", "--config", QUICKSTART, *fedprox)
    assert torch.allclose(shown, ours, atol=1e-6)


def test_sam_is_short_and_needs_eight_names() -> None:
    code = files_shown(GUIDE / "algorithm.md")["sam.py"].splitlines()
    assert len([line for line in code if line.strip()]) <= 15
    (table,) = re.findall(
        r"\| name \| what it is \|\n\|---\|---\|\n((?:\|.*\n)*)", text_of(GUIDE / "algorithm.md")
    )
    assert len(table.splitlines()) <= 8


# Links


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=page_id)
def test_links_and_named_files_exist(page: Path) -> None:
    assert not broken_links(page)
    assert not missing_files(page)


def test_pages_that_the_code_names_exist() -> None:
    sources = [
        p for s in ("py", "yaml", "sh", "sbatch") for p in (ROOT / "configs").rglob(f"*.{s}")
    ]
    sources += (ROOT / "flsuite").rglob("*.py")
    pattern = re.compile(r"(?<![\w/.])((?:\.\./)?[\w/-]+\.md(?:#[\w-]+)?)")
    texts = [(source, source.read_text("utf-8")) for source in sources]
    links = [(source, *link.partition("#")) for source, t in texts for link in pattern.findall(t)]
    # Others are files of a run, such as report.md.
    links = [link for link in links if "/" in link[1] or link[1] == "README.md"]
    assert links
    for source, path, _, anchor in links:
        found = [p for p in (source.parent / path, ROOT / path) if p.exists()]
        assert found, (source, path)
        assert not anchor or anchor in anchors(text_of(found[0])), (source, path, anchor)


# Pages of results


@pytest.mark.parametrize("folder", RESULT_PAGES)
def test_a_results_page_names_its_configs_and_opens_with_its_findings(folder: str) -> None:
    path = ROOT / "configs" / folder / "README.md"
    page = path.read_text("utf-8")
    named = set(re.findall(r"`([\w-]+\.yaml)`", page))
    places = [path.parent, ROOT / "configs"]
    assert named and all(any((place / n).is_file() for place in places) for n in named)

    opening, appendix = page.split("\n## Appendix\n")
    assert len(re.findall(r"^\|(?:---\|)+$", opening, flags=re.M)) == 1
    assert re.findall(r"^(\d)\. \*\*", opening, flags=re.M) == ["1", "2", "3"]
    assert opening.index("|---|") < opening.index("\n1. **") and "\n### " in appendix
