"""What the README shows is true."""

import re
from pathlib import Path

import pytest
import yaml

import flsuite.aggregators
import flsuite.callbacks
import flsuite.data
import flsuite.engines
import flsuite.models
import flsuite.schedules

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    accuracy, worst = map(float, capsys.readouterr().out.split()[-2:])
    assert worst <= accuracy and accuracy > 0.5


def test_the_config_shown_is_the_shipped_one() -> None:
    shown, _ = blocks("yaml")
    assert yaml.safe_load(shown) == yaml.safe_load(
        (ROOT / "configs" / "retinamnist.yaml").read_text()
    )


def test_the_tasks_shown_are_those_of_a_config() -> None:
    shown = yaml.safe_load(blocks("yaml")[1])["data"]
    shipped = yaml.safe_load((ROOT / "configs" / "nf_fisher" / "fashionmnist.yaml").read_text())[
        "data"
    ]
    shipped["init_args"]["data"]["init_args"].pop("batch_size")  # the default
    assert shown == shipped


def test_links_and_named_files_exist() -> None:
    links = re.findall(r"\]\((?!https:)([^)#]+)\)", README) + re.findall(
        r"(?:configs|notebooks|flsuite)/[\w/.]+\.\w+", README
    )
    assert links and all((ROOT / link).exists() for link in links), [
        link for link in links if not (ROOT / link).exists()
    ]


@pytest.mark.parametrize(
    "package", ["aggregators", "callbacks", "data", "engines", "models", "schedules"]
)
def test_everything_inside_is_listed(package: str) -> None:
    abstract = {
        "Aggregator",
        "DataSplit",
        "Augment",
        "Backbone",
        "ClientModel",
        "CropFlip",
        "DataSpec",
        "Engine",
    }
    abstract |= {
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
