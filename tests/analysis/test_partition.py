"""Who meets what when: as a run leaves it, and as ``flsuite partition`` draws it beforehand."""

from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.image import imread

from flsuite.analysis import read_partition
from flsuite.commands.main import main
from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits, TaskSequence
from flsuite.data.tasks import _TaskData
from tests.commands.command import Capture
from tests.conftest import classifier, trainer

COLUMNS = ["client", "task", "first_round", "class", "samples"]


@pytest.mark.draws
def test_a_run_says_who_meets_what_when_and_the_command_says_it_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    data = TaskSequence(Digits(clients=3), tasks=2, classes_per_task=3, rounds_per_task=[1, 4])
    trainer(rounds=1, run_dir=str(tmp_path / "run")).fit(classifier(), data)
    table = pd.read_csv(tmp_path / "run" / "tasks.csv")
    assert list(table.columns) == COLUMNS
    federated = data.federated
    assert isinstance(federated, _TaskData)
    for client, groups in enumerate(federated.sequences):
        for task, (group, start) in enumerate(zip(groups, (1, 2), strict=True)):
            rows = table[(table["client"] == client) & (table["task"] == task)]
            assert rows["class"].tolist() == list(group) and set(rows["first_round"]) == {start}
            assert rows["samples"].tolist() == federated.class_counts(client)[list(group)].tolist()

    monkeypatch.chdir(tmp_path)
    wrapped = {"class_path": "Digits", "init_args": {"clients": 3}}
    arguments = {"data": wrapped, "tasks": 2, "classes_per_task": 3, "rounds_per_task": [1, 4]}
    config = {"seed_everything": 3, "data": {"class_path": "TaskSequence", "init_args": arguments}}
    Path("plan.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as exit:
        main(["partition", "--config", "plan.yaml"])
    assert not exit.value.code and "plan-tasks.png" in capsys.readouterr().out
    pd.testing.assert_frame_equal(pd.read_csv("plan-tasks.csv"), table)
    assert imread("plan-tasks.png").std() > 0


def test_without_tasks_there_is_no_plan(tmp_path: Path) -> None:
    trainer(rounds=1, run_dir=str(tmp_path / "run")).fit(classifier(), Digits(clients=3))
    assert not (tmp_path / "run" / "tasks.csv").exists()


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("", "no training samples"),
        ("0,test,a,1\n", "no training samples"),
        ("0,train,a,1\n0,train,a,1\n", "occurs twice"),
        ("0,train,a,99999999999999999999\n", "is damaged"),
    ],
)
def test_a_damaged_partition_is_one_line(rows: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "partition.csv").write_text(f"client,split,class,samples\n{rows}")
    with pytest.raises(FlsuiteError, match=rf"partition\.csv .*{fault}"):
        read_partition(tmp_path)
