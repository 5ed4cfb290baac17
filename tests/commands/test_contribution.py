"""``flsuite contribution``: games with known values, and a federation."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from flsuite.analysis import read_metrics
from flsuite.analysis.clients import rank_correlation
from flsuite.commands.contribution import (
    _RebuiltUtility,
    _RetrainedUtility,
    leave_one_out,
    place_of,
    shapley,
)
from flsuite.common.files import save_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.record import read_settings
from tests.commands.command import QUICKSTART, cli, files, refused
from tests.conftest import THREADS, equal_states, long

SHORT = [
    *("--trainer.rounds", "2", "--trainer.max_epochs", "1", "--data.clients", "4"),
    *("--data.train_samples", "400"),
    *("--trainer.enable_progress_bar", "false", "--trainer.engine", "InProcess"),
]
KEEPS = ["--trainer.keep_updates", "true", "--trainer.keep_rounds", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, and with the same run without client 2."""
    folder = tmp_path_factory.mktemp("contribution")
    torch.set_num_threads(THREADS)  # as in each test, but earlier
    fit = ["fit", "--config", QUICKSTART, *SHORT, *KEEPS, "--run_dir"]
    cli(*fit, str(folder / "run"))
    cli(*fit, str(folder / "alone"), "--trainer.without", "[2]")
    return folder


@pytest.fixture
def kept(finished: Path) -> Path:
    return Path(shutil.copytree(finished / "run", "run"))


def game(score: Callable[[frozenset[int]], float], players: int) -> Any:
    """Return a utility whose score depends on who is present."""
    everyone = frozenset(range(players))
    asked: list[frozenset[int]] = []

    def of_absent(absent: frozenset[int]) -> float:
        asked.append(absent)
        return score(everyone - absent)

    return SimpleNamespace(score=of_absent, seed=3, made=0, unit="runs", asked=asked)


def test_in_an_additive_game_both_are_each_players_own_value() -> None:
    worth = [0.5, -0.25, 0.0, 2.0]
    made = game(lambda present: sum(worth[c] for c in present), 4)
    assert dict(leave_one_out(made, range(4))) == dict(enumerate(worth))
    assert [value == worth[c] for c, value in shapley(made, range(4), 5, 0.0)] == [True] * 20


def test_shapley_values_of_the_glove_game() -> None:
    """Players 0 and 1 have a left glove each, 2 a right one: 1/6, 1/6 and 4/6."""
    made = game(lambda present: float(2 in present and bool({0, 1} & present)), 3)
    sums = [0.0] * 3
    for client, value in shapley(made, range(3), 2000, 0.0):
        sums[client] += value / 2000
    assert sums == pytest.approx([1 / 6, 1 / 6, 4 / 6], abs=0.03)
    assert sum(sums) == pytest.approx(1.0), "each order shares out the whole"


def test_who_joins_near_the_whole_is_not_trained() -> None:
    made = game(lambda present: float(len(present) >= 2), 5)
    values = list(shapley(made, range(5), 4, tolerance=0.0))
    assert sum(value for _, value in values) == 4.0
    assert max(5 - len(absent) for absent in made.asked if absent) == 2


def column(folder: str, name: str) -> dict[int, float]:
    """Return the values of a contribution by client."""
    with Path(folder, "contribution.csv").open(newline="") as file:
        return {int(row["client"]): float(row[name]) for row in csv.DictReader(file)}


def test_a_federation_without_each_client(kept: Path, finished: Path) -> None:
    cli("contribution", "run", "--output", "out", "--clients", "2")
    rows = column("out", "contribution")
    assert [*rows] == [2] and Path("out/contribution.png").is_file()

    utility = _RetrainedUtility(kept, "accuracy", 0, Path())
    whole, without = (utility._last(finished / name) for name in ("run", "alone"))
    assert rows[2] == pytest.approx(whole - without, abs=1e-12)


@pytest.mark.long
def test_who_was_left_out_once_is_not_trained_without_again(kept: Path) -> None:
    cli("contribution", "run", "--output", "out", "--clients", "1,2")
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("last.ckpt")}
    cli("contribution", "run", "--output", "out", "--method", "shapley", "--clients", "1,2")
    after = {path: path.stat().st_mtime_ns for path in Path("out").rglob("last.ckpt")}
    assert before.items() <= after.items() and len(after) == len(before) + 1, "one more pair"


def scores(run: Path, metric: str) -> list[float]:
    """Return the global validation scores of the rounds."""
    table = read_metrics(run)
    key = (table["scope"] == "global") & (table["split"] == "val") & (table["metric"] == metric)
    return table[key]["value"].tolist()


@pytest.mark.parametrize("aggregator", ["FedAdam", *long("CoordinateMedian")])
def test_a_round_with_all_clients_is_rebuilt_as_it_was(aggregator: str) -> None:
    half = ["--trainer.schedule.participation", "0.5", "--trainer.aggregator", aggregator]
    cli("fit", "--config", QUICKSTART, "--run_dir", "run", *SHORT, *KEEPS, *half)
    before = files(Path("run"))
    rebuilt = _RebuiltUtility(Path("run"), "loss", 0, Path())
    assert rebuilt.score(frozenset()) == pytest.approx(sum(scores(Path("run"), "loss")), abs=1e-6)
    for kept in rebuilt.rounds:
        assert len(kept.clients) == 2
        saved = load_checkpoint(Path(f"run/checkpoints/round-{kept.number:06d}.ckpt"))
        assert equal_states(kept.without(()), saved["federation"]["state"])
        assert equal_states(kept.without(kept.clients), kept.before["state"])
    assert files(Path("run")) == before


def test_after_one_round_the_estimate_is_exact(finished: Path) -> None:
    """Nobody has trained on a model that the absent client had a part in."""
    first, _ = _RebuiltUtility(finished / "run", "accuracy", 0, Path()).rounds
    alone = finished / "alone"
    saved = load_checkpoint(alone / "checkpoints" / "round-000001.ckpt")
    assert equal_states(first.without({2}), saved["federation"]["state"])
    own = scores(alone, "accuracy")[0]
    assert first.score({2}, "accuracy") == pytest.approx(own, abs=1e-8)


@pytest.mark.long
def test_both_are_compared_in_one_table(kept: Path, capsys: Any) -> None:
    cli("contribution", "run", "--output", "out", "--by", "both")
    out = capsys.readouterr().out
    assert "estimate: val data, 10 aggregations" in out and "rank correlation of the two" in out
    assert "contribution: test data, 4 forks" in out
    rebuilt = _RebuiltUtility(Path("run"), "accuracy", 0, Path())
    whole = rebuilt.score(frozenset())
    for client, value in column("out", "estimate").items():
        own = whole - rebuilt.score(frozenset({client}))
        assert value == pytest.approx(own, abs=1e-12)
    cli("contribution", "run", "--output", "shapley", "--by", "updates", "--method", "shapley")
    nobody = rebuilt.score(frozenset(range(4)))
    values = column("shapley", "estimate").values()
    assert sum(values) == pytest.approx(whole - nobody), "the values share out the whole"


def test_the_rank_correlation_is_that_of_ranks_within_a_run() -> None:
    columns = {"a": [1.0, 2.0, 30.0], "b": [0.1, 0.2, 0.3], "c": [3.0, 2.0, 1.0]}
    values = pd.DataFrame(
        {"run": run, "client": client, "name": name, "value": value + 100 * run * (name == "b")}
        for run in range(2)
        for name, own in columns.items()
        for client, value in enumerate(own)
    )
    assert rank_correlation(values, ["a", "b"]).tolist() == pytest.approx([1, 1])
    assert rank_correlation(values, ["a", "c"]).tolist() == pytest.approx([-1, -1])
    two = values[values["client"] < 2]
    assert rank_correlation(two, ["a", "c"]).isna().all(), "two clients have no ranks to speak of"


def test_of_a_loss_a_useful_client_is_positive_and_first(kept: Path, capsys: Any) -> None:
    request = ["--by", "updates", "--metric", "loss", "--output", "out"]
    cli("contribution", "run", *request)
    out = capsys.readouterr().out
    values = column("out", "estimate")
    utility = _RebuiltUtility(Path("run"), "loss", 0, Path())
    whole = utility.score(frozenset())
    for client, value in values.items():
        assert value == pytest.approx(utility.score(frozenset({client})) - whole)
    assert "contribution to a lower loss" in out
    order = sorted(values, key=lambda client: -values[client])
    shown = [int(line.split()[1]) for line in out.splitlines() if line.startswith("│")]
    assert shown == order


@pytest.mark.long
def test_the_ranks_of_two_clients_are_not_printed(kept: Path, capsys: Any) -> None:
    cli("contribution", "run", "--by", "both", "--clients", "0,1", "--output", "out")
    assert "rank correlation" not in capsys.readouterr().out


def test_an_estimate_needs_what_a_run_keeps(kept: Path, capsys: Any) -> None:
    Path("contribution").mkdir()
    request = ("contribution", "run", "--by", "updates")
    for name in "best", "round-000001":
        (kept / "checkpoints" / f"{name}.ckpt").unlink()
    line = refused(capsys, *request)
    assert "such as that after round 1; fit it with --trainer.keep_rounds 1" in line
    shutil.rmtree(kept / "updates" / "round-0001")  # the state before round 1 needs no checkpoint
    (kept / "checkpoints" / "round-000002.ckpt").unlink()
    line = refused(capsys, *request)
    assert "fit it with --trainer.keep_rounds 1, or use --by training" in line
    shutil.rmtree(kept / "updates")
    line = refused(capsys, *request)
    assert "has not kept its clients' models; fit it with --trainer.keep_updates true" in line
    assert line.endswith("use --by training")


@pytest.mark.long
def test_forks_of_another_run_or_moment_are_not_taken_for_ones_own() -> None:
    cli("fit", "--config", QUICKSTART, "--run_dir", "a/run", *SHORT)
    cli("fit", "--config", QUICKSTART, "--run_dir", "b/run", *SHORT, "--seed_everything", "7")
    places = {place_of(Path(run), at) for run in ("a/run", "b/run") for at in (0, 1)}
    assert len(places) == 4
    cli("fork", "a/run", "--at", "1", "--without", "2", "--run_dir", "fork")
    utility = _RetrainedUtility(Path("fork"), "accuracy", 0, Path("out"))
    assert utility.absent == {2}
    # Nobody trains after the fork: the score is the parent's in that round.
    assert utility.score(frozenset({0, 1, 3})) == utility._at_the_fork(1)
    utility.score(frozenset({0}))
    (settings,) = Path("out").glob("fork-*/without-0/settings.yaml")
    assert "without:\n- 0\n- 2\n" in settings.read_text()


@pytest.mark.long
def test_forks_use_the_engine_that_auto_chose() -> None:
    cli("fit", "--config", QUICKSTART, "--run_dir", "run", *SHORT, "--trainer.engine", "Auto")
    utility = _RetrainedUtility(Path("run"), "accuracy", 0, Path())
    trainer, _, _ = utility._built(frozenset({1}), Path("a"))
    chosen = read_settings(Path("run")).get("engine", {}).get("class_path", "InProcess")
    assert type(trainer.engine).__name__ == chosen.rpartition(".")[2]


def test_runs_that_cannot_be_compared_are_refused_before_training(
    kept: Path, finished: Path, capsys: Any
) -> None:
    shutil.copytree(kept, "three")
    for path in Path("three/config.yaml"), Path("three/settings.yaml"):
        path.write_text(path.read_text().replace("clients: 4", "clients: 3"))
    line = refused(capsys, "contribution", "run", "three")
    assert "have other numbers of clients (run: 4, three: 3)" in line
    shutil.copytree(finished / "alone", "lacks")
    for clients in "2", "0,2":
        line = refused(capsys, "contribution", "lacks", "--clients", clients)
        assert "lacks is without client 2 already" in line
    settings = Path("run/settings.yaml")
    settings.write_text(settings.read_text().replace("rounds: 2", "rounds: 9"))
    checkpoint = Path("run/checkpoints/last.ckpt")
    content = load_checkpoint(checkpoint)
    content["summary"]["ends"] = []
    checkpoint.unlink()
    save_tensors(content, checkpoint)
    line = refused(capsys, "contribution", "run")
    assert "run was interrupted after round 2: flsuite resume run first" in line


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["nowhere"], "is not a run"),
        (["run", "--clients", "4"], "must be from 0 to 3"),
        (["run", "--clients", "one"], "must be all, or numbers"),
        (["run", "--at", "2"], "give --at below 2"),
        (["run", "--metric", "beauty"], "has no score beauty"),
        (["run", "--permutations", "0"], "at least 1"),
    ],
)
def test_a_wrong_request_is_one_line(args: list[str], reason: str, kept: Path, capsys: Any) -> None:
    Path("contribution").mkdir()
    assert reason in refused(capsys, "contribution", *args)
