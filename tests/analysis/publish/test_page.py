"""The page: what it holds, that it needs nothing else, and that its charts can be drawn."""

import json
import math
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import pandas as pd
import pytest
import vl_convert

import flsuite.analysis.publish.page
from flsuite.analysis import find_runs, group_runs
from flsuite.analysis.publish.page.tables import headline
from flsuite.commands.main import main
from tests.analysis.made_runs import made_grid, made_run, settings
from tests.commands.command import Capture

METHODS = ("FedAvg", "LocalOnly")
SHOWN = ("accuracy", "loss", "--x", "bytes")
CHARTS = {"curves", "targets", "differences", "map", "spread", "gains", "mix", "gamma"}
BUNDLE = vl_convert.javascript_bundle
SCRIPT = Path(flsuite.analysis.publish.page.__file__).parent / "page.js"


class Page(HTMLParser):
    """The elements of a page, with the text of scripts, cells and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "td", "h2", "option", "pre"):
            self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.texts.append(("", ""))

    def handle_data(self, data: str) -> None:
        if self.texts:
            tag, text = self.texts[-1]
            self.texts[-1] = (tag, text + data)

    def specs(self) -> dict[str, dict[str, Any]]:
        """Return the charts by name."""
        names = [
            str(attributes["id"]).removeprefix("spec-") if "id" in attributes else ""
            for tag, attributes in self.elements
            if tag == "script"
        ]
        scripts = [text for tag, text in self.texts if tag == "script"]
        return {name: json.loads(text) for name, text in zip(names, scripts, strict=True) if name}


def written(root: Path, *args: str) -> Path:
    page = root.parent / "page.html"
    with pytest.raises(SystemExit) as done:
        main(["report", str(root), "--html", str(page), *args])
    assert done.value.code == 0
    return page


@pytest.fixture(autouse=True, scope="module")
def _no_library() -> Iterator[None]:
    """Leave out the library for charts: it is always the same, and takes seconds to bundle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", lambda vl_version: "")
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = made_grid(tmp_path_factory.mktemp("report") / "runs", METHODS)
    return written(root, "--metric", *SHOWN)


@pytest.mark.long
def test_it_is_small_with_its_library(page: Path) -> None:
    library = BUNDLE(vl_version="_".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2]))
    assert len(library) > 5e5 and page.stat().st_size + len(library) < 2e6


def test_it_loads_nothing(page: Path) -> None:
    parsed = Page(page.read_text(encoding="utf-8"))
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert not {"src", "srcset", "data", "poster", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    styles = "".join(text for tag, text in parsed.texts if tag == "style")
    assert len(styles) > 1000 and "url(" not in styles and "@import" not in styles
    # Even a script could not load anything.
    (policy,) = (
        str(attributes["content"])
        for tag, attributes in parsed.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';") and "http" not in policy


@pytest.mark.long
def test_each_choice_of_each_chart_can_be_drawn(tmp_path: Path) -> None:
    page = written(made_grid(tmp_path / "runs", (*METHODS, "FedProx")), "--metric", *SHOWN)
    specs = Page(page.read_text(encoding="utf-8")).specs()
    assert specs
    for name, spec in specs.items():
        assert marks(spec) > 2, name
        for place, param in enumerate(spec["params"]):
            for option in param.get("bind", {}).get("options", []) if "value" in param else []:
                chosen = [*spec["params"]]
                chosen[place] = {**param, "value": option}
                assert marks({**spec, "params": chosen}) > 2, (name, option)


def marks(spec: dict[str, Any]) -> int:
    """Return the number of marks of a chart that are not its axes or legend."""
    svg = vl_convert.vegalite_to_svg({**spec, "width": 400})
    bodies = re.findall(r'<g class="mark-\w+ role-mark[^"]*".*?</g>', svg, flags=re.S)
    return sum(body.count("<path") for body in bodies)


def test_all_charts_are_there_and_the_curves_are_those_of_the_runs(page: Path) -> None:
    specs = Page(page.read_text(encoding="utf-8")).specs()
    assert set(specs) == CHARTS
    spec = specs["curves"]
    params = {param["name"]: param for param in spec["params"]}
    assert params["metric"]["bind"]["options"] == ["test accuracy", "test loss"]
    assert params["axis"]["value"] == "bytes"
    rows = spec["datasets" if "datasets" in spec else "layer"]
    text = json.dumps(rows)
    # FedAvg at alpha 0.3: seeds 1 to 3 have 0.51, 0.52 and 0.53 in round 3, after 15 MB.
    assert re.search(
        r"15,0\.52,0\.51,0\.53,FedAvg,Dirichlet\(alpha=0\.3\),test accuracy,bytes", text
    )


def test_the_tables_have_the_numbers(page: Path) -> None:
    cells = [
        text.strip() for tag, text in Page(page.read_text(encoding="utf-8")).texts if tag == "td"
    ]
    assert "0.520 ± 0.010" in cells and "0.320 ± 0.010" in cells
    assert "0 of 3" in cells and "+0.2000" in cells
    assert "Dirichlet(alpha=0.05)" in cells


def test_a_single_partition_has_no_column(page: Path, tmp_path: Path) -> None:
    """On a phone, the scores would be out of sight behind it."""
    alone = written(made_grid(tmp_path / "runs", METHODS, alphas=(0.3,)), "--metric", *SHOWN)
    for file, columns in ((page, True), (alone, False)):
        cells = [text for tag, text in Page(file.read_text("utf-8")).texts if tag == "td"]
        assert (cells[1] == "Dirichlet(alpha=0.05)") is columns
        assert ("<b>Dirichlet(alpha=0.3)</b>" in file.read_text("utf-8")) is not columns


def texts(spec: dict[str, Any], **chosen: str) -> list[str]:
    """Return the words of a chart: of its axes, its legend and its marks."""
    params = [{**p, "value": chosen.get(p["name"], p.get("value"))} for p in spec["params"]]
    params = [{k: v for k, v in p.items() if k != "value" or v is not None} for p in params]
    svg = vl_convert.vegalite_to_svg({**spec, "params": params, "width": 700})
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)<", svg)]


def pair(method: str, other: str, p: float, seeds: int = 3, by: float = 0.2) -> dict[str, Any]:
    return {
        "partition": "Dirichlet(alpha=0.3)",
        "method": method,
        "other": other,
        "seeds": seeds,
        "difference": by,
        "low": p,
        "differs": p < 0.05,
    }


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([pair("FedAvg", "FedProx", 0.04)], "; ahead of FedProx (0.320"),
        ([pair("FedProx", "FedAvg", 0.06)], "; these seeds do not tell it from FedProx (0.320"),
        ([pair("FedAvg", "FedProx", math.nan, by=0.0)], "; these seeds do not tell it from"),
        ([pair("FedAvg", "FedProx", math.nan)], "; the same difference on all seeds from FedProx"),
        ([pair("FedAvg", "FedProx", math.nan, 1)], "takes two common seeds"),
    ],
)
def test_the_headline_names_no_winner_that_the_corrected_p_value_does_not(
    tmp_path: Path, pairs: list[dict[str, Any]], said: str
) -> None:
    root = made_grid(tmp_path, ("FedAvg", "FedProx"), alphas=(0.3,))
    (line,) = headline(group_runs(find_runs([root])), pd.DataFrame(pairs), "accuracy", "last")
    assert line.startswith("FedAvg (0.520 ± 0.010) has the best") and said in line


@pytest.fixture
def engine() -> Any:
    """Return an engine that has read the page's own functions."""
    racer = pytest.importorskip("py_mini_racer", reason="needs mini-racer").MiniRacer()
    racer.eval(f"const module = {{}}; {SCRIPT.read_text(encoding='utf-8')}")
    return racer


def test_each_row_says_how_to_run_it_again(page: Path) -> None:
    blocks = [text for tag, text in Page(page.read_text(encoding="utf-8")).texts if tag == "pre"]
    loops = [text for text in blocks if text.startswith("for seed in 1 2 3; do\n")]
    assert len(loops) == len(METHODS) * 2
    assert all(
        "flsuite fit --config " in text and "--seed_everything $seed" in text for text in loops
    )
    assert sum("rounds: 3" in text for text in blocks) == len(METHODS) * 2


def test_a_chart_without_data_is_left_out(tmp_path: Path) -> None:
    made_run(tmp_path / "runs", settings("FedAvg", 1), [("global", "test", "accuracy", [0.5, 0.6])])
    parsed = Page(written(tmp_path / "runs").read_text(encoding="utf-8"))
    assert set(parsed.specs()) == {"curves", "targets", "mix"}
    assert not any(tag == "option" for tag, _ in parsed.texts), "one partition needs no menu"


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    name = "</script><b>&"
    rows = [("global", "test", "accuracy", [0.5, 0.6])]
    for method in (name, "FedAvg"):
        made_run(tmp_path / "runs" / str(len(method)), settings(method, 1), rows)
    text = written(tmp_path / "runs").read_text(encoding="utf-8")
    assert name not in text and "&lt;/script&gt;&lt;b&gt;&amp;" in text
    assert name in json.dumps(Page(text).specs()["curves"]["layer"][0]["encoding"]["color"])


def test_the_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(SystemExit) as done:
        main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
    error = capsys.readouterr().err
    assert done.value.code == 2 and "install flsuite[report]" in error and error.count("\n") == 1


def test_a_folder_is_no_page(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main(["report", str(tmp_path), "--html", str(tmp_path)])
    assert done.value.code == 2 and "is a folder; name a file" in capsys.readouterr().err


@pytest.mark.long
def test_a_heading_sorts_numbers_and_words(engine: Any) -> None:
    """Run the page's own function on rows of cells; an empty cell is last either way."""
    engine.eval("""
const cell = (text, value) =>
  ({ textContent: text, dataset: value === undefined ? {} : { value } });
const rows = [["b", "10"], ["a10", "9"], ["", undefined], ["a9", "-1"], ["c", "9"]]
  .map(([word, value]) => ({ cells: [cell(word), cell(value ?? "", value)] }));
const words = (column, descending) =>
  sortRows(rows, column, descending).map((row) => row.cells[0].textContent);
""")
    out = engine.eval(
        "JSON.stringify([words(0, false), words(0, true), words(1, false), words(1, true)])"
    )
    assert json.loads(out) == [
        ["a9", "a10", "b", "c", ""],
        ["c", "b", "a10", "a9", ""],
        ["a9", "a10", "c", "b", ""],
        ["b", "a10", "c", "a9", ""],
    ]
