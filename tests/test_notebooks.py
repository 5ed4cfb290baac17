"""Every notebook runs from top to bottom."""

import ast
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import NOTEBOOKS, ROOT

PICTURES = {
    "acvae_cmga": 7,
    "asynchronous": 5,
    "clients_and_heterogeneity": 5,
    "compare_methods": 2,
    "counterfactual": 3,
    "fedavg_by_hand": 1,
    "fusedspacefed": 5,
    "inversion": 1,
    "nf_classifier": 6,
    "one_shot": 5,
    "personal": 2,
    "quickstart": 3,
    "trust": 3,
    "your_own": 1,
}
MOST_BYTES = 1_000_000
LEAST_WIDTH = 500  # pixels of a figure


def cells_of(name: str, kind: str) -> list[str]:
    """Return the sources of a notebook's cells of this kind."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def printed(notebook: dict[str, Any]) -> str:
    return "".join("".join(o["text"]) for o in outputs(notebook) if o.get("name") == "stdout")


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    """Return the PNGs of the outputs."""
    data = [output.get("data", {}) for output in outputs(notebook)]
    return [b64decode("".join(own["image/png"])) for own in data if "image/png" in own]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    monkeypatch.setenv("FLSUITE_SMALL_NOTEBOOKS", "1")  # a notebook of minutes runs in seconds
    notebook = nbformat.read(path, as_version=4)
    committed = printed(notebook)

    # In a fresh kernel, in which an error in a cell raises.
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()

    assert len(pictures(notebook)) == PICTURES[path.stem]
    assert printed(notebook) == committed, "what they print is the same on every run"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_time_sharp_figures_and_files_that_exist(path: Path) -> None:
    notebook = json.loads(path.read_text())
    prose = cells_of(path.stem, "markdown")
    assert re.search(r"takes about [\w ]+ (seconds|minutes?) on two cores\.", prose[0])
    assert path.stat().st_size < MOST_BYTES
    stored = pictures(notebook)
    assert len(stored) == PICTURES[path.stem]
    widths = [int.from_bytes(picture[16:20], "big") for picture in stored]  # of the header of a PNG
    assert min(widths) >= LEAST_WIDTH, widths

    named = re.findall(r"(?:configs|notebooks|flsuite)/[\w/.]+\.\w+", "\n".join(prose))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
    shown = [
        [*o.get("text", ()), *o.get("data", {}).get("text/plain", ())] for o in outputs(notebook)
    ]
    assert not re.search(r"(?:^|[\s'\"])/\w+/", "\n".join(map("".join, shown))), "absolute paths"


def test_fedavg_by_hand_compares_all_tensors_after_every_round() -> None:
    """Check what the comparison printed; the test above shows that a new run prints the same."""
    notebook = json.loads((ROOT / "notebooks" / "fedavg_by_hand.ipynb").read_text())
    assert printed(notebook).splitlines() == [
        f"round {round}: all 4 tensors are equal" for round in range(1, 6)
    ]


def by_hand() -> str:
    """Return the code of the notebook, for one round and without its picture."""
    code = cells_of("fedavg_by_hand", "code")
    source = "\n".join(cell for cell in code if "plt.show" not in cell)
    return source.replace("%matplotlib inline", "").replace("ROUNDS = 5", "ROUNDS = 1")


def test_the_code_of_fedavg_by_hand_passes_for_one_round() -> None:
    exec(by_hand(), {})


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("n * state[name].double()", "n * state[name]"),  # the mean in float32
        ("n * state[name].double()", "state[name].double()"),  # not weighted by samples
        ("Loader(federated, client, SEED, round)", "Loader(federated, client, SEED + 1, round)"),
        ("lr=LEARNING_RATE)\n    batches", "lr=LEARNING_RATE * (1 + 1e-6))\n    batches"),
        ("manual_seed(seed_for(SEED,", "manual_seed(seed_for(SEED + 1,"),
    ],
)
def test_fedavg_by_hand_fails_if_the_two_differ(line: str, changed: str) -> None:
    """Change one line of the loop by hand and expect the comparison to fail after one round."""
    source = by_hand()
    assert source.count(line) == 1
    with pytest.raises(AssertionError):
        exec(source.replace(line, changed), {})


def test_your_own_classes_are_each_under_thirty_lines() -> None:
    code = [c for c in cells_of("your_own", "code") if c.startswith("%%writefile my_")]
    assert len(code) == 3
    for source in code:
        module = ast.parse(source.split("\n", 1)[1])
        classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
        assert classes
        assert all((node.end_lineno or 0) - node.lineno < 30 for node in classes)
