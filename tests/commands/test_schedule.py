"""``flsuite schedule``: the fits of a run before it is run, as a table and a picture."""

from pathlib import Path

import pandas as pd
import pytest

from flsuite.runs.table import TimelineTable
from tests.commands.command import CONFIGS, QUICKSTART, Capture, cli, refused
from tests.conftest import mostly_long

ASYNCHRONOUS = str(CONFIGS / "asynchronous" / "quickstart.yaml")
SHORT = ("--trainer.max_client_updates", "20", "--trainer.max_epochs", "1")
SYNCHRONOUS = ("--trainer.rounds", "5", "--trainer.schedule.participation", "4")

RUNS = {
    "asynchronous": (ASYNCHRONOUS, SHORT),
    "fedasync": (
        ASYNCHRONOUS,
        (*SHORT, "--trainer.aggregator", "FedAsync", "--trainer.schedule.buffer_size", "1"),
    ),
    "time_limits": (
        ASYNCHRONOUS,
        (
            *("--trainer.max_client_updates", "null", "--trainer.max_virtual_seconds", "2"),
            *("--trainer.schedule.buffer_timeout", "0.1"),
        ),
    ),
    "clients_are_lost": (
        QUICKSTART,
        (
            *SYNCHRONOUS,
            *("--trainer.schedule.speeds", "LogNormal"),
            *("--trainer.schedule.speeds.per_fit", "true", "--data.train_samples", "200"),
            *("--trainer.schedule.over_selection", "2", "--trainer.schedule.deadline", "1"),
            *("--trainer.schedule.availability", "Bernoulli"),
            *("--trainer.schedule.availability.dropout", "0.2"),
        ),
    ),
    "bytes_of_extras": (
        QUICKSTART,
        (
            *(*SYNCHRONOUS, "--trainer.aggregator", "SCAFFOLD"),
            *("--trainer.schedule.speeds", "PerSample"),
            *("--trainer.schedule.speeds.seconds_per_byte_up", "1e-6"),
        ),
    ),
    "samples_and_bytes": (
        QUICKSTART,
        (
            *SYNCHRONOUS,
            *("--trainer.schedule.speeds", "PerSample", "--trainer.limit_train_batches", "3"),
            *("--trainer.schedule.speeds.seconds_per_byte_up", "1e-6"),
            *("--trainer.schedule.speeds.seconds_per_byte_down", "1e-7"),
        ),
    ),
}


@pytest.mark.parametrize("run", mostly_long(RUNS, "clients_are_lost"))
def test_the_fits_are_those_of_the_run(
    run: tuple[str, tuple[str, ...]], tmp_path: Path, capsys: Capture
) -> None:
    config, options = run
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "quickstart-timeline.csv").write_text("what is there is replaced")
    assert cli("schedule", "--config", config, *options, "--output", "drawn") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert {path.name for path in tmp_path.iterdir()} == {"drawn"}
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "quickstart-timeline.csv",
        "quickstart-timeline.png",
    ]
    picture = (tmp_path / "drawn" / "quickstart-timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG")

    silent = ("--trainer.enable_progress_bar", "false")
    assert cli("fit", "--config", config, *options, *silent, "--run_dir", "run") == 0
    drawn = pd.read_csv(tmp_path / "drawn" / "quickstart-timeline.csv")
    run = pd.read_csv(tmp_path / "run" / "timeline.csv")
    assert tuple(drawn.columns) == tuple(run.columns) == TimelineTable.columns
    pd.testing.assert_frame_equal(drawn[drawn.columns[:6]], run[run.columns[:6]])
    pd.testing.assert_frame_equal(drawn[["round", "staleness"]], run[["round", "staleness"]])
    assert run["weight"].notna().any() == (config == ASYNCHRONOUS) and drawn["weight"].isna().all()

    counts = run["outcome"].value_counts()
    assert f"virtual seconds │ {run['ended_s'].max():.1f} │" in said
    assert f"aggregations │ {run['round'].max():.0f} │" in said
    assert f"client updates │ {counts['merged']} │" in said
    assert f"dropped out │ {counts.get('dropped', 0)} │" in said
    assert f"left out │ {counts.get('late', 0)} │" in said


@pytest.mark.long
def test_runs_in_which_every_kind_of_fit_ends_are_compared(tmp_path: Path) -> None:
    outcomes = set()
    for config, options in RUNS.values():
        assert cli("schedule", "--config", config, *options) == 0
        outcomes |= set(pd.read_csv("quickstart-timeline.csv")["outcome"])
    assert outcomes == {"merged", "dropped", "late"}


POOLED = ("--trainer.schedule.speeds", "Stragglers", "--trainer.aggregator", "Centralized")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--config", QUICKSTART, "--output", "drawn"),
            "the times of Synchronous are measured while clients train; set trainer.schedule.sp",
        ),
        (
            ("--config", ASYNCHRONOUS, "--trainer.schedule.speeds", "Measured"),
            "the times of Asynchronous are measured while clients train",
        ),
        (
            ("--config", QUICKSTART, *POOLED),
            "Centralized trains on pooled data, without clients; change "
            "trainer.schedule or trainer.aggregator (set trainer.aggregator to FedAvg)",
        ),
        (("--config", ASYNCHRONOUS, "--trainer.rouns", "3"), "did you mean --trainer.rounds?"),
        (
            ("--config", ASYNCHRONOUS, "--trainer.schedule.concurrency", "21"),
            "Asynchronous: concurrency 21 is above the number of clients, 20",
        ),
        (("--config", ASYNCHRONOUS, "--output"), "schedule: argument --output: expected one"),
        ((), "schedule: give a config, as --config"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_met_is_one_line(
    args: tuple[str, ...], words: str, capsys: Capture
) -> None:
    assert words in refused(capsys, "schedule", *args)


def test_a_pooled_run_has_a_timeline_without_rows_and_no_picture(tmp_path: Path) -> None:
    pooled = ("--trainer.aggregator", "Centralized", "--trainer.rounds", "1", "--run_dir", "run")
    assert cli("fit", "--config", QUICKSTART, *pooled, "--data.train_samples", "200") == 0
    assert (tmp_path / "run" / "timeline.csv").read_text() == ",".join(TimelineTable.columns) + "\n"
    assert (tmp_path / "run" / "curves.png").exists()
    assert not (tmp_path / "run" / "timeline.png").exists()
