"""What a wheel holds, beyond the Python files."""

from pathlib import Path

import pytest
import yaml

import flsuite

tomllib = pytest.importorskip("tomllib", reason="the reader of pyproject.toml is in Python 3.11")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_that_is_not_python_is_package_data() -> None:
    source = ROOT / "flsuite"
    ((package, globs),) = PROJECT["tool"]["setuptools"]["package-data"].items()
    shipped = {path for glob in globs for path in source.glob(glob)}
    files = {path for path in source.rglob("*") if path.is_file()}
    assert package == "flsuite"
    assert {f for f in files - shipped if f.suffix not in (".md", ".py", ".pyc")} == set()


def test_the_citation_and_the_changes_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"\n## {flsuite.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["version"] == flsuite.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]


def test_dev_has_every_optional_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (inside,) = (r for r in extras["dev"] if r.startswith("flsuite["))
    (tested,) = (r for r in extras["test"] if r.startswith("flsuite["))
    named = {name for r in (inside, tested) for name in r[8:-1].split(",")}
    assert set(extras) - named == {
        "dev",
        "flower",
    }  # Flower is there without its simulation, and with
    assert set(extras["flower"]) <= {r.partition(";")[0].strip() for r in extras["dev"]}
