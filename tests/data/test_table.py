"""Tests of tables from CSV and Parquet: reading, split, scaling, defects."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import read_yaml
from flsuite.data import PublishedSplits, Table
from flsuite.data.datasets.csv_files import csv_frames, fit_scale, numeric_chunks
from flsuite.data.splits import evenly_held_out
from tests.commands.command import Capture, cli


def frame(rows: int = 100, seed: int = 0) -> pd.DataFrame:
    """Make a table: three separable classes, two useful columns, a constant, text, five owners."""
    rng = np.random.default_rng(seed)
    label = np.arange(rows) % 3
    return pd.DataFrame(
        {
            "a": label + rng.normal(0, 0.2, rows),
            "b": -1000.0 * label + rng.normal(0, 200, rows),
            "constant": 7,
            "note": [f"row {k}" for k in range(rows)],
            "owner": [f"site {k}" for k in np.arange(rows) // 3 % 5],
            "kind": np.array(["worm", "benign", "scan"])[label],
        }
    )


def write(file: Path, content: pd.DataFrame) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    content.to_csv(file, index=False)
    return file


def read(file: Path, **kwargs: Any) -> PublishedSplits:
    return Table(file, **{"label": "kind", **kwargs}).load()


def text(tmp_path: Path, content: str, **kwargs: Any) -> PublishedSplits:
    file = tmp_path / "t.csv"
    file.write_text(content)
    return Table(file, **{"label": "y", **kwargs}).load()


# Reading


def test_reading(tmp_path: Path) -> None:
    source = read(write(tmp_path / "t.csv", frame()))
    assert source.spec.shape == (3,) and source.spec.task == "multiclass" and source.val is None
    assert source.spec.class_names == ("benign", "scan", "worm")
    assert (len(source.train), len(source.test)) == (80, 20)
    assert (source.train.x.dtype, source.train.y.dtype) == (torch.float32, torch.int64)
    assert source.train.ids is None
    assert (source.train.y.bincount() + source.test.y.bincount()).tolist() == [33, 33, 34]


def test_numbers_are_classes_in_their_own_order(tmp_path: Path) -> None:
    rows = "".join(f"{k},{label}\n" for k, label in enumerate([10, 2, 9.0] * 10))
    source = text(tmp_path, "x,y\n" + rows)
    assert source.spec.class_names == ("2", "9", "10")
    assert (source.train.y.bincount() + source.test.y.bincount()).tolist() == [10, 10, 10]


def test_features_and_owners(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", frame())
    source = read(file, features=["b", "a"], client="owner", scale="none")
    assert source.train.x.shape == (80, 2) and source.train.x[:, 0].min() < -1000
    assert source.train.ids is not None and source.test.ids is not None
    owners = source.train.ids.bincount() + source.test.ids.bincount()
    assert owners.tolist() == [21, 21, 21, 19, 18]


def test_numeric_owners_are_no_feature(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", frame().assign(owner=np.arange(100) % 5 * 3))
    assert read(file, client="owner").spec.shape == (3,) and read(file).spec.shape == (4,)


def test_a_folder_is_one_table(tmp_path: Path) -> None:
    content = frame()
    whole = read(write(tmp_path / "whole.csv", content))
    write(tmp_path / "parts" / "1.csv", content[:60])
    write(tmp_path / "parts" / "2.csv", content[60:][content.columns[::-1]])
    (tmp_path / "parts" / "README.txt").write_text("no table")
    (tmp_path / "parts" / "._1.csv").write_bytes(b"\x00\x05\x16\x07")
    source = read(tmp_path / "parts")
    assert torch.equal(source.train.x, whole.train.x) and torch.equal(source.test.y, whole.test.y)


@pytest.mark.long  # needs pyarrow
def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    content = frame()
    content.to_parquet(tmp_path / "t.parquet")
    source, expected = read(tmp_path / "t.parquet"), read(write(tmp_path / "t.csv", content))
    for name in ("train", "test"):
        assert torch.equal(getattr(source, name).x, getattr(expected, name).x)
    content.loc[3, "a"] = np.nan
    content.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(FlsuiteError, match=r"t\.parquet: row 4, column 'a': .*missing"):
        read(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(FlsuiteError, match=r"t\.parquet cannot be read as Parquet"):
        read(tmp_path / "t.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flsuite.common.errors.find_spec", lambda package: None)
    (tmp_path / "t.parquet").touch()
    with pytest.raises(FlsuiteError, match=r"CSV.*pip install 'flsuite\[parquet\]'"):
        read(tmp_path / "t.parquet")


# The split


def test_the_split_is_the_same_in_every_run(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", frame())
    modules = [Table(str(file), "kind", client="owner", seed=seed) for seed in (1, 2)]
    for module in modules:
        module.setup()
    first, second = (module.federated for module in modules)
    assert torch.equal(first.test.x, second.test.x) and torch.equal(first.train.x, second.train.x)
    assert not torch.equal(first.train.rows.values, second.train.rows.values)


def test_every_owner_and_class_has_its_share(tmp_path: Path) -> None:
    source = read(write(tmp_path / "t.csv", frame(300)), client="owner", test_fraction=0.25)
    assert len(source.test) == 75
    assert source.test.ids is not None
    cells = (3 * source.test.ids + source.test.y).bincount()
    assert cells.shape == (15,) and cells.min() == cells.max() == 5


def test_the_last_row_of_a_class_is_trained_on(tmp_path: Path) -> None:
    """This holds for every position of the row."""
    for others in range(5, 15):
        rows = "".join(f"{k},{k % 2}\n" for k in range(others)) + "3,2\n4,3\n5,4\n"
        source = text(tmp_path, "x,y\n" + rows)
        assert {2, 3, 4} <= {*source.train.y.tolist()} and len(source.test)


def test_test_files(tmp_path: Path) -> None:
    test = frame(30, seed=2)
    train_file = write(tmp_path / "train.csv", frame(60, seed=1))
    write(tmp_path / "held" / "test.csv", test)
    kwargs = {"client": "owner", "scale": "none", "features": ["a"]}
    source = read(train_file, test_path=tmp_path / "held", **kwargs)
    assert (len(source.train), len(source.test)) == (60, 30)
    assert torch.equal(source.test.x[:, 0], torch.tensor(test["a"], dtype=torch.float32))


@pytest.mark.parametrize(
    ("samples", "fraction", "held"), [(100, 0.29, 29), (100, 0.2, 20), (4, 0.2, 0), (10, 0.75, 7)]
)
def test_evenly_held_out(samples: int, fraction: float, held: int) -> None:
    places = evenly_held_out(samples, fraction)
    assert places.sum() == held
    assert (evenly_held_out(2 * samples, fraction)[:samples] == places).all()


# Scaling


def test_the_scale_is_that_of_the_training_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", frame())
    x = {scale: read(file, scale=scale).train.x[:, :2] for scale in ("minmax", "standard")}
    assert x["minmax"].amin(0).tolist() == pytest.approx([0.1, 0.1])
    assert x["minmax"].amax(0).tolist() == pytest.approx([0.9, 0.9])
    assert x["standard"].mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert x["standard"].std(0, correction=0).tolist() == pytest.approx([1, 1], rel=1e-6)


@pytest.mark.parametrize(("scale", "constant"), [("minmax", 0.5), ("standard", 0.0), ("none", 7.0)])
def test_the_scale_does_not_depend_on_test_rows(
    tmp_path: Path, scale: str, constant: float
) -> None:
    """The oracle: other test rows, even outliers, leave the scaled training rows bit for bit."""
    train, wild = write(tmp_path / "train.csv", frame(60, seed=1)), frame(30, seed=3)
    mild = write(tmp_path / "mild.csv", frame(30, seed=2))
    wild.loc[0, ["a", "b"]] = [1e6, -1e9]
    wild.loc[1, "constant"] = 3
    files = (mild, write(tmp_path / "wild.csv", wild))
    sources = [read(train, test_path=test, scale=scale) for test in files]
    assert torch.equal(sources[0].train.x, sources[1].train.x)
    first = sources[1].test.x[0]
    assert first[:2].tolist() == [1, 0] if scale == "minmax" else first[0] > 1e5
    assert (sources[0].train.x[:, 2] == constant).all()
    assert (sources[0].test.x[:, 2] == constant).all()
    assert sources[1].test.x[1, 2] == (3 if scale == "none" else constant)


def test_large_numbers_close_together(tmp_path: Path) -> None:
    """Float32 cannot tell these apart: they are seconds since 1970."""
    rows = "".join(f"{1_506_000_000 + k},{k % 2}\n" for k in range(50))
    x = text(tmp_path, "time,y\n" + rows).train.x
    assert len(x.unique()) == len(x)


@pytest.mark.parametrize("scale", ["minmax", "standard"])
def test_almost_constant_columns(scale: Any) -> None:
    """The columns have the smallest possible spread, and a constant whose mean is not exact."""
    x = np.array([[0.0, 0.1], [5e-324, 0.1], [0.0, 0.1]])
    scaled = fit_scale(scale, x)(x.copy())
    assert np.isfinite(scaled).all() and np.abs(scaled).max() <= 1
    assert (scaled[:, 1] == (0.5 if scale == "minmax" else 0)).all()


# Defects

GOOD = "a,b,y\n" + "1,2,u\n3,4,v\n" * 5


@pytest.mark.parametrize(
    ("content", "kwargs", "message"),
    [
        ("", {}, r"t\.csv is empty"),
        ("a,b,y\n", {}, r"t\.csv has a header but no rows"),
        (",a,y\n0,1,u\n", {}, r"t\.csv has no name for column 1; name it"),
        ("a,a,y\n1,2,u\n", {}, r"more than one column named 'a'"),
        ("a,b,y\n1,2,u\n1,2,u,4\n", {}, r"t\.csv cannot be read as CSV \(.*line 3.*\)"),
        ("a,b,y\n1,2,u,\n3,4,v,\n", {}, r"cannot be read as CSV .*line 2"),
        (GOOD, {"label": "x"}, r"t\.csv has no column 'x'; set data\.label"),
        (GOOD.replace("y", "Label"), {"label": "label"}, r"data\.label .*the nearest are 'Label'"),
        (GOOD, {"client": "who"}, r"no column 'who'; set data\.client"),
        (GOOD, {"features": ["a", "c"]}, r"no column 'c'; set data\.features"),
        (GOOD + "1,,v\n3,4,v\n,,v\n", {}, r"row 13, column 'a': .*missing .in 1 row"),
        (GOOD + "1\n", {}, r"column 'b': the value is missing"),
        (GOOD + "1,2,\n", {}, r"row 11, column 'y': .*missing .in 1 row"),
        (
            "w," + GOOD.replace("\n", "\n,")[:-1],
            {"client": "w"},
            r"row 1, column 'w': .*missing .in 10 row",
        ),
        (GOOD + "1,2x,v\n", {}, r"row 11, column 'b'.*got '2x';"),
        (GOOD + "1,-inf,v\n", {}, r"row 11, column 'b'.*got -inf;"),
        (GOOD + "1e39,1,v\n", {}, r"row 11, column 'a'.*got 1e\+39;"),
        (GOOD.replace("v", "u"), {}, r"column 'y' of .*t\.csv has the same label"),
        (
            GOOD,
            {"label": "a", "features": ["b"], "test_fraction": 0.05},
            r"no row of .* it has 10 rows; raise",
        ),
        (GOOD + "1.5,1,u\n", {"label": "a"}, r"row 11, column 'a'.*got 1\.5;"),
        ("y,z\nu,p\nv,q\n", {}, r"no numeric column besides 'y'; name some"),
        ("a;b;y\n1;2;u\n", {}, r"no column 'y'; .*it has 'a;b;y'"),
    ],
)
def test_defects(tmp_path: Path, content: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message) as error:
        text(tmp_path, content, **kwargs)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"no file or folder .*t\.csv; set data\.path"):
        Table("t.csv", "y", root=str(tmp_path)).setup()
    with pytest.raises(FlsuiteError, match=r"has no file whose name ends in \.csv"):
        read(tmp_path)
    (tmp_path / "t.xlsx").touch()
    with pytest.raises(FlsuiteError, match=r"t\.xlsx is not a file whose name"):
        read(tmp_path / "t.xlsx")
    (tmp_path / "t.csv").write_bytes(b"a,y\n\xff\xfe,\x80\n")
    with pytest.raises(FlsuiteError, match=r"t\.csv cannot be read as CSV"):
        read(tmp_path / "t.csv")


def test_headers_that_differ(tmp_path: Path) -> None:
    content = frame(30)
    write(tmp_path / "1.csv", content)
    second = write(tmp_path / "2.csv", content.rename(columns={"a": "A"}))
    with pytest.raises(FlsuiteError, match=r"2\.csv and .*1\.csv differ in their columns"):
        read(tmp_path)
    assert read(tmp_path, features=["b"]).spec.shape == (1,)
    with pytest.raises(FlsuiteError, match=r"2\.csv has no column 'a'"):
        read(tmp_path / "1.csv", test_path=second, features=["a"])


def test_a_class_that_is_only_tested(tmp_path: Path) -> None:
    content = frame(30)
    write(tmp_path / "train.csv", content[content["kind"] != "worm"])
    write(tmp_path / "test.csv", content)
    with pytest.raises(FlsuiteError, match=r"test\.csv has rows of class worm"):
        read(tmp_path / "train.csv", test_path=tmp_path / "test.csv")


def test_defects_do_not_depend_on_the_chunks(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,b\n" + "1,2\n" * 6 + ",2\n1,\n1,2\n,3\n")
    for rows in (None, 1, 3, 4, 100):
        with pytest.raises(FlsuiteError, match=r"row 7, column 'a': .*missing \(in 2 rows"):
            list(numeric_chunks(csv_frames(file, rows), file))


# A federation


def test_a_file_beside_the_user_comes_before_the_published_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, published = tmp_path / "here", tmp_path / "published"
    for folder, rows in ((here, 40), (published, 80)):
        folder.mkdir()
        write(folder / "t.csv", frame(rows))
    monkeypatch.chdir(here)
    monkeypatch.setenv("FLSUITE_DATA_ROOT", str(published))

    def rows(**kwargs: Any) -> int:
        source = Table("t.csv", label="kind", **kwargs).load()
        return len(source.train) + len(source.test)

    assert rows() == 40 and rows(root=str(published)) == 80
    (here / "t.csv").unlink()
    assert rows() == 80


# The content of the files is a setting of the run.


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a finished run of two rounds."""
    monkeypatch.chdir(tmp_path)
    file = write(Path("t.csv"), frame())
    own = ["--data", "Table", "--data.path", "t.csv", "--data.label", "kind", "--data.clients", "2"]
    fast = ["--trainer.rounds", "2", "--trainer.accelerator", "cpu", "--run_dir", "run"]
    model = ["--model", "Classifier", "--model.backbone", "MLP"]
    assert cli("fit", *model, *own, *fast, "--trainer.engine", "InProcess") == 0
    return file


def test_a_changed_file_is_noticed_by_all_that_read_it_again(
    trained: Path, capsys: Capture
) -> None:
    write(trained, frame(seed=1))
    for command in (
        ["resume", "run", "--trainer.rounds", "3"],
        ["test", "--config", "run/config.yaml", "--run_dir", "run", "--ckpt_path", "last"],
        ["debug", "run", "--at", "1", "--client", "0", "--no-pdb"],
        ["verify", "run"],
        ["fork", "run", "--at", "1", "--run_dir", "fork"],
    ):
        capsys.readouterr()
        assert cli(*command) == 2, command
        said = capsys.readouterr().err
        assert "t.csv, content " in said and "data.path is" in said, command

    write(trained, frame())
    assert cli("verify", "run") == 0 and cli("resume", "run", "--trainer.rounds", "3") == 0


def test_a_run_of_a_version_without_digests_goes_on(trained: Path) -> None:
    settings = read_yaml(Path("run/settings.yaml"))
    assert settings["data"]["init_args"]["path"].startswith("t.csv, content ")
    settings["data"]["init_args"]["path"] = "t.csv"
    Path("run/settings.yaml").write_text(yaml.safe_dump(settings))
    last = Path("run/checkpoints/last.ckpt")
    content = torch.load(last, weights_only=True)
    content["settings"]["data"]["init_args"]["path"] = "sub/t.csv"
    torch.save(content, last)
    assert cli("fork", "run", "--at", "2", "--run_dir", "fork", "--trainer.rounds", "3") == 0
    assert cli("resume", "run", "--trainer.rounds", "3") == 0
